"""transformers' own modules as graphs: which families can be recorded, and their tokens.

On a CPU the steps are not recorded and run in Triton's interpreter; all else is the same.
"""

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rayfin.actors.errors import UnrecognizedModule
from rayfin.actors.messages import Sampling
from rayfin.actors.runner import checkpoint
from rayfin.actors.runner.models.paged_model import ATTENTION, PagedModel
from rayfin.actors.scheduler.policy import multi_step
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.sampling import select as sampling_select

pytest.importorskip("triton")
from rayfin.actors.runner.gpu.graph_model import GraphModel, NoSyncs, build_graph_model
from rayfin.kernels.attention.triton_backend import TritonAttention

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tools"))

import model_table

Make = Callable[..., Any]
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def load(folder: Path) -> PagedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION)
    return PagedModel(model.to(DEVICE).eval().requires_grad_(False), TritonAttention(DEVICE))


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.max().item(),
    "branch": lambda x: 1 if x.sum() > 0 else 2,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked write": lambda x: x.index_put_((x > 0,), x.new_ones(())),
    "unique": lambda x: x.unique(),
    "repeat": lambda x: x.repeat_interleave(x.long()),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_for_the_device_is_refused(name: str) -> None:
    x = torch.ones(3, device=DEVICE)
    with torch.inference_mode(), pytest.raises(UnrecognizedModule, match="waits"), NoSyncs():
        WAITS[name](x)
    with torch.inference_mode(), NoSyncs():
        (x[torch.arange(2, device=DEVICE)].to(torch.float64) + 1).masked_fill(x[:2] > 0, 0.0)


@pytest.mark.parametrize("family", ["gpt2", "deepseek_v3", "gpt_oss"])
def test_recorded_steps_give_the_logits_of_eager_ones(
    family: str, tiny_model: Make, few_programs: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Other norms, latent attention, sinks."""
    paged = load(tiny_model(family).folder)
    caplog.set_level(logging.INFO)
    assert build_graph_model(paged, TritonAttention(DEVICE)) is not None
    assert "are CUDA graphs of transformers' own modules" in caplog.text


def test_a_model_that_cannot_be_recorded_stays_eager(
    tiny_model: Make, few_programs: None, caplog: pytest.LogCaptureFixture
) -> None:
    """It waits for the device, or a graph would repeat what the first step has."""
    paged = load(tiny_model("gpt2").folder)
    block = paged.transformer.transformer.h[1]
    forward = block.forward

    def waits(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return forward(x * (1.0 if x.abs().max() > 0 else 0.0), *args, **kwargs)

    block.forward = waits
    assert build_graph_model(paged, TritonAttention(DEVICE)) is None
    assert "waits for the device" in caplog.text or "without CUDA graphs" in caplog.text
    calls: list[int] = []

    def counts(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls))
        return forward(x * (1.0 + len(calls)), *args, **kwargs)

    block.forward = counts
    assert build_graph_model(paged, TritonAttention(DEVICE)) is None
    assert "logits would differ" in caplog.text
    block.forward = forward
    for why, family in ((KEYS, "deepseek_v32"), (CHUNKS, "llama4_text")):
        assert load(tiny_model(family).folder).why_unrecorded == why


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)


def test_the_tokens_of_an_engine(
    tiny_models: Any,
    tmp_path: Path,
    served: Make,
    request_of: Make,
    few_programs: None,
    on_triton: None,
) -> None:
    """Prompts in chunks, leases, rows that end: the tokens of torch's attention."""
    folder, tokens = tiny_models.TinyModel("gpt2", tmp_path, n_layer=2).folder, []
    for attention in ("torch", "triton"):
        engine = served(
            folder, attention=attention, device=DEVICE.type, max_lease=3, max_decoding_batch=2
        )
        if attention == "triton":
            assert isinstance(engine.runner._loaded.gpu_model, GraphModel)
            engine.runner._model.forward = engine._forward
            engine.runner._forward.run = engine._advance
            assert engine.runner._graphs is not None
            assert engine.runner._loaded.gpu_model.replay is not None
        sampling = Sampling(temperature=0.9, seed=3, logprobs=2)
        requests = [request_of(0, range(3, 33), 5), request_of(1, [9, 8], 7, sampling=sampling)]
        tokens.append(engine.run(*requests))
    assert tokens[0] == tokens[1]


KEYS, CHUNKS, WAITING = (
    "its layers choose keys",
    "its layers attend in chunks",
    "its forward waits for the device (aten::",
)
NOT_RECORDED: dict[str, str] = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), KEYS),
    **dict.fromkeys(("llama4", "llama4_text"), CHUNKS),
    "dbrx": f"{WAITING}nonzero)",
    "longcat_flash": f"{WAITING}nonzero)",
    "gemma3": f"{WAITING}index_put_)",
}
"""Served families whose steps no graph holds."""


def families() -> list[str]:
    text = model_table.DOCS.read_text(encoding="utf-8").partition(model_table.BEGIN)[2]
    return re.findall(r"`([^`]+)`", re.split(r"^### (?!Served)", text, flags=re.MULTILINE)[0])


@pytest.mark.thorough(reason="every family that is served")
@pytest.mark.parametrize("family", families())
def test_families(family: str) -> None:
    """A decode step of each, without its attention: whether it waits for the device."""
    attention = TritonAttention(torch.device("cpu"))
    attention.write_kv = lambda *_: None  # type: ignore[method-assign]
    paged = PagedModel(model_table.build(family).requires_grad_(False), attention)
    why = paged.why_unrecorded
    try:
        with torch.inference_mode():
            if why is None:
                GraphModel(paged, attention).observe()
    except UnrecognizedModule as error:
        why = str(error)
    assert why == NOT_RECORDED.get(family)
