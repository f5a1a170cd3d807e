"""The slots on the device equal those of the host, for the rows of a multi-step call."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.gpu.decode_state import DeviceSlots
from rayfin.actors.runner.request_slots import RequestSlots

Make = Callable[..., Any]
SLOTS, PAGES = 5, 12


@pytest.mark.parametrize("seed", range(4))
def test_random_lives(step_of: Make, row: Make, seed: int) -> None:
    """Requests enter, grow, leave; only some steps are leases, and only of some rows."""
    chance = random.Random(seed)
    host = RequestSlots(SLOTS, PAGES)
    device = DeviceSlots(host, PAGES, torch.device("cpu"))
    held: dict[int, int] = {}
    for _ in range(200):
        finished = [slot for slot in held if chance.random() < 0.1]
        for slot in finished:
            del held[slot]
        new, rows = [], []
        for slot in range(SLOTS):
            if slot not in held and chance.random() < 0.3:
                settings = (chance.random(), chance.randrange(50), chance.random(), 0.1)
                new.append(NewRequest(slot, Sampling(*settings, chance.randrange(2**62)), 100))
                held[slot] = 0
            elif slot not in held or chance.random() < 0.3:
                continue
            more = chance.randint(0, min(2, PAGES - held[slot]))
            pages = [chance.randrange(1000) for _ in range(more)]
            held[slot] += more
            rows.append(row(slot, [1], held=held[slot], new_pages=pages))
        if not rows:
            continue
        host.apply(step_of(*rows, new=new, finished=finished))
        if chance.random() < 0.5:
            continue
        ids = np.array(chance.sample(sorted(held), chance.randint(1, len(held))), np.int32)
        device.update(ids)
        assert device.integers[:, ids].tolist() == [
            host.settings.top_k[ids].tolist(),
            host.settings.seed[ids].tolist(),
        ]
        numbers = np.stack(
            [host.settings.temperature[ids], host.settings.top_p[ids], host.settings.min_p[ids]]
        )
        assert np.array_equal(device.numbers[:, ids].numpy(), numbers)
        for slot in ids:
            pages = host.page_tables[slot, : host.num_pages[slot]].tolist()
            assert device.tables[slot, : len(pages)].tolist() == pages


def test_nothing_travels_twice(step_of: Make, row: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    host = RequestSlots(2, PAGES)
    device = DeviceSlots(host, PAGES, torch.device("cpu"))
    new = [NewRequest(1, Sampling(0.5), 100)]
    host.apply(step_of(row(1, [1], held=2, new_pages=[7, 8]), new=new))
    ids = np.array([1], np.int32)
    device.update(ids)

    def refuse(*_: Any) -> torch.Tensor:
        raise AssertionError("there is nothing new")

    monkeypatch.setattr("rayfin.actors.runner.gpu.decode_state.all_to_device", refuse)
    device.update(ids)
    host.apply(step_of(row(1, [1], kv_len=1, held=3, new_pages=[9])))
    with pytest.raises(AssertionError, match="nothing new"):
        device.update(ids)
