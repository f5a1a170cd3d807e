"""Replacing a model or its modules by faster ones: both compute the same probe, and must agree."""

import numpy as np
import torch

from rayfin.actors.runner.models.paged_model import PagedModel, StepModel
from rayfin.cache.kv_tensors import KVTensors
from rayfin.kernels.shapes import PagedBatch

CHECKED_TOKENS = 24


def probe_logits(model: StepModel, paged: PagedModel) -> torch.Tensor:
    """The logits of all tokens of a chunk after half a prompt, on pages of its own."""
    page_size, half = 8, CHECKED_TOKENS // 2
    pages = CHECKED_TOKENS // page_size
    cache = KVTensors(paged.layouts, pages, page_size, paged.dtype, paged.device)
    model.bind(cache)
    vocabulary = paged.transformer.config.get_text_config(decoder=True).vocab_size
    device = paged.device
    tokens = (torch.arange(CHECKED_TOKENS, device=device) * 7919 + 11) % vocabulary
    logits = []
    for start in (0, half):
        positions = torch.arange(start, start + half, device=device)
        starts, lengths = np.array([0, half], np.int32), np.array([start + half], np.int32)
        batch = PagedBatch(
            query_start=torch.from_numpy(starts).to(device),
            kv_len=torch.from_numpy(lengths).to(device),
            page_tables=torch.arange(pages, dtype=torch.int32, device=device).unsqueeze(0),
            slots=positions,
            positions=positions,
            query_start_cpu=starts,
            kv_len_cpu=lengths,
            decoding=0,
            page_size=page_size,
        )
        every = torch.arange(half, device=device)
        logits.append(model.forward(tokens[start : start + half], batch, every))
    model.bind(KVTensors(paged.layouts, 0, page_size, paged.dtype, paged.device))
    return torch.cat(logits).float()
