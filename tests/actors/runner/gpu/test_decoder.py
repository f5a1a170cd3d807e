"""The fused model for GPUs: on one where there is one, else in Triton's interpreter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoModelForCausalLM

from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.runner.models.replace import probe_logits
from rayfin.actors.scheduler.policy import multi_step
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.attention.torch_backend import paged_attention
from rayfin.kernels.sampling import select as sampling_select

pytest.importorskip("triton")
from rayfin.actors.runner.gpu import decoder as gpu_decoder
from rayfin.actors.runner.gpu.decoder import build_gpu_decoder
from rayfin.actors.runner.gpu.experts import TOLERANCE, GroupedExperts, group_experts
from rayfin.actors.runner.gpu.routers import FusedRouter
from rayfin.kernels.attention.triton_backend import TritonAttention

Make = Callable[..., Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(folder: Path) -> PagedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION)
    return PagedModel(model.to(DEVICE).eval().requires_grad_(False), paged_attention)


class Launches(TorchDispatchMode):
    """Counts what would be launched: Triton's kernels, and torch's operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Counts within ``with launches``, in Triton's interpreter only."""
    counting = Launches()
    if DEVICE.type == "cpu":
        from triton.runtime.interpreter import GridExecutor

        own_call = GridExecutor.__call__

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            counting.names.append(self.fn.__name__)
            with _disable_current_modes():  # the interpreter's own work
                return own_call(self, *args, **kwargs)

        monkeypatch.setattr(GridExecutor, "__call__", call)
    return counting


@pytest.mark.parametrize(
    ("family", "few", "many"),
    [("qwen2", 6, 7), ("qwen3", 6, 7), ("gemma3_text", 8, 9), ("olmo2", 11, 12), ("granite", 6, 7)],
)
def test_logits_agree(
    family: str, few: int, many: int, tiny_model: Make, launches: Launches
) -> None:
    """Biases, norms of heads and of all heads, norms on both sides, windows, scales; in so many
    launches a layer for few rows and for many."""
    paged = load(tiny_model(family).folder)
    wanted = probe_logits(paged, paged)
    fused = build_gpu_decoder(paged, TritonAttention(DEVICE))
    assert fused is not None
    for few_rows, count in ((64, few), (0, many)):
        fused.few_rows = few_rows
        launches.names.clear()
        with launches:
            given = probe_logits(fused, paged)
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
        if DEVICE.type == "cpu":
            first, second, *_ = (
                i for i, n in enumerate(launches.names) if n == "rope_and_write_kv"
            )
            assert second - first == count, launches.names[first:second]
    again = probe_logits(paged, paged)  # on the merged weights, of which it has a part
    torch.testing.assert_close(again, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_wide_rows_of_weights_are_left_to_torch(
    family: str, tiny_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Down projections of models whose hidden size is not too wide; with norms behind them too."""
    paged = load(tiny_model(family).folder)
    widths = [layer.mlp.down_proj.in_features for layer in paged.transformer.model.layers]
    hidden = paged.transformer.config.get_text_config().hidden_size
    assert min(widths) > hidden
    monkeypatch.setattr(gpu_decoder, "widest_row", lambda rows: hidden)
    wanted = probe_logits(paged, paged)
    fused = build_gpu_decoder(paged, TritonAttention(DEVICE))
    assert fused is not None and fused.few_rows == 4
    torch.testing.assert_close(probe_logits(fused, paged), wanted, rtol=1e-4, atol=1e-4)


def test_float16_takes_no_more_launches(tiny_model: Make, launches: Launches) -> None:
    """Though gates that are not yet divided would be over its range: they are scaled down."""
    paged = load(tiny_model("qwen2").folder)
    model = paged.transformer.half().model
    for layer in model.layers:
        layer.mlp.gate_proj.weight.mul_(200)
    stream = model.embed_tokens.weight
    stream.mul_(2000 / stream.abs().max())
    first = model.layers[0]
    weight = first.mlp.gate_proj.weight.float() * first.post_attention_layernorm.weight.float()
    assert (stream.float() @ weight.T).abs().max() > torch.finfo(torch.float16).max
    wanted = probe_logits(paged, paged)
    fused = build_gpu_decoder(paged, TritonAttention(DEVICE))
    assert fused is not None
    for few_rows, count in ((64, 6), (0, 7)):
        fused.few_rows = few_rows
        launches.names.clear()
        with launches:
            given = probe_logits(fused, paged)
        apart = (given - wanted).abs().max() / wanted.abs().max()
        assert apart < TOLERANCE[torch.float16]
        if DEVICE.type == "cpu":
            start, end, *_ = (i for i, n in enumerate(launches.names) if n == "rope_and_write_kv")
            assert end - start == count, launches.names[start:end]


def test_what_is_not_recognised_or_differs_stays(
    tiny_model: Make, caplog: pytest.LogCaptureFixture
) -> None:
    paged = load(tiny_model("llama").folder)
    mlp = paged.transformer.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * 1.01
    assert build_gpu_decoder(paged, TritonAttention(DEVICE)) is None
    assert "logits would differ by" in caplog.text
    mlp.add_module("extra", torch.nn.Linear(2, 2))
    assert build_gpu_decoder(paged, TritonAttention(DEVICE)) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_grouped(family: str, tiny_model: Make) -> None:
    """In a decoder that is fused as a whole, and in one whose attention is not recognised.

    Those of gpt-oss have gate and up outputs in turn, biases and a clamp.
    """
    paged = load(tiny_model(family).folder)
    wanted = probe_logits(paged, paged)
    assert group_experts(paged)
    grouped = [own for own in paged.transformer.modules() if isinstance(own, GroupedExperts)]
    assert len(grouped) == (2 if family == "deepseek_v3" else 3)
    torch.testing.assert_close(probe_logits(paged, paged), wanted, rtol=1e-4, atol=1e-4)
    fused = build_gpu_decoder(paged, TritonAttention(DEVICE))
    assert (fused is None) == (family == "deepseek_v3")
    if fused is not None:
        torch.testing.assert_close(probe_logits(fused, paged), wanted, rtol=1e-4, atol=1e-4)


def test_experts_that_differ_stay(tiny_model: Make, caplog: pytest.LogCaptureFixture) -> None:
    paged = load(tiny_model("mixtral").folder)
    experts = paged.transformer.model.layers[1].mlp.experts
    forward = experts.forward
    experts.forward = lambda *inputs: forward(*inputs) * 1.01
    assert not group_experts(paged)
    assert paged.transformer.model.layers[1].mlp.experts is experts
    assert "logits would differ by" in caplog.text


def test_tokens_of_a_mixture(
    tiny_model: Make, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers says, through the runner: prompts in chunks, and leases as on a GPU."""
    for module in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)  # long leases, however slow the machine
    tiny = tiny_model("mixtral")
    engine = served(
        tiny.folder, attention="triton", max_lease=3, max_decoding_batch=2, device=DEVICE.type
    )
    decoder = engine.runner._loaded.gpu_model
    routers = [each for each in decoder._paged.transformer.modules() if type(each) is FusedRouter]
    assert len(routers) == 3
    engine.runner._model.forward = engine._forward
    engine.runner._forward.run = engine._advance
    prompt = [5, 9, 3, 100, 7]
    assert engine.run(request_of(0, prompt, 6))[0] == tiny.greedy(prompt, 6)
