"""A slow and obvious fp32 version of every kernel, the oracle of the tests.

No fast kernel uses this code. `rayfin.kernels.reference_pages` has the page-level kernels of the
first design (V0, V1), which this module exports as well.
"""

import math
from collections.abc import Callable, Collection, Sequence

import torch

from rayfin.kernels.grouped import Grouped
from rayfin.kernels.reference_pages import (
    combine_partials,
    last_token_index,
    page_level_decode_attention,
    page_level_prefill_attention,
    page_level_prefill_inputs,
    partial_attention,
    split_and_write_kv,
)
from rayfin.kernels.shapes import PagedBatch, Routing, SamplingRows, TokenBits

__all__ = [
    "adjusted",
    "allowed_only",
    "clamped_swish_mul",
    "combine_partials",
    "delta_rule",
    "e4m3",
    "experts",
    "gelu_mul",
    "int8_rows",
    "last_token_index",
    "logprobs",
    "low_rank",
    "matmul_grouped",
    "matmul_rounded",
    "min_p_filter",
    "page_level_decode_attention",
    "page_level_prefill_attention",
    "page_level_prefill_inputs",
    "paged_attention",
    "partial_attention",
    "penalised",
    "rms_norm",
    "round_int4",
    "round_int8",
    "round_levels",
    "rotary",
    "route",
    "sample",
    "short_conv",
    "silu_mul",
    "split_and_write_kv",
    "ssd",
    "top_k_filter",
    "top_p_filter",
    "uniform",
    "write_kv",
]

NEVER = float("-inf")
BITS_64 = (1 << 64) - 1


# --- attention ------------------------------------------------------------------------------------


