"""Products, sampling, and the kernels between them, beside torch's and beside their floors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gpu_attention import tiles
from gpu_bench import Bench, Table

from rayfin.kernels.grouped import Grouped
from rayfin.kernels.shapes import SamplingRows

MATRICES = {  # name -> (outputs, inputs)
    "0.6b gate, up": (6144, 1024),
    "0.6b head": (151936, 1024),
    "8b gate, up": (28672, 4096),
    "8b down": (4096, 14336),
}
FEW = {  # products of few rows: name -> (outputs, inputs)
    "0.6b qkv": (4096, 1024),
    "0.6b o": (1024, 2048),
    "0.6b down": (1024, 3072),
    "8b qkv": (6144, 4096),
    "8b o": (4096, 4096),
    "8b down": (4096, 14336),
}
CODED = {  # products with weights of few bits: name -> (outputs, inputs)
    "8b qkv": (6144, 4096),
    "8b gate, up": (28672, 4096),
    "8b down": (4096, 14336),
}
CODED_ROWS = (1, 16, 64, 128, 256, 2048)
GATED = {"0.6b gate, up": (6144, 1024), "8b gate, up": (28672, 4096)}
ROWS = (1, 2, 4, 8)
TORCHS_ROWS = (16, 64, 128)  # torch's products alone
SETTINGS = {  # name -> temperature, top-k, top-p
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.6, 0, 1.0),
    "temperature, top-k 20, top-p 0.95": (0.6, 20, 0.95),
}


def matmul(bench: Bench) -> None:
    """torch's products against their floor."""
    columns = ("weight", "rows", "us", "TFLOP/s", "share of its floor")
    table = bench.table("matmul", "Matrix products of torch", columns)
    for name, shape in MATRICES.items():
        weight = _weight(shape, bench)
        for rows in (1, 32, 256, 8192):
            if rows > 256 and (bench.toy or "head" in name):
                continue
            x = _random(rows, weight.shape[1], bench)
            took = bench.seconds(lambda x=x, weight=weight: F.linear(x, weight))  # type: ignore[misc]
            rate = 2 * rows * weight.numel() / took / 1e12
            share = f"{_floor(rows, weight, bench) / took:.2f}"
            table.add(name, rows, f"{took * 1e6:.1f}", f"{rate:.1f}", share)


def check_products(bench: Bench) -> None:
    """Compares products of few rows with torch's in float32; raises if they differ."""
    if not bench.on_gpu:
        return
    columns = ("product", "rows", "largest difference, of the largest output")
    table = bench.table("check", "Check: products of few rows against torch's", columns)
    from rayfin.kernels.triton.products import WIDEST_ROW

    for name, shape in FEW.items():
        if shape[1] > WIDEST_ROW:
            continue
        weight = _weight(shape, bench)
        for rows in (1, 2, 4):
            x = _random(rows, shape[1], bench)
            wanted = F.linear(x.float(), weight.float())
            for kernel, run in _products(x, weight).items():
                bench.expect("product", run)
                given = run().float()
                apart = float((given - wanted).abs().max() / wanted.abs().max())
                table.add(f"{name}, {kernel}", rows, f"{apart:.1e}")
                assert apart < 2e-2, f"{kernel} is wrong: nothing below would mean anything"


def check_coded(bench: Bench) -> None:
    """Compares products with codes with those of the same weights made whole, in float32."""
    if not bench.on_gpu:
        return
    columns = ("product", "rows", "largest difference, of the largest output")
    table = bench.table("check", "Check: products with weights of few bits", columns)
    from rayfin.kernels.triton.quantized import add_product, most_rows, pack_weight, product

    for name in CODED:
        for kind, weight in _grouped(CODED[name], bench).items():
            codes = pack_weight(weight, bench.dtype)
            assert codes is not None
            whole = weight.dense().to(bench.dtype).float()
            for rows in (1, 16, 17, 64, 65, 256):
                x = _random(rows, whole.shape[1], bench)
                wanted = F.linear(x.float(), whole)
                kernel = "coded_columns" if rows <= most_rows(codes, x) else "widen_codes"
                bench.expect(kernel, partial(product, x, codes, None))
                hidden = torch.zeros(rows, len(whole), dtype=x.dtype, device=x.device)
                add_product(x, codes, None, hidden)
                for given in (product(x, codes, None), hidden):
                    apart = float((given.float() - wanted).abs().max() / wanted.abs().max())
                    table.add(f"{name}, {kind}", rows, f"{apart:.1e}")
                    assert apart < 2e-2, f"{kind} is wrong: nothing below would mean anything"


