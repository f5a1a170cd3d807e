"""Adapters, images, states, few bits, drafts and vectors on a GPU's kernels, in the interpreter.

They give the tokens that they give elsewhere, whether graphs run their steps or torch does. A GPU's
start is part of each: the steps that compile kernels. A machine with a GPU may lack the packages of
some.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fake_fa3 import Package
from rayfin import LLM
from rayfin.actors.errors import InvalidConfig
from rayfin.actors.runner import checkpoint, loading
from rayfin.actors.runner.model_runner import ModelRunner
from rayfin.actors.runner.sampling.sampler import Sampler
from rayfin.actors.scheduler.policy import multi_step
from rayfin.kernels.attention import select as attention_select
from rayfin.kernels.sampling import select as sampling_select

pytest.importorskip("triton")
from rayfin.actors.runner.gpu import warm_up as warming

Make = Callable[..., Any]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
SETTINGS: dict[str, Any] = {"attention": "triton", "device": DEVICE, "max_decoding_batch": 2}
PROMPT, OUTPUT = [5, 9, 3, 5, 9, 3, 77], 5


@pytest.fixture(autouse=True)
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's path, whatever the device, with two short steps of the start."""
    if ON_GPU:
        return
    for module in (checkpoint, attention_select, sampling_select):
        monkeypatch.setattr(module, "can_use_triton", lambda device: True)
    monkeypatch.setattr(warming, "WARMED_TOKENS", (6, 16))

    def warm_up(self: ModelRunner, config: Any) -> None:
        sampler = self._sampler if isinstance(self._sampler, Sampler) else None
        sizes = (self._args.page_size, config.num_pages, config.max_model_len)
        warming.warm_up(self._model, sampler, *sizes, self._loaded.device)

    monkeypatch.setattr(ModelRunner, "_warm_up", warm_up)


