"""Steps queued behind others whose tokens are not read yet: the tokens of an engine that waits.

On a CPU the steps are not recorded and run in Triton's interpreter; all else is the same.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.media.part import ROWS, EmbedsInput
from rayfin.actors.media.virtual_ids import row_ids
from rayfin.actors.messages import BeamParams, Sampling
from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.scheduler.policy import multi_step
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.sampling import select as sampling_select

pytest.importorskip("triton")
from rayfin.actors.runner.gpu.graphs import DecodeGraphs
from rayfin.kernels.triton.logprobs import MAX_TOP_LOGPROBS

Make = Callable[..., Any]
MODULES = (checkpoint, attention_select, sampling_select)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def small_engine(served: Make, folder: Path, attention: str, lease: int) -> Any:
    """Returns an engine of two rows, whose prompts are cut into chunks of 8 tokens."""
    engine = served(
        folder,
        attention=attention,
        max_decoding_batch=2,
        max_batch_tokens=8,
        max_lease=lease,
        num_pages=24,
        device=DEVICE,
    )
    engine.runner._model.forward = engine._forward
    engine.runner._forward.run = engine._advance
    return engine


def drive(engine: Any, requests: dict[int, Any], abort: tuple[int, int]) -> dict[int, list[int]]:
    """Tokens by key. Requests come at the steps of ``requests``; (key, tokens) is aborted then."""
    engine.runner._model.forward = engine._forward
    engine.runner._forward.run = engine._advance
    tokens: dict[int, list[int]] = {}
    step, aborted = 0, False
    while requests or engine.engine.has_work:
        if (request := requests.pop(step, None)) is not None:
            engine.engine.add(request)
            tokens[request.key] = []
        for deltas in engine.engine.step().values():
            for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                tokens[key].append(token)
        if not aborted and len(tokens.get(abort[0], ())) >= abort[1]:
            engine.engine.abort("", abort[0])
            aborted = True
        step += 1
    engine.engine.check_integrity()
    tokens[abort[0]] = tokens[abort[0]][: abort[1]]
    return tokens


def test_the_tokens_of_an_engine_that_waits(
    two_layers: Any, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop token, an abort, a preemption, a late request, and rows that need the host.

    Those of them that no graph can run leave it to the others.
    """
    behind: list[tuple[int, int]] = []  # (rows, unread ones) of each call behind another
    in_graphs: dict[int, int] = {}  # step -> rows
    begin = DecodeGraphs.begin

    def seen(self: DecodeGraphs, info: Any, rules: Any) -> None:
        in_graphs[info.step] = len(info.ids)
        if self.queued:
            behind.append((len(info.ids), int(self._unread[info.ids].sum())))
        begin(self, info, rules)

    def recorded(self: DecodeGraphs, bucket: int, *kind: Any) -> Any:
        """To record runs the step: no row of the call before, which may be larger, is in it."""
        for each in self._state.launches._graph_launches.values():
            assert not each.launch.items[: bucket + each.shape.programs, 2].any()
        return record(self, bucket, *kind)

    record = DecodeGraphs._step
    monkeypatch.setattr(DecodeGraphs, "_step", recorded)
    monkeypatch.setattr(DecodeGraphs, "begin", seen)
    for module in MODULES:
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    penalised = Sampling(temperature=0.8, seed=4, frequency_penalty=1.0)
    on_host = Sampling(bad_words=((3, 4),))
    many = Sampling(temperature=1.0, seed=2, logprobs=MAX_TOP_LOGPROBS + 1)

    def requests(stop: list[int]) -> dict[int, Any]:
        return {
            0: request_of(0, [5, 6, 7], 12, eos=stop),
            1: request_of(1, [9, 8], 14, sampling=Sampling(temperature=1.1, seed=7)),
            3: request_of(2, [4] * 6, 14),
            10: request_of(4, [12, 3, 3], 4, sampling=on_host),
            11: request_of(5, [2, 2], 3, sampling=many),
            17: request_of(3, [11, 3], 3, sampling=penalised),
        }

    def engine(attention: str) -> Any:
        return served(
            two_layers.folder,
            num_pages=6,
            attention=attention,
            max_decoding_batch=4,
            device=DEVICE,
        )

    free = drive(engine("torch"), requests([]), abort=(1, 5))
    stop = free[0][7:8]
    waits = engine("torch")
    wanted = drive(waits, requests(stop), abort=(1, 5))
    assert not behind and len(wanted[0]) == free[0].index(stop[0]) + 1 < 12
    assert waits.engine.lifecycle.state.counters.preemptions
    overlapped = engine("triton")
    assert drive(overlapped, requests(stop), abort=(1, 5)) == wanted
    assert sum(unread for _, unread in behind) >= 4
    assert not overlapped.runner._graphs.queued
    mixed = [info for info in overlapped.steps if 0 < in_graphs.get(info.step, 0) < len(info.ids)]
    assert len(mixed) >= 2 and all(len(info.ids) == info.decoding_batch for info in mixed)
    assert overlapped.engine.lifecycle.state.counters.preemptions


