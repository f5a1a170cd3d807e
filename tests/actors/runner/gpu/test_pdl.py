"""Which kernels of a recorded decode step start early, and what stands before them.

In Triton's interpreter, where the instructions themselves do nothing.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rayfin.actors.runner import checkpoint
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.sampling import select as sampling_select

pytest.importorskip("triton")
from rayfin.actors.runner.gpu import decoder
from rayfin.kernels.triton.device import (
    attention_kernels,
    decode_kernels,
    layer_kernels,
    row_kernels,
    sample_kernels,
)

Make = Callable[..., Any]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the interpreter")

LAYER = ["product", "rope_and_write_kv", "attend_tiles", "product", "gated_product", "product"]
NORMED_LAYER = [
    *("product", "rope_and_write_kv", "attend_tiles", "product", "add_and_norm"),
    *("gated_product", "product", "add_and_norm"),
]
LAYER_OF_MORE = ["rope_and_write_kv", "attend_tiles", "add_and_norm", "gate", "add_and_norm"]
SAMPLE = ["find_highest", "find_top", "weigh_blocks", "draw_rows"]


class Launches(TorchDispatchMode):
    """What is launched, in order: torch's operators, and Triton's kernels with how they start."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[str, bool]] = []  # name, starts early

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.__name__:
            self.kernels.append((func.__name__, False))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """A device that can start kernels early, and what ``with launches`` launches."""
    from triton.runtime.interpreter import GridExecutor

    counting, own_call = Launches(), GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        counting.kernels.append((self.fn.__name__, bool(kwargs.get("launch_pdl"))))
        assert bool(kwargs.get("PDL")) == bool(kwargs.get("launch_pdl"))
        with _disable_current_modes():
            return own_call(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", call)
    monkeypatch.setattr(decoder, "can_use_pdl", lambda device: True)
    for module in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    kernels = (attention_kernels, decode_kernels, layer_kernels, row_kernels, sample_kernels)
    for module in kernels:
        for name in ("gdc_wait", "gdc_launch_dependents"):
            monkeypatch.setattr(module, name, lambda: None)
    return counting


@pytest.mark.parametrize(("family", "layer"), [("qwen3", LAYER), ("gemma3_text", NORMED_LAYER)])
def test_a_recorded_step_is_a_chain(
    family: str,
    layer: list[str],
    two_layers: Any,
    tiny_model: Make,
    served: Make,
    launches: Launches,
) -> None:
    """An early kernel reads the step's inputs before it waits, so a launch that is not early stands
    between them. It follows a kernel, not a copy, whose edge in a graph would be another one."""
    tiny = two_layers if family == "qwen3" else tiny_model(family)
    engine = served(tiny.folder, attention="triton", max_lease=2, max_decoding_batch=2)
    graphs = engine.runner._graphs
    assert graphs is not None and engine.runner._loaded.gpu_model.pdl
    launches.kernels.clear()
    with launches:
        graphs._replays[2, False, ()]()
    names = [name for name, _ in launches.kernels]
    early = [name for name, is_early in launches.kernels if is_early]
    layers = early[: early.index("find_highest")]
    assert layers == layer * (len(layers) // len(layer)) and len(layers) >= 2 * len(layer)
    assert early[len(layers) :] == [*SAMPLE, "finish_rows"]
    assert names[-5:] == [*SAMPLE, "finish_rows"]
    first = names.index("product")
    assert {"prepare_rows", "place_items"} <= set(names[:first])
    assert names[first - 1].startswith(("embedding", "mul")) and early[0] == "product"
    for (before, _), (name, is_early) in zip(launches.kernels, launches.kernels[1:], strict=False):
        assert not (is_early and before.startswith(("copy_", "zero_", "fill_"))), (before, name)


def test_steps_of_more_rows_wait(tiny_model: Make, served: Make, launches: Launches) -> None:
    """All of their kernels: what the decoder's layers do, the sampling does too."""
    engine = served(
        tiny_model("qwen3").folder, attention="triton", max_lease=2, max_decoding_batch=4
    )
    graphs, model = engine.runner._graphs, engine.runner._loaded.gpu_model
    assert graphs is not None and model.few_rows == 4 and model.pdl
    for few_rows, early in ((4, True), (2, False)):
        model.few_rows = few_rows
        step = graphs._step(4, False)
        launches.kernels.clear()
        with launches:
            step()
        assert any(is_early for _, is_early in launches.kernels) == early


def test_kernels_between_torchs_products_start_early_when_tried(
    tiny_model: Make, served: Make, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products end before the next kernel begins: so items and page tables are complete when
    attention reads them, as those of few rows are behind the embedding."""
    monkeypatch.setenv("RAYFIN_TRY", "early")
    folder = tiny_model("gemma3_text").folder
    engine = served(folder, attention="triton", max_lease=2, max_decoding_batch=4)
    graphs, model = engine.runner._graphs, engine.runner._loaded.gpu_model
    assert graphs is not None and model.pdl
    model.few_rows = 2
    step = graphs._step(4, False)
    launches.kernels.clear()
    with launches:
        step()
    names = [name for name, _ in launches.kernels]
    early = [name for name, is_early in launches.kernels if is_early]
    count = early.index("find_highest")
    assert early[:count] == LAYER_OF_MORE * (count // len(LAYER_OF_MORE)) and count
    assert early[count:] == [*SAMPLE, "finish_rows"]
    first = names.index("linear.default")
    assert {"prepare_rows", "place_items"} <= set(names[:first])
    assert early[0] in names[first:] and not set(early) & set(names[:first])
    for (before, _), (name, is_early) in zip(launches.kernels, launches.kernels[1:], strict=False):
        assert not (is_early and before.startswith(("copy_", "zero_", "fill_"))), (before, name)
        assert before == "linear.default" or name not in ("rope_and_write_kv", "gate")


def test_layers_of_few_tokens_start_early(
    two_layers: Any, served: Make, launches: Launches
) -> None:
    """Of steps with prompts too, except for the attention of prompts: its tiles are large. The
    first one follows torch's embedding."""
    engine = served(two_layers.folder, attention="triton", max_lease=2, max_decoding_batch=2)
    (layers,) = engine.runner._graphs._layers
    for tokens, early in ((4, True), (8, False)):
        launches.kernels.clear()
        with launches:
            layers._replays[tokens]()
        first, *kernels = launches.kernels
        assert first[0].startswith("embedding")
        if early:
            layer = [(name, True) for name in LAYER]
            layer.insert(3, ("attend_tiles", False))
            assert kernels == layer * (len(kernels) // len(layer)) and len(kernels) > len(layer)
        assert any(is_early for _, is_early in kernels) == early


def test_eager_attention_is_not_early(
    tiny_model: Make, served: Make, request_of: Make, launches: Launches
) -> None:
    """Its items are copied to the device just before it."""
    engine = served(tiny_model("qwen3").folder, attention="triton", enforce_eager=True)
    launches.kernels.clear()
    with launches:
        assert engine.run(request_of(0, [5, 6, 7], 2))
    assert {is_early for name, is_early in launches.kernels if name == "attend_tiles"} == {False}
    assert {is_early for name, is_early in launches.kernels if name == "product"} == {True}