@pytest.mark.skipif(ON_GPU, reason="stands for what a GPU may have installed")
def test_another_kernel_for_prompts(
    two_layers: Any, served: Make, request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried when the model is compared at load; ``--attention fa3`` insists on it."""
    from rayfin.kernels.attention import fa3

    package = Package()
    kernel = fa3.FlashAttention3(package.flash_attn_with_kvcache)
    monkeypatch.setattr(fa3, "load_fa3", lambda device: kernel)
    changes = {"attention": "fa3", "enforce_eager": True, "max_batch_tokens": 128}
    settings = SETTINGS | changes
    with pytest.raises(InvalidConfig, match="'fa3' cannot be used: it computes in 16 bits") as bad:
        served(two_layers.folder, **settings)
    assert bad.value.param == "attention"
    kernel = fa3.FlashAttention3(package.flash_attn_with_kvcache)
    monkeypatch.setitem(fa3.TOLERANCE, torch.float32, 1e-5)  # the interpreter lacks bfloat16
    engine = served(two_layers.folder, **settings)
    tried, prompts = len(package.queries), [list(range(3, 43)), list(range(7, 60))]
    tokens = engine.run(*(request_of(key, each, 3) for key, each in enumerate(prompts)))
    assert tokens == {key: two_layers.greedy(each, 3) for key, each in enumerate(prompts)}
    assert package.queries[tried:] == [93, 93], "of each layer"


def has_graphs(engine: Any) -> bool:
    return engine.runner._graphs is not None


def test_adapters(two_layers: Any, served: Make, request_of: Make, tmp_path: Path) -> None:
    """Their decode steps are graphs too, by tables of two adapters, which three take in turn."""
    pytest.importorskip("peft")
    from peft_adapters import KINDS, generate, make_adapter, ref_of

    folder = two_layers.folder
    adapters = {
        kind: make_adapter(folder, tmp_path / kind, seed, **KINDS[kind])
        for seed, kind in enumerate(KINDS)
    }
    engine = served(folder, enable_lora=True, max_loras=2, **SETTINGS)
    graphs = engine.runner._graphs
    assert {names for *_, names in graphs._replays} == {(), ("adapters",)}
    recorded, steps = graphs._state.load_numbers, []
    graphs._state.load_numbers = lambda numbers, bucket: (
        steps.append({name: given.tolist() for name, given in numbers.items()}),
        recorded(numbers, bucket),
    )
    for first, second in ((None, "small"), ("small", "mixed"), ("rslora", None)):
        requests = []
        for key, kind in enumerate((first, second)):
            request = request_of(key, PROMPT, OUTPUT)
            if kind is not None:
                request.use(ref_of(adapters[kind], kind))
            requests.append(request)
        tokens = engine.run(*requests)
        for key, kind in enumerate((first, second)):
            adapter = None if kind is None else adapters[kind]
            assert tokens[key] == generate(folder, adapter, PROMPT, OUTPUT), kind
    assert len(steps) >= 9
    entries = [numbers["adapters"] for numbers in steps]
    assert [-1, 0] in entries and [0, 1] in entries


def test_an_adapter_that_no_graph_has(
    two_layers: Any,
    served: Make,
    request_of: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rows run on modules, the others in graphs."""
    pytest.importorskip("peft")
    from peft_adapters import generate, make_adapter, ref_of
    from rayfin.actors.runner.parts.lora.adapted_model import DeviceTables

    monkeypatch.setattr(DeviceTables, "fit", lambda *_: False)
    folder, adapter = two_layers.folder, make_adapter(two_layers.folder, tmp_path)
    engine = served(folder, enable_lora=True, **SETTINGS)
    calls: list[int] = []
    begin = engine.runner._graphs.begin
    engine.runner._graphs.begin = lambda info, rules: (
        calls.append(len(info.ids)),
        begin(info, rules),
    )
    adapted = request_of(1, PROMPT, OUTPUT)
    adapted.use(ref_of(adapter))
    tokens = engine.run(request_of(0, PROMPT, OUTPUT), adapted)
    assert tokens[0] == generate(folder, None, PROMPT, OUTPUT) and set(calls) == {1}
    assert tokens[1] == generate(folder, adapter, PROMPT, OUTPUT)


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_images(family: str, served: Make, request_of: Make, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from rayfin.actors.runner.gpu.decoder import GpuDecoder
    from vision_models import EOS, VisionModel, picture

    model = VisionModel(family, tmp_path)
    ids, images = model.prompt([60, 61], picture(1), [70, 71])
    engine = served(model.folder, **SETTINGS)
    request = request_of(0, ids, OUTPUT, eos=(EOS,))
    request.parts = images
    engine.runner._model.forward = engine._forward
    engine.runner._forward.run = engine._advance
    steps = []
    begin = engine.runner._graphs.begin
    engine.runner._graphs.begin = lambda info, rules: (steps.append(info), begin(info, rules))
    assert engine.run(request)[0] == model.greedy(ids, images, OUTPUT)
    assert len(steps) >= OUTPUT - 2 and isinstance(engine.runner._loaded.gpu_model, GpuDecoder)
    text = request_of(1, [5, 9, 3], OUTPUT, eos=(EOS,))
    assert engine.run(text)[1] == model.greedy([5, 9, 3], (), OUTPUT)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_states(
    family: str,
    tiny_model: Make,
    served: Make,
    request_of: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Layers with a state per request, which the steps of the start have written over.

    Decode steps are graphs, one and several in a call; then a slot has another request.
    """
    monkeypatch.setattr(multi_step, "CALL_SECONDS", 1e6)
    tiny = tiny_model(family)
    engine = served(tiny.folder, max_model_len=64, max_lease=3, **SETTINGS)
    engine.runner._model.forward = engine._forward
    engine.runner._forward.run = engine._advance
    graphs = engine.runner._graphs
    calls: list[int] = []
    begin = graphs.begin
    graphs.begin = lambda info, rules: (calls.append(info.num_steps), begin(info, rules))
    prompts = {0: PROMPT, 1: PROMPT[2:], 2: PROMPT[:3], 3: [9, 9]}
    lengths = {0: 9, 1: 4, 2: 6, 3: 3}
    requests = [request_of(key, prompt, lengths[key]) for key, prompt in prompts.items()]
    tokens = engine.run(*requests[:2]) | engine.run(*requests[2:], stagger=1)
    assert tokens == {key: tiny.greedy(prompts[key], lengths[key]) for key in prompts}
    assert max(calls) == 3 and {1, 2} & set(calls) and len(calls) >= 4


@pytest.mark.parametrize(
    ("kind", "family"),
    [("gptq", "llama"), ("awq", "qwen3"), ("fp8 blocks", "qwen2"), ("fp8", "mixtral")],
)
def test_few_bits(kind: str, family: str, served: Make, request_of: Make, tmp_path: Path) -> None:
    """The model is recognised, and its layers stay small; experts in float32 are made whole."""
    from quantised import QuantisedModel
    from rayfin.actors.runner.gpu.decoder import GpuDecoder
    from rayfin.kernels.triton.quantized import CodedWeight

    model = QuantisedModel(kind, family, tmp_path)
    engine = served(model.folder, **SETTINGS)
    assert engine.run(request_of(0, PROMPT, OUTPUT))[0] == model.greedy(PROMPT, OUTPUT)
    assert has_graphs(engine)
    decoder = engine.runner._loaded.gpu_model
    assert isinstance(decoder, GpuDecoder) and decoder.few_rows == 0
    for layer in decoder._layers:
        assert isinstance(layer.qkv.weight, CodedWeight)
        assert isinstance(layer.attention_out, CodedWeight)


def test_few_bits_made_whole(served: Make, request_of: Make, tmp_path: Path) -> None:
    from quantised import QuantisedModel

    model = QuantisedModel("gptq", "llama", tmp_path)
    engine = served(model.folder, quantization="dequantize", **SETTINGS)
    assert engine.run(request_of(0, PROMPT, OUTPUT))[0] == model.greedy(PROMPT, OUTPUT)
    assert not any(layer.is_coded for layer in engine.runner._loaded.gpu_model._layers)


@pytest.mark.parametrize(("bits", "least", "most"), [("int8", 0.0005, 0.03), ("int4", 0.01, 0.4)])
def test_weights_rounded_at_the_load(
    bits: str,
    least: float,
    most: float,
    two_layers: Any,
    served: Make,
    request_of: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Near the plain model's logits, in the decoder."""
    if not ON_GPU:
        monkeypatch.setattr(loading, "can_use_triton", lambda device: True)
    folder = two_layers.folder
    engine = served(folder, quantization=bits, enforce_eager=True, **SETTINGS)
    engine.run(request_of(0, PROMPT, 2))
    assert all(layer.is_coded for layer in engine.runner._loaded.gpu_model._layers)
    exact = served(folder, **{**SETTINGS, "attention": "torch"})
    exact.run(request_of(0, PROMPT, 1))
    (position, wanted), *_ = exact.sampled[0].items()
    assert least < float((engine.sampled[0][position] - wanted).norm() / wanted.norm()) < most


def test_drafts(two_layers: Any, served: Make, request_of: Make) -> None:
    """Of the model for itself: layers of both are graphs by tokens (`test_prompt_graphs.py`)."""
    written = {"model": str(two_layers.folder), "num_speculative_tokens": 2, "adaptive": False}
    engine = served(two_layers.folder, speculative_config=json.dumps(written), **SETTINGS)
    tokens = engine.run(request_of(0, PROMPT, OUTPUT))
    assert tokens[0] == two_layers.greedy(PROMPT, OUTPUT)
    assert has_graphs(engine) and engine.engine.stats().spec_draft_tokens


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads(
    method: str, tiny_model: Make, served: Make, request_of: Make, tmp_path: Path
) -> None:
    """The layers of a model whose states a head reads are graphs by tokens: drafts are plain's."""
    from draft_heads import PlainEagle, PlainEagle3
    from head_checks import watch
    from rayfin.actors.runner.gpu.graph_model import GraphModel

    tiny = tiny_model("llama")
    plain = PlainEagle(tiny.model) if method == "eagle" else PlainEagle3(tiny.model)
    plain.save(tmp_path)
    written = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    config = json.dumps({**written, "adaptive": False})
    engine = served(tiny.folder, speculative_config=config, **SETTINGS)
    model = engine.runner._loaded.gpu_model
    assert isinstance(model, GraphModel) and not engine.runner._graphs._replays
    replay, held = model.replay, []

    def replayed(inputs: Any) -> Any:
        stream = replay(inputs)
        held.append(stream is not None)
        return stream

    model.replay = replayed
    seen = watch(engine.runner)
    assert engine.run(request_of(0, PROMPT, OUTPUT))[0] == tiny.greedy(PROMPT, OUTPUT)
    assert all(held) and len(held) >= 2 and engine.engine.stats().spec_draft_tokens
    assert seen and all(drafts == plain.drafts(text, len(drafts)) for text, drafts in seen)


def test_vectors(tmp_path: Path) -> None:
    from pooling_models import TEXTS, add_modules, make_decoder

    folder = str(add_modules(make_decoder(tmp_path), {"pooling_mode_lasttoken": True}))
    found = []
    for attention in ("triton", "torch"):
        settings: dict[str, Any] = {**SETTINGS, "attention": attention, "num_pages": 32}
        with LLM(folder, **settings) as llm:
            outputs = [one.outputs for one in llm.embed(TEXTS[:3], use_tqdm=False)]
            found.append(np.float32([own.embedding for own in outputs]))  # type: ignore[union-attr]
    assert np.abs(found[0] - found[1]).max() < 1e-4