@pytest.mark.parametrize("lease", [1, 3])
def test_slots_that_are_taken(
    lease: int, two_layers: Any, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end at stops and lengths, one step before the device knows; others enter behind.

    Prompts in chunks, beside decodes and alone; some leave the graphs.
    """
    behind: list[tuple[int, int, int]] = []  # new, in slots of a queued call, rows that go on
    begin = DecodeGraphs.begin

    def seen(self: DecodeGraphs, info: Any, rules: Any) -> None:
        for call in self.queued:
            held = set(call.info.ids.tolist())
            again = sum(new.handle in held for new in info.new_requests)
            assert not again or call.info.num_steps == 1
            behind.append((len(info.new_requests), again, int((info.last_pos < 0).sum())))
        begin(self, info, rules)

    for module in MODULES:
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)
    monkeypatch.setattr(DecodeGraphs, "begin", seen)
    tokens = []
    for attention in ("torch", "triton"):
        random = Random(1)
        engine = small_engine(served, two_layers.folder, attention, lease)
        requests = []
        for key in range(12):
            prompt = [random.randrange(3, 60) for _ in range(random.choice([1, 2, 5, 13]))]
            rules = {"frequency_penalty": 1.0} if key == 4 else {}
            sampling = Sampling(random.choice([0.0, 1.2]), seed=key, **rules)
            stops = random.sample(range(128), 50)
            length = random.randrange(2, 7)
            requests.append(request_of(key, prompt, length, eos=stops, sampling=sampling))
        tokens.append(engine.run(*requests))
        assert attention == "triton" or not behind
    assert tokens[0] == tokens[1]
    new, again, chunks = (sum(column) for column in zip(*behind, strict=True))
    assert new and chunks and (again or lease > 1), (new, again, chunks)
    assert not engine.runner._graphs.queued


@pytest.mark.parametrize("lease", [1, 3])
def test_log_probabilities_of_queued_steps(
    lease: int, two_layers: Any, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes, and prompts in chunks: each step's are its own, though another one is behind it."""
    behind: list[tuple[bool, int, bool]] = []  # prompts, rows that ask, new ones among them
    begin = DecodeGraphs.begin

    def seen(self: DecodeGraphs, info: Any, rules: Any) -> None:
        if self.queued:
            asking = int((self._slots.logprobs[info.ids] >= 0).sum())
            new = any(each.sampling.logprobs is not None for each in info.new_requests)
            behind.append((len(info.ids) > info.decoding_batch, asking, new))
        begin(self, info, rules)

    for module in MODULES:
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)
    monkeypatch.setattr(DecodeGraphs, "begin", seen)
    results = []
    for attention in ("torch", "triton"):
        random = Random(2)
        engine = small_engine(served, two_layers.folder, attention, lease)
        for key in range(9):
            prompt = [random.randrange(3, 60) for _ in range(random.choice([1, 2, 5, 13]))]
            sampling = Sampling(random.choice([0.0, 1.2]), seed=key, logprobs=(None, 0, 3)[key % 3])
            stops = random.sample(range(128), 40)
            length = random.randrange(2, 7)
            engine.engine.add(request_of(key, prompt, length, eos=stops, sampling=sampling))
        tokens: dict[int, list[int]] = {key: [] for key in range(9)}
        chosen: dict[int, list[float]] = {key: [] for key in range(9)}
        likeliest: dict[int, list[float]] = {key: [] for key in range(9)}
        while engine.engine.has_work:
            for deltas in engine.engine.step().values():
                for key, token in zip(deltas.keys.tolist(), deltas.tokens.tolist(), strict=True):
                    tokens[key].append(token)
                if (given := deltas.logprobs) is None:
                    continue
                for number, at in enumerate(given.at.tolist()):
                    key = int(deltas.keys[at])
                    chosen[key].append(float(given.chosen[number]))
                    likeliest[key] += given.values[number, : 3 * (key % 3 == 2)].tolist()
        results.append((tokens, chosen, likeliest))
        assert attention == "triton" or not behind
    (wanted, *expected), (got, *logprobs) = results
    assert got == wanted
    for each, other in zip(logprobs, expected, strict=True):
        assert each.keys() == other.keys()
        for key in each:
            assert each[key] == pytest.approx(other[key], abs=1e-4), key
    assert all(len(logprobs[0][key]) == len(got[key]) * (key % 3 > 0) for key in got)
    kinds = {(prompts, asking > 0) for prompts, asking, _ in behind}
    assert kinds >= {(False, True), (True, True)}, behind
    assert any(new for *_, new in behind)
    assert not engine.runner._graphs.queued


