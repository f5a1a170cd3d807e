"""Attention within the segments of a packed row, both ways, with an optional window."""

from collections import defaultdict

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention


def segment_attention(
    query: torch.Tensor,  # [T, H, D]
    key: torch.Tensor,  # [T, H, D]
    value: torch.Tensor,  # [T, H, D]
    starts: npt.NDArray[np.int32],  # [S + 1] int: where each segment begins, and T
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Returns [T, H, D]: each token attends to all of its own segment.

    With a ``window``, token i attends to j where \\|i - j\\| < window. Segments of one length are
    computed together; a segment's bits depend on nothing but itself.
    """
    out = torch.empty_like(query)
    by_length: dict[int, list[int]] = defaultdict(list)
    for start, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        by_length[end - start].append(start)
    for length, begins in by_length.items():
        offsets = torch.arange(length, device=query.device)
        places = torch.tensor(begins, device=query.device)[:, None] + offsets  # [N, L]
        q, k, v = (tensor[places].transpose(1, 2) for tensor in (query, key, value))  # [N, H, L, D]
        mask = None
        if window is not None and length > window:
            mask = (offsets[:, None] - offsets).abs() < window
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        out[places] = attended.transpose(1, 2)
    return out
