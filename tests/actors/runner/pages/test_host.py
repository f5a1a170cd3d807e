"""Pages go to host memory and come back bit by bit, with the names that say what they hold."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.config import resolve
from rayfin.actors.messages import HOST, SWAP_OUT, PageTransfer
from rayfin.actors.runner.inline import InlineExecutor
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.page_moves import PageMover
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.runner.pages.transfers import PageTransfers
from rayfin.actors.scheduler.engine import Engine
from rayfin.actors.step_cost import PromptCost
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.cache.prefix_index import PageName

Make = Callable[..., Any]
PAGES, SIZE = 8, 2
LAYOUTS = [KVLayout(2, 3, 3), KVLayout(1, 4, 0)]
HASHES = [bytes([number]) * 32 for number in range(PAGES)]
TOKENS = np.arange(PAGES * SIZE, dtype=np.int32).reshape(PAGES, SIZE)
STEP = (5, 7)


class Host:
    """A cache whose page n has the name n, and host memory behind it, both of plain memory."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.names = PageNames()
        self.names._know({n: PageName(HASHES[n], TOKENS[n].tobytes()) for n in range(PAGES)})
        cpu = torch.device("cpu")
        self.cache = KVTensors(LAYOUTS, PAGES, SIZE, dtype, cpu)
        self.mover = PageMover(self.cache, KVTensors(LAYOUTS, 6, SIZE, dtype, cpu))
        self.next_step = (STEP[0], STEP[1] + 1)
        self.pages = PageTransfers(
            0, lambda: self.next_step, lambda pages: self.names.overwritten(pages), self.names
        )
        self.pages.use(self.cache, STEP[0], mover=self.mover)
        for tensor in self.tensors:
            tensor.copy_(torch.randint(0, 120, tensor.shape, dtype=torch.uint8))
        self.before = [tensor.clone() for tensor in self.tensors]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [own.view(torch.uint8) for own in (*self.cache.keys, *self.cache.values)]

    def store(self, pages: list[int], host: list[int]) -> None:
        """A step takes pages to host memory."""
        moves = self.moves(pages, host)
        leaving = self.names.moving(moves)
        self.mover.run(moves)
        self.names.moved(leaving)

    @staticmethod
    def moves(pages: list[int], host: list[int]) -> Any:
        return np.array([(SWAP_OUT, *pair) for pair in zip(pages, host, strict=True)], np.int32)

    def read(self, pages: list[int], names: list[int], **more: Any) -> int:
        hashes = [HASHES[number] for number in names]
        what = PageTransfer(False, pages, hashes, TOKENS[names], [], source=HOST, after=STEP)
        return self.pages.run(replace(what, **more))

    def holds(self, pages: list[int], names: list[int]) -> bool:
        both = zip(self.tensors, self.before, strict=True)
        return all(torch.equal(tensor[pages], before[names]) for tensor, before in both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_there_and_back(dtype: torch.dtype) -> None:
    host = Host(dtype)
    host.store([1, 4, 2], [5, 0, 3])
    for tensor in host.tensors:
        tensor.zero_()
    assert host.read([7, 0, 3], [1, 4, 2]) == 3
    assert host.holds([7, 0, 3], [1, 4, 2])
    assert not any(tensor[[1, 2, 4, 5, 6]].any() for tensor in host.tensors)
    assert sorted(host.names.all()) == [1, 2, 4, 5, 6]


def test_what_is_missing_ends_a_read() -> None:
    host = Host()
    host.store([1, 2, 3], [0, 1, 2])
    host.store([5], [1])  # in the place of the second
    assert host.read([6, 7, 4], [1, 2, 3]) == 1
    assert host.read([6], [5]) == 1 and host.holds([6], [5])


def test_a_page_without_a_name_leaves_none() -> None:
    """Its row has failed, or its step has not run."""
    host = Host()
    host.names.overwritten(np.array([1]))
    host.store([1], [0])
    assert host.read([6], [1]) == 0


def test_other_tokens_under_a_name() -> None:
    host = Host()
    host.store([1], [0])
    assert host.read([6], [1], tokens=TOKENS[[2]]) == 0


def test_a_read_saves_what_it_writes_over() -> None:
    host = Host()
    host.store([1, 2], [0, 1])
    assert host.read([4, 5], [1, 2], moves=host.moves([4, 5], [2, 3])) == 2
    assert host.holds([4, 5], [1, 2])
    assert host.read([1, 2], [4, 5]) == 2
    assert host.holds([1, 2], [4, 5])


def test_a_host_page_that_is_written_over_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step drops its name first, and what was copied does not count."""
    host = Host()
    host.store([1, 2], [0, 1])
    assert host.pages._host is not None
    mover = host.pages._host._mover
    run = mover.run_beside

    def slow(moves: Any) -> None:
        host.names.moving(host.moves([3], [1]))
        run(moves)

    monkeypatch.setattr(mover, "run_beside", slow)
    assert host.read([6, 7], [1, 2]) == 1


def test_a_page_is_not_found_before_it_has_come() -> None:
    host = Host()
    moves = host.moves([1], [0])
    leaving = host.names.moving(moves)
    assert host.read([6], [1]) == 0
    host.mover.run(moves)
    host.names.moved(leaving)
    assert host.read([6], [1]) == 1


@pytest.mark.parametrize("why", ["epoch", "asleep", "weights", "step"])
def test_nothing_is_read(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    host.store([1], [0])
    match why:
        case "epoch":
            host.pages.use(host.cache, STEP[0] + 1, mover=host.mover)
        case "asleep":
            host.pages.use(None, STEP[0])
        case "weights":
            host.names.turn()
        case "step":
            host.next_step = STEP
            monkeypatch.setattr("rayfin.actors.runner.pages.transfers.PAGE_READ_SECONDS", 0.01)
    assert host.read([6], [1]) == 0 and host.holds([6], [6])


@pytest.mark.parametrize("changes", [{}, {"check_pages": True}])
def test_tokens_equal_transformers(
    changes: dict[str, Any], tiny_model: Make, engine_args: Make, request_of: Make
) -> None:
    """Conversations over more pages than the device has; each turn finds the one before."""
    tiny = tiny_model("llama")
    args = engine_args(tiny.folder, **changes)
    runner = ModelRunner(args)
    config = replace(resolve(args, *runner.profile()), num_pages=20, num_offloaded_pages=60)
    engine = Engine(config, InlineExecutor(runner, config))
    tier: Any = engine.lifecycle.tier
    tier.least_read_tokens = 4
    tier._cost = PromptCost()  # a model as tiny as this one computes sooner than it reads
    talks = [[3 + number, 7, *range(5, 25 + number)] for number in range(3)]
    cached = []
    for turn in range(3):
        for number, talk in enumerate(talks):
            request = request_of(10 * turn + number, talk, 6)
            engine.add(request)
            answer: list[int] = []
            while engine.has_work:
                for deltas in engine.step().values():
                    answer += deltas.tokens.tolist()
                    cached += [ended.cached_tokens for ended in deltas.ended]
            assert answer == tiny.greedy(talk, 6)
            talk += [*answer, 9, 11]
    state = engine.lifecycle.state
    assert state.host is not None
    state.host.check_integrity()
    stats = engine.stats()
    assert min(cached[3:]) >= 20 and stats.pages_read["host", "arrived"] > 0
    assert stats.pages_read["host", "missing"] == 0
