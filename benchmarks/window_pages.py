"""What a KV cache holds of models whose layers see windows, with and without freeing pages behind.

    python benchmarks/window_pages.py
    python benchmarks/window_pages.py --context 8192 --gib 4

No model runs: tables of pages are filled as a scheduler fills them, chunk by chunk, until the next
request does not fit.
"""

import argparse

import torch

from rayfin.cache.kv_tensors import KVLayout, group_layers, page_bytes
from rayfin.cache.page_tables import PageTables
from rayfin.cache.window_tables import WindowTables

PAGE_SIZE, CHUNK, SLOTS = 16, 256, 4096
SHAPES = {  # layers, every how many see all (0: none), window, KV heads, their size
    "Gemma 3 1B": (26, 6, 512, 1, 256),
    "Gemma 3 27B": (62, 6, 1024, 16, 128),
    "gpt-oss-20b": (24, 2, 128, 8, 64),
    "OLMo 3 7B": (32, 4, 4096, 32, 128),
    "Mistral 7B v0.1": (32, 0, 4096, 8, 128),
}


def layouts(shape: tuple[int, int, int, int, int]) -> list[KVLayout]:
    """What the layers store, the last of each ``every`` without a window."""
    layers, every, window, heads, size = shape
    return [
        KVLayout(heads, size, size, None if every and layer % every == every - 1 else window)
        for layer in range(layers)
    ]


def fill(tables: PageTables, context: int) -> tuple[int, int]:
    """Computes prompts of ``context`` tokens one after the other; returns how many are held at
    once, and the pages of the first."""
    requests = pages = 0
    while requests < len(tables.held) and tables.fits(context + 1, [], 0, 0):
        assert tables.reserve(requests, context)
        for position in range(0, context, CHUNK):
            tables.slide(requests, position)
            assert tables.reserve(requests, context), "a chunk takes what the last one freed"
        tables.slide(requests, context - 1)
        requests += 1
        pages = pages or tables.num_held
    return requests, pages


def main() -> None:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=32_768, help="tokens of each request")
    parser.add_argument("--gib", type=float, default=40.0, help="memory of the pages, GiB")
    args = parser.parse_args()
    title = f"{args.context:,} tokens, {args.gib:g} GiB, bfloat16"
    print(f"| {title} | Bytes a token | freed | Requests at once | freed | Times |")
    print("|---|---|---|---|---|---|")
    for name, shape in SHAPES.items():
        kinds = layouts(shape)
        groups = group_layers(kinds)
        assert groups is not None
        rows: list[tuple[float, int]] = []
        for layers in (len(kinds), groups.size):
            each = page_bytes(kinds[:layers], PAGE_SIZE, torch.bfloat16)
            num_pages = int(args.gib * 2**30) // each
            tables = PageTables(SLOTS, num_pages, PAGE_SIZE)
            if rows:
                windows = groups.windows.with_reach(CHUNK, PAGE_SIZE)
                tables = WindowTables(SLOTS, num_pages, PAGE_SIZE, windows)
            requests, pages = fill(tables, args.context)
            rows.append((each * pages / args.context, requests))
        (before, few), (after, many) = rows
        print(f"| {name} | {before:,.0f} | {after:,.0f} | {few} | {many} | {before / after:.1f} |")


if __name__ == "__main__":
    main()
