"""What the fake model says next, and what a client must get of it: the oracle of a request."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import (
    Ended,
    EngineRequest,
    Float32Array,
    Hypothesis,
    Int32Array,
    Logprobs,
    NewRequest,
    SchedulerInfo,
    TokenLogprob,
)


def next_token(context: Int32Array, seed: int, vocab_size: int) -> int:
    """The fake model: a hash of the whole context [N] and the request's seed."""
    return zlib.crc32(context.astype(np.int32).tobytes(), seed) % vocab_size


def model_seed(seed: int, adapter: AdapterRef | None, version: int = 0) -> int:
    """The seed of the fake model for a request: an adapter, and a version of the weights, make
    another model of it."""
    if version:
        seed = zlib.crc32(b"%d" % version, seed)
    return seed if adapter is None else zlib.crc32(bytes.fromhex(adapter.digest), seed)


def guided_token(token: int, history: Sequence[int] | Int32Array, grammar: str, size: int) -> int:
    """A toy grammar: what it makes of the model's ``token`` after a request's ``history`` [N]."""
    said = np.asarray(history, np.int32).tobytes()
    return zlib.crc32(said, zlib.crc32(grammar.encode(), token)) % size


class Stream:
    """What a client has got of one request, and what there is to get."""

    def __init__(self, source: EngineRequest, vocab_size: int, version: int = 0) -> None:
        self.source = source
        self.tokens: list[int] = list(source.output)
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []  # from the second token on
        self.ended: Ended | None = None
        self.aborted = False
        self.waited = False  # for its grammar, beside the queue
        self.arrival = 0.0  # both on the executor's clock
        self.deadline = math.inf
        self._vocab_size = vocab_size
        self._truth = np.concatenate([source.prompt, source.output]).astype(np.int32)
        # Positions from which on a version of the weights makes tokens.
        self._versions = [(0, version)]
        self.scored: list[int] = []  # the versions that make its prompt's log probabilities
        self.labels: list[str] = []  # of the versions, by what the engine says of each token

    @property
    def seed(self) -> int:
        return self.source.sampling.seed

    def turn(self, version: int) -> None:
        """The model has other weights from now on: the client has all tokens of those before."""
        known = len(self.source.prompt) + len(self.tokens)
        self._truth = self._truth[:known]
        self._versions.append((known, version))

    def version_at(self, position: int) -> int:
        """The version that makes the token at ``position``."""
        return [version for start, version in self._versions if start <= position][-1]

    def model_seed(self, position: int) -> int:
        """Of the token at ``position``."""
        return model_seed(self.seed, self.source.part(AdapterRef), self.version_at(position))

    @property
    def open(self) -> bool:
        return self.ended is None and not self.aborted

    def truth(self, length: int) -> Int32Array:
        """The first ``length`` tokens of the request's context if nothing ever stopped it."""
        if length > len(self._truth):
            tokens = np.concatenate([self._truth, np.zeros(length, np.int32)])
            guidance = self.source.part(Guidance)
            for end in range(len(self._truth), length):
                token = next_token(tokens[:end], self.model_seed(end), self._vocab_size)
                for grammar in guidance.grammars if guidance is not None else ():
                    token = guided_token(token, tokens[:end], grammar, self._vocab_size)
                tokens[end] = token
            self._truth = tokens[:length]
        return self._truth[:length]

    def check_logprobs(self) -> None:
        """Delivered log probabilities are the model's, for each token if requested."""
        source, sampling, size = self.source, self.source.sampling, self._vocab_size
        prompt, first = len(source.prompt), len(source.prompt) + len(source.output)
        asked = sampling.logprobs is not None and source.beams is None
        assert len(self.logprobs) == (len(self.tokens) - len(source.output) if asked else 0)
        for position, logprob in enumerate(self.logprobs, start=first):
            seed = self.model_seed(position)
            self._check_logprob(position, logprob, sampling.logprobs or 0, size, seed)
        assert len(set(self.scored)) <= 1, "a prompt was scored by two versions"
        for position, logprob in enumerate(self.prompt_logprobs, start=1):
            assert sampling.prompt_logprobs is not None
            size = size_of_prompt(source.prompt, size)
            version = self.scored[position - 1] if self.scored else self.version_at(0)
            seed = model_seed(self.seed, source.part(AdapterRef), version)
            self._check_logprob(position, logprob, sampling.prompt_logprobs, size, seed)
        if sampling.prompt_logprobs is not None and self.logprobs:
            assert len(self.prompt_logprobs) == prompt - 1, (
                "prompt log probabilities come before the output"
            )

    def _check_logprob(
        self, position: int, logprob: TokenLogprob, most: int, size: int, seed: int
    ) -> None:
        context = self.truth(position + 1)
        row = next_logprobs(context[:-1], seed, size)
        assert logprob.logprob == row[context[-1]]
        assert logprob.rank == 1 + (row > logprob.logprob).sum()
        likeliest = np.argsort(-row, kind="stable")[:most]
        assert logprob.top[:most] == tuple(
            zip(likeliest.tolist(), row[likeliest].tolist(), strict=True)
        )

    @cached_property
    def search(self) -> tuple[list[Hypothesis], int]:
        """What a beam search finds, and in how many steps."""
        return search_by_the_book(self.source, self._vocab_size, self._versions[-1][1])

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
    stream: Stream | None  # None: a request that no test has named; only its pages are checked
    beams: EngineRequest | None  # of which it is a beam; then it has no stream of its own
    known: int  # tokens that the scheduler knew when it sent the request
    pages: list[int] = field(default_factory=list)
    beside: list[list[int]] = field(default_factory=list)  # of each page: those of other groups
    num_tokens: int = -1  # in the pages; -1 before the first row, which says what was cached
    sampled: int | None = None
    history: list[int] = field(default_factory=list)  # of a guided request: sent, then sampled
    over_since: int | None = None  # the call in which it failed, or stopped within its lease
    kept: bool = False  # its pages may be of several versions of the weights