def _grouped(shape: tuple[int, int], bench: Bench) -> dict[str, Grouped]:
    """A 4-bit weight with groups of 128 and zero points, and one of e4m3 in blocks of 128."""
    outputs, inputs = shape
    device, groups = bench.device, inputs // 128
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device=device)
    zero = torch.randint(0, 16, (outputs, groups), dtype=torch.int32, device=device)
    scale = (0.01 * (1 + torch.rand(outputs, groups, device=device))).half().float()
    floats = torch.randn(outputs, inputs, device=device).mul_(60).clamp_(-448, 448)
    return {
        "4 bits": Grouped(codes, scale, 128, 4, zero),
        "fp8": Grouped(floats.to(torch.float8_e4m3fn), scale / 60, 128, 8),
    }


def _coded(bench: Bench) -> None:
    """Products with weights of few bits beside torch's with plain ones; targets in gpu.md."""
    from rayfin.kernels.triton.quantized import most_rows, pack_weight, product

    columns = ("product", "rows", "bits", "us", "torch's of 16 bits, us", "share of its floor")
    table = bench.table("kernels", "Products with weights of few bits", columns)
    for name, shape in CODED.items():
        plain = _weight(shape, bench)
        for kind, weight in _grouped(shape, bench).items():
            codes = pack_weight(weight, bench.dtype)
            assert codes is not None
            for rows in CODED_ROWS:
                x = _random(rows, shape[1], bench)
                kernel = "coded_columns" if rows <= most_rows(codes, x) else "widen_codes"
                bench.expect(kernel, partial(product, x, codes, None))
                took = bench.seconds(partial(product, x, codes, None))
                torchs = bench.seconds(partial(F.linear, x, plain))
                operations = 2 * rows * plain.numel() / bench.flops
                share = max(operations, codes.bytes / bench.bandwidth) / took
                shown = (f"{took * 1e6:.1f}", f"{torchs * 1e6:.1f}", f"{share:.2f}")
                table.add(name, rows, kind, *shown)


