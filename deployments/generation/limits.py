"""What requests may ask for: limits of the server, and of its engine for SamplingParams.

The latter are turned into a runner's settings here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import EngineInfo, Sampling, StopRules
from rayfin.actors.sampling_params import WHOLE_VOCABULARY, SamplingParams, listed
from rayfin.actors.timing import SSE_COMMENT_SECONDS
from rayfin.deployments.text.tokenizer import Tokenizer

MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128  # as token strings
TIES = 64  # more tokens than top_k may be as likely as the last one
PRIORITIES = range(-(2**31), 2**31)

MAX_PROMPTS = 1024  # of one HTTP request
MAX_CHOICES = 16384  # prompts x n of one HTTP request
MAX_STOP_STRINGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplySettings:
    """What a server lets requests ask for, and what its replies say unasked."""

    max_prompts: int = MAX_PROMPTS
    trust_chat_templates: bool = False  # of requests
    force_usage: bool = False  # in each chunk of each stream
    tokens_as_ids: bool = False  # the default of return_tokens_as_token_ids
    prompt_tokens_details: bool = True  # in usage
    metrics: bool = False  # times of each request
    drop_images: bool = False  # those that the model cannot read become lines of text
    hide_barred_tools: bool = False  # from chat templates, with tool_choice none
    response_role: str = "assistant"  # of chat completions, unless the last message is continued
    comment_seconds: float = SSE_COMMENT_SECONDS  # of silence, until a stream says that; 0: never

    def check_prompts(self, count: int, param: str) -> None:
        """Raises:
        InvalidRequest: a request of more prompts than the server takes; ``param`` is their field.
        """
        if count > self.max_prompts:
            raise InvalidRequest(
                f"'{param}' takes at most {self.max_prompts} prompts, got {count}.",
                param,
                "array_above_max_length",
            )

    def check(self, params: SamplingParams, prompts: int) -> None:
        """Checks the size of a request.

        Raises:
            InvalidRequest: too many choices or stop strings.
        """
        name, of_each = ("best_of", params.best_of) if params.best_of else ("n", params.n)
        if (count := prompts * of_each) > MAX_CHOICES:
            raise InvalidRequest(
                f"prompts times {name} must be at most {MAX_CHOICES}, got {count}.", name
            )
        if (count := len(params.stop or ())) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {count}.",
                "stop",
                "array_above_max_length",
            )


def check_sampling(params: SamplingParams, info: EngineInfo) -> None:
    """Checks the limits that depend on the engine.

    Raises:
        InvalidRequest: an id outside the vocabulary, or more log probabilities than this engine
            returns.
    """
    if len(params.stop_token_ids or ()) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, "
            f"got {len(params.stop_token_ids or ())}.",
            "stop_token_ids",
            "array_above_max_length",
        )
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
        _check_ids(name, getattr(params, name) or (), info.vocab_size)
    if not params.logprob_token_ids:  # else it is their number
        _check_logprobs("logprobs", params.logprobs, info)
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, info)
    for row in prompt_ids(params, 0):
        _check_ids("prompt_logprob_token_ids", row, info.vocab_size)
        _check_logprobs("prompt_logprob_token_ids", len(row), info)


def runner_sampling(
    params: SamplingParams,
    info: EngineInfo,
    stopping: StopRules,
    prompt_len: int,
    bad_words: Sequence[Sequence[int]] = (),
    index: int = 0,
    guidance: Guidance | None = None,
) -> Sampling:
    """Returns the settings of choice ``index``; only the first scores the prompt.

    With ``guidance`` the runner itself decides where an end may be sampled.

    Raises:
        InvalidRequest: no token could be sampled.
    """
    ends = () if guidance is None else guidance.ends
    banned = tuple(sorted(stopping.stop_token_ids.difference(ends))) if params.min_tokens else ()
    allowed = tuple(sorted(set(params.allowed_token_ids or ())))
    never = {word[0] for word in bad_words if len(word) == 1}.union(banned)
    if allowed and never.issuperset(allowed):
        raise InvalidRequest(
            "no token is left: bad_words and min_tokens forbid all of allowed_token_ids.",
            "allowed_token_ids",
        )
    masked, free = params.return_sampling_mask, params.greedy
    scored, wanted = params.prompt_logprobs, params.logprobs
    if params.prompt_logprob_token_ids is not None:
        scored = 0
    if masked and wanted != WHOLE_VOCABULARY:
        wanted = max(wanted or 0, params.top_k + TIES)
    return Sampling(
        temperature=params.temperature,
        top_k=0 if free or params.top_k >= info.vocab_size else params.top_k,
        top_p=1.0 if free else params.top_p,
        min_p=0.0 if free else params.min_p,
        seed=params.fixed_seed(index),
        banned=banned,
        banned_until=prompt_len + params.min_tokens if banned else 0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=tuple((params.logit_bias or {}).items()),
        allowed=allowed if len(allowed) < info.vocab_size else (),
        bad_words=tuple(map(tuple, bad_words)),
        logprobs=0 if params.logprob_token_ids else _count(wanted, info),
        logprob_ids=tuple(params.logprob_token_ids or ()),
        prompt_logprobs=None if index else _count(scored, info),
        prompt_logprob_start=params.prompt_logprob_start,
        prompt_logprob_ids=() if index else prompt_ids(params, prompt_len),
        processed=masked or (params.logprobs_mode or info.logprobs_mode) == "processed_logprobs",
    )


def prompt_ids(params: SamplingParams, prompt_len: int) -> tuple[tuple[int, ...], ...]:
    """Returns the ids to score at each token of a prompt behind ``prompt_logprob_start``.

    Args:
        prompt_len: 0 gives each different row once.

    Raises:
        InvalidRequest: there are more or fewer rows than such tokens.
    """
    given: Sequence[Any] | None = params.prompt_logprob_token_ids
    if given is None:
        return ()
    count = prompt_len - 1 - params.prompt_logprob_start
    rows = given if isinstance(given[0], Sequence) else [given] * max(count, 1)
    if prompt_len and (count < 1 or len(rows) != count):
        raise InvalidRequest(
            f"prompt_logprob_token_ids needs {max(count, 0)} rows, one for each token of the "
            f"prompt behind prompt_logprob_start and the one after it, got {len(rows)}.",
            "prompt_logprob_token_ids",
        )
    return tuple(tuple(token for token in row if token >= 0) for row in rows)


def bad_word_ids(words: Iterable[str], tokenizer: Tokenizer | None) -> list[list[int]]:
    """Returns the token strings of bad words: each at the start of a text and after a space.

    Raises:
        InvalidRequest: no tokenizer, a word without tokens, or too many token strings.
    """
    token_strings: list[list[int]] = []
    for word in words:
        if tokenizer is None:
            raise InvalidRequest("bad_words need a tokenizer", "bad_words")
        bare = word.lstrip()
        first = tokenizer.encode(bare, False)
        if not first:
            raise InvalidRequest(f"bad_words: {word[:64]!r} has no tokens.", "bad_words")
        token_strings.append(first)
        spaced = tokenizer.encode(" " + bare, False)
        if spaced[-len(first) :] != first:
            token_strings.append(spaced)
        if len(token_strings) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words takes at most {MAX_BAD_WORDS} strings of tokens.",
                "bad_words",
                "array_above_max_length",
            )
    return token_strings


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    if wrong := [token for token in ids if token >= vocab_size]:
        raise InvalidRequest(
            f"{name} must be in [0, {vocab_size}), got {listed(wrong)}.",
            name,
            "invalid_token_id",
        )


def _check_logprobs(name: str, asked: int | None, info: EngineInfo) -> None:
    limit = info.vocab_size if info.max_logprobs == WHOLE_VOCABULARY else info.max_logprobs
    if asked is not None and (info.vocab_size if asked == WHOLE_VOCABULARY else asked) > limit:
        raise InvalidRequest(
            f"{name} must be at most {limit}, the limit of this engine, got {str(asked)[:24]}.",
            name,
            "integer_above_max_value",
        )


def _count(asked: int | None, info: EngineInfo) -> int | None:
    if asked is None:
        return None
    return info.vocab_size if asked == WHOLE_VOCABULARY else min(asked, info.vocab_size)