def paged_attention(
    query: torch.Tensor,  # [T, H, Dk]
    k_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dk]
    v_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dv]
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`PagedAttention`, one query token and one head at a time."""
    heads, kv_heads = query.shape[1], k_pages.shape[2]
    out = query.new_zeros(*query.shape[:2], v_pages.shape[3])
    for row in range(batch.rows):
        start, end = int(batch.query_start[row]), int(batch.query_start[row + 1])
        kv_len = int(batch.kv_len[row])
        for token in range(start, end):
            position = kv_len - (end - token)
            first = 0 if window is None else max(0, position - window + 1)
            last = position if batch.sees_to is None else int(batch.sees_to[token])
            keys, values = [], []
            for p in range(first, last + 1):
                page = int(batch.page_tables[row, p // batch.page_size])
                keys.append(k_pages[page, p % batch.page_size])
                values.append(v_pages[page, p % batch.page_size])
            k, v = torch.stack(keys).float(), torch.stack(values).float()  # [n, Hkv, D]
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                scores = k[:, kv_head] @ query[token, head].float() * scale  # [n]
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].float().view(1)])
                weights = torch.softmax(scores, dim=0)[: len(keys)]
                out[token, head] = (weights @ v[:, kv_head]).to(out.dtype)
    return out


def write_kv(
    key: torch.Tensor,  # [T, Hkv, Dk]
    value: torch.Tensor,  # [T, Hkv, Dv]
    k_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dk]
    v_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dv]
    slots: torch.Tensor,  # [T] int64
) -> None:
    """Writes each token's key and value to its slot, one token at a time."""
    page_size = k_pages.shape[1]
    if k_pages.dtype == torch.float8_e4m3fn:
        key, value = e4m3(key), e4m3(value)
    for token, slot in enumerate(slots.tolist()):
        k_pages[slot // page_size, slot % page_size] = key[token]
        v_pages[slot // page_size, slot % page_size] = value[token]


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """Rounds to 8 bits (4 of exponent, 3 of mantissa): [...] -> [...] fp32.

    Ties go to the even mantissa; values over 448, the largest number, become 448 (Micikevicius et
    al., 2022, "FP8 formats for deep learning").
    """
    out = []
    for value in x.flatten().tolist():
        size = min(abs(value), 448.0)
        exponent = max(math.frexp(size)[1] - 1, -6)  # below 2**-6 the spacing is constant
        step = 2.0 ** (exponent - 3)
        out.append(value if math.isnan(value) else math.copysign(round(size / step) * step, value))
    return torch.tensor(out).view(x.shape)


# --- the parts of a layer -------------------------------------------------------------------------


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    [..., D], [D] -> [..., D] in x's dtype.
    """
    x32 = x.float()
    mean_square = (x32 * x32).mean(dim=-1, keepdim=True)
    return (x32 / torch.sqrt(mean_square + eps) * weight.float()).to(x.dtype)


def rotary(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary position embedding (Su et al., 2021), in the half-split layout of Llama.

    Pair i of a head is (x[i], x[i + D/2]), rotated by positions * theta ** (-2i / D) radians.
    [T, H, D], [T] int64 -> [T, H, D] in x's dtype.
    """
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        angle = positions.double() * theta ** (-i / half)
        cos, sin = angle.cos().float().unsqueeze(1), angle.sin().float().unsqueeze(1)  # [T, 1]
        a, b = x[..., i].float(), x[..., i + half].float()  # [T, H]
        out[..., i] = (a * cos - b * sin).to(x.dtype)
        out[..., i + half] = (b * cos + a * sin).to(x.dtype)
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [..., 2F] = [gate | up] -> [..., F] ("SwiGLU", Shazeer, 2020)."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor, *, tanh: bool = True) -> torch.Tensor:
    """gelu(gate) * up: [..., 2F] = [gate | up] -> [..., F]; `tanh` = by the approximation."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if tanh:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        gelu = 0.5 * gate * (1 + torch.tanh(inner))
    else:
        gelu = 0.5 * gate * (1 + torch.erf(gate / math.sqrt(2)))
    return (gelu * up).to(gate_up.dtype)


def clamped_swish_mul(gate_up: torch.Tensor, slope: float, limit: float) -> torch.Tensor:
    """gpt-oss' (1 + up) * gate * sigmoid(slope * gate): [..., 2F] = [gate | up] -> [..., F].

    The gate is at most ``limit``, up is within +-``limit``.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((1 + up) * gate / (1 + torch.exp(-slope * gate))).to(gate_up.dtype)


def experts(
    x: torch.Tensor,  # [T, H]
    gate_up: torch.Tensor,  # [E, 2 F, H]
    down: torch.Tensor,  # [E, H, F]
    chosen: torch.Tensor,  # [T, K] int64
    weights: torch.Tensor,  # [T, K]
    *,
    gated: Callable[[torch.Tensor], torch.Tensor] = silu_mul,
    gate_up_bias: torch.Tensor | None = None,  # [E, 2 F]
    down_bias: torch.Tensor | None = None,  # [E, H]
) -> torch.Tensor:
    """The weighted sum of each row's experts (SwiGLU by default): [T, H].

    Ids of experts that do not exist are ignored.
    """
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            if 0 <= expert < len(down):
                first = gate_up[expert] @ x[row]
                inner = gated(first if gate_up_bias is None else first + gate_up_bias[expert])
                last = down[expert] @ inner
                out[row] += weight * (last if down_bias is None else last + down_bias[expert])
    return out


def route(
    logits: torch.Tensor,  # [T, E]
    correction: torch.Tensor | None,  # [E], added to scores for the choice alone
    routing: Routing,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares [T, K] fp32 of a row's experts and their ids [T, K], highest first."""
    scores = logits.float().sigmoid() if routing.sigmoid else logits.float().softmax(dim=1)
    ranks = scores if correction is None else scores + correction.float()
    groups = ranks.view(len(ranks), routing.groups, ranks.shape[1] // routing.groups)
    best = groups.sort(dim=2, descending=True).values[:, :, : 2 if routing.pairs else 1].sum(dim=2)
    kept = best.sort(dim=1, descending=True, stable=True).indices[:, : routing.kept]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
    ranks = groups.masked_fill(~allowed[:, :, None], NEVER).flatten(1)
    chosen = ranks.sort(dim=1, descending=True, stable=True).indices[:, : routing.choices]
    shares = scores.gather(1, chosen)
    if routing.normed:
        shares = shares / shares.sum(dim=1, keepdim=True)
    return shares * routing.scale, chosen


def low_rank(
    x: torch.Tensor,  # [T, K]
    adapters: Sequence[tuple[torch.Tensor, torch.Tensor, float] | None],  # A, B, scale; or nothing
    of_row: Sequence[int],  # [T] which adapter, or -1
    outputs: int,
) -> torch.Tensor:
    """What adapters (Hu et al., 2021) add to a linear layer: scale * B (A x), [T, outputs]."""
    out = torch.zeros(len(x), outputs)
    for row, number in enumerate(of_row):
        adapter = adapters[number] if number >= 0 else None
        if adapter is not None:
            a, b, scale = adapter
            out[row] = scale * (b.float() @ (a.float() @ x[row]))
    return out


def int8_rows(x: torch.Tensor, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes rows to integers from -127 to 127; a scale is the largest magnitude over 127.

    Each ``part`` inputs have a scale: [M, K] -> [M, K] int8, [M, P] float32.
    """
    values, scales = torch.zeros(x.shape, dtype=torch.int8), []
    for start in range(0, x.shape[1], part):
        numbers = x[:, start : start + part].float()
        largest = numbers.abs().amax(1, keepdim=True)
        # 127 / largest would be 127 * (1 / largest); next to nothing counts as zeros
        factor = torch.where(largest >= 1e-30, torch.tensor(127.0) / largest, 0.0)
        values[:, start : start + part] = torch.round(numbers * factor).to(torch.int8)
        scales.append(torch.where(largest >= 1e-30, largest / 127, 0.0))
    return values, torch.cat(scales, 1)


def matmul_grouped(x: torch.Tensor, weight: Grouped) -> torch.Tensor:
    """x W^T of a weight in groups that share a scale: [M, K], [N, K] -> [M, N] float32."""
    return (x.double() @ weight.dense().double().T).float()


def matmul_rounded(x: torch.Tensor, weight: Grouped, part: int = 32) -> torch.Tensor:
    """x W^T of rows rounded to 8 bits: integer sums of parts of groups, times both scales.

    [M, K], [N, K] -> [M, N] float32.
    """
    x = x if weight.order is None else x[:, weight.order]
    zero = torch.zeros_like(weight.scale) if weight.zero is None else weight.zero
    out = torch.zeros(len(x), len(weight.values))
    for group, scale in enumerate(weight.scale.T):
        start = group * weight.group
        values = weight.values[:, start : start + weight.group].int()
        numbers = values if weight.table is None else weight.table[values].int()
        numbers = numbers - zero[:, group : group + 1].int()
        rows, row_scales = int8_rows(x[:, start : start + weight.group], part)
        split = (torch.split(each, part, 1) for each in (rows.int(), numbers))
        parts = zip(*split, row_scales.T, strict=True)
        for some, factors, row_scale in parts:
            sums = (some @ factors.T).float() * scale
            if weight.least is not None:
                sums += some.sum(1, keepdim=True).float() * weight.least[:, group]
            out += sums * row_scale.unsqueeze(1)
    return out


def round_int4(weight: torch.Tensor, group: int) -> Grouped:
    """Rounds groups of inputs to 4 bits: -8 is the number of largest magnitude, times a factor.

    Of six factors each group has the one of the least squared error.
    """
    outputs, inputs = weight.shape
    codes = torch.zeros(outputs, inputs, dtype=torch.uint8)
    scales = torch.zeros(outputs, -(-inputs // group))
    for output in range(outputs):
        for index in range(scales.shape[1]):
            part = slice(index * group, (index + 1) * group)
            numbers = weight[output, part].float()
            peak = numbers[numbers.abs().argmax()]
            best, least = torch.full_like(numbers, 8.0), math.inf
            for factor in (1.0, 1.0625, 0.9375, 0.875, 0.8125, 0.75) if abs(peak) >= 1e-30 else ():
                scale = peak / -8 * factor
                rounded = torch.round(numbers * (1 / scale)).clamp(-8, 7)
                error = float((numbers - rounded * scale).square().sum())
                if error < least:
                    best, least, scales[output, index] = rounded + 8, error, scale
            codes[output, part] = best.to(torch.uint8)
    zero = torch.full(scales.shape, 8, dtype=torch.int32)
    return Grouped(codes, scales, group, 4, zero)


def round_int8(weight: torch.Tensor, group: int) -> Grouped:
    """Rounds groups of inputs to 8 bits: 127 is the number of largest magnitude."""
    codes, scales = torch.zeros(weight.shape, dtype=torch.int8), []
    for start in range(0, weight.shape[1], group):
        numbers = weight[:, start : start + group].float()
        scale = (numbers.abs().amax(1, keepdim=True) / 127).half().float()
        rounded = torch.round(numbers * torch.where(scale > 0, 1 / scale, 0.0))
        codes[:, start : start + group] = rounded.clamp(-127, 127).to(torch.int8)
        scales.append(scale)
    return Grouped(codes, torch.cat(scales, 1), group, 8)


def round_levels(weight: torch.Tensor, bits: int, group: int) -> Grouped:
    """Rounds groups of inputs to levels from the least to the largest number of each."""
    codes, scales, leasts = torch.zeros(weight.shape, dtype=torch.uint8), [], []
    for start in range(0, weight.shape[1], group):
        numbers = weight[:, start : start + group].float()
        least = numbers.amin(1, keepdim=True)
        scale = (numbers.amax(1, keepdim=True) - least) / (2**bits - 1)
        levels = torch.round((numbers - least) * torch.where(scale > 0, 1 / scale, 0.0))
        codes[:, start : start + group] = levels.to(torch.uint8)
        scales.append(scale)
        leasts.append(least)
    return Grouped(codes, torch.cat(scales, 1), group, bits, least=torch.cat(leasts, 1))


# --- layers that keep a state ---------------------------------------------------------------------


def short_conv(
    x: torch.Tensor,  # [T, C]
    weight: torch.Tensor,  # [K, C]
    bias: torch.Tensor | None,  # [C]
    state: torch.Tensor,  # [C, W], the inputs before x
) -> tuple[torch.Tensor, torch.Tensor]:
    """A depthwise causal convolution: [T, C] and the state behind x."""
    inputs = torch.cat([state.T, x])
    out = torch.zeros_like(x)
    for token in range(len(x)):
        last = token + state.shape[1] + 1
        out[token] = (inputs[last - len(weight) : last] * weight).sum(dim=0)
    return out if bias is None else out + bias, inputs[len(x) :].T


def delta_rule(
    q: torch.Tensor,  # [T, Hk, Dk]
    k: torch.Tensor,  # [T, Hk, Dk]
    v: torch.Tensor,  # [T, Hv, Dv]
    g: torch.Tensor,  # [T, Hv]
    beta: torch.Tensor,  # [T, Hv]
    state: torch.Tensor,  # [Hv, Dk, Dv]
    *,
    normalize: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule (Yang et al., 2024), token by token: [T, Hv, Dv] and the last state."""
    if normalize:
        q, k = (x / torch.sqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6) for x in (q, k))
    out, shared = torch.zeros_like(v), v.shape[1] // k.shape[1]
    for token in range(len(q)):
        query, key = (x[token].repeat_interleave(shared, dim=0) for x in (q, k))
        state = state * g[token].exp()[:, None, None]
        known = torch.einsum("hkv,hk->hv", state, key)
        change = (v[token] - known) * beta[token][:, None]
        state = state + key[:, :, None] * change[:, None, :]
        out[token] = torch.einsum("hkv,hk->hv", state, query) / math.sqrt(q.shape[-1])
    return out, state


def ssd(
    x: torch.Tensor,  # [T, H, P]
    dt: torch.Tensor,  # [T, H]
    a: torch.Tensor,  # [H]
    b: torch.Tensor,  # [T, G, N]
    c: torch.Tensor,  # [T, G, N]
    d: torch.Tensor | None,  # [H]
    state: torch.Tensor,  # [H, P, N]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mamba 2's recurrence (Dao and Gu, 2024), token by token: [T, H, P] and the last state."""
    out, shared = torch.zeros_like(x), x.shape[1] // b.shape[1]
    for token in range(len(x)):
        key, query = (y[token].repeat_interleave(shared, dim=0) for y in (b, c))
        change = torch.einsum("hp,hn->hpn", x[token] * dt[token][:, None], key)
        state = state * (dt[token] * a).exp()[:, None, None] + change
        out[token] = torch.einsum("hpn,hn->hp", state, query)
        if d is not None:
            out[token] += d[:, None] * x[token]
    return out, state


# --- sampling -------------------------------------------------------------------------------------


def top_k_filter(logits: torch.Tensor, k: int) -> torch.Tensor:
    """[V] -> [V]: -inf below the k-th highest logit, 0 = off."""
    if k <= 0 or k >= len(logits):
        return logits
    floor = sorted(logits.tolist(), reverse=True)[k - 1]
    return torch.where(logits < floor, NEVER, logits)


def top_p_filter(logits: torch.Tensor, p: float) -> torch.Tensor:
    """[V] -> [V]: -inf outside the smallest set of likeliest tokens with mass >= p, 1 = off."""
    if p >= 1:
        return logits
    probabilities = torch.softmax(logits.double(), dim=-1).tolist()
    likeliest_first = sorted(range(len(logits)), key=lambda i: (-float(logits[i]), i))
    out = torch.full_like(logits, NEVER)
    mass = 0.0
    for rank, token in enumerate(likeliest_first):
        if rank > 0 and mass >= p:
            break
        out[token] = logits[token]
        mass += probabilities[token]
    return out


def min_p_filter(logits: torch.Tensor, p: float) -> torch.Tensor:
    """[V] -> [V]: -inf where a token is less than p times as likely as the likeliest."""
    probabilities = torch.softmax(logits.double(), dim=-1)
    return torch.where(probabilities < p * probabilities.max(), NEVER, logits)


def penalised(
    logits: torch.Tensor,
    prompt: list[int],
    output: list[int],
    *,
    repetition: float,
    presence: float,
    frequency: float,
) -> torch.Tensor:
    """[V] -> [V]: repetition for all tokens, presence and frequency for those of the output."""
    out = logits.float().clone()
    for token in {*prompt, *output}:
        value, count = float(logits[token]), output.count(token)
        value = value / repetition if value > 0 else value * repetition
        out[token] = value - frequency * count - presence * (count > 0)
    return out


def adjusted(
    logits: torch.Tensor,
    *,
    allowed: Collection[int] | None = None,
    banned: Collection[int] = (),
    bias: dict[int, float] | None = None,
) -> torch.Tensor:
    """[V] -> [V]: the changes before penalties, which are allowed tokens, bans and bias."""
    out = logits.float().clone()
    for token in range(len(out)):
        if token in banned or (allowed is not None and token not in allowed):
            out[token] = NEVER
        out[token] += (bias or {}).get(token, 0.0)
    return out


def allowed_only(logits: torch.Tensor, allowed: TokenBits) -> torch.Tensor:
    """[S, V] -> [S, V]: -inf for the tokens that a row may not sample, one token at a time."""
    out = logits.clone()
    for row, words in zip(allowed.rows.tolist(), allowed.words.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> token % 32 & 1:
                out[row, token] = NEVER
    return out


def logprobs(logits: torch.Tensor, token: int, k: int) -> tuple[float, int, list[int], list[float]]:
    """[V] -> a token's log probability and rank, the k likeliest tokens and theirs, by a sort."""
    values = torch.log_softmax(logits.double(), dim=-1).tolist()
    order = sorted(range(len(values)), key=lambda i: (-float(logits[i]), i))
    rank = 1 + sum(float(x) > float(logits[token]) for x in logits)
    return values[token], rank, order[:k], [values[i] for i in order[:k]]


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) of (seed, position), in Python integers."""

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS_64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    start = mix((seed + golden) & BITS_64)
    return (mix((start + (position + 1) * golden) & BITS_64) >> 11) / 2**53


def sample(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[S, V] -> [S] int64: temperature, min_p, top_k, top_p, inverse CDF in vocabulary order."""
    tokens = []
    for i, raw in enumerate(logits.float()):
        temperature = float(rows.temperature[i])
        if temperature == 0:
            tokens.append(int(raw.argmax()))
            continue
        x = min_p_filter(raw / temperature, float(rows.min_p[i]))
        x = top_k_filter(x, int(rows.top_k[i]))
        x = top_p_filter(x, float(rows.top_p[i]))
        u = uniform(int(rows.seed[i]), int(rows.position[i]))
        mass, chosen = 0.0, -1
        for token, probability in enumerate(torch.softmax(x.double(), dim=-1).tolist()):
            mass += probability
            if probability > 0 and (chosen < 0 or mass - probability <= u):
                chosen = token
        tokens.append(chosen)
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)
