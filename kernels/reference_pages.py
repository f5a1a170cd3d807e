"""The page-level kernels of the first design, kept as oracles: V0's pages as rows, V1's split KV.

V0 lays prompts out as a batch of pages, attends page against page, and combines the partial results
by their log-sum-exps (the online softmax of Milakov and Gimelshein, 2018, spread over pages as in
Flash-Decoding). V1 gets keys and values of all chunks in one tensor, splits them per request and
copies each part into the request's pages. The serving kernels write straight to slots and gather
from them, and must give the same results.
"""

from collections.abc import Sequence

import torch


def page_level_prefill_inputs(
    prompts: Sequence[Sequence[int]], page_size: int
) -> tuple[torch.Tensor, list[int]]:
    """Splits prompts into pages, the last page of each padded with 0.

    A prompt that ends on a page boundary fills its last page and gets no empty one after it.

    Returns:
        ids [num_pages, page_size] int64, and the number of pages of each prompt.

    Raises:
        ValueError: A prompt is empty.
    """
    pages, request_num_pages = [], []
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        request_num_pages.append((len(prompt) + page_size - 1) // page_size)
        for start in range(0, len(prompt), page_size):
            chunk = list(prompt[start : start + page_size])
            pages.append(chunk + [0] * (page_size - len(chunk)))
    ids = torch.tensor(pages, dtype=torch.int64).view(-1, page_size)
    return ids, request_num_pages


def last_token_index(prompt_len: int, page_size: int) -> int:
    """The offset of a prompt's last token in its last page.

    `prompt_len % page_size` would be one too many, and 0 when the last page is exactly full.
    """
    return (prompt_len - 1) % page_size


def partial_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a part of the keys, with the log-sum-exp that is needed to combine parts.

    Args:
        query: [n, H, Dk].
        key: [m, Hkv, Dk].
        value: [m, Hkv, Dv].
        visible: [n, m] bool.
        scale: factor on the scores.

    Returns:
        out [n, H, Dv] fp32 and lse [n, H] fp32; a query that sees no key has out 0 and lse -inf.
    """
    group = query.shape[1] // key.shape[1]
    k = key.float().repeat_interleave(group, dim=1)  # [m, H, Dk]
    v = value.float().repeat_interleave(group, dim=1)  # [m, H, Dv]
    scores = torch.einsum("nhd,mhd->nhm", query.float(), k) * scale
    scores = scores.masked_fill(~visible.unsqueeze(1), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)  # [n, H]
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(
        0.0
    )  # -inf - -inf where none is seen
    return torch.einsum("nhm,mhd->nhd", weights, v), lse


def combine_partials(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Attention over all keys from partial ones: [N, n, H, Dv], [N, n, H] -> [n, H, Dv].

    Each part's weight is its share of the softmax denominator, exp(lse).
    """
    share = torch.softmax(lses, dim=0)  # [N, n, H]
    return (share.unsqueeze(-1) * outs).sum(dim=0)


def page_level_prefill_attention(
    query: torch.Tensor,  # [num_pages, page_size, H, Dk]
    key: torch.Tensor,  # [num_pages, page_size, Hkv, Dk]
    value: torch.Tensor,  # [num_pages, page_size, Hkv, Dv]
    request_num_pages: Sequence[int],
    scale: float,
) -> torch.Tensor:  # [num_pages, page_size, H, Dv] fp32
    """Causal attention within each request, page against page.

    Padding follows a request's last token, so no token of the request attends to it. The output at
    padding is meaningless.
    """
    page_size = query.shape[1]
    full = torch.ones(page_size, page_size, dtype=torch.bool)
    out = []
    first = 0
    for num_pages in request_num_pages:
        for page in range(first, first + num_pages):
            parts = [
                partial_attention(
                    query[page], key[past], value[past], full if past < page else full.tril(), scale
                )
                for past in range(first, page + 1)
            ]
            outs, lses = zip(*parts, strict=True)
            out.append(combine_partials(torch.stack(outs), torch.stack(lses)))
        first += num_pages
    return torch.stack(out)


def page_level_decode_attention(
    query: torch.Tensor,  # [R, H, Dk], one token per row
    k_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dk]
    v_pages: torch.Tensor,  # [num_pages, page_size, Hkv, Dv]
    page_tables: torch.Tensor,  # [R, P] page ids
    kv_len: torch.Tensor,  # [R] tokens visible
    scale: float,
) -> torch.Tensor:  # [R, H, Dv] fp32
    """Attends to each page of a row without gathering, then combines the parts."""
    page_size = k_pages.shape[1]
    out = []
    for row, visible_tokens in enumerate(kv_len.tolist()):
        num_pages = (visible_tokens + page_size - 1) // page_size
        parts = []
        for index in range(num_pages):
            page = int(page_tables[row, index])
            visible = torch.arange(page_size) + index * page_size < visible_tokens
            parts.append(
                partial_attention(
                    query[row : row + 1], k_pages[page], v_pages[page], visible.unsqueeze(0), scale
                )
            )
        outs, lses = zip(*parts, strict=True)
        out.append(combine_partials(torch.stack(outs), torch.stack(lses))[0])
    return torch.stack(out)


def split_and_write_kv(
    kv: torch.Tensor,  # [2, L, T, Hkv, D]: keys and values of all layers and all chunks
    chunk_len: Sequence[int],  # [R] tokens of each request in this step, in order along T
    cached: Sequence[int],  # [R] tokens each request had in its pages before
    page_tables: Sequence[Sequence[int]],  # [R] page ids of each request
    k_pages: torch.Tensor,  # [L, num_pages, page_size, Hkv, D], written in place
    v_pages: torch.Tensor,  # [L, num_pages, page_size, Hkv, D], written in place
) -> None:
    """V1's update: splits the step's keys and values per request and copies them to pages."""
    page_size = k_pages.shape[2]
    parts = torch.split(kv, list(chunk_len), dim=2)
    for part, before, pages in zip(parts, cached, page_tables, strict=True):
        for token in range(part.shape[2]):
            position = before + token
            page, offset = pages[position // page_size], position % page_size
            k_pages[:, page, offset] = part[0, :, token]
            v_pages[:, page, offset] = part[1, :, token]
