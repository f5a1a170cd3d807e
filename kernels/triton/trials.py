"""Forms of kernels that no GPU has timed yet: each is off until the environment names it."""

import os

TWO_LOOPS = "two_loops"
"""Attention reads blocks that all queries of a tile see first, without a mask."""

PER_KEY = "per_key"
"""Decode tiles add up their weights for each key, and sum these behind the loop."""

WORDS = "words"
"""fp8 pages are read by words and multiplied in fp16, which holds their numbers exactly."""

BY_PAGE = "by_page"
"""Attention reads one page id for each page of a block of keys, not one for each key."""

EARLY = "early"
"""Kernels between torch's products start early too, in steps of any number of rows (`pdl`)."""

SIXTEEN_ROWS = "sixteen_rows"
"""Products of 5 to 16 rows of narrow models are `mma_kernels`', not torch's."""

EIGHT_ROWS = "eight_rows"
"""Products with codes have a tile for up to 8 rows."""

MORE_PARTS = "more_parts"
"""Their inputs are cut into parts by a quotient that is rounded up."""

NAMES = (TWO_LOOPS, PER_KEY, WORDS, BY_PAGE, EARLY, SIXTEEN_ROWS, EIGHT_ROWS, MORE_PARTS)


def trials() -> frozenset[str]:
    """The names in the environment variable ``RAYFIN_TRY``, which commas separate.

    Raises:
        ValueError: There is no such trial.
    """
    tried = frozenset(filter(None, os.environ.get("RAYFIN_TRY", "").split(",")))
    if unknown := tried - set(NAMES):
        raise ValueError(f"RAYFIN_TRY has unknown names: {', '.join(sorted(unknown))}")
    return tried
