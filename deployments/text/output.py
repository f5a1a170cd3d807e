"""Token deltas of one request to text deltas."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rayfin.actors.messages import EngineRequest, TokenDelta, TokenLogprob
from rayfin.actors.sampling_params import SamplingParams
from rayfin.actors.weights.spans import SpanLog
from rayfin.deployments.text.answer_parts import AnswerParts
from rayfin.deployments.text.detokenizer import HALF
from rayfin.deployments.text.parsing.events import Event
from rayfin.deployments.text.stop_strings import StopStrings
from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from rayfin.deployments.text.parsing.parser import OutputParser

JOINED = ("reasoning", "content", "arguments")  # kinds of events whose texts join


@dataclass(slots=True)
class DeltaPart:
    """Events that end with a token of their delta, and the tokens since the part before."""

    events: list[Event]
    tokens: int


@dataclass(slots=True)
class TextDelta:
    """One request's new text; ``finish_reason`` marks the last one."""

    text: str = ""  # with a parser the content only
    finish_reason: str | None = None  # "stop", "length", "abort", "error"
    stop_reason: int | str | None = None  # the stop token's id or the stop string
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int = 0  # prompt tokens that were not computed
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of each token, if requested
    offsets: list[int] = field(default_factory=list)  # with them: characters before each token
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # by prompt position
    parts: list[DeltaPart] = field(default_factory=list)  # with a parser: of all tokens, in order
    reasoning_tokens: int = 0  # with a parser: tokens between the marks of a thought
    silent_end: bool = False  # the last token ends the answer, and is no text

    def append(self, other: "TextDelta") -> None:
        """Appends the delta that follows."""
        self.text += other.text
        self.finish_reason, self.stop_reason = other.finish_reason, other.stop_reason
        self.token_ids += other.token_ids
        self.cached_tokens, self.silent_end = other.cached_tokens, other.silent_end
        self.logprobs += other.logprobs
        self.offsets += other.offsets
        self.prompt_logprobs |= other.prompt_logprobs
        self.reasoning_tokens += other.reasoning_tokens
        for part in other.parts:
            self.add(part.events, part.tokens)

    @property
    def events(self) -> list[Event]:
        """With a parser: what the text is, in order."""
        return [event for part in self.parts for event in part.events]

    def add(self, events: Sequence[Event], tokens: int) -> None:
        """Adds what ``tokens`` further tokens have brought; texts of one kind and call join.

        Another kind begins a part of its own, unless no token is left for it.
        """
        last = self.parts[-1] if self.parts else None
        if last is None or (tokens and last.events and not _follows(last.events, events)):
            last = DeltaPart([], 0)
            self.parts.append(last)
        last.tokens += tokens
        for event in events:
            if last.events and _joins(last.events[-1], event):
                before = last.events[-1]
                last.events[-1] = before._replace(text=before.text + event.text)
            else:
                last.events.append(event)

    def split(self, *, end_apart: bool = False) -> "Iterator[TextDelta]":
        """Yields the parts as deltas of their own tokens, log probabilities and events.

        Only the last one has a finish reason. Without a parser it is the delta itself.

        Args:
            end_apart: a token without text that ends the answer is a part of its own.
        """
        if end_apart and self.silent_end and self._shows_with_its_end():
            last = len(self.token_ids) - 1
            parts = [*self.parts]
            if parts:
                parts[-1] = DeltaPart(parts[-1].events, parts[-1].tokens - 1)
            shown = replace(self, finish_reason=None, stop_reason=None, parts=parts)
            yield from shown._tokens(0, last).split()
            yield replace(self, text="", parts=[])._tokens(last, last + 1)
            return
        if len(self.parts) < 2:
            yield self
            return
        start = 0
        for number, part in enumerate(self.parts, start=1):
            end, is_last = start + part.tokens, number == len(self.parts)
            yield TextDelta(
                text="".join(event.text for event in part.events if event.kind == "content"),
                finish_reason=self.finish_reason if is_last else None,
                stop_reason=self.stop_reason if is_last else None,
                token_ids=self.token_ids[start:end],
                logprobs=self.logprobs[start:end],
                offsets=self.offsets[start:end],
                parts=[part],
            )
            start = end

    def _tokens(self, start: int, end: int) -> "TextDelta":
        """Returns the delta with so many of its tokens only."""
        return replace(
            self,
            token_ids=self.token_ids[start:end],
            logprobs=self.logprobs[start:end],
            offsets=self.offsets[start:end],
        )

    def _shows_with_its_end(self) -> bool:
        """Returns whether the part of the last token has a text, and tokens of that."""
        if not self.parts:
            return bool(self.text) and len(self.token_ids) > 1
        last = self.parts[-1]
        return last.tokens > 1 and any(event.text or event.kind == "call" for event in last.events)


def _joins(before: Event, event: Event) -> bool:
    return event.kind in JOINED and (before.kind, before.index) == (event.kind, event.index)


def _follows(before: Sequence[Event], events: Sequence[Event]) -> bool:
    """Returns whether events belong to those before: they go on, or have nothing to show."""
    return all(event.kind == "call_end" for event in events) or _joins(before[-1], events[0])


