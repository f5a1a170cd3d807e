"""Adapters in tables, against their products one by one."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
from rayfin.kernels.triton.low_rank import LowRankTable

Close = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.mark.parametrize("outputs", [(70,), (24, 40), (64, 16, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_each_row_has_its_adapter(
    outputs: tuple[int, ...], dtype: torch.dtype, device: torch.device, close: Close
) -> None:
    """Of several ranks, without some layers, put in the place of another; rows without one stay."""
    random = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random) / 8

    table = LowRankTable(3, 12, 600, outputs, dtype, device)
    pairs: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor, float]] = {}
    for entry, rank in ((0, 12), (1, 12), (2, 5), (1, 3)):  # the last takes another's place
        table.clear(entry)
        for part, count in enumerate(outputs):
            pairs.pop((entry, part), None)
            if (entry, part) == (2, 1):
                continue
            a, b, scale = draw(rank, 600), draw(count, rank), 0.5 + part
            pairs[entry, part] = a, b, scale
            table.put(entry, part, a.to(device, dtype), b.to(device, dtype), scale)
    rows = torch.tensor([1, -1, 0, 2, 1])
    x, y = draw(5, 600).to(dtype), draw(5, sum(outputs)).to(dtype)
    wanted, firsts = y.float().clone(), [sum(outputs[:part]) for part in range(len(outputs))]
    for row, entry in enumerate(rows.tolist()):
        for part, count in enumerate(outputs):
            if (entry, part) in pairs:
                a, b, scale = pairs[entry, part]
                added = (x[row].float() @ a.to(dtype).float().T) @ b.to(dtype).float().T * scale
                wanted[row, firsts[part] : firsts[part] + count] += added
    out = y.clone().to(device)
    table.add(x.to(device), out, rows.to(device))
    close(out.cpu(), wanted)
    assert torch.equal(out[1].cpu(), y[1])
