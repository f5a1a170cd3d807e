"""A computation that raises: whose fault it is, and that no other result differs."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rayfin.actors.messages import NO_TOKEN, Logprobs, SchedulerInfo
from rayfin.actors.runner.execution.failed_rows import isolate, rows_of
from rayfin.actors.runner.sampling.sampler import Sampled


def step(decoding: int, chunks: tuple[int, ...]) -> SchedulerInfo:
    lengths = np.array([1] * decoding + list(chunks), np.int32)
    rows = len(lengths)
    counts = np.arange(rows, dtype=np.int32) % 3
    return SchedulerInfo(
        epoch=0,
        step=7,
        ids=np.arange(rows, dtype=np.int32) + 40,
        chunk_idx=(np.cumsum(lengths) - lengths).astype(np.int32),
        chunk_len=lengths,
        merge_prompt=np.arange(lengths.sum(), dtype=np.int32) + 100,
        kv_len=np.arange(rows, dtype=np.int32),
        kv_page_len=counts,
        last_pos=lengths - 1,
        is_decoding=np.arange(rows) < decoding,
        decoding_batch=decoding,
        prefill_batch=len(chunks),
        new_pages=np.arange(counts.sum(), dtype=np.int32),
        new_pages_len=counts,
    )


class Model:
    """Answers with the last token of each row's chunk; raises where a chunk has a bad token."""

    def __init__(self, *bad: int, error: type[Exception] = RuntimeError) -> None:
        self.bad = bad
        self.error = error
        self.rows: list[int] = []  # of each call

    def __call__(self, info: SchedulerInfo) -> Sampled:
        self.rows.append(len(info.ids))
        if set(self.bad) & set(info.merge_prompt.tolist()):
            raise self.error("bad token")
        last = np.array([info.chunk_prompt(row)[-1] for row in range(len(info.ids))], np.int32)
        rows = np.arange(len(last), dtype=np.int32)
        column = np.zeros((len(last), 1), np.float32)
        scores = Logprobs(rows, last.astype(np.float32), rows, column.astype(np.int32), column)
        return Sampled(
            last,
            logprobs=scores,
            prompt_logprobs={0: scores} if info.prefill_batch else {},
            vectors={row: np.full(3, last[row], np.float32) for row in range(len(last))},
        )


def isolated(model: Model, info: SchedulerInfo) -> Sampled:
    with pytest.raises(Exception) as caught:
        model(info)
    return isolate(model, info, caught.value)


@pytest.mark.parametrize("bad", [(100,), (103,), (108,), (101, 106), (100, 115)])
def test_rows_at_fault_fail_alone(bad: tuple[int, ...]) -> None:
    info = step(4, (3, 5, 1, 3))
    whole = Model()(info)
    guilty = [row for row in range(8) if set(bad) & set(info.chunk_prompt(row).tolist())]
    sampled = isolated(Model(*bad), info)
    assert sorted(sampled.errors) == guilty and 0 < len(guilty) < 8
    others = [row for row in range(8) if row not in guilty]
    assert sampled.tokens[others].tolist() == whole.tokens[others].tolist()
    assert (sampled.tokens[guilty] == NO_TOKEN).all()
    assert sampled.logprobs is not None
    scores = {at: entry.logprob for at, entry in sampled.logprobs.entries()}
    assert scores == {row: float(whole.tokens[row]) for row in others}
    assert {row: own.tolist() for row, own in sampled.vectors.items()} == {
        row: [whole.tokens[row]] * 3 for row in others
    }


def test_one_bad_row_costs_a_logarithm() -> None:
    model = Model(100 + 17)
    isolated(model, step(64, ()))
    assert len(model.rows) == 1 + 2 * 6


def test_fault_of_all_is_nobodys() -> None:
    info = step(3, (2,))
    with pytest.raises(RuntimeError, match="bad token"):
        isolated(Model(*range(100, 110)), info)


def test_single_row_is_at_fault_itself() -> None:
    sampled = isolated(Model(101), step(0, (4,)))
    assert sampled.errors[0].code == "engine_error" and "bad token" in str(sampled.errors[0])


def test_row_that_takes_too_much_memory_is_not_at_fault() -> None:
    with pytest.raises(MemoryError):
        isolated(Model(101, error=MemoryError), step(0, (4,)))


@pytest.mark.parametrize("start, stop", [(0, 3), (2, 6), (4, 8), (7, 8)])
def test_rows_of_a_step_are_a_step(start: int, stop: int) -> None:
    info = step(4, (3, 5, 1, 3))
    part = rows_of(info, start, stop)
    assert part.decoding_batch + part.prefill_batch == len(part.ids) == stop - start
    assert part.is_decoding.sum() == part.decoding_batch
    for row in range(stop - start):
        assert part.chunk_prompt(row).tolist() == info.chunk_prompt(start + row).tolist()
    ends = np.cumsum(info.new_pages_len)
    assert part.new_pages.tolist() == list(
        range(ends[start] - info.new_pages_len[start], ends[stop - 1])
    )


def test_runner_isolates_a_row_and_the_others_are_exact(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a real model: the batch with a bad row gives the others what they get without it."""
    from rayfin import LLM, SamplingParams
    from rayfin.actors import failpoints
    from rayfin.actors.errors import RequestFailed

    prompts = [[5, 6, 7, 8], [9, 77, 3], [4, 4, 2, 1, 1], [8, 8]]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    folder = str(tiny_model("llama").folder)
    with LLM(folder, skip_tokenizer_init=True, kv_cache_memory=2**20, threads=1) as llm:
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        expected = [o.outputs[0].token_ids for o in llm.generate(asked, params, use_tqdm=False)]
        monkeypatch.setattr(
            failpoints, "ACTIVE", failpoints.Failpoints("runner.row=raise@token:77")
        )
        with pytest.raises(RequestFailed, match="InjectedFault"):
            llm.generate(asked, params, use_tqdm=False)
        del asked[1], expected[1]
        again = [o.outputs[0].token_ids for o in llm.generate(asked, params, use_tqdm=False)]
        assert again == expected
        assert llm.stats().pages_held == 0
