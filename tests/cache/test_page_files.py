"""Which pages of a prompt have files."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rayfin.cache.page_files import PageFolder

HASHES = [bytes([number]) * 32 for number in range(40)]


class Counted(PageFolder):
    """Says how often it was asked."""

    asked = 0
    there: frozenset[bytes] = frozenset()

    def holds(self, page_hash: bytes) -> bool:
        Counted.asked += 1
        return page_hash in Counted.there


@given(st.integers(0, len(HASHES)))
def test_a_beginning_is_found_with_few_questions(length: int) -> None:
    Counted.there, Counted.asked = frozenset(HASHES[:length]), 0
    assert Counted("", "", 1).match(HASHES) == length
    assert Counted.asked <= 7
    assert Counted("", "", 1).match([]) == 0


def test_without_its_first_page_nothing_is_found() -> None:
    Counted.there = frozenset(HASHES[1:])
    assert Counted("", "", 1).match(HASHES) == 0


def test_names(tmp_path: Path) -> None:
    """Models and ranks have folders of their own; no folder has all files of a model."""
    folder, other = PageFolder(str(tmp_path), "one", 1), PageFolder(str(tmp_path), "other", 1)
    files = {own.file(page, rank) for own in (folder, other) for page in HASHES for rank in (0, 1)}
    assert len(files) == 4 * len(HASHES)
    assert folder.file(HASHES[3]).parent.parent == folder.home()
    assert len({path.parent for path in files}) == 4 * len(HASHES)
    assert not folder.holds(HASHES[3])
    folder.file(HASHES[3]).parent.mkdir(parents=True)
    folder.file(HASHES[3]).touch()
    assert folder.holds(HASHES[3]) and not other.holds(HASHES[3])
