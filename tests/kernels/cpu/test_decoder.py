"""The decoder in one call against the same decoder put together from reference operations."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from rayfin.kernels import reference
from rayfin.kernels.cpu.codes import pack_int4, pack_int8
from rayfin.kernels.cpu.decoder import DecoderLayer, DecoderShape, PackedDecoder, StepAdapters
from rayfin.kernels.cpu.kernels import Activation, CpuKernels, Pack
from rayfin.kernels.cpu.low_rank import AdapterParts, AdapterRows, PackedLowRank, Place
from rayfin.kernels.shapes import PagedBatch

pytestmark = pytest.mark.slow(reason="every variant on every instruction set")

HIDDEN, INNER, VOCABULARY = 40, 27, 51
HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, ROTARY = 6, 2, 12, 10, 8
THETA, EPS, LAYERS = 100.0, 1e-5, 3
POSITIONS = 150
STEP = [(3, 1), (20, 1), (0, 9), (6, 5)]
Case = Callable[..., Any]


def packs(kernels: CpuKernels) -> dict[str, Pack]:
    return {
        "float32": partial(kernels.pack, storage=torch.float32),
        "bfloat16": partial(kernels.pack, storage=torch.bfloat16),
        "int8": partial(pack_int8, kernels),
        "int4": partial(pack_int4, kernels),
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {"biases": True, "head_norms": "each"},
    "gemma": {
        "out_norms": True,
        "shape": {
            "activation": Activation.GELU_TANH,
            "embedding_scale": 6.3,
            "logit_softcap": 2.0,
        },
        "layer": {"softcap": 1.5, "window": 7},
    },
    "olmo": {"in_norms": False, "out_norms": True, "head_norms": "whole"},
    "granite": {"shape": {"residual_scale": 0.4, "logit_scale": 0.2}},
    "sinks": {"layer": {"sinks": True, "window": 4}},
    "values apart": {"biases": True, "rest": KV_HEADS * VALUE_DIM},
}


class Weights:
    """Random weights of a variant, and the computation in reference operations."""

    def __init__(
        self,
        in_norms: bool = True,
        out_norms: bool = False,
        biases: bool = False,
        head_norms: str | None = None,
        shape: dict[str, Any] | None = None,
        layer: dict[str, Any] | None = None,
        rest: int = 0,
    ) -> None:
        self.rest = rest  # outputs of "qkv" in a matrix of their own
        generator = torch.Generator().manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator) / size[-1] ** 0.5

        def norm(size: int, wanted: bool) -> torch.Tensor | None:
            return torch.rand(size, generator=generator) + 0.5 if wanted else None

        queries, keys = HEADS * KEY_DIM, KV_HEADS * KEY_DIM
        sizes = {"each": (KEY_DIM, KEY_DIM), "whole": (queries, keys)}.get(head_norms or "", (0, 0))
        self.factors, self.options = shape or {}, dict(layer or {})
        self.sinks = normal(HEADS) if self.options.pop("sinks", False) else None
        self.whole = head_norms == "whole"
        qkv = queries + keys + KV_HEADS * VALUE_DIM
        self.layers = [
            {
                "qkv": normal(qkv, HIDDEN),
                "attention_out": normal(HIDDEN, HEADS * VALUE_DIM),
                "gate_up": normal(2 * INNER, HIDDEN),
                "down": normal(HIDDEN, INNER),
                "attention_norm": norm(HIDDEN, in_norms),
                "attention_out_norm": norm(HIDDEN, out_norms),
                "mlp_norm": norm(HIDDEN, in_norms),
                "mlp_out_norm": norm(HIDDEN, out_norms),
                "query_norm": norm(sizes[0], head_norms is not None),
                "key_norm": norm(sizes[1], head_norms is not None),
                "qkv_bias": normal(qkv) if biases else None,
                "attention_out_bias": normal(HIDDEN) if biases else None,
                "gate_up_bias": normal(2 * INNER) if biases else None,
                "down_bias": normal(HIDDEN) if biases else None,
            }
            for _ in range(LAYERS)
        ]
        self.embedding, self.head = normal(VOCABULARY, HIDDEN), normal(VOCABULARY, HIDDEN)
        self.final_norm = norm(HIDDEN, True)

    def packed(self, kernels: CpuKernels, pack: Pack | None = None) -> PackedDecoder:
        matrices = ("qkv", "attention_out", "gate_up", "down")
        pack, layers = pack or kernels.pack, []
        for weights in self.layers:
            fields = {
                name: pack([value], paired=name == "gate_up") if name in matrices else value
                for name, value in weights.items()
            }
            if self.rest:
                parts = weights["qkv"][: -self.rest], weights["qkv"][-self.rest :]
                both = (pack([part]) for part in parts)
                fields["qkv"], fields["qkv_rest"] = both
            layers.append(DecoderLayer(**fields, scale=0.3, sinks=self.sinks, **self.options))
        shape = DecoderShape(
            *(HIDDEN, INNER, VOCABULARY, HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, ROTARY, EPS),
            **{"activation": Activation.SILU, "whole_norm": self.whole, **self.factors},
        )
        embedding, head = (pack([weight]) for weight in (self.embedding, self.head))
        decoder = PackedDecoder(
            kernels, shape, layers, embedding=embedding, head=head, final_norm=self.final_norm
        )
        angles = torch.arange(float(POSITIONS)).unsqueeze(1) * THETA ** (
            -torch.arange(ROTARY // 2) / (ROTARY // 2)
        )
        decoder.set_rope_tables([(angles.cos(), angles.sin())])
        return decoder

    def run(
        self,
        tokens: torch.Tensor,
        case: Any,
        sampled: torch.Tensor,
        pages: list[list[torch.Tensor]],
    ) -> torch.Tensor:
        batch, factor = case.batch, self.factors
        x = self.embedding[tokens] * factor.get("embedding_scale", 1.0)
        residual_scale = factor.get("residual_scale", 1.0)
        self.inputs: list[torch.Tensor] = []  # of the layers
        for weights, k_pages, v_pages in zip(self.layers, *pages, strict=True):
            self.inputs.append(x)
            qkv = linear(normed(x, weights["attention_norm"]), weights, "qkv")
            q, k, v = qkv.split([HEADS * KEY_DIM, KV_HEADS * KEY_DIM, KV_HEADS * VALUE_DIM], dim=-1)
            if not self.whole:
                q, k = q.unflatten(-1, (HEADS, KEY_DIM)), k.unflatten(-1, (KV_HEADS, KEY_DIM))
            q, k = normed(q, weights["query_norm"]), normed(k, weights["key_norm"])
            q, k = q.reshape(len(x), HEADS, KEY_DIM), k.reshape(len(x), KV_HEADS, KEY_DIM)
            for heads in (q, k):
                turned = reference.rotary(heads[..., :ROTARY], batch.positions, THETA)
                heads[..., :ROTARY] = turned
            v = v.reshape(len(x), KV_HEADS, VALUE_DIM)
            reference.write_kv(k, v, k_pages, v_pages, batch.slots)
            attended = reference.paged_attention(
                q, k_pages, v_pages, batch, scale=0.3, sinks=self.sinks, **self.options
            ).flatten(1)
            out = linear(attended, weights, "attention_out")
            x = x + residual_scale * normed(out, weights["attention_out_norm"])
            merged = linear(normed(x, weights["mlp_norm"]), weights, "gate_up")
            gelu = factor.get("activation") == Activation.GELU_TANH
            gated = reference.gelu_mul(merged) if gelu else reference.silu_mul(merged)
            out = linear(gated, weights, "down")
            x = x + residual_scale * normed(out, weights["mlp_out_norm"])
        self.inputs.append(x)  # of the head
        logits = normed(x[sampled], self.final_norm) @ self.head.T * factor.get("logit_scale", 1.0)
        cap = factor.get("logit_softcap")
        return logits if cap is None else cap * torch.tanh(logits / cap)


def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return x if weight is None else reference.rms_norm(x, weight, EPS)


def linear(x: torch.Tensor, weights: dict[str, Any], name: str) -> torch.Tensor:
    bias = weights[f"{name}_bias"]
    return x @ weights[name].T + (0.0 if bias is None else bias)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(kernels: CpuKernels, paged_case: Case, variant: str) -> None:
    weights = Weights(**VARIANTS[variant])
    case = paged_case(STEP, heads=HEADS, kv_heads=KV_HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM)
    k_pages = [case.k_pages.clone() for _ in range(LAYERS)]
    v_pages = [case.v_pages.clone() for _ in range(LAYERS)]
    own = [[page.clone() for page in pages] for pages in (k_pages, v_pages)]
    tokens = torch.arange(len(case.query)) * 7 % VOCABULARY
    decoder = weights.packed(kernels)
    decoder.bind(k_pages, v_pages)
    for sampled in (torch.tensor([0, 1, 10, 15]), torch.tensor([15, 3, 3]), torch.arange(16)):
        logits = decoder.run(tokens, case.batch, sampled)
        expected = weights.run(tokens, case, sampled, own)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for actual, wanted in zip([*k_pages, *v_pages], [*own[0], *own[1]], strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    assert decoder.run(tokens, case.batch, torch.empty(0, dtype=torch.int64)).shape[0] == 0


@pytest.mark.parametrize("taps", [[0], [LAYERS - 1], [LAYERS], [0, LAYERS - 1, LAYERS]])
def test_inputs_of_layers(kernels: CpuKernels, paged_case: Case, taps: list[int]) -> None:
    """They are copied for all tokens, and the logits are those of a step without."""
    weights = Weights(**VARIANTS["llama"])
    case = paged_case(STEP, heads=HEADS, kv_heads=KV_HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM)
    pages = [[pages.clone() for _ in range(LAYERS)] for pages in (case.k_pages, case.v_pages)]
    tokens, sampled = torch.arange(len(case.query)) * 7 % VOCABULARY, torch.tensor([1, 15])
    decoder = weights.packed(kernels)
    decoder.bind(*pages)
    plain = decoder.run(tokens, case.batch, sampled)
    decoder.tap(taps)
    assert torch.equal(decoder.run(tokens, case.batch, sampled), plain)
    weights.run(tokens, case, sampled, pages)
    expected = torch.cat([weights.inputs[layer] for layer in taps], dim=-1)
    torch.testing.assert_close(decoder.tapped, expected, rtol=1e-4, atol=1e-4)


def step_of(start: int, end: int) -> PagedBatch:
    """Positions ``start`` .. ``end`` - 1 of one sequence, on pages of 16 that lie in reverse."""
    pages = torch.arange(-(-POSITIONS // 16), dtype=torch.int32).flip(0)
    positions = torch.arange(start, end)
    starts, lengths = np.array([0, end - start], np.int32), np.array([end], np.int32)
    return PagedBatch(
        query_start=torch.from_numpy(starts),
        kv_len=torch.from_numpy(lengths),
        page_tables=pages.unsqueeze(0),
        slots=pages[positions // 16].long() * 16 + positions % 16,
        positions=positions,
        query_start_cpu=starts,
        kv_len_cpu=lengths,
        decoding=int(end - start == 1),
        page_size=16,
    )


QUERIES, KEYS, VALUES = HEADS * KEY_DIM, KV_HEADS * KEY_DIM, KV_HEADS * VALUE_DIM
PLACES = {  # of each projection: sizes of its linear layers, and its inputs
    "qkv": ((QUERIES, KEYS, VALUES), HIDDEN),
    "attention_out": ((HIDDEN,), HEADS * VALUE_DIM),
    "gate_up": ((INNER, INNER), HIDDEN),
    "down": ((HIDDEN,), INNER),
}


class Adapter:
    """Random A and B for all linear layers but those of ``without``."""

    def __init__(self, seed: int, rank: int, without: str = "") -> None:
        generator = torch.Generator().manual_seed(seed)
        self.places: list[list[Place]] = []
        self.layers: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        for layer in range(LAYERS):
            for name, (counts, inputs) in PLACES.items():
                firsts = np.cumsum([0, *counts]).tolist()
                places = [
                    Place(f"{layer}.{name}.{number}", first, count)
                    for number, (first, count) in enumerate(zip(firsts, counts, strict=False))
                ]
                self.places.append(places)
                for place in places if name != without else []:
                    a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
                    b = torch.randn(place.count, rank, generator=generator) / rank**0.5
                    self.layers[place.path] = (a, b, 0.5)

    def packed(self, kernels: CpuKernels) -> AdapterParts:
        layers = {path: PackedLowRank(kernels, *own) for path, own in self.layers.items()}
        return AdapterParts(self.places, layers)

    def merged(self, weights: Weights) -> Weights:
        """The weights of a model that has only this adapter."""
        own = copy.copy(weights)
        own.layers = [dict(layer) for layer in weights.layers]
        for index, places in enumerate(self.places):
            layer, name = own.layers[index // 4], list(PLACES)[index % 4]
            weight = layer[name] = layer[name].clone()
            for place in places:
                if place.path in self.layers:
                    a, b, scale = self.layers[place.path]
                    weight[place.first : place.first + place.count] += scale * b @ a
        return own


@pytest.mark.parametrize("variant", VARIANTS)
def test_adapters_of_rows(kernels: CpuKernels, paged_case: Case, variant: str) -> None:
    """Each request's logits are those of a model with its adapter's products in the weights."""
    weights = Weights(**VARIANTS[variant])
    case = paged_case(STEP, heads=HEADS, kv_heads=KV_HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM)
    adapters = [Adapter(1, 5), Adapter(2, 40, without="gate_up"), Adapter(3, 16, without="qkv")]
    of_request = [0, -1, 1, 2]
    of_token = np.repeat(of_request, [chunk for _, chunk in STEP])
    tokens = torch.arange(len(case.query)) * 7 % VOCABULARY
    decoder = weights.packed(kernels)
    tables = [adapter.packed(kernels) for adapter in adapters]
    for sampled in (torch.tensor([0, 1, 10, 15]), torch.arange(16), torch.tensor([11, 2])):
        decoder.bind(
            [case.k_pages.clone() for _ in range(LAYERS)],
            [case.v_pages.clone() for _ in range(LAYERS)],
        )
        rows = (AdapterRows(tables, of_token), AdapterRows(tables, of_token[sampled.numpy()]))
        logits = decoder.run(tokens, case.batch, sampled, adapters=StepAdapters(*rows))
        for number in (-1, 0, 1, 2):
            own = weights if number < 0 else adapters[number].merged(weights)
            pages = [[page.clone() for _ in range(LAYERS)] for page in (case.k_pages, case.v_pages)]
            expected = own.run(tokens, case, sampled, pages)
            here = of_token[sampled.numpy()] == number
            torch.testing.assert_close(logits[here], expected[here], rtol=1e-4, atol=1e-4)


def test_rows_without_an_adapter_are_the_same_beside_others(
    kernels: CpuKernels, paged_case: Case
) -> None:
    """To the last bit; and a step in which no row has one is a step without adapters."""
    weights = Weights(**VARIANTS["qwen"])
    case = paged_case(STEP, heads=HEADS, kv_heads=KV_HEADS, key_dim=KEY_DIM, value_dim=VALUE_DIM)
    tokens, sampled = torch.arange(16) * 7 % VOCABULARY, torch.arange(16)
    decoder, table = weights.packed(kernels), Adapter(1, 5).packed(kernels)

    def logits(of_request: list[int] | None) -> torch.Tensor:
        decoder.bind(
            [case.k_pages.clone() for _ in range(LAYERS)],
            [case.v_pages.clone() for _ in range(LAYERS)],
        )
        if of_request is None:
            return decoder.run(tokens, case.batch, sampled)
        rows = AdapterRows([table], np.repeat(of_request, [chunk for _, chunk in STEP]))
        return decoder.run(tokens, case.batch, sampled, adapters=StepAdapters(rows, rows))

    plain, mixed, alone = logits(None), logits([0, -1, 0, -1]), logits([-1, -1, 0, -1])
    assert torch.equal(mixed[1], plain[1]) and torch.equal(mixed[11:], plain[11:])
    assert torch.equal(mixed[2:11], alone[2:11]) and not torch.equal(mixed[0], plain[0])
    assert torch.equal(logits([-1] * 4), plain)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_is_the_same_however_it_is_cut(
    kernels: CpuKernels, variant: str, stored: str
) -> None:
    """What was decoded and is computed again as a prompt gives the same bits."""
    decoder = Weights(**VARIANTS[variant]).packed(kernels, packs(kernels)[stored])
    tokens = torch.arange(POSITIONS) * 7 % VOCABULARY

    def logits(cuts: list[int]) -> torch.Tensor:
        sizes = (-(-POSITIONS // 16), 16, KV_HEADS)
        decoder.bind(
            [torch.zeros(*sizes, KEY_DIM) for _ in range(LAYERS)],
            [torch.zeros(*sizes, VALUE_DIM) for _ in range(LAYERS)],
        )
        chunks = zip(cuts, [*cuts[1:], POSITIONS], strict=True)
        return torch.cat(
            [
                decoder.run(tokens[start:end], step_of(start, end), torch.arange(end - start))
                for start, end in chunks
            ]
        )

    whole = logits([0])
    assert torch.equal(logits([0, *range(20, POSITIONS)]), whole)
    assert torch.equal(logits([0, 70, 71, 100]), whole)
