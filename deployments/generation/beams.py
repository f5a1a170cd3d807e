"""Beam search over HTTP, with the fields of vLLM: ``use_beam_search``, and ``n`` beams."""

from collections.abc import Iterator, Sequence

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.messages import TokenDelta
from rayfin.actors.sampling_params import BeamSearchParams, SamplingParams
from rayfin.deployments.generation.bodies import GenerationBody
from rayfin.deployments.generation.choice import Choice
from rayfin.deployments.generation.plan import OutputPlan
from rayfin.deployments.http.json_body import rename_error_params
from rayfin.deployments.text.output import TextDelta

IGNORABLE = {  # fields that a search does not support -> values that change nothing
    **{name: (False,) for name in ("stream", "logprobs")},
    **{name: (0,) for name in ("presence_penalty", "frequency_penalty", "min_tokens", "min_p")},
    **{name: (1,) for name in ("repetition_penalty", "top_p")},
    **{name: ([],) for name in ("stop", "bad_words", "allowed_token_ids")},
    "top_k": (0, -1),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "prompt_logprobs": (),
    "best_of": (),
    "repetition_detection": ({},),
}


def search_params(body: GenerationBody, max_tokens: int | None) -> BeamSearchParams:
    """Returns the settings of the search that ``body`` asks for.

    Raises:
        InvalidRequest: a value out of range, or a field that a search does not support.
    """
    body.check()
    for name, harmless in IGNORABLE.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name} does not go with use_beam_search.", name)
    with rename_error_params({"beam_width": "n"}):
        return BeamSearchParams(
            beam_width=1 if body.n is None else body.n,
            max_tokens=max_tokens,
            ignore_eos=bool(body.ignore_eos),
            temperature=0 if body.temperature is None else body.temperature,
            length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
            early_stopping=False if body.early_stopping is None else body.early_stopping,
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
        )


def check_search(plan: OutputPlan) -> None:
    """Rejects rules that an answer has to keep: a search ranks hypotheses without masks.

    Raises:
        InvalidRequest: ``param`` is use_beam_search.
    """
    if (guidance := plan.guidance) is None:
        return
    limited = guidance.thinking is not None and guidance.thinking.budget is not None
    if guidance.grammar or guidance.forbidden or limited:
        raise InvalidRequest(
            "use_beam_search does not go with structured outputs, a tool call that is forced or "
            "barred, or a budget of thoughts.",
            "use_beam_search",
        )


def text_params(body: GenerationBody, search: BeamSearchParams) -> SamplingParams:
    """Returns the settings that the prompts and the texts of the choices need."""
    return SamplingParams(
        n=search.beam_width,
        max_tokens=search.max_tokens,  # what a prompt that is cut leaves room for
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        stop_token_ids=body.stop_token_ids,
        include_stop_str_in_output=search.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
    )


def hypothesis_deltas(
    choices: Sequence[Choice], delta: TokenDelta
) -> Iterator[tuple[Choice, TextDelta]]:
    """Yields the whole text of each choice of a prompt, best first, if the search has ended."""
    request = choices[0].request
    for choice, hypothesis in zip(choices, delta.hypotheses, strict=False):
        last = TokenDelta(request.request_id, hypothesis.tokens, hypothesis.finish_reason)
        if hypothesis.finish_reason == "stop":
            token = hypothesis.tokens[-1]
            last.stop_reason = None if token in request.stopping.eos_token_ids else token
        last.cached_tokens = delta.cached_tokens
        assert request.beams is not None
        length = len(hypothesis.tokens)
        choice.likelihood.logprob = hypothesis.score * length**request.beams.length_penalty
        choice.likelihood.tokens = length
        text = choice.output.push(last)
        choice.append(text)
        yield choice, text