def _products(x: torch.Tensor, weight: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Kernel -> what it gives for x W^T."""
    from rayfin.kernels.triton.products import add_product, product

    def added() -> torch.Tensor:
        hidden = torch.zeros(len(x), len(weight), dtype=x.dtype, device=x.device)
        add_product(x, weight, None, hidden)
        return hidden

    return {"product": lambda: product(x, weight, None), "product (added)": added}


def kernels(bench: Bench) -> None:
    """Each kernel of a decode step beside torch's; on a GPU only."""
    if not bench.on_gpu:
        print("\n(no kernels without a GPU)")
        return
    table = bench.table("kernels", "A launch that does nothing", ("kernel", "us"))
    one = torch.zeros(1, device=bench.device)
    table.add("zero_ of one number", f"{bench.seconds(one.zero_) * 1e6:.1f}")
    tiles(bench)
    _few_rows(bench)
    _coded(bench)
    _sampling(bench)
    _between(bench)
    _experts(bench)


def _few_rows(bench: Bench) -> None:
    """Products with all that is around them, beside torch's products alone."""
    from rayfin.kernels.triton.products import WIDEST_ROW, add_product, gated_product, product

    columns = ("product", "rows", "us", "torch's product alone, us", "share of its floor")
    table = bench.table("kernels", "Products of few rows (`few_rows` is where torch wins)", columns)
    norm: dict[str, Any] = {"gain": 1.0, "eps": 1e-6}
    for name, shape in (FEW | GATED).items():
        weight, gated = _weight(shape, bench), name in GATED
        for rows in (*ROWS, *TORCHS_ROWS):
            x = _random(rows, shape[1], bench)
            hidden = _random(rows, shape[0], bench)
            if "qkv" in name or gated:
                plain = bench.seconds(partial(F.linear, x, weight))
                ours: Callable[[], object] = partial(product, x, weight, None, **norm)
                if gated:
                    ours = partial(gated_product, x, weight, None, "silu", **norm)
            else:
                plain = bench.seconds(partial(hidden.addmm_, x, weight.T))
                ours = partial(add_product, x, weight, None, hidden)
            took = bench.seconds(ours) if rows in ROWS and shape[1] <= WIDEST_ROW else None
            share = f"{_floor(rows, weight, bench) / (took or plain):.2f}"
            shown = f"{took * 1e6:.1f}" if took else "-"
            table.add(name, rows, shown, f"{plain * 1e6:.1f}", share)


def _sampling(bench: Bench) -> None:
    from rayfin.kernels.triton.sample import sample

    columns = ("settings", "rows", "us")
    table = bench.table("kernels", "Sampling from 151,936 logits", columns)
    for name, (temperature, top_k, top_p) in SETTINGS.items():
        for rows in (1, 64, 256):
            logits = _random(rows, 151936, bench) * 3
            settings = sampling_rows(rows, temperature, top_k, top_p, bench.device)
            took = bench.seconds(lambda x=logits, s=settings: sample(x, s))  # type: ignore[misc]
            table.add(name, rows, f"{took * 1e6:.1f}")


def sampling_rows(
    rows: int, temperature: float, top_k: int, top_p: float, device: torch.device
) -> SamplingRows:
    """The same settings for all rows, flagged as graphs flag them: each row is looked at."""

    def of(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    return SamplingRows(
        temperature=of(temperature, torch.float32),
        top_k=of(top_k, torch.int64),
        top_p=of(top_p, torch.float32),
        min_p=of(0.0, torch.float32),
        seed=torch.arange(rows, device=device),
        position=of(100, torch.int64),
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
    )


def _between(bench: Bench) -> None:
    """The kernels between the products of a layer of the 0.6B shape."""
    from rayfin.kernels.triton.layers import gate, rope_and_write_kv

    device = bench.device
    columns = ("kernel", "tokens", "us", "share of bandwidth")
    table = bench.table("kernels", "Between the products, 0.6B shape", columns)
    angles = torch.randn(4096, 64, device=device)
    tables = (angles.cos(), angles.sin())
    norm = torch.ones(128, device=device)
    pages = torch.zeros(1024, 16, 8, 128, dtype=bench.dtype, device=device)

    def turn(qkv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        sizes = {"heads": 16, "eps": 1e-6}
        return rope_and_write_kv(
            qkv,
            norm,
            norm,
            tables,
            slots,
            slots,
            pages,
            pages,
            **sizes,  # type: ignore[arg-type]
        )

    for tokens in (1, 64, 256, 2048):
        qkv = _random(tokens, 4096, bench)
        slots = torch.arange(tokens, device=device)
        bench.expect("rope_and_write", partial(turn, qkv, slots))
        took = bench.seconds(partial(turn, qkv, slots))
        _add_moved(table, "turn and write", tokens, took, 2 * qkv.nbytes, bench)
        both = _random(tokens, 6144, bench)
        took = bench.seconds(lambda x=both: gate(x, "silu"))  # type: ignore[misc]
        _add_moved(table, "gate", tokens, took, both.nbytes * 3 // 2, bench)


def _add_moved(table: Table, name: str, tokens: int, took: float, moved: int, bench: Bench) -> None:
    table.add(name, tokens, f"{took * 1e6:.1f}", f"{moved / took / bench.bandwidth:.2f}")


def _experts(bench: Bench) -> None:
    from rayfin.kernels.triton.experts import Experts, run_experts

    experts, hidden, inner, choices = 128, 2048, 768, 8
    where = {"dtype": bench.dtype, "device": bench.device}
    gate_up = torch.randn(experts, 2, inner, hidden, **where)  # type: ignore[arg-type]
    down = torch.randn(experts, hidden, inner, **where)  # type: ignore[arg-type]
    mixture = Experts(gate_up, down, "silu")
    columns = ("tokens", "us", "share of bandwidth, of the experts read")
    table = bench.table("kernels", "128 experts of 768, 8 a token", columns)
    for tokens in (1, 16, 64, 256, 2048):
        x = _random(tokens, hidden, bench)
        chosen = torch.rand(tokens, experts, device=bench.device).topk(choices).indices
        weights = torch.full((tokens, choices), 1 / choices, **where)  # type: ignore[arg-type]
        took = bench.seconds(
            lambda x=x, c=chosen, w=weights: run_experts(x, mixture, c, w)  # type: ignore[misc]
        )
        read = int(chosen.unique().numel()) * 3 * inner * hidden * bench.dtype.itemsize
        table.add(tokens, f"{took * 1e6:.1f}", f"{read / took / bench.bandwidth:.2f}")
    _routers(bench, experts, choices)


def _routers(bench: Bench, experts: int, choices: int) -> None:
    from rayfin.kernels.shapes import Routing
    from rayfin.kernels.triton.experts import choose_experts, map_assignments

    def by_torch(logits: torch.Tensor) -> torch.Tensor:
        shares, _ = logits.softmax(dim=1, dtype=torch.float32).topk(choices)
        return (shares / shares.sum(dim=1, keepdim=True)).to(bench.dtype)

    columns = ("tokens", "us of torch", "us of the kernel", "us of the map")
    table = bench.table("kernels", "the choice of 8 of 128 experts by logits, its map", columns)
    routing = Routing(choices, normed=True)
    for tokens in (1, 64, 512, 2048, 16384):
        logits = _random(tokens, experts, bench)
        _, chosen = choose_experts(logits, None, routing, bench.dtype)
        took = (
            bench.seconds(partial(by_torch, logits)),
            bench.seconds(partial(choose_experts, logits, None, routing, bench.dtype)),
            bench.seconds(partial(map_assignments, chosen, None, experts, 16)),
        )
        table.add(tokens, *(f"{each * 1e6:.1f}" for each in took))


def _weight(shape: tuple[int, int], bench: Bench) -> torch.Tensor:
    outputs, inputs = (size // 64 for size in shape) if bench.toy else shape
    return _random(outputs, inputs, bench)


def _random(rows: int, columns: int, bench: Bench) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=bench.dtype, device=bench.device)


def _floor(rows: int, weight: torch.Tensor, bench: Bench) -> float:
    return max(2 * rows * weight.numel() / bench.flops, weight.nbytes / bench.bandwidth)
