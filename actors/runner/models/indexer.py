"""Sparse attention whose tokens choose their keys by an index (DeepSeek-V3.2, GLM-5).

Such an attention module has a small module, its indexer. That keeps one more key per token, scores
all keys of the request for each query, and gives the positions of the best ones. transformers hands
them to the attention function as ``indices``. Here the indexer's keys lie in pages of their own
layer, so that prefixes, copies and swaps work as for any layer. transformers' own module computes
the scores, with a small object in place of its cache.

Source: DeepSeek-V3.2-Exp (DeepSeek-AI, 2025), "lightning indexer".
"""

import inspect
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from rayfin.actors.runner.batch import StepInputs
from rayfin.cache.kv_tensors import KVLayout
from rayfin.kernels.attention.chosen import read_slots, slots_of
from rayfin.kernels.attention.write_kv import write_kv
from rayfin.kernels.shapes import PagedBatch

ARGUMENTS = {"hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids"}
"""Of an indexer's forward; behind them is the cache, which transformers has renamed in 5.24."""

SCORES_AT_ONCE = 1 << 24
"""Scores that an indexer computes at once, of all its heads."""

Forward = Callable[..., torch.Tensor]


class IndexLayer(Protocol):
    """Chooses keys for the indexer that it is put on."""

    def choose(
        self,
        indexer: Any,
        forward: Forward,
        hidden: torch.Tensor,  # [1, T, H]
        query: torch.Tensor,  # [1, T, Q]
        rotary: tuple[torch.Tensor, torch.Tensor],  # [1, T, D]
    ) -> torch.Tensor:  # [1, T, C] int32
        ...


class Step(Protocol):
    """The step that a model is computing."""

    inputs: StepInputs | None


def redirect_indexers(model: PreTrainedModel, name: str, layer: str) -> None:
    """Makes indexers of ``model`` ask the attribute ``layer`` while their config names ``name``."""
    for module, indexer in _indexers(model):
        if "forward" not in vars(indexer):  # or it is redirected
            _redirect(indexer, model.config, name, layer)
            module.register_forward_pre_hook(_MaskFor(model.config, name), with_kwargs=True)


def inside_indexers(model: nn.Module) -> set[nn.Module]:
    """The modules that choose keys: rounding or adapting them changes what a token sees."""
    return {part for _, indexer in _indexers(model) for part in indexer.modules()}


