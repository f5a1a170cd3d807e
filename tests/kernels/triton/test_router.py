"""The experts of a row, chosen by one kernel, against the reference."""

from collections.abc import Callable

import pytest
import torch

from rayfin.kernels import reference
from rayfin.kernels.shapes import Routing

pytest.importorskip("triton")
from rayfin.kernels.triton.experts import choose_experts

Close = Callable[[torch.Tensor, torch.Tensor], None]


def check(
    logits: torch.Tensor,
    correction: torch.Tensor | None,
    routing: Routing,
    device: torch.device,
    close: Close,
) -> None:
    wanted, wanted_ids = reference.route(logits, correction, routing)
    moved = None if correction is None else correction.to(device)
    shares, ids = choose_experts(logits.to(device), moved, routing, logits.dtype)
    assert torch.equal(ids.cpu(), wanted_ids)
    close(shares.cpu(), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize(
    ("experts", "routing"),
    [
        (8, Routing(2, normed=True)),
        (60, Routing(4)),
        (5, Routing(5, sigmoid=True, scale=2.5)),
        (16, Routing(1, sigmoid=True, normed=True)),
        (24, Routing(3, normed=True, groups=4, kept=2)),
        (32, Routing(6, sigmoid=True, normed=True, scale=2.5, groups=8, kept=4, pairs=True)),
        (15, Routing(3, sigmoid=True, groups=3, kept=1, pairs=True)),
    ],
)
def test_choices(
    device: torch.device,
    close: Close,
    dtype: torch.dtype,
    corrected: bool,
    experts: int,
    routing: Routing,
) -> None:
    generator = torch.Generator().manual_seed(experts)
    logits = 2 * torch.randn(9, experts, generator=generator)
    correction = torch.randn(experts, generator=generator) / 4 if corrected else None
    check(logits.to(dtype), correction, routing, device, close)
    check(logits[:0].to(dtype), correction, routing, device, close)


def test_equal_logits_choose_the_lower_id(device: torch.device, close: Close) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    check(logits, None, Routing(3, normed=True), device, close)


def test_a_row_that_is_not_finite_spoils_no_other(device: torch.device, close: Close) -> None:
    routing = Routing(2, normed=True)
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    logits[1] = float("nan")
    shares, ids = choose_experts(logits.to(device), None, routing, torch.float32)
    wanted, wanted_ids = reference.route(logits[::2], None, routing)
    assert torch.equal(ids[::2].cpu(), wanted_ids) and shares[1].isnan().all()
    close(shares[::2].cpu(), wanted)
