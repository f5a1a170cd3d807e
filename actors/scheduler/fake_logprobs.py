"""What the fake model says beside its next token: log probabilities, and a beam search by the book.

The distribution is drawn from a hash of the whole context, so it is as sensitive to a lost page as
the fake's tokens are.
"""

import zlib
from collections.abc import Sequence

import numpy as np

from rayfin.actors.messages import (
    EngineRequest,
    Float32Array,
    Hypothesis,
    Int32Array,
    Logprobs,
    NewRequest,
    SchedulerInfo,
)


def next_logprobs(context: Int32Array, seed: int, vocab_size: int) -> Float32Array:
    """Log probabilities [V] of the token after ``context`` [N]."""
    draw = np.random.default_rng([zlib.crc32(context.astype(np.int32).tobytes()), seed])
    logits = draw.normal(0.0, 2.0, vocab_size)
    row: Float32Array = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
    return row


def size_of_prompt(prompt: Int32Array, vocab_size: int) -> int:
    """A vocabulary that has the prompt's tokens too, which nobody checks here."""
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


def search_by_the_book(source: EngineRequest, vocab_size: int) -> tuple[list[Hypothesis], int]:
    """The request's beam search over all continuations of the fake model; and its steps.

    Written as a textbook has it, to hold ``BeamSearch`` and all that runs it against.
    """
    beams, stopping = source.beams, source.stopping
    assert beams is not None
    width, penalty, early = beams.width, beams.length_penalty, beams.early_stopping
    running: list[tuple[np.float32, list[int]]] = [(np.float32(0), [])]
    done: list[Hypothesis] = []
    for length in range(1, stopping.max_tokens + 1):
        every: list[tuple[np.float32, list[int]]] = []
        for score, text in running:
            context = np.concatenate([source.prompt, np.array(text, np.int32)])
            row = next_logprobs(context, source.sampling.seed, vocab_size)
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
    info: SchedulerInfo, row: int, new: NewRequest, vocab_size: int
) -> Logprobs | None:
    """What the model thinks of the prompt tokens that follow those of the row's chunk."""
    assert new.history is not None, "a prompt to score was not sent"
    first = int(info.kv_len[row]) + 1
    prompt, seed = new.history[: new.prompt_len], new.sampling.seed
    size = size_of_prompt(prompt, vocab_size)
    said = [
        (at, int(prompt[at]), next_logprobs(prompt[:at], seed, size))
        for at in range(first, min(first + int(info.chunk_len[row]), new.prompt_len))
    ]
    return tell(said, new.sampling.prompt_logprobs or 0) if said else None
