"""Compiles every kernel for a GPU that need not be there, and prints a line of JSON for each.

    python tests/kernels/triton/compile_kernels.py [--arch 90] [--pdl]

The interpreter takes much that the compiler does not. Run by test_compile.py.
"""

import argparse
import json
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rayfin.kernels.attention.triton_backend import (
    CAST,
    OCTETS,
    PAIRS,
    PTX,
    Sizes,
    TritonAttention,
    width,
)
from rayfin.kernels.cpu.experts import ClampedSwish
from rayfin.kernels.shapes import Routing
from rayfin.kernels.triton import quantized, scaled
from rayfin.kernels.triton.device import (
    adjust_kernels,
    decode_kernels,
    expert_kernels,
    layer_kernels,
    logprob_kernels,
    low_rank_kernels,
    quant_kernels,
    router_kernels,
    row_kernels,
    sample_kernels,
)
from rayfin.kernels.triton.device.attention_kernels import attend_tiles
from rayfin.kernels.triton.device.mma_kernels import mma_product
from rayfin.kernels.triton.experts import (
    CODED_FEW,
    CODED_MANY,
    FEW,
    MANY,
    MAP_SIZES,
    Experts,
    gate_constants,
    routing_constants,
    weight_constants,
)
from rayfin.kernels.triton.low_rank import INPUTS_AT_ONCE, OUTPUTS_AT_ONCE, RANKS_AT_ONCE
from rayfin.kernels.triton.products import MMA_WARPS, _programs, mma_sizes

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FP8 = "fp8e4nv"
REGISTERS, STACK = 0x2F, 0x11  # attributes in the section .nv.info
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Shared memory that a program may have at most, by architecture."""

Kernel = tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]
OF_THE_MODEL = set("query_stride x_stride qkv_stride stride vocabulary blocks size window".split())
"""Integers that no step changes: Triton compiles for 1, for multiples of 16, and for others."""


def attention() -> Iterator[Kernel]:
    backend = TritonAttention(torch.device("cpu"))
    backend.cores = 132
    plain = {"WINDOW": False, "SOFTCAP": False, "SINKS": False}
    every = {"WINDOW": True, "SOFTCAP": True, "SINKS": True}
    for dtype, dim, flags, stored, form, two, by_page in (
        (torch.bfloat16, 128, plain, "bf16", CAST, False, False),
        (torch.bfloat16, 128, plain, FP8, CAST, False, False),
        (torch.float16, 64, every, "fp16", CAST, False, False),
        (torch.float32, 64, plain, "fp32", CAST, False, False),
        (torch.bfloat16, 128, plain, "bf16", CAST, True, False),
        (torch.bfloat16, 128, plain, FP8, PAIRS, True, False),
        (torch.bfloat16, 128, plain, FP8, PTX, True, False),
        (torch.bfloat16, 128, plain, "bf16", CAST, False, True),
        (torch.bfloat16, 128, plain, FP8, PTX, True, True),
    ):
        sizes = Sizes(16, 8, dim, dim, dtype, None)
        types = dict.fromkeys(("query", "sinks", "out"), f"*{NAMES[dtype]}")
        words = form in (OCTETS, PTX)
        types |= dict.fromkeys(("k_pages", "v_pages"), "*i32" if words else f"*{stored}")
        types |= dict.fromkeys(("tables", "items", "arrived"), "*i32")
        types |= dict.fromkeys(("part_out", "part_lse"), "*fp32")
        types |= dict.fromkeys(("query_stride", "table_stride", "window"), "i32")
        types |= dict.fromkeys(("scale", "softcap"), "fp32")
        for kind, shape in (
            ("decode", backend.decode_shape(sizes)),
            ("prefill", backend.prefill_shape(sizes)),
        ):
            constants = {
                "KV_HEADS": 8,
                "GROUP": 2,
                "KEY_DIM": dim,
                "VALUE_DIM": dim,
                "KEY_WIDTH": width(dim),
                "VALUE_WIDTH": width(dim),
                "PAGE_SIZE": 16,
                "ROWS": shape.rows,
                "KEYS": shape.keys,
                "PARTS_AHEAD": shape.parts_ahead,
                "TWO_LOOPS": two,
                "PER_KEY": two and kind == "decode",
                "FORM": form,
                "BY_PAGE": by_page,
                **flags,
            }
            options = {"num_warps": shape.warps, "num_stages": shape.stages}
            how = ", two loops" * two + (f", form {form}" if form != CAST else "")
            how += ", by page" * by_page
            name = f"{kind} {NAMES[dtype]} {dim}, pages {stored}{how}"
            yield name, attend_tiles, types, constants, options


def layers() -> Iterator[Kernel]:
    types = {"x": "*bf16", "hidden": "*bf16", "out_weight": "*fp32", "weight": "*fp32"}
    types |= {"out": "*bf16", "x_stride": "i32", "eps": "fp32", "residual_scale": "fp32"}
    flags = {"ADD": True, "OUT_NORM": True, "NORM": True}
    constants = {"SIZE": 4096, "WIDTH": 4096, **flags}
    yield "norm", layer_kernels.add_and_norm, types, constants, {"num_warps": 8}

    types = {"qkv": "*bf16", "query": "*bf16"}
    types |= dict.fromkeys(("query_norm", "key_norm", "cosines", "sines"), "*fp32")
    types |= {"positions": "*i64", "slots": "*i64", "qkv_stride": "i32", "eps": "fp32"}
    end = {"residual": "*bf16", "bias": "*bf16", "gain": "fp32"}
    behind = {"INPUTS": 4096, "INPUT_WIDTH": 4096, "NORM": True, "BIAS": True}
    sizes = {"HEADS": 16, "KV_HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128, "WIDTH": 128}
    constants = {**sizes, "HALF": 64, "AT_ONCE": 16, "QUERY_NORM": True, "KEY_NORM": True}
    for stored in ("bf16", FP8):
        more = types | end | dict.fromkeys(("k_pages", "v_pages"), f"*{stored}")
        name = f"turn and write, pages {stored}"
        yield name, layer_kernels.rope_and_write_kv, more, constants | behind, {"num_warps": 4}

    strides = ("key_stride", "key_head_stride", "value_stride", "value_head_stride")
    types = {"key": "*bf16", "value": "*bf16", "slots": "*i64"} | dict.fromkeys(strides, "i32")
    constants = {"KV_HEADS": 8, "KEY_DIM": 128, "VALUE_DIM": 128, "HEADS_WIDTH": 8, "WIDTH": 128}
    for stored in ("bf16", FP8):
        more = types | dict.fromkeys(("k_pages", "v_pages"), f"*{stored}")
        name = f"store, pages {stored}"
        yield name, layer_kernels.store_kv, more, constants, {"num_warps": 4}

    types = {"gate_up": "*bf16", "out": "*bf16", "size": "i32", "eps": "fp32"} | end
    for activation in (0, 1, 2):
        constants = {"ACTIVATION": activation, "BLOCK": 4096} | behind
        yield f"gate {activation}", layer_kernels.gate, types, constants, {"num_warps": 8}


def adapters() -> Iterator[Kernel]:
    types = {"x": "*bf16", "a": "*bf16", "rows": "*i64", "h": "*fp32", "x_stride": "i32"}
    constants = {"K": 4096, "RANKS": 48, "AT_ONCE": RANKS_AT_ONCE, "BLOCK": INPUTS_AT_ONCE}
    yield "adapters: shrink", low_rank_kernels.shrink, types, constants, {"num_warps": 4}
    types = {"h": "*fp32", "b": "*bf16", "scales": "*fp32", "rows": "*i64", "out": "*bf16"}
    constants = {"N": 6144, "FIRST_END": 4096, "SECOND_END": 5120, "PARTS": 3}
    constants |= {"RANK": 16, "WIDTH": 16, "BLOCK": OUTPUTS_AT_ONCE}
    yield "adapters: expand", low_rank_kernels.expand, types, constants, {"num_warps": 4}


def products() -> Iterator[Kernel]:
    for dtype, rows, inputs, outputs in (
        (torch.bfloat16, 1, 3072, 1024),
        (torch.bfloat16, 2, 1024, 4096),
        (torch.bfloat16, 4, 2048, 6144),
        (torch.bfloat16, 2, 4096, 14336),
        (torch.bfloat16, 4, 8192, 2048),
        (torch.bfloat16, 2, 8192, 8192),
        (torch.float32, 4, 1024, 6144),
    ):
        pointer = f"*{NAMES[dtype]}"
        types = dict.fromkeys(("x", "weight", "bias", "out"), pointer)
        types |= {"rows": "i32", "eps": "fp32", "gain": "fp32", "scale": "fp32"}
        name = f"{NAMES[dtype]} {rows} x {inputs} x {outputs}"
        flags = {"INPUTS": inputs, "OUTPUTS": outputs, "NORM": True, "BIAS": True}
        for matrices in (1, 2):
            _, how = _programs(rows, outputs, inputs, dtype, matrices)
            options = {"num_warps": how.pop("num_warps")}
            constants = flags | how
            if matrices == 2:
                more = constants | {"ACTIVATION": 0}
                yield f"gated product {name}", row_kernels.gated_product, types, more, options
                continue
            for add in (True, False):
                more = constants | {"ADD": add, "NORM": not add}
                kind = "added product" if add else "product"
                yield f"{kind} {name}", row_kernels.product, types, more, options


def mma_products() -> Iterator[Kernel]:
    """Those of the 0.6B shape."""
    types = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16")
    types |= {"rows": "i32", "eps": "fp32", "gain": "fp32", "scale": "fp32"}
    for rows in (8, 16):
        for role, inputs, outputs in (
            ("product", 1024, 4096),
            ("gated product", 1024, 3072),
            ("added product", 3072, 1024),
        ):
            added = role == "added product"
            flags = {"INPUTS": inputs, "OUTPUTS": outputs, "NORM": not added, "BIAS": True}
            flags |= {"ACTIVATION": 0, "ADD": added, "GATED": role == "gated product"}
            constants = flags | mma_sizes(rows, inputs)
            name = f"{role} by mma {rows} x {inputs} x {outputs}"
            yield name, mma_product, types, constants, {"num_warps": MMA_WARPS}


def coded(shared: int) -> Iterator[Kernel]:
    types = {"arrived": "*i32", "words": "*i32", "table": "*fp32", "sums": "*fp32"}
    types |= {"zeros": "*fp32", "rows": "i32", "factor": "fp32"}
    for dtype, rows, outputs, bits, kind, group, form in (
        ("bf16", 8, 28672, 4, quantized.INTEGER, 128, quantized.HALF),
        ("bf16", 8, 28672, 8, quantized.E4M3, 128, quantized.WIDE),
        ("bf16", 1, 4096, 4, quantized.INTEGER, 128, quantized.HALF),
        ("bf16", 1, 28672, 4, quantized.INTEGER, 128, quantized.HALF),
        ("fp16", 1, 4096, 4, quantized.INTEGER, 128, quantized.HALF),
        ("fp16", 17, 4096, 4, quantized.INTEGER, 32, quantized.HALF),
        ("bf16", 64, 28672, 4, quantized.INTEGER, 128, quantized.HALF),
        ("bf16", 65, 28672, 4, quantized.INTEGER, 128, quantized.HALF),
        ("bf16", 64, 4096, 4, quantized.TABLE, 64, quantized.WIDE),
        ("bf16", 1, 4096, 4, quantized.E2M1, 32, quantized.EXPONENT),
        ("fp16", 64, 28672, 4, quantized.E2M1, 32, quantized.EXPONENT),
        ("bf16", 65, 28672, 4, quantized.E2M1, 32, quantized.EXPONENT),
        ("bf16", 64, 28672, 4, quantized.INTEGER, 32, quantized.HALF),
        ("bf16", 1, 4096, 4, quantized.E2M1, 16, quantized.WIDE),
        ("bf16", 64, 28672, 4, quantized.E2M1, 16, quantized.WIDE),
        ("bf16", 65, 28672, 8, quantized.INTEGER, 32, quantized.HALF),
        ("bf16", 64, 28672, 8, quantized.INTEGER, 32, quantized.HALF),
        ("bf16", 1, 4096, 8, quantized.E4M3, 128, quantized.WIDE),
        ("bf16", 64, 28672, 8, quantized.E4M3, 128, quantized.WIDE),
        ("fp16", 65, 4096, 8, quantized.E4M3, 128, quantized.WIDE),
        ("bf16", 1, 4096, 8, quantized.INTEGER, 4096, quantized.BRAIN),
        ("bf16", 1, 4096, 8, quantized.INTEGER, 16, quantized.HALF),
        ("fp32", 1, 4096, 4, quantized.INTEGER, 128, quantized.HALF),
    ):
        torchs = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
        halved = group % (quantized.DEPTH * bits // 16) != 0
        depth = quantized.SHALLOW if halved else quantized.DEPTH
        part = depth * bits // 16
        parted = kind != quantized.TABLE and dtype != "fp32" and group % part == 0
        depth = depth if parted else quantized.DEPTH
        nothing = torch.empty(outputs, 0)
        weight = quantized.CodedWeight(
            *(nothing, nothing, nothing, 4096, group, bits, kind, form), parted=parted, depth=depth
        )
        shape = quantized.shape_for(rows, weight, torchs, shared)
        shape = quantized.EIGHT if rows == 8 else shape
        more = types | dict.fromkeys(("x", "bias", "out"), f"*{dtype}")
        groups = "*u8" if form == quantized.EXPONENT else "*i32" if form else "*fp32"
        more |= {"groups": groups, "codes": "*i16" if parted else "*i32"}
        whole = {
            **{"INPUTS": 4096, "OUTPUTS": outputs, "ROW_CODES": 4096 * bits // 16},
            **{"GROUP": group, "GROUP_STRIDE": outputs, "KIND": kind},
            **{"BITS": bits, "FORM": form, "MIDDLE": quantized.MIDDLES[bits], "ZEROS": False},
        }
        constants = whole | {
            **{"DEPTH": depth, "SPANS": max(depth // group, 1), "GROUPS": 4096 // group},
            **{"BIAS": True, "ADD": True, "SPLIT": 6, "PAIRS": True, "STAGES": shape.stages},
            **{"ROWS": shape.rows, "COLUMNS": shape.columns, "ROW_WORDS": 4096 * bits // 32},
        }
        kernel = quant_kernels.coded_columns if parted else quant_kernels.coded_product
        options = {"num_warps": shape.warps} | ({} if parted else {"num_stages": shape.stages})
        of = f"{dtype} {rows} x {outputs}, {bits} bits, kind {kind}, groups of {group}"
        yield f"coded product {of}", kernel, more, used(kernel, constants), options
        more = whole | {"PART": part if parted else 1, "ROWS": 4, "COUNT": 256}
        types_whole = types | {"groups": groups, "out": f"*{dtype}"}
        types_whole["codes"] = "*i16" if parted else "*i32"
        kernel = quant_kernels.widen_codes
        yield f"widen {of}", kernel, types_whole, used(kernel, more), {"num_warps": 4}


def rounds() -> Iterator[Kernel]:
    types = {"x": "*bf16", "out": f"*{FP8}", "scales": "*fp32", "rows": "i32", "padded_rows": "i32"}
    for inputs, by_block in ((4096, True), (14336, True), (14336, False)):
        blocks = inputs // scaled.DEPTH
        width = triton.next_power_of_2(blocks)
        constants = {"INPUTS": inputs, "BLOCKS": blocks, "WIDTH": width, "DEPTH": scaled.DEPTH}
        name = f"round {inputs}, {'a block' if by_block else 'a row'}"
        options = {"num_warps": scaled.warps_for(width)}
        yield name, quant_kernels.round_rows, types, constants | {"BY_BLOCK": by_block}, options


def used(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Those constants that the kernel has."""
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def experts() -> Iterator[Kernel]:
    types = {"chosen": "*i64", "slots": "*i64", "order": "*i32", "tiles": "*i32"}
    masked = {"CHOICES": 8, "MASKED": True}
    types |= {"counts": "*i32", "assignments": "i32", "max_tiles": "i32"}
    for count in (8, 128, 256):
        for counted in (False, True):
            constants = masked | MAP_SIZES.constants(count, counted=counted)
            kernel, options = expert_kernels.count_assignments, {"num_warps": 4}
            if counted:
                yield f"count {count} experts", kernel, dict(types), constants, options
            constants = {**constants, "COUNTED": counted, "ROWS": 16, "BLOCK": MAP_SIZES.block}
            constants |= {"SORTED": MAP_SIZES.sorted, "AT_ONCE": MAP_SIZES.at_once}
            name = f"map {count} experts{', counted' * counted}"
            yield name, expert_kernels.map_tiles, dict(types), constants, options
    yield from routers()
    sizes = {"HIDDEN": 2048, "INTERMEDIATE": 768, "BIAS": False}
    types = dict.fromkeys(("order", "tiles"), "*i32")
    for dtype, shape in (("bf16", FEW), ("bf16", MANY), ("fp32", FEW), ("fp32", MANY)):
        names = ("x", "weight", "bias", "inner", "parts", "shares")
        types = types | dict.fromkeys(names, f"*{dtype}")  # each kernel has its own
        how = {"ROWS": shape.rows, "COLUMNS": shape.columns, "DEPTH": shape.depth}
        options = {"num_warps": shape.warps, "num_stages": shape.stages}
        name, constants = f"{dtype} {shape.rows}", {**sizes, **how}
        gates = {"CHOICES": 8, "ACTIVATION": 0, "SLOPE": 1.0, "LIMIT": 0.0}
        gates |= weight_constants(torch.empty(128, 2, 768, 2048, device="meta"))
        yield f"gate up {name}", expert_kernels.gate_up_tiles, types, constants | gates, options
        strides = weight_constants(torch.empty(128, 2048, 768, device="meta"))
        yield f"down {name}", expert_kernels.down_tiles, types, constants | strides, options
    yield from coded_experts()
    types = {"parts": "*bf16", "chosen": "*i64", "slots": "*i64", "out": "*bf16"}
    constants = {**masked, "EXPERTS": 128, "HIDDEN": 2048, "BLOCK": 1024}
    yield "add choices", expert_kernels.add_choices, types, constants, {"num_warps": 4}


