"""Word errors of transcripts."""

import re
from collections.abc import Sequence


def words_in(text: str) -> list[str]:
    """Words as they are compared: small letters, without marks."""
    return re.sub(r"[^\w' ]+", " ", text.lower()).split()


def word_errors(said: str, heard: str) -> tuple[float, int]:
    """Substitutions, insertions and deletions by the words ``said``, and the longest run of words
    that are missing."""
    wanted, found = words_in(said), words_in(heard)
    rows = _distances(wanted, found)
    longest = run = 0
    row, column = len(wanted), len(found)
    while row or column:
        here = rows[row][column]
        differs = bool(row and column) and wanted[row - 1] != found[column - 1]
        if row and column and here == rows[row - 1][column - 1] + differs:
            row, column, run = row - 1, column - 1, 0
        elif row and here == rows[row - 1][column] + 1:
            row, run = row - 1, run + 1
            longest = max(longest, run)
        else:
            column -= 1
    return rows[-1][-1] / max(len(wanted), 1), longest


def _distances(wanted: Sequence[str], found: Sequence[str]) -> list[list[int]]:
    rows = [list(range(len(found) + 1))]
    for number, word in enumerate(wanted, 1):
        above, row = rows[-1], [number]
        for place, other in enumerate(found, 1):
            row.append(min(above[place] + 1, row[-1] + 1, above[place - 1] + (word != other)))
        rows.append(row)
    return rows