def _indexers(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Attention modules and their indexers."""
    for module in model.modules():
        indexer = getattr(module, "indexer", None)
        if isinstance(indexer, nn.Module) and _arguments(indexer) >= ARGUMENTS:
            yield module, indexer


def _arguments(indexer: nn.Module) -> set[str]:
    return set(inspect.signature(indexer.forward).parameters)


def _redirect(indexer: Any, config: Any, name: str, layer: str) -> None:
    original = indexer.forward

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> torch.Tensor:
        if config._attn_implementation != name:
            indices: torch.Tensor = original(
                hidden_states,
                q_resid,
                position_embeddings,
                attention_mask,
                position_ids,
                past_key_values if cache is None else cache,
            )
            return indices
        pages: IndexLayer = getattr(self, layer)
        return pages.choose(self, original, hidden_states, q_resid, position_embeddings)

    indexer.forward = MethodType(forward, indexer)


NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
"""What an attention module with an indexer gets in place of a mask, which it does not read."""


class _MaskFor:
    """Gives a module ``NO_MASK`` while its config names paged attention."""

    def __init__(self, config: Any, name: str) -> None:
        self._config, self._name = config, name

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._config._attn_implementation == self._name:
            kwargs["attention_mask"] = NO_MASK
        return args, kwargs


class _KeyTaker:
    """Stands for transformers' cache: takes the keys of an indexer, and lets it score only one."""

    keys: torch.Tensor

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        self.keys = keys
        return keys[:, :1]


class _KeyGiver:
    """Stands for transformers' cache: gives an indexer all keys of its rows."""

    def __init__(self, keys: torch.Tensor) -> None:
        self._keys = keys  # [N, C, D]

    def update_indexer(self, keys: torch.Tensor, layer: int) -> torch.Tensor:
        return self._keys.to(keys.dtype)


def index_keys(
    forward: Forward,
    hidden: torch.Tensor,
    query: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """The keys [T, D] that an indexer makes of the tokens."""
    taker = _KeyTaker()
    forward(hidden, query, rotary, NO_MASK[:, 0].to(hidden.device), None, taker)
    return taker.keys[0]


def index_layout(keys: torch.Tensor) -> KVLayout:
    """How keys [T, D] lie in pages: a half of each among keys, the other among values."""
    return KVLayout(1, keys.shape[-1] // 2, keys.shape[-1] - keys.shape[-1] // 2)


class PagedIndex:
    """The keys of one indexer, in pages."""

    def __init__(self, k_pages: torch.Tensor, v_pages: torch.Tensor, step: Step) -> None:
        self._k_pages, self._v_pages, self._step = k_pages, v_pages, step

    def choose(
        self,
        indexer: Any,
        forward: Forward,
        hidden: torch.Tensor,
        query: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Writes the step's keys, then gives the positions [1, T, C] int32 that each token sees.

        C is 0 if every token of the step sees all of its request, else the most that one sees.
        """
        assert self._step.inputs is not None, "a forward outside of a step"
        batch, limit = self._step.inputs.batch, int(indexer.index_topk)
        keys = index_keys(forward, hidden, query, rotary).unsqueeze(1)  # [T, 1, D]
        half = self._k_pages.shape[-1]
        write_kv(keys[..., :half], keys[..., half:], self._k_pages, self._v_pages, batch.slots)
        count, device = hidden.shape[1], hidden.device
        if max(batch.kv_len_cpu, default=0) <= limit:
            return torch.empty(1, count, 0, dtype=torch.int32, device=device)
        chosen = torch.arange(limit, dtype=torch.int32, device=device).repeat(1, count, 1)
        width = max(int(getattr(indexer, "n_heads", 64)), keys.shape[-1])
        for rows, pieces in _long_rows(batch, limit, width):
            seen = torch.arange(max(context for _, context in pieces), device=device)
            past = self._read(batch, rows, seen)
            for tokens, context in pieces:
                mask = seen[:context] <= batch.positions[tokens].unsqueeze(-1)  # [N, L, C]
                parts = [part[0, tokens] for part in (hidden, query, *rotary)]  # [N, L, ...]
                giver = _KeyGiver(past[:, :context])
                best = forward(*parts[:2], tuple(parts[2:]), mask, None, giver)
                chosen[0, tokens] = best.to(chosen.dtype)
        return chosen

    def _read(self, batch: PagedBatch, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The keys [N, C, D] fp32 of positions [C] in rows [N]; beyond a row's end any numbers."""
        # A table has valid pages behind a row's last one.
        slots = slots_of(batch, rows, positions.expand(len(rows), -1))
        halves = [read_slots(pages, slots)[:, :, 0] for pages in (self._k_pages, self._v_pages)]
        return torch.cat(halves, dim=-1).nan_to_num()


def _long_rows(
    batch: PagedBatch, limit: int, width: int
) -> Iterator[tuple[torch.Tensor, list[tuple[torch.Tensor, int]]]]:
    """(rows [N], their pieces) of rows with more than ``limit`` keys, read at once.

    A piece is (tokens [N, L], keys that the last of them sees), so that scores and keys of `width`
    numbers stay within bounds. Tokens that see at most ``limit`` keys are in none.
    """
    device = batch.positions.device
    starts = np.asarray(batch.query_start_cpu, np.int64)
    ends = np.asarray(batch.kv_len_cpu, np.int64)
    lengths = np.diff(starts)
    long = ends > limit
    # Longest first, so that rows of about the same length come together.
    single = sorted(np.flatnonzero(long & (lengths == 1)).tolist(), key=lambda row: -int(ends[row]))
    while single:
        context = int(ends[single[0]])
        some = single[: max(SCORES_AT_ONCE // (width * context), 1)]
        single = single[len(some) :]
        tokens = torch.from_numpy(starts[some]).to(device).unsqueeze(1)
        yield torch.tensor(some, device=device), [(tokens, context)]
    for row in np.flatnonzero(long & (lengths > 1)).tolist():
        end, before = int(starts[row + 1]), int(ends[row] - lengths[row])
        at = min(int(starts[row]) + max(limit - before, 0), end)  # those ahead of it see all
        count = max(SCORES_AT_ONCE // (width * int(ends[row])), 1)
        pieces = []
        for first in range(at, end, count):
            last = min(first + count, end)
            tokens = torch.arange(first, last, device=device).unsqueeze(0)
            pieces.append((tokens, before + last - int(starts[row])))
        yield torch.tensor([row], device=device), pieces