def routers() -> Iterator[Kernel]:
    """Those of Qwen3-30B-A3B and DeepSeek V3."""
    deepseek = Routing(8, sigmoid=True, normed=True, scale=2.5, groups=8, kept=4, pairs=True)
    for name, dtype, count, routing in (
        ("softmax", "bf16", 128, Routing(8, normed=True)),
        ("groups", "fp32", 256, deepseek),
    ):
        types = {"logits": f"*{dtype}", "correction": "*fp32", "chosen": "*i64"}
        types |= {"shares": f"*{dtype}", "scale": "fp32"}
        constants = {"CORRECTED": routing.sigmoid, **routing_constants(routing, count)}
        options = {"num_warps": 1}
        yield f"router {name}", router_kernels.choose_experts, types, constants, options


def coded_experts() -> Iterator[Kernel]:
    """Experts of Qwen3-30B-A3B in FP8 and 4 bits, and of gpt-oss."""
    types = {"codes": "*i16", "zeros": "*fp32", "order": "*i32", "tiles": "*i32"}
    forms = {quantized.WIDE: "*fp32", quantized.HALF: "*i32", quantized.EXPONENT: "*u8"}
    integer, e4m3, e2m1 = quantized.INTEGER, quantized.E4M3, quantized.E2M1
    for dtype, bits, kind, form, group, hidden, inner in (
        ("bf16", 8, e4m3, quantized.WIDE, 128, 2048, 768),
        ("bf16", 4, integer, quantized.HALF, 128, 2048, 768),
        ("fp16", 4, integer, quantized.HALF, 32, 2048, 768),
        ("bf16", 4, e2m1, quantized.EXPONENT, 32, 2880, 2880),
        ("fp16", 4, e2m1, quantized.EXPONENT, 32, 2880, 2880),
        ("bf16", 4, e2m1, quantized.WIDE, 16, 2048, 768),
        ("bf16", 8, integer, quantized.HALF, 32, 2048, 768),
    ):
        deep = group % (quantized.DEPTH * bits // 16) == 0
        depth = quantized.DEPTH if deep else quantized.SHALLOW
        types |= dict.fromkeys(("x", "bias", "inner", "parts", "shares"), f"*{dtype}")
        types |= {"groups": forms[form]}
        clamped = ClampedSwish(1.702, 7.0) if kind == e2m1 else "silu"
        first, last = (
            weight_constants(
                quantized.CodedWeight(
                    torch.empty(outputs, -(-inputs // 128) * bits * 4, device="meta"),
                    torch.empty(-(-inputs // group), outputs, device="meta"),
                    *(torch.empty(0), inputs, group, bits, kind, form),
                    parted=True,
                    depth=depth,
                )
            )
            for outputs, inputs in ((128 * 2 * inner, hidden), (128 * hidden, inner))
        )
        gates = gate_constants(Experts(torch.empty(0), torch.empty(0), clamped))
        for shape in (CODED_FEW, CODED_MANY):
            how: dict[str, Any] = {"ROWS": shape.rows, "COLUMNS": shape.columns, "PAIRS": True}
            how |= {"STAGES": shape.stages, "BIAS": kind == e2m1}
            options = {"num_warps": shape.warps}
            of = f"{dtype} {shape.rows}, {bits} bits, kind {kind}, groups of {group}"
            more = how | gates | first | {"CHOICES": 8, "INTERMEDIATE": inner}
            kernel = expert_kernels.coded_gate_up_tiles
            yield f"coded gate up {of}", kernel, dict(types), more, options
            more = how | last | {"HIDDEN": hidden}
            yield f"coded down {of}", expert_kernels.coded_down_tiles, dict(types), more, options


def sampling() -> Iterator[Kernel]:
    types = dict.fromkeys(("temperatures", "top_ps", "min_ps"), "*fp32")
    types |= dict.fromkeys(("top_ks", "seeds", "positions", "tokens"), "*i64")
    types |= {"logits": "*bf16", "stride": "i32", "vocabulary": "i32"}
    types |= {"blocks": "i32", "highest": "*fp32", "likeliest": "*i32", "left_out": "*fp32"}
    types |= dict.fromkeys(("weights", "keys"), "*i64")
    for kernel, constants, warps in (
        (sample_kernels.find_highest, {"BLOCK": 4096}, 8),
        (sample_kernels.find_top, {"TOP": 32, "GROUP": 8, "BLOCK": 4096}, 8),
        (sample_kernels.weigh_blocks, {"BLOCK": 4096, "BLOCKS": 64}, 8),
        (sample_kernels.draw_rows, {"TOP": 32, "BLOCK": 4096, "BLOCKS": 64}, 16),
    ):
        for logits in ("bf16", "fp32"):  # with token rules they are fp32
            of = f"sample: {kernel.__name__}, logits {logits}"
            yield of, kernel, types | {"logits": f"*{logits}"}, constants, {"num_warps": warps}

    types = {"logits": "*bf16", "out": "*fp32", "positions": "*i64", "banned_until": "*i64"}
    types |= dict.fromkeys(("first", "length", "restricted", "counted", "remaining"), "*i32")
    types |= dict.fromkeys(("tokens", "counts", "kinds"), "*i32") | {"sampled": "*i64"}
    types |= dict.fromkeys(("repetition", "presence", "frequency", "biases"), "*fp32")
    types |= {"stride": "i32", "vocabulary": "i32"}
    for kernel, block, warps in (
        (adjust_kernels.copy_rows, 4096, 8),
        (adjust_kernels.adjust_rows, 1024, 4),
        (adjust_kernels.count_rows, 1024, 1),
    ):
        yield kernel.__name__, kernel, types, {"BLOCK": block}, {"num_warps": warps}

    types = {"logits": "*bf16", "tokens": "*i64", "num_logprobs": "*i32", "keys": "*i64"}
    types |= dict.fromkeys(("highest", "total", "values"), "*fp32")
    types |= dict.fromkeys(("above", "numbers"), "*i32")
    types |= dict.fromkeys(("stride", "vocabulary", "blocks"), "i32")
    for kernel, constants in (
        (logprob_kernels.summarise_blocks, {"MAX_TOP": 32, "BLOCK": 4096}),
        (logprob_kernels.merge_blocks, {"MAX_TOP": 32, "BLOCKS": 64, "CANDIDATES": 2048}),
    ):
        yield kernel.__name__, kernel, types, constants, {"num_warps": 8}


def decoding() -> Iterator[Kernel]:
    types = dict.fromkeys(("positions", "slots", "drawn_positions"), "*i64")
    types |= {"remaining": "*i32", "tables": "*i32", "table_stride": "i32"}
    yield "prepare", decode_kernels.prepare_rows, types, {"PAGE_SIZE": 16}, {}
    types = dict.fromkeys(("new_rows", "last_tokens", "slot_integers"), "*i64")
    types |= dict.fromkeys(("tokens", "positions", "integers"), "*i64")
    types |= dict.fromkeys(("slot_tables", "remaining", "tables"), "*i32")
    types |= dict.fromkeys(("slot_numbers", "numbers"), "*fp32")
    types |= dict.fromkeys(("rows", "slot_count", "slot_stride", "table_stride", "widest"), "i32")
    yield "enter", decode_kernels.enter_rows, types, {"BLOCK": 128}, {}
    types = dict.fromkeys(("entered", "last_tokens", "tokens", "positions", "slots"), "*i64")
    yield "enter tokens", decode_kernels.enter_tokens, types | {"count": "i32"}, {"BLOCK": 256}, {}
    types = {"items": "*i32", "positions": "*i64"}
    yield "place", decode_kernels.place_items, types, {}, {}
    types = {"new_rows": "*i64", "items": "*i32", "rows": "i32"}
    constants = {"ROWS": 512, "PROGRAMS": 33, "KEY_BLOCK": 32, "MIN_PART": 128, "WINDOW": 0}
    yield "map", decode_kernels.map_rows, types, constants, {}
    types = dict.fromkeys(("sampled", "slots", "tokens", "positions", "last_tokens"), "*i64")
    types |= {"remaining": "*i32"}
    yield "finish", decode_kernels.finish_rows, types, {}, {}


def registers_of(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of a thread: NVIDIA's own section of the ELF file.

    Spilled registers are on the stack.
    """
    table, count, names = (
        struct.unpack_from(kind, cubin, at)[0]
        for kind, at in (("<Q", 0x28), ("<H", 0x3C), ("<H", 0x3E))
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    facts = {}
    for name, _, _, _, offset, size in sections:
        start = sections[names][4] + name
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        end = offset + size
        while offset < end:
            form, attribute, length = struct.unpack_from("<BBH", cubin, offset)
            if form == 4 and attribute in (REGISTERS, STACK):
                key = "registers" if attribute == REGISTERS else "stack"
                facts[key] = struct.unpack_from("<II", cubin, offset + 4)[1]
            offset += 4 + (length if form == 4 else 0)
    return facts


def loads_of(ttgir: str) -> dict[str, list[int]]:
    """Asynchronous loads that each loop leaves in flight when it waits for the oldest ones.

    A loop that reads nothing ahead is not listed.
    """
    waits = map(int, re.findall(r"ttg.async_wait .*num = (\d+)", ttgir))
    return {"in_flight": [number for number in waits if number]}


def sass_loops(cubin: bytes) -> list[dict[str, int]]:
    """Machine instructions of each loop by their names, which ``total`` counts.

    NVIDIA's disassembler comes with Triton.
    """
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [program, "-c", file.name], capture_output=True, text=True, check=True
        )
    names: list[str] = []
    places: dict[str, int] = {}
    loops = []
    for line in done.stdout.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            places[label[1]] = len(names)
        elif each := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ +)?([A-Z]\S*)(.*?);", line):
            names.append(each[1])
            target = re.search(r"\.L_x_\d+", each[2])
            if each[1].startswith("BRA") and target and target[0] in places:
                body = names[places[target[0]] :]
                loops.append({"total": len(body), **Counter(body)})
    return loops


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--only", help="kernels with this in their name")
    parser.add_argument("--pdl", action="store_true", help="kernels that start early, with PTX")
    parser.add_argument("--sass", action="store_true", help="with the instructions of loops")
    parser.add_argument("--dump", action="store_true", help="print PTX")
    args = parser.parse_args()
    for name, function, types, constants, options in [
        *attention(),
        *layers(),
        *adapters(),
        *products(),
        *mma_products(),
        *coded(SHARED_BYTES[args.arch]),
        *(rounds() if args.arch >= 89 else ()),
        *experts(),
        *sampling(),
        *decoding(),
    ]:
        if args.only and args.only not in name:
            continue
        if "PDL" in function.arg_names:
            constants = {"PDL": args.pdl, **constants}
            options = {**options, "launch_pdl": args.pdl}
        elif args.pdl:
            continue
        signature = {
            arg: "constexpr" if arg in constants else types[arg] for arg in function.arg_names
        }
        for param in function.params:
            varies = signature[param.name][0] in "iu" and param.name not in OF_THE_MODEL
            assert not varies or param.do_not_specialize, f"{name}: {param.name} is specialised"
        aligned = [["tt.divisibility", 16]]  # as torch's tensors are
        attributes = {
            (index,): aligned for index, kind in enumerate(signature.values()) if kind[0] == "*"
        }
        source = ASTSource(function, signature, constants, attributes)
        target = GPUTarget("cuda", args.arch, 32)
        compiled = triton.compile(source, target=target, options=options)
        facts = {"shared": compiled.metadata.shared} | registers_of(compiled.asm["cubin"])
        facts |= loads_of(compiled.asm["ttgir"])
        if args.sass:
            facts["loops"] = sass_loops(compiled.asm["cubin"])
        if args.pdl:
            passed = [arg for arg, kind in signature.items() if kind != "constexpr"]
            pointers = [arg if signature[arg][0] == "*" else None for arg in passed]
            facts |= {"pointers": pointers, "ptx": compiled.asm["ptx"]}
        print(json.dumps({"name": name} | facts), flush=True)
        if args.dump:
            print(compiled.asm["ptx"])


if __name__ == "__main__":
    main()
