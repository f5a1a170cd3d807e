"""Engine requests and results of beam searches, for HTTP and ``LLM``."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfin.actors.messages import EngineInfo, EngineRequest, Hypothesis
from rayfin.actors.sampling_params import BeamSearchParams, SamplingParams
from rayfin.deployments.generation.build_requests import build_requests
from rayfin.deployments.text.tokenizer import Tokenizer


@dataclass(slots=True)
class BeamSearchSequence:
    """One result of a search; the names are vLLM's."""

    tokens: list[int]  # prompt included
    cum_logprob: float
    score: float  # cum_logprob / output length ** length_penalty
    text: str | None = None  # of the output; None without a tokenizer
    finish_reason: str | None = None  # "stop" or "length"


@dataclass(slots=True)
class BeamSearchOutput:
    """A prompt's sequences, best first."""

    sequences: list[BeamSearchSequence]


def build_search(
    prompt_ids: Sequence[int],
    params: BeamSearchParams,
    info: EngineInfo,
    *,
    request_id: str,
    eos_token_ids: Iterable[int],
    stop_token_ids: Sequence[int] = (),
    **others: Any,
) -> EngineRequest:
    """Returns the engine request of a search; ``others`` are for ``build_requests``.

    Without ``max_tokens`` the search continues while all its beams fit the cache.

    Raises:
        ContextLengthExceeded, InvalidRequest: as ``build_requests``.
    """
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=stop_token_ids,
    )
    (request,) = build_requests(
        prompt_ids, sampling, info, request_id=request_id, eos_token_ids=eos_token_ids, **others
    )
    if params.max_tokens is None:
        room = _room(len(prompt_ids), params.beam_width, info)
        max_tokens = min(request.stopping.max_tokens, max(1, room))
        request.stopping = replace(request.stopping, max_tokens=max_tokens)
    request.beams = params.beams()
    return request


def build_searches(
    prompt_ids: Sequence[int],
    params: SamplingParams,
    search: BeamSearchParams,
    info: EngineInfo,
    **others: Any,
) -> list[EngineRequest]:
    """Returns the request of a search once for each of its choices."""
    request = build_search(
        prompt_ids, search, info, stop_token_ids=params.stop_token_ids or (), **others
    )
    return [request] * params.n


def _room(prompt_len: int, width: int, info: EngineInfo) -> int:
    """Returns the tokens that fit each beam after the prompt, whose full pages are shared."""
    shared = prompt_len // info.page_size
    longest = (shared + (info.num_pages - shared) // width) * info.page_size
    return longest + 1 - prompt_len  # the last token is never written to the cache


def sequence_of(
    hypothesis: Hypothesis,
    request: EngineRequest,
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> BeamSearchSequence:
    """Returns a hypothesis as ``LLM.beam_search`` does; its text ends before its stop token."""
    tokens = hypothesis.tokens
    spoken = tokens
    if hypothesis.finish_reason == "stop" and not params.include_stop_str_in_output:
        spoken = tokens[:-1]
    return BeamSearchSequence(
        tokens=[*request.prompt.tolist(), *tokens],
        cum_logprob=hypothesis.score * len(tokens) ** params.length_penalty,
        score=hypothesis.score,
        text=None if tokenizer is None else tokenizer.detokenizer().whole(spoken),
        finish_reason=hypothesis.finish_reason,
    )
