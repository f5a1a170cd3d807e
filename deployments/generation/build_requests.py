"""Token ids and sampling parameters to checked engine requests, for HTTP and ``LLM``."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rayfin.actors.errors import ContextLengthExceeded, InvalidConfig, InvalidRequest
from rayfin.actors.guidance import NO_END, Guidance
from rayfin.actors.media.part import MediaFacts, MediaInput, PromptEmbeds
from rayfin.actors.media.virtual_ids import put_virtual_ids
from rayfin.actors.messages import EngineInfo, EngineRequest, Int32Array, StopRules
from rayfin.actors.model_files.files import generation_config
from rayfin.actors.parts import RequestPart
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.generation.limits import (
    bad_word_ids,
    check_sampling,
    runner_sampling,
)
from rayfin.deployments.generation.prompt_forms import MEDIA
from rayfin.deployments.text.tokenizer import Tokenizer

KEY_BITS = 62  # keys travel as int64
SAMPLING_DEFAULTS = {  # names of generation_config.json -> ours
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def build_requests(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    info: EngineInfo,
    *,
    request_id: str,
    eos_token_ids: Iterable[int],
    client: str = "",
    priority: int = 0,
    arrival: float = 0.0,
    param: str = "prompt",
    tokenizer: Tokenizer | None = None,
    cache_salt: str | None = None,
    guidance: Guidance | None = None,
    images: Sequence[MediaInput] = (),
    embeds: Sequence[PromptEmbeds] = (),
    parts: Sequence[RequestPart] = (),
) -> list[EngineRequest]:
    """Returns one engine request per choice, with ids ``{request_id}-{i}``, keys and seeds.

    The first choice is the parent of the others, so that the prompt is computed once. Keys are
    random: each request of a client has its own, and none is reused. ``max_tokens`` is limited to
    what the context and the cache leave; None fills them. ``param`` is the caller's name of the
    prompt, for errors; the ``tokenizer`` is needed for bad words. Only prompts of one salt
    share pages. ``guidance`` holds for all choices; its ends and the position from which they may
    be sampled are set here, from ``min_tokens`` and ``ignore_eos``. Tokens of ``images`` get ids of
    their own, and ``embeds``, in the order of their positions, bring them. ``parts`` are added as
    they are.

    Raises:
        ContextLengthExceeded: no room for one token, or the prompt needs more pages than exist.
        InvalidRequest: an empty prompt, an id outside the vocabulary, a limit outside the context
            or the engine's own, or no clip in front where the model wants one.
    """
    prompt = _prompt(prompt_ids, info, param)
    if images:
        prompt = _with_images(prompt, images, info, params, param)
    if clip := _clip_tokens(info):
        _check_clip(prompt, images, clip, param)
    if embeds:
        prompt = _with_embeds(prompt, embeds, params)
    _check_uncut(prompt, images, info, params, param)
    room = _room(len(prompt), info, param)
    check_sampling(params, info)
    eos = frozenset(eos_token_ids)
    stopping = _stop_rules(params, info, room, eos, guided=guidance is not None)
    if guidance is not None:
        guidance = replace(
            guidance,
            ends=tuple(sorted(eos)),
            ends_from=NO_END if params.ignore_eos else len(prompt) + params.min_tokens,
        )
    rows = [part.sent for part in embeds]
    parts = (*images, *rows, *([guidance] if guidance else ()), *parts)
    bad_words = bad_word_ids(params.bad_words or (), tokenizer)
    first_key = secrets.randbits(KEY_BITS)
    return [
        EngineRequest(
            request_id=f"{request_id}-{index}",
            prompt=prompt,
            sampling=runner_sampling(
                params, info, stopping, len(prompt), bad_words, index, guidance
            ),
            stopping=stopping,
            client=client,
            key=first_key + index,
            priority=priority,
            arrival=arrival,
            extra_keys=() if cache_salt is None else (f"salt:{cache_salt}",),
            parent_key=first_key if index else None,
            parts=parts,
        )
        for index in range(params.n)
    ]


def sampling_defaults(
    model: str | Path | None, changes: Mapping[str, Any] | None = None, **hub: Any
) -> dict[str, Any]:
    """Returns the sampling defaults of the model's ``generation_config``.

    As in vLLM these are temperature, top_p, top_k, min_p, repetition_penalty and, as max_tokens,
    max_new_tokens.

    Args:
        model: None if no file has defaults.
        changes: of the file's values, by the file's names; others are ignored, as in vLLM.
        hub: where on the Hub to look (``EngineArgs.hub``).

    Raises:
        InvalidConfig: a value is outside its range.
    """
    config = {} if model is None else generation_config(model, **hub)
    config = {**config, **(changes or {})}
    defaults = {
        field: config[name]
        for name, field in SAMPLING_DEFAULTS.items()
        if config.get(name) is not None
    }
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        source = (
            "override_generation_config"
            if changes
            else f"generation_config.json or config.json of {model}"
        )
        raise InvalidConfig(f"{source}: {error}") from error
    return defaults


def check_vocabulary(ids: Sequence[int], info: EngineInfo, param: str) -> None:
    """Raises:
    InvalidRequest: one of the token ids is none of the model's.
    """
    low, high = min(ids), max(ids)
    if low < 0 or high >= info.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            f"Token id {str(wrong)[:24]} is out of vocabulary: ids are in [0, {info.vocab_size}).",
            param,
            "invalid_token_id",
        )


def _prompt(prompt_ids: Sequence[int], info: EngineInfo, param: str) -> Int32Array:
    if len(prompt_ids) == 0:
        raise InvalidRequest("The prompt must hold at least one token.", param, "empty_prompt")
    if len(prompt_ids) >= info.max_model_len:
        tokens = _clip_tokens(info)
        clip = f" ({tokens} of them for a clip)" if tokens else ""
        raise ContextLengthExceeded(
            f"This model's maximum context length is {info.max_model_len} tokens{clip}, however "
            f"the prompt is too long: it has {len(prompt_ids)} tokens. Please shorten it.",
            param,
        ).sized(len(prompt_ids), info.max_model_len - 1)
    try:
        ids = np.asarray(prompt_ids)
    except (ValueError, OverflowError):
        ids = np.empty((0, 0))
    whole = ids.ndim == 1 and (ids.dtype.kind in "iu" or _all_int(prompt_ids))
    if not whole:
        raise InvalidRequest("A prompt must hold integer token ids.", param, "invalid_type")
    check_vocabulary(prompt_ids, info, param)
    return ids.astype(np.int32)


def _with_images(
    prompt: Int32Array,
    images: Sequence[MediaInput],
    info: EngineInfo,
    params: SamplingParams,
    param: str,
) -> Int32Array:
    """The prompt in which each token of an image or clip has an id of its own."""
    facts = info.part(MediaFacts)
    if facts is None:
        raise InvalidRequest(
            "Images and audio are not supported: this model reads text only.",
            param,
            "unsupported_content",
        )
    if params.scores_prompt:
        raise InvalidRequest(
            f"prompt_logprobs does not go with {MEDIA}.", "prompt_logprobs", "unsupported_parameter"
        )
    return put_virtual_ids(prompt, images, facts.token_id)


def _clip_tokens(info: EngineInfo) -> int:
    """Tokens of the clip in front of each prompt; 0 if there is none."""
    facts = info.part(MediaFacts)
    return 0 if facts is None else facts.front_tokens


def _check_clip(
    prompt: Int32Array, images: Sequence[MediaInput], clip_tokens: int, param: str
) -> None:
    """Refuses a prompt that is not one clip and tokens behind it."""
    first = [image.length for image in images if image.start == 0]
    if len(images) != 1 or first != [clip_tokens] or len(prompt) == clip_tokens:
        raise InvalidRequest(
            "A prompt of this model is one clip of audio, then the tokens of a transcript: it only "
            "writes down speech.",
            param,
            "unsupported_content",
        )


def _with_embeds(
    prompt: Int32Array, embeds: Sequence[PromptEmbeds], params: SamplingParams
) -> Int32Array:
    """The prompt in which each embedding has an id of its own."""
    if params.scores_prompt:
        raise InvalidRequest(
            "prompt_logprobs does not go with prompt_embeds: they are no tokens.",
            "prompt_logprobs",
            "unsupported_parameter",
        )
    for part in embeds:
        prompt[part.sent.start : part.sent.end] = part.ids
    return prompt


def _check_uncut(
    prompt: Int32Array,
    images: Sequence[MediaInput],
    info: EngineInfo,
    params: SamplingParams,
    param: str,
) -> None:
    """Refuses what would have to be cut, though its tokens see each other both ways."""
    if info.uncut.ahead == "nothing":
        return
    if info.uncut.ahead == "prompt" and params.scores_prompt:
        raise InvalidRequest(
            "prompt_logprobs does not go with a model whose prompts are read both ways.",
            "prompt_logprobs",
            "unsupported_parameter",
        )
    spans = [(image.start, image.start + image.length) for image in images]
    for first, last in info.uncut.spans(spans, len(prompt)):
        if last - first > info.uncut.room:
            part = "a prompt" if info.uncut.ahead == "prompt" else "an image"
            raise InvalidRequest(
                f"This model computes {part} in one step, which has room for {info.uncut.room} "
                f"tokens (max_batch_tokens less max_decoding_batch): {last - first} are given.",
                param,
                "too_large_for_a_step",
            )


def _all_int(ids: Sequence[int]) -> bool:
    return all(isinstance(token, int) and not isinstance(token, bool) for token in ids)


def _room(prompt_len: int, info: EngineInfo, param: str) -> int:
    """Returns the tokens that fit after the prompt; the last one is never written to the cache."""
    pages = -(-prompt_len // info.page_size)
    if pages > info.num_pages:
        raise ContextLengthExceeded(
            f"The prompt has {prompt_len} tokens and needs {pages} cache pages of "
            f"{info.page_size} tokens, however this engine has {info.num_pages}.",
            param,
        ).sized(prompt_len, info.num_pages * info.page_size)
    cache = info.num_pages * info.page_size + 1
    return min(info.max_model_len, cache) - prompt_len


def _stop_rules(
    params: SamplingParams, info: EngineInfo, room: int, eos: frozenset[int], guided: bool
) -> StopRules:
    if params.min_tokens > room:
        raise InvalidRequest(
            f"min_tokens must be at most {room}, what the context leaves after the prompt, "
            f"got {params.min_tokens}.",
            "min_tokens",
            "integer_above_max_value",
        )
    if params.ignore_eos and not guided:  # a complete form ends the answer, nothing else is left
        eos = frozenset()
    assert not isinstance(params.repetition_detection, Mapping)
    return StopRules(
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        stop_token_ids=eos | frozenset(params.stop_token_ids or ()),
        eos_token_ids=eos,
        repetition=params.repetition_detection,
    )