def test_forks_of_beams_behind_a_queued_step(
    two_layers: Any, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They enter as decode rows; a search with many stop tokens asks for more than graphs give."""
    behind: set[tuple[bool, bool]] = set()  # (many, forks) of steps with beams behind another
    begin = DecodeGraphs.begin

    def seen(self: DecodeGraphs, info: Any, rules: Any) -> None:
        begin(self, info, rules)
        call = self.queued[-1]
        if len(self.queued) > 1 and call.num_logprobs is not None:
            many = bool((call.num_logprobs > MAX_TOP_LOGPROBS).any())
            behind.add((many, bool(info.new_requests) and len(info.ids) == info.decoding_batch))

    for module in MODULES:
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(DecodeGraphs, "begin", seen)
    found: dict[str, list[Any]] = {"torch": [], "triton": []}
    for attention in found:
        engine = served(
            two_layers.folder, attention=attention, page_size=1, max_decoding_batch=3, device=DEVICE
        )
        engine.runner._model.forward = engine._forward
        engine.runner._forward.run = engine._advance
        for stops in (range(120, 123), range(90, 90 + MAX_TOP_LOGPROBS)):
            search = replace(request_of(0, [7, 5], 4, eos=stops), beams=BeamParams(2))
            tokens = engine.run(request_of(1, [9, 3], 9), search, stagger=2)[1]
            found[attention].append((tokens, [each.tokens for each in engine.hypotheses[0]]))
        assert attention == "triton" or not behind
    assert found["torch"] == found["triton"]
    assert (False, True) in behind and not any(many for many, _ in behind), behind


@pytest.mark.parametrize("part", ["adapters", "images", "embeddings"])
def test_requests_with_parts_beside_others(
    part: str,
    two_layers: Any,
    served: Make,
    request_of: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their decode rows are queued, and so are prompts of others where none of them decodes."""
    behind: set[tuple[bool, bool]] = set()  # (prompts, a row with a part) of steps behind another
    holders: dict[int, bool] = {}  # slot -> whether its request has a part
    begin, enter = DecodeGraphs.begin, RequestSlots._enter

    def entered(self: RequestSlots, new: Any) -> None:
        holders[new.handle] = bool(new.parts)
        enter(self, new)

    def seen(self: DecodeGraphs, info: Any, rules: Any) -> None:
        if self.queued:
            with_part = any(holders[slot] for slot in info.ids.tolist())
            behind.add((len(info.ids) > info.decoding_batch, with_part))
        begin(self, info, rules)

    for module in MODULES:
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(DecodeGraphs, "begin", seen)
    monkeypatch.setattr(RequestSlots, "_enter", entered)
    folder, ids, settings, parts = with_part(part, two_layers.folder, tmp_path)
    tokens = []
    for attention in ("torch", "triton"):
        engine = served(
            folder, attention=attention, max_decoding_batch=3, device=DEVICE, **settings
        )
        engine.runner._model.forward = engine._forward
        engine.runner._forward.run = engine._advance
        holder = request_of(0, ids, 9)
        holder.parts = parts
        late = [request_of(key, [key, 5], 9) for key in (2, 3, 4)]
        alone = engine.run(request_of(1, [9, 8, 7], 12), late[0], stagger=4)
        tokens.append(alone | engine.run(holder, *late[1:], stagger=4))
        assert attention == "triton" or not behind
    assert tokens[0] == tokens[1]
    assert behind == {(False, False), (False, True), (True, False)}


def with_part(part: str, folder: Path, tmp_path: Path) -> tuple[Path, list[int], Any, Any]:
    """A model, and a prompt of it with a part: its folder, tokens, settings and parts."""
    if part == "adapters":
        pytest.importorskip("peft")
        from peft_adapters import make_adapter, ref_of

        adapter = make_adapter(folder, tmp_path)
        return folder, [5, 9, 3], {"enable_lora": True}, (ref_of(adapter),)
    if part == "images":
        pytest.importorskip("PIL")
        from vision_models import VisionModel, picture

        ids, images = VisionModel("qwen2_vl", tmp_path).prompt([60, 61], picture(1), [70, 71])
        return tmp_path, ids, {}, images
    rows = np.random.default_rng(1).normal(0, 0.3, (5, 32)).astype(np.float32)
    embeds = EmbedsInput({ROWS: rows}, len(rows), "float32")
    return folder, row_ids(rows, "float32").tolist(), {"enable_prompt_embeds": True}, (embeds,)


def test_a_call_of_several_steps_keeps_its_slots() -> None:
    """Where its rows end is looked up when it is collected."""

    def queued(steps: int) -> Any:
        info = SimpleNamespace(num_steps=steps, ids=np.array([3, 5], np.int32))
        return SimpleNamespace(queued=[SimpleNamespace(info=info)])

    assert DecodeGraphs.still_ends(queued(2), [1, 5])
    assert not DecodeGraphs.still_ends(queued(2), [1, 4])
    assert not DecodeGraphs.still_ends(queued(1), [5])
