"""Texts of a pooling model to engine requests: its prompts, its length, its special tokens."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayfin.actors.errors import ContextLengthExceeded, InvalidRequest
from rayfin.actors.messages import EngineInfo, EngineRequest, Int32Array, Sampling, StopRules
from rayfin.actors.model_files.pooling_recipe import Pooling, PoolingRecipe
from rayfin.deployments.generation.build_requests import KEY_BITS, check_vocabulary
from rayfin.deployments.generation.prompt_forms import Side
from rayfin.deployments.text.tokenizer import Tokenizer

MAX_INPUTS = 2048


@dataclass(frozen=True, slots=True)
class Cut:
    """How long inputs are cut to fit."""

    tokens: int | None = None  # None: they are not; -1: to the context
    side: Side = "right"  # what is cut off

    def limit(self, context: int) -> int | None:
        """Tokens that are kept, or None for all.

        Raises:
            InvalidRequest: more than the context has.
        """
        if self.tokens is None:
            return None
        if self.tokens > context or self.tokens < -1 or self.tokens == 0:
            rule = f"in [1, {context}], the context, or -1"
            raise InvalidRequest(
                f"truncate_prompt_tokens must be {rule}, got {str(self.tokens)[:24]}.",
                "truncate_prompt_tokens",
                "integer_above_max_value" if self.tokens > context else "integer_below_min_value",
            )
        return context if self.tokens == -1 else self.tokens


@dataclass(slots=True)
class PoolingInput:
    """One input: its tokens, and what the engine needs to know of them."""

    ids: list[int]
    skip: int = 0  # tokens of an instruction at its start
    second: int | None = None  # where the second text of a pair begins


def text_input(
    tokenizer: Tokenizer,
    recipe: PoolingRecipe,
    text: str,
    *,
    prefix: str = "",
    add_special_tokens: bool = True,
    limit: int | None = None,
    side: Side = "right",
) -> PoolingInput:
    """Tokenizes a text behind the instruction ``prefix``; at most ``limit`` tokens are kept.

    Special tokens stay: the text between them is cut.
    """
    whole = prefix + text
    if recipe.lower_case:
        whole = whole.lower()
    ids = tokenizer.encode(whole, add_special_tokens)
    if limit is not None and len(ids) > limit:
        bare = tokenizer.encode(whole, False)
        kept = max(limit - (len(ids) - len(bare)), 0)
        bare = bare[:kept] if side == "right" else bare[len(bare) - kept :]
        ids = tokenizer.with_special_tokens(bare) if add_special_tokens else bare
        ids = ids[:limit]
    skip = 0
    if prefix and not recipe.include_prompt:
        skip = instruction_length(tokenizer, recipe, prefix, add_special_tokens)
    return PoolingInput(ids, skip)


def instruction_length(
    tokenizer: Tokenizer, recipe: PoolingRecipe, prefix: str, add_special_tokens: bool
) -> int:
    """Tokens of an instruction with those that begin a text, without those that end it."""
    ids = tokenizer.encode(prefix.lower() if recipe.lower_case else prefix, add_special_tokens)
    ends = bool(ids) and ids[-1] in tokenizer.special_token_ids
    return len(ids) - (1 if ends and add_special_tokens else 0)


def pair_input(
    tokenizer: Tokenizer, first: str, second: str, limit: int | None = None
) -> PoolingInput:
    """Tokenizes a pair by the tokenizer's own template; the longer text is cut token by token.

    That is transformers' truncation ``longest_first``, at the right.
    """
    pair = tokenizer.backend.encode(first, second, add_special_tokens=True)
    ids, types = list(pair.ids), list(pair.type_ids)
    if limit is not None and len(ids) > limit:
        ids, types = _cut_pair(pair, ids, types, limit)
    if "token_type_ids" not in tokenizer.inner.model_input_names:
        return PoolingInput(ids)
    kinds = [place for place, kind in enumerate(types) if kind == 1]
    return PoolingInput(ids, second=kinds[0] if kinds else None)


def _cut_pair(
    pair: Any, ids: list[int], types: list[int], limit: int
) -> tuple[list[int], list[int]]:
    sequences = pair.sequence_ids
    places: list[list[int]] = [
        [place for place, sequence in enumerate(sequences) if sequence == which] for which in (0, 1)
    ]
    for _ in range(len(ids) - limit):
        longer = places[0] if len(places[0]) > len(places[1]) else places[1]
        if longer:
            longer.pop()
    kept = {*places[0], *places[1]}
    chosen = [p for p, sequence in enumerate(sequences) if sequence is None or p in kept]
    return [ids[p] for p in chosen], [types[p] for p in chosen]


def instruction(recipe: PoolingRecipe, name: str | None) -> str:
    """The text of one of the model's prompts; None is its default one.

    Raises:
        InvalidRequest: the model has no such prompt.
    """
    prompts = dict(recipe.prompts)
    if name is None:
        return prompts.get(recipe.default_prompt or "", "")
    if name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise InvalidRequest(
            f"The model has no prompt {name[:64]!r}; it has {known}.", "prompt_name"
        )
    return prompts[name]


def build_pooling(
    inputs: Sequence[PoolingInput],
    poolings: Sequence[Pooling],
    info: EngineInfo,
    *,
    request_id: str,
    params: Sequence[str],
    priority: int = 0,
    arrival: float = 0.0,
    cache_salt: str | None = None,
) -> list[EngineRequest]:
    """One engine request for each input; ``params`` are their paths, for errors.

    Raises:
        ContextLengthExceeded: an input is longer than the context.
        InvalidRequest: an empty input, or a token id outside the vocabulary.
    """
    first_key = secrets.randbits(KEY_BITS)
    return [
        EngineRequest(
            request_id=f"{request_id}-{index}",
            prompt=_prompt(prompt.ids, info, param),
            sampling=Sampling(),
            stopping=StopRules(max_tokens=0),
            key=(first_key + index) % 2**KEY_BITS,
            priority=priority,
            arrival=arrival,
            extra_keys=() if cache_salt is None else (f"salt:{cache_salt}",),
            parts=(pooling,),
        )
        for index, (prompt, pooling, param) in enumerate(zip(inputs, poolings, params, strict=True))
    ]


def _prompt(ids: list[int], info: EngineInfo, param: str) -> Int32Array:
    if not ids:
        raise InvalidRequest("The input must hold at least one token.", param, "empty_prompt")
    if len(ids) > info.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {info.max_model_len} tokens, however the "
            f"input has {len(ids)} tokens. Please shorten it, or set truncate_prompt_tokens.",
            param,
        )
    check_vocabulary(ids, info, param)
    return np.array(ids, np.int32)
