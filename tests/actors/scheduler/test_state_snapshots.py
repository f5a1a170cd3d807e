"""Where prompts are cut for snapshots, and which snapshot is replaced."""

from rayfin.actors.scheduler.state_snapshots import StateSnapshots


def test_chunks_end_where_snapshots_are_due() -> None:
    snapshots = StateSnapshots(4, 16)
    ends, computed = [], 0
    while computed < 1100:
        computed = snapshots.next_end(computed, 1100)
        ends.append(computed)
    assert ends == [512, 1024, 1088, 1100]
    assert [snapshots.is_due(end, 1100) for end in ends] == [True, True, True, False]
    assert not snapshots.is_due(0, 1100)


def test_short_prompts_are_not_cut() -> None:
    assert StateSnapshots(4, 16).next_end(0, 64) == 64
    assert StateSnapshots(4, 16).next_end(0, 65) == 64
    assert StateSnapshots(4, 16).next_end(992, 1052, 992) == 1052  # one step for a short turn
    assert StateSnapshots(4, 16).next_end(960, 1000, 512) == 992


def test_the_one_not_used_for_longest_is_replaced() -> None:
    snapshots = StateSnapshots(2, 16)
    first, second = snapshots.add(b"1"), snapshots.add(b"2")
    assert {first, second} == {0, 1} and snapshots.add(b"1") is None
    assert snapshots.add(b"3") == second
    assert snapshots.match([b"1", b"2"]) == 1 and snapshots.match([b"x", b"3"]) == 2
    assert snapshots.find(b"1") == first
    snapshots.clear()
    assert len(snapshots) == 0 and snapshots.match([b"1"]) == 0
    assert {snapshots.add(b"4"), snapshots.add(b"5")} == {0, 1}


def test_snapshots_are_lent_to_reads() -> None:
    """Half of them at most; what comes may be there already, or not come."""
    snapshots = StateSnapshots(4, 16)
    for page_hash in (b"1", b"2", b"3", b"4"):
        snapshots.add(page_hash)
    first, second = snapshots.lend(), snapshots.lend()
    assert {first, second} == {0, 1, 2, 3} - {snapshots.find(b"3"), snapshots.find(b"4")}
    assert snapshots.lend() is None and len(snapshots) == 2
    snapshots.give_back(first or 0, b"5")
    snapshots.give_back(second or 0, b"4")
    assert snapshots.find(b"5") == first and snapshots.add(b"6") == second
    third = snapshots.lend()
    snapshots.clear()
    snapshots.give_back(third or 0, None)
    assert {snapshots.add(bytes([own])) for own in range(4)} == {0, 1, 2, 3}


def test_what_was_saved_is_said_once() -> None:
    snapshots = StateSnapshots(2, 16)
    first = snapshots.add(b"1")
    assert snapshots.saved() == {first: b"1"} and snapshots.saved() is None
