"""One choice of an offline batch: an engine request on its way, and where its output goes."""

from rayfin.actors.messages import EngineRequest, TokenDelta, TokenLogprob
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.offline.outputs import CompletionOutput, RequestOutput
from rayfin.deployments.requests.best_of import Likelihood
from rayfin.deployments.text.logprobs import by_token, of_prompt, total
from rayfin.deployments.text.output import OutputText, TextDelta
from rayfin.deployments.text.tokenizer import Tokenizer


class OfflineChoice:
    """Fills an output of ``result``, and what the first of its choices tells of the prompt."""

    def __init__(
        self,
        request: EngineRequest,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        result: RequestOutput,
    ) -> None:
        self.request = request
        self.output = CompletionOutput(index=len(result.outputs))
        self._result = result
        self._tokenizer = tokenizer
        self._text = None if tokenizer is None else OutputText(tokenizer, params, request)
        self.likelihood = Likelihood()
        self._most = request.sampling.logprobs or 0
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._prompt: dict[int, TokenLogprob] = {}  # what was told of it, by position

    def append(self, delta: TokenDelta) -> bool:
        """Adds a delta to the output; True if that ended it before the engine did."""
        output, result = self.output, self._result
        news = _untold(delta) if self._text is None else self._text.push(delta)
        output.text += news.text
        output.token_ids += news.token_ids
        output.finish_reason, output.stop_reason = news.finish_reason, news.stop_reason
        self.likelihood.add(delta, len(news.token_ids))
        self._tell(news)
        if output.index == 0:
            result.num_cached_tokens = max(result.num_cached_tokens, news.cached_tokens)
        return output.finish_reason is not None and delta.finish_reason is None

    def _tell(self, news: TextDelta) -> None:
        sampling, output = self.request.sampling, self.output
        if output.logprobs is not None and output.cumulative_logprob is not None:
            output.cumulative_logprob += total(news.logprobs)
            output.logprobs += [
                by_token(token, told, self._most, self._tokenizer)
                for token, told in zip(news.token_ids, news.logprobs, strict=True)
            ]
        self._prompt |= news.prompt_logprobs
        if sampling.prompt_logprobs is not None and output.finish_reason is not None:
            ids, most = self._result.prompt_token_ids, sampling.prompt_logprobs
            self._result.prompt_logprobs = of_prompt(ids, self._prompt, most, self._tokenizer)


def _untold(delta: TokenDelta) -> TextDelta:
    """A delta without a text, of an LLM without a tokenizer."""
    return TextDelta(
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        token_ids=delta.tokens,
        cached_tokens=delta.cached_tokens,
        logprobs=delta.logprobs or [],
        prompt_logprobs=delta.prompt_logprobs,
    )