# What the fake model says beside its next token: log probabilities, and a beam search by the
# book.
#
# The distribution is drawn from a hash of the whole context, so it is as sensitive to a lost page
# as the fake's tokens are.


def next_logprobs(context: Int32Array, seed: int, vocab_size: int) -> Float32Array:
    """Log probabilities [V] of the token after ``context`` [N]."""
    draw = np.random.default_rng([zlib.crc32(context.astype(np.int32).tobytes()), seed])
    logits = draw.normal(0.0, 2.0, vocab_size)
    row: Float32Array = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    return row


def size_of_prompt(prompt: Int32Array, vocab_size: int) -> int:
    """A vocabulary that has the prompt's tokens too; they are not checked here."""
    return max(vocab_size, int(prompt.max()) + 1)


def tell(said: Sequence[tuple[int, int, Float32Array]], most: int) -> Logprobs:
    """The message of N (place in ``tokens``, token, log probabilities [V]); ``most`` is its K."""
    values = np.array([row for _, _, row in said], np.float32)
    chosen = np.array([token for _, token, _ in said])
    order = np.argsort(-values, axis=1, kind="stable")[:, :most].astype(np.int32)
    own = np.take_along_axis(values, chosen[:, None], 1)
    return Logprobs(
        at=np.array([at for at, _, _ in said], np.int32),
        chosen=own[:, 0],
        rank=((values > own).sum(axis=1) + 1).astype(np.int32),
        ids=order,
        values=np.take_along_axis(values, order, 1),
    )


def search_by_the_book(
    source: EngineRequest, vocab_size: int, version: int
) -> tuple[list[Hypothesis], int]:
    """The request's beam search over all continuations of the fake model; and its steps.

    Written as a textbook has it, to hold ``BeamSearch`` and all that runs it against.
    """
    beams, stopping = source.beams, source.stopping
    assert beams is not None
    width, penalty, early = beams.width, beams.length_penalty, beams.early_stopping
    seed = model_seed(source.sampling.seed, source.part(AdapterRef), version)
    running: list[tuple[np.float32, list[int]]] = [(np.float32(0), [])]
    done: list[Hypothesis] = []
    for length in range(1, stopping.max_tokens + 1):
        every: list[tuple[np.float32, list[int]]] = []
        for score, text in running:
            context = np.concatenate([source.prompt, np.array(text, np.int32)])
            row = next_logprobs(context, seed, vocab_size)
            likeliest = sorted(range(vocab_size), key=lambda token: -row[token])
            every += [(score + row[token], [*text, token]) for token in likeliest]
        every.sort(key=lambda candidate: -candidate[0])
        for score, text in every[:width]:
            stops = text[-1] in stopping.stop_token_ids
            if stops or length == stopping.max_tokens:
                own = float(score / np.float32(length**penalty))
                done.append(Hypothesis(text, own, "stop" if stops else "length"))
        done = sorted(done, key=lambda hypothesis: -hypothesis.score)[:width]
        running = [own for own in every if own[1][-1] not in stopping.stop_token_ids][:width]
        if not running:
            break
        if len(done) == width:
            ahead = stopping.max_tokens if early == "never" and penalty > 0 else length
            best = float(running[0][0] / np.float32(ahead**penalty))
            if early is True or width == 1 or best <= done[-1].score:
                break
    return done, length


def score_prompt(
    info: SchedulerInfo, row: int, new: NewRequest, vocab_size: int, version: int
) -> Logprobs | None:
    """What the model thinks of the prompt tokens that follow those of the row's chunk."""
    assert new.history is not None, "a prompt to score was not sent"
    first = int(info.kv_len[row]) + 1
    prompt = new.history[: new.prompt_len]
    seed = model_seed(new.sampling.seed, new.part(AdapterRef), version)
    size = size_of_prompt(prompt, vocab_size)
    said = [
        (at, int(prompt[at]), next_logprobs(prompt[:at], seed, size))
        for at in range(first, min(first + int(info.chunk_len[row]), new.prompt_len))
    ]
    return tell(said, new.sampling.prompt_logprobs or 0) if said else None
