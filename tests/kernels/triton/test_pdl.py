"""Where kernels may start before the ones before them end; test_compile.py has their waits."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from rayfin.kernels.triton.pdl import can_use_pdl, launch_options


@pytest.mark.parametrize(
    ("capability", "environment", "can"),
    [
        ((9, 0), {}, True),
        ((12, 0), {}, True),
        ((8, 9), {}, False),
        ((9, 0), {"RAYFIN_PDL": "0"}, False),
        ((9, 0), {"TRITON_INTERPRET": "1"}, False),
    ],
)
def test_from_hopper_on_unless_it_is_switched_off(
    capability: tuple[int, int],
    environment: dict[str, str],
    can: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for name in ("RAYFIN_PDL", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert can_use_pdl(torch.device("cuda")) == can
    assert not can_use_pdl(torch.device("cpu"))


def test_a_launch_is_early_only_if_the_kernel_waits() -> None:
    """One without the other is a race, or a wait for nothing."""
    options: dict[str, Any] = launch_options(True)
    assert options == {"PDL": True, "launch_pdl": True}
    assert launch_options(False) == {}
