"""What the fake model says next, and what a client must get of it: the oracle of a request."""

import math
import zlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rayfin.actors.messages import (
    Ended,
    EngineRequest,
    Hypothesis,
    Int32Array,
    NewRequest,
    TokenLogprob,
)
from rayfin.actors.scheduler.fake_logprobs import (
    next_logprobs,
    search_by_the_book,
    size_of_prompt,
)


def next_token(context: Int32Array, seed: int, vocab_size: int) -> int:
    """The fake model: a hash of the whole context [N] and the request's seed."""
    return zlib.crc32(context.astype(np.int32).tobytes(), seed) % vocab_size


class Stream:
    """What a client has got of one request, and what there is to get."""

    def __init__(self, source: EngineRequest, vocab_size: int) -> None:
        self.source = source
        self.tokens: list[int] = list(source.output)
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # from the second token on
        self.ended: Ended | None = None
        self.aborted = False
        self.arrival = 0.0  # both on the executor's clock
        self.deadline = math.inf
        self._vocab_size = vocab_size
        self._truth = np.concatenate([source.prompt, source.output]).astype(np.int32)

    @property
    def seed(self) -> int:
        return self.source.sampling.seed

    @property
    def open(self) -> bool:
        return self.ended is None and not self.aborted

    def truth(self, length: int) -> Int32Array:
        """The first ``length`` tokens of the request's context if nothing ever stopped it."""
        if length > len(self._truth):
            tokens = np.concatenate([self._truth, np.zeros(length, np.int32)])
            for end in range(len(self._truth), length):
                tokens[end] = next_token(tokens[:end], self.seed, self._vocab_size)
            self._truth = tokens[:length]
        return self._truth[:length]

    def check_logprobs(self) -> None:
        """What was told is what the model thinks of each token, where it was asked for."""
        source, sampling, size = self.source, self.source.sampling, self._vocab_size
        prompt, first = len(source.prompt), len(source.prompt) + len(source.output)
        asked = sampling.logprobs is not None and source.beams is None
        assert len(self.logprobs) == (len(self.tokens) - len(source.output) if asked else 0)
        for position, told in enumerate(self.logprobs, start=first):
            self._check_logprob(position, told, sampling.logprobs or 0, size)
        for position, told in enumerate(self.prompt_logprobs, start=1):
            assert sampling.prompt_logprobs is not None
            size = size_of_prompt(source.prompt, size)
            self._check_logprob(position, told, sampling.prompt_logprobs, size)
        if sampling.prompt_logprobs is not None and self.logprobs:
            assert len(self.prompt_logprobs) == prompt - 1, (
                "the prompt is told of before its output"
            )

    def _check_logprob(self, position: int, told: TokenLogprob, most: int, size: int) -> None:
        context = self.truth(position + 1)
        row = next_logprobs(context[:-1], self.seed, size)
        assert told.logprob == row[context[-1]]
        assert told.rank == 1 + (row > told.logprob).sum()
        likeliest = np.argsort(-row, kind="stable")[:most]
        assert told.top[:most] == tuple(
            zip(likeliest.tolist(), row[likeliest].tolist(), strict=True)
        )

    @cached_property
    def search(self) -> tuple[list[Hypothesis], int]:
        """What a beam search finds, and in how many steps."""
        return search_by_the_book(self.source, self._vocab_size)

    def outcome(self) -> tuple[list[int], str, int | None]:
        """The tokens, finish reason and stop reason of the request when it runs to its end."""
        prompt, stopping = len(self.source.prompt), self.source.stopping
        for count in range(len(self.source.output) + 1, stopping.max_tokens + 1):
            output = self.truth(prompt + count)[prompt:]
            last = int(output[-1])
            if last in stopping.stop_token_ids:
                return output.tolist(), "stop", None if last in stopping.eos_token_ids else last
        return output.tolist(), "length", None


@dataclass(slots=True)
class Mirror:
    """What a runner knows of one handle, from diffs alone."""

    new: NewRequest
    stream: Stream | None  # None: a request that no test has told of; only its pages are checked
    beams: EngineRequest | None  # of which it is a beam; then it has no stream of its own
    known: int  # tokens that the scheduler knew when it sent the request
    pages: list[int] = field(default_factory=list)
    num_tokens: int = -1  # in the pages; -1 before the first row, which says what was cached
    sampled: int | None = None
    over_since: int | None = None  # the call in which it failed, or stopped within its lease
