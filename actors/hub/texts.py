"""Prometheus texts of several models as one: each family is told once, with all its series."""

from collections.abc import Sequence

FIRST_LINE = b"# HELP "


def merged(texts: Sequence[bytes]) -> bytes:
    """One text of ``texts``, as ``prometheus_client`` writes them, whose series all differ.

    A family has a line of help, one of its type, and its series; its name may stand only once in a
    text.
    """
    if len(texts) == 1:
        return texts[0]
    heads: dict[bytes, list[bytes]] = {}
    series: dict[bytes, list[bytes]] = {}
    for text in texts:
        name = b""
        for line in text.splitlines(keepends=True):
            if line.startswith(FIRST_LINE):
                name = line.split(b" ", 3)[2]
                heads[name] = []
            kind = heads if line.startswith(b"#") else series
            kind.setdefault(name, []).append(line)
    return b"".join(b"".join(lines + series.get(name, [])) for name, lines in heads.items())