class OutputText:
    """Detokenizes one request and ends it at a stop string.

    With a ``parser`` the text is read as events, and stop strings do not count in reasoning.

    After a delta with a ``finish_reason`` the caller closes the engine's stream, which aborts a
    request that has met a stop string. Tokens past the stop string are dropped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        request: EngineRequest,
        parser: "OutputParser | None" = None,
    ) -> None:
        self._stop_token_ids = request.stopping.stop_token_ids
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._stops: StopStrings | None = None
        if params.stop:
            self._stops = StopStrings(list(params.stop), self._include_stop)
        self._detokenizer = (
            tokenizer.detokenizer(
                request.prompt,
                params.skip_special_tokens,
                params.spaces_between_special_tokens,
            )
            if params.detokenize
            else None
        )
        self._parts: AnswerParts | None = None
        if parser is not None and self._detokenizer is not None:
            hidden = tokenizer.special_token_ids if params.skip_special_tokens else frozenset()
            self._parts = AnswerParts(parser, tokenizer.added_ids, hidden, self._stops)
        self.versions = SpanLog(request.spans)
        """Which weights have made which of its tokens."""
        self._tokens = 0
        self._length = 0  # characters of their text, including those that stop strings hold back
        self.finished = False

    def push(self, delta: TokenDelta) -> TextDelta:
        """Returns the text of ``delta``, or an empty delta once the request has finished."""
        if self.finished:
            return TextDelta()
        result = TextDelta(
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            cached_tokens=delta.cached_tokens,
            prompt_logprobs=delta.prompt_logprobs,
        )
        self._push(delta, result)
        result.logprobs = (delta.logprobs or [])[: len(result.token_ids)]
        result.offsets = result.offsets[: len(result.logprobs)]
        self.versions.add(delta.weights, len(result.token_ids), kept=delta.kept)
        return result

    @property
    def unparsed(self) -> int:
        """Tool calls that did not parse and became content."""
        return 0 if self._parts is None else self._parts.unparsed

    def _push(self, delta: TokenDelta, result: TextDelta) -> None:
        if self._parts is not None:
            self._push_parts(self._parts, delta, result)
            return
        for piece, _, armed in self._pieces(delta, result):
            hit = None
            if self._stops is not None:
                piece, hit = self._stops.push(piece, armed)
            result.text += piece
            if hit is not None:
                result.finish_reason, result.stop_reason = "stop", hit
                self.finished = True
                return
        if delta.finish_reason is not None:
            if self._stops is not None:
                result.text += self._stops.flush()
            self.finished = True

    def _push_parts(self, parts: AnswerParts, delta: TokenDelta, result: TextDelta) -> None:
        thought, seen = parts.reasoning_tokens, 0
        for piece, token, armed in self._pieces(delta, result):
            hit = parts.push(piece, token, armed)
            if events := parts.take():
                result.add(events, len(result.token_ids) - seen)
                seen = len(result.token_ids)
            if hit is not None:
                result.finish_reason, result.stop_reason = "stop", hit
                break
        if result.finish_reason is not None:
            parts.finish(result.finish_reason)
            self.finished = True
        if (events := parts.take()) or len(result.token_ids) > seen:
            result.add(events, len(result.token_ids) - seen)
        for event in result.events:
            if event.kind == "content":
                result.text += event.text
        result.reasoning_tokens = parts.reasoning_tokens - thought

    def _pieces(
        self, delta: TokenDelta, result: TextDelta
    ) -> Iterator[tuple[str, int | None, bool]]:
        """Yields texts, the token of each, and whether stop strings count.

        Adds the tokens to ``result``. The token is None where there are several or none.
        """
        silent = self._silent_tail(delta)
        result.silent_end = bool(silent)
        spoken = delta.tokens[: len(delta.tokens) - silent]
        # Token by token with stop strings, as the token that completes one is the last; with log
        # probabilities, which need the offset of each token; and with a parser.
        by_token = self._stops is not None or delta.logprobs is not None or self._parts is not None
        step = 1 if by_token else max(1, len(spoken))
        for start in range(0, len(spoken), step):
            tokens = spoken[start : start + step]
            self._tokens += len(tokens)
            result.token_ids += tokens
            result.offsets.append(self._length)
            text = self._text(tokens)
            self._length += len(text)
            yield text, tokens[0] if by_token else None, self._armed
        result.token_ids += delta.tokens[len(spoken) :]
        result.offsets.append(self._length)
        self._tokens += silent
        if delta.finish_reason is not None and self._detokenizer is not None:
            last = delta.tokens[-1] if silent else None
            tail = self._detokenizer.finish()
            if delta.finish_reason == "length":
                # A character that was cut off, whose first bytes alone would be U+FFFD.
                tail = "" if self._parts and self._parts.holds_back else tail.rstrip(HALF)
            yield tail, last, self._armed

    def _silent_tail(self, delta: TokenDelta) -> int:
        """Returns 1 if the last token is a stop token without text, else 0."""
        ended = delta.finish_reason == "stop" and bool(delta.tokens) and not self._include_stop
        return int(ended and delta.tokens[-1] in self._stop_token_ids)

    @property
    def _armed(self) -> bool:
        return self._tokens > self._min_tokens or self._min_tokens == 0

    def _text(self, tokens: list[int]) -> str:
        if self._detokenizer is None:
            return ""
        if self._parts is not None and tokens[0] in self._parts.markers:
            return self._detokenizer.split(tokens[0])
        return self._detokenizer.push(tokens)
