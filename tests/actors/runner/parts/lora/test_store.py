"""What a runner says of the adapters that it reads, keeps and gives up."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peft_adapters import make_adapter, ref_of
from rayfin.actors.adapters.part import short
from rayfin.actors.runner.parts.lora.load import AdaptersPart

Make = Callable[..., Any]


def test_results_say_what_is_resident(
    tiny_model: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    model = tiny_model("llama").folder
    refs = [ref_of(make_adapter(model, tmp_path / name, seed)) for seed, name in enumerate("abc")]
    server = served(model, max_loras=1, max_cpu_loras=2)
    seen = []
    for key, ref in enumerate([None, refs[0], refs[0], refs[1], refs[2], refs[0]]):
        request = request_of(key, [5, 9, 3], 2)
        if ref is not None:
            request.use(ref)
        server.run(request)
        stats = server.engine.stats().adapters
        seen.append((len(stats.resident), stats.loads["ok"], stats.evicted))
    assert seen == [(0, 0, 0), (1, 1, 0), (1, 1, 0), (2, 2, 0), (2, 3, 1), (2, 4, 2)]
    assert stats.resident == {short(refs[2].digest), short(refs[0].digest)}
    assert server.engine.stats().histograms["adapter_load_seconds"].count == 4
    store = server.runner._loaded.part(AdaptersPart).store
    sizes = sum(4 * (rows + columns) * 4 for rows, columns in store.sizes.values())
    assert stats.bytes == 2 * sizes  # of rank 4, float32


def test_a_failure_is_told(
    tiny_model: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    model = tiny_model("llama").folder
    ref = ref_of(make_adapter(model, tmp_path / "a"))
    server = served(model, enable_lora=True)
    request = request_of(0, [5, 9, 3], 2)
    request.use(dataclasses.replace(ref, path=str(tmp_path / "gone")))
    server.run(request, request_of(1, [5, 9, 3], 2))
    stats = server.engine.stats().adapters
    assert "No adapter at" in server.errors[0]
    assert stats.loads == {"ok": 0, "failed": 1} and stats.resident == frozenset()


def test_memory_of_adapters_is_no_memory_of_pages(
    tiny_model: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    """It is kept for those of a step, of the largest rank; smaller ones may be more."""
    model = tiny_model("llama").folder
    settings: dict[str, Any] = {"max_loras": 2, "max_cpu_loras": 100, "max_lora_rank": 6}
    server = served(model, **settings)
    loaded = server.runner._loaded
    part = loaded.part(AdaptersPart)
    sizes = sum(inputs + outputs for inputs, outputs in part.store.sizes.values())
    assert part.facts.num_bytes == loaded.bytes_beside_pages(8) == 2 * 6 * 4 * sizes
    for key in range(5):  # of rank 4: three have room
        request = request_of(key, [5, 9, 3], 2)
        request.use(ref_of(make_adapter(model, tmp_path / str(key), key)))
        server.run(request)
        stats = server.engine.stats().adapters
        assert stats.bytes == min(key + 1, 3) * 4 * 4 * sizes <= part.facts.num_bytes
    assert stats.evicted == 2
