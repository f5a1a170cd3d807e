"""Routers of mixtures in one kernel, against transformers' own."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
from rayfin.actors.runner.gpu.experts import GroupedExperts
from rayfin.actors.runner.gpu.routers import FusedRouter, fuse_routers
from rayfin.kernels.shapes import Routing
from rayfin.kernels.triton.experts import Experts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"hidden_size": 24, "num_experts": 12, "num_local_experts": 12, "num_experts_per_tok": 3}
GROUPS = {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}


class Mixture(nn.Module):
    """A router beside experts that are grouped."""

    def __init__(self, family: str, name: str, dtype: torch.dtype, **settings: Any) -> None:
        super().__init__()
        source = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        self.gate = getattr(source, name)(SimpleNamespace(**SIZES, **settings))
        generator = torch.Generator().manual_seed(1)
        for tensor in [*self.gate.parameters(), *self.gate.buffers()]:
            tensor.data = (torch.randn(tensor.shape, generator=generator) / 5).to(dtype)
        self.to(DEVICE)
        self.experts = GroupedExperts(Experts(torch.empty(0), torch.empty(0), "silu"))


def given(router: nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the share of each expert in each row."""
    rows = torch.randn(1, 40, 24, generator=torch.Generator().manual_seed(2))
    logits, shares, ids = router(rows.to(DEVICE, dtype).squeeze(0))
    return logits, torch.zeros_like(logits, dtype=shares.dtype).scatter(1, ids, shares)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("family", "name", "settings", "routing"),
    [
        ("mixtral", "MixtralTopKRouter", {}, Routing(3, normed=True)),
        ("qwen3_moe", "Qwen3MoeTopKRouter", {"norm_topk_prob": True}, Routing(3, normed=True)),
        ("olmoe", "OlmoeTopKRouter", {"norm_topk_prob": False}, Routing(3)),
        ("gpt_oss", "GptOssTopKRouter", {}, Routing(3, normed=True)),
        (
            "deepseek_v2",
            "DeepseekV2TopkRouter",
            GROUPS | {"topk_method": "group_limited_greedy"},
            Routing(3, scale=2.5, groups=4, kept=2),
        ),
        (
            "deepseek_v3",
            "DeepseekV3TopkRouter",
            GROUPS,
            Routing(3, sigmoid=True, normed=True, scale=2.5, groups=4, kept=2, pairs=True),
        ),
        (
            "glm4_moe",
            "Glm4MoeTopkRouter",
            GROUPS | {"n_group": 1, "topk_group": 1},
            Routing(3, sigmoid=True, normed=True, scale=2.5),
        ),
    ],
)
def test_what_a_router_does_is_found(
    family: str, name: str, settings: dict[str, Any], routing: Routing, dtype: torch.dtype
) -> None:
    mixture = Mixture(family, name, dtype, **settings)
    logits, shares = given(mixture.gate, dtype)
    assert fuse_routers(mixture, dtype) == 1
    assert isinstance(mixture.gate, FusedRouter) and mixture.gate.routing == routing
    own_logits, own_shares = given(mixture.gate, dtype)
    assert torch.equal(own_logits, logits) and own_shares.dtype == shares.dtype
    tolerance = 2e-3 if shares.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(own_shares, shares, rtol=tolerance, atol=1e-6)


def test_others_stay(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO")
    mixture = Mixture("mixtral", "MixtralTopKRouter", torch.float32)
    router, forward = mixture.gate, type(mixture.gate).forward

    def other(self: Any, hidden_states: torch.Tensor) -> Any:
        logits, shares, ids = forward(self, hidden_states)
        return logits, shares * 1.01, ids

    with monkeypatch.context() as patch:
        patch.setattr(type(router), "forward", other)
        assert fuse_routers(mixture, torch.float32) == 0 and mixture.gate is router
    assert "no kernel does what MixtralTopKRouter does" in caplog.text
    mixture.gate = nn.Linear(24, 12, bias=False)  # such as the gate of a shared expert
    assert fuse_routers(mixture, torch.float32) == 0 and isinstance(mixture.gate, nn.Linear)
    alone = nn.ModuleDict({"gate": router})  # with transformers' loop over experts
    assert fuse_routers(alone, torch.float32) == 0


def test_a_kernel_that_fails_leaves_the_router(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayfin.actors.runner.gpu import routers

    def failing(*_: Any) -> Any:
        raise RuntimeError("out of resource: shared memory")

    caplog.set_level("INFO")
    monkeypatch.setattr(routers, "choose_experts", failing)
    mixture = Mixture("mixtral", "MixtralTopKRouter", torch.float32)
    router = mixture.gate
    assert fuse_routers(mixture, torch.float32) == 0 and mixture.gate is router
    assert "RuntimeError: out of resource" in caplog.text
