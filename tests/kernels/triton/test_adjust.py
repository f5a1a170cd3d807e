"""Rules on logits from lists on the device, against the reference: row by row, step by step."""

import random
from typing import Any

import pytest
import torch

from rayfin.kernels import reference
from rayfin.kernels.shapes import ALLOWED, BANNED, BANNED_EARLY, USED, RuleTensors

pytest.importorskip("triton")
from rayfin.kernels.triton import adjust as module

V = 300
ROOM = 8


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 128)
    monkeypatch.setattr(module, "ENTRIES_AT_ONCE", 16)


class Row:
    """Settings of one row, drawn at random, and the tokens that it has used."""

    def __init__(self, numbers: random.Random) -> None:
        def some(most: int) -> list[int]:
            return numbers.sample(range(V), numbers.randrange(most))

        self.penalises = numbers.random() < 0.7
        self.prompt = some(40) if self.penalises else []
        self.output = some(20) * 2 if self.penalises else []
        self.penalties: dict[str, Any] = {
            "repetition": numbers.choice([1.0, 1.3, 0.8]),
            "presence": numbers.choice([0.0, 0.5, -0.5]),
            "frequency": numbers.choice([0.0, 0.7]),
        }
        self.allowed = some(60) if numbers.random() < 0.3 else None
        self.banned, self.early = some(5), some(5)
        self.banned_until = 12
        self.bias = {token: numbers.uniform(-3, 3) for token in some(10)}

    def entries(self) -> dict[int, tuple[int, int, float]]:
        """token -> (count, kind, bias)."""
        kinds: dict[int, int] = {}
        used = [*self.prompt, *self.output]
        for kind, tokens in (
            (USED, used),
            (ALLOWED, self.allowed or []),
            (BANNED, self.banned),
            (BANNED_EARLY, self.early),
            (0, list(self.bias)),
        ):
            for token in tokens:
                kinds[token] = kinds.get(token, 0) | kind
        return {
            token: (self.output.count(token), kind, self.bias.get(token, 0.0))
            for token, kind in kinds.items()
        }

    def expected(self, logits: torch.Tensor, position: int) -> torch.Tensor:
        early = self.early if position < self.banned_until else []
        out = reference.adjusted(
            logits, allowed=self.allowed, banned=[*self.banned, *early], bias=self.bias
        )
        if not self.penalises:
            return out
        return reference.penalised(out, self.prompt, self.output, **self.penalties)


def lay_out(rows: list[Row], device: torch.device) -> RuleTensors:
    entries: list[tuple[int, int, int, float]] = []
    first, length = [], []
    for row in rows:
        first.append(len(entries))
        own = [(token, *rest) for token, rest in row.entries().items()]
        length.append(len(own))
        entries += [*own, *[(-7, 5, 5, 5.0)] * ROOM]
    token, count, kind, bias = zip(*entries, strict=True)

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    def floats(values: Any) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=device)

    return RuleTensors(
        first=ints(first),
        length=ints(length),
        restricted=ints(int(row.allowed is not None) for row in rows),
        counted=ints(int(row.penalises) for row in rows),
        banned_until=torch.tensor([row.banned_until for row in rows], device=device),
        **{
            name: floats(row.penalties[name] for row in rows)
            for name in ("repetition", "presence", "frequency")
        },
        token=ints(token),
        count=ints(count),
        kind=ints(kind),
        bias=floats(bias),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_against_the_reference(device: torch.device, seed: int, dtype: torch.dtype) -> None:
    """Tokens are counted as they come, new ones too; a row whose steps are over stays."""
    numbers = random.Random(seed)
    rows = [Row(numbers) for _ in range(3)]
    rules = lay_out(rows, device)
    generator = torch.Generator().manual_seed(seed)
    remaining = torch.tensor([9, 9, 1], dtype=torch.int32, device=device)
    for step in range(3):
        logits = (3 * torch.randn(3, V, generator=generator)).to(dtype)
        positions = [10 + step, 30, 11 + step]
        out = module.adjust(logits.to(device), rules, torch.tensor(positions, device=device)).cpu()
        for row, own, x, position in zip(rows, out, logits, positions, strict=True):
            torch.testing.assert_close(own, row.expected(x, position), rtol=1e-6, atol=1e-6)
        known = [row.output[0] if row.output else 3 for row in rows]
        sampled = [known[0], numbers.randrange(V), known[2]]
        tokens = torch.tensor(sampled if step else [-1, 7, 200], device=device)
        module.count_sampled(tokens, rules, remaining)
        for row, token, left in zip(rows, tokens.tolist(), remaining.tolist(), strict=True):
            if row.penalises and token >= 0 and left > 0:
                row.output.append(token)
        remaining -= 1


def test_what_is_not_finite_stays(device: torch.device) -> None:
    """The sampler must see it, whatever is banned; the raw logits are not written."""
    rows = [Row(random.Random(seed)) for seed in range(2)]
    rows[0].allowed, rows[0].banned = [3], [5]
    rules = lay_out(rows, device)
    logits = torch.zeros(2, V, device=device)
    logits[0, [5, 9]], logits[0, 299] = float("nan"), float("inf")
    before = logits.clone()
    out = module.adjust(logits, rules.rows(2), torch.tensor([50, 50], device=device))
    assert out[0, [5, 9]].isnan().all() and out[0, 299] == float("inf")
    torch.testing.assert_close(logits, before, equal_nan=True)
