"""Shares of layers in codes: some outputs or inputs, cut out of the whole or read by themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantised import KINDS, QuantisedModel, mxfp4_model
from rayfin.actors.runner.models.config import load_config
from rayfin.actors.runner.parallel.shard_codes import whole_groups
from rayfin.actors.runner.quantized.experts import StoredLayer
from rayfin.actors.runner.quantized.formats import Part
from rayfin.actors.runner.quantized.loader import StoredCodes, quantizer_of
from rayfin.actors.runner.quantized.share import (
    InputsOf,
    OutputsOf,
    group_within,
    some_inputs,
    some_outputs,
)

Make = Callable[..., Any]
CPU = torch.device("cpu")
LAYER = "model.layers.0.mlp.down_proj"  # [64, 96]
WHOLE = {0: [range(32), range(32, 64)], 1: [range(32), range(32, 96), range(64, 96)]}
"""Runs of outputs and inputs that end with groups of 32 and words of 8."""


def stored(written: QuantisedModel, engine_args: Make) -> StoredCodes:
    config = load_config(engine_args(written.folder))
    quantizer = quantizer_of(config)
    assert quantizer is not None
    with torch.device("meta"):
        model = type(written.model)._from_config(config)
    return quantizer.stored(model, list(written.folder.glob("*.safetensors")), CPU)


@pytest.fixture(scope="module", params=list(KINDS))
def layer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine_args: Make
) -> tuple[str, StoredLayer, torch.Tensor]:
    """A format, a layer of it in the files, and its weight."""
    written = QuantisedModel(request.param, "llama", tmp_path_factory.mktemp("model"))
    weight = written.model.get_parameter(f"{LAYER}.weight").detach()
    return request.param, stored(written, engine_args).linear[LAYER], weight


def test_any_outputs(layer: Any) -> None:
    """Also such as end within words and blocks, several runs, chosen ones, and beyond the last."""
    _, own, weight = layer
    for rows, count in (
        ((range(5, 38),), 33),
        ((range(0, 16), range(40, 56)), 32),
        ((range(48, 64),), 20),
        (torch.tensor([7, 3, 63]), 3),
    ):
        share = OutputsOf(own, rows, count)
        indices = rows if isinstance(rows, torch.Tensor) else [i for run in rows for i in run]
        expected = torch.zeros(count, 96)
        expected[: len(indices)] = weight[indices]
        assert (share.outputs, share.inputs) == share.grouped().shape == (count, 96)
        torch.testing.assert_close(share.grouped().dense(), expected, atol=1e-6, rtol=1e-6)


def test_any_inputs(layer: Any) -> None:
    """In the order of the groups, and within them."""
    _, own, weight = layer
    order = own.order()
    ordered = weight if order is None else weight[:, order]
    for run in (range(48), range(48, 96), range(32, 64), range(40, 56), range(72, 96)):
        share = InputsOf(own, run)
        grouped = share.grouped()
        assert (share.outputs, share.inputs) == grouped.shape == (64, len(run))
        expected = ordered[:, run.start : run.stop]
        torch.testing.assert_close(grouped.dense(), expected, atol=1e-6, rtol=1e-6)
        assert grouped.order is None


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_that_are_read_by_themselves(layer: Any, dim: int) -> None:
    """They are those that are cut out of the whole, to the bit."""
    kind, own, _ = layer
    has_order = own.order() is not None
    for run in WHOLE[dim]:
        part = own.part(Part(dim, run))
        if dim == 1 and (has_order or kind.startswith("nf4")):
            assert part is None
        elif kind == "nf4 nested" and run.start:
            assert part is None  # its blocks are among the first 256, which share a number
        else:
            whole = own.grouped()
            expected = some_inputs(whole, run) if dim else some_outputs(whole, (run,), len(run))
            assert part is not None and part.group == expected.group
            assert torch.equal(part.dense(), expected.dense())
            assert part.values.shape == expected.values.shape


@pytest.mark.parametrize("run", [range(4, 32), range(28)])
def test_a_part_that_ends_within_words_or_groups(layer: Any, run: range) -> None:
    kind, own, _ = layer
    if kind.startswith(("gptq", "awq")):
        assert own.part(Part(0, run)) is None or kind == "gptq 8 bits"
    if own.format.group is not None:
        assert own.part(Part(1, run)) is None


def test_a_share_reads_no_more_than_its_part(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, own, _ = layer
    if kind == "nf4 nested":
        pytest.skip("its second half begins among blocks that share a number")
    monkeypatch.setattr(StoredLayer, "grouped", None)
    assert OutputsOf(own, (range(32, 64),), 32).grouped().shape == (32, 96)


def test_blocks_of_mxfp4(tmp_path: Path, engine_args: Make) -> None:
    written = mxfp4_model(tmp_path)
    (experts, *_) = stored(written, engine_args).experts.values()
    expert: Any = experts[2]
    for one in expert:
        whole = one.grouped().dense()
        for dim, run in ((0, range(8, 40)), (1, range(32, 64))):
            expected = whole[run.start : run.stop] if dim == 0 else whole[:, run.start : run.stop]
            part = one.part(Part(dim, run))
            assert part is not None and torch.equal(part.dense(), expected)
    down = expert.down.grouped().dense()
    assert expert.down.part(Part(1, range(48))) is None
    assert torch.equal(InputsOf(expert.down, range(48, 96)).grouped().dense(), down[:, 48:])
    up = expert.up.grouped().dense()
    assert torch.equal(OutputsOf(expert.up, (range(48, 96),), 48).grouped().dense(), up[48:])


@pytest.mark.parametrize(
    ("group", "inputs", "run", "expected"),
    [
        (32, 96, range(32, 96), 32),
        (32, 96, range(48), 16),
        (32, 96, range(20, 60), 4),
        (32, 96, range(40, 60), 20),
        (96, 96, range(17, 50), 33),
        (32, 80, range(64, 80), 16),
        (32, 80, range(40, 80), 8),
    ],
)
def test_groups_within_a_run(group: int, inputs: int, run: range, expected: int) -> None:
    assert group_within(group, inputs, run) == expected


@pytest.mark.parametrize(
    ("inputs", "size", "expected"), [(96, 2, 1), (128, 4, 4), (128, 8, 4), (64, 8, 2), (40, 2, 1)]
)
def test_a_size_that_fits(inputs: int, size: int, expected: int) -> None:
    assert whole_groups(inputs, 32, size) == expected
