"""How much the recordings hold that are written down now."""

import pytest

from rayfin.actors.errors import Overloaded
from rayfin.deployments.media.memory_limit import RecordingRoom


def test_a_room_that_is_full() -> None:
    room = RecordingRoom(100)
    first, second = room.place(), room.place()
    first.take(60)
    second.take(40)
    with pytest.raises(Overloaded, match="hold 100 bytes here, of at most 100"):
        second.take(1)
    with pytest.raises(Overloaded):
        room.check()
    first.take(-20)
    room.check()
    second.take(20)
    first.leave()
    second.take(10**6)  # alone it may have more
    second.leave()
    assert room.num_bytes == 0


def test_a_place_that_is_left() -> None:
    """A thread that still works for it takes nothing; one that is dropped is left."""
    room = RecordingRoom(100)
    place = room.place()
    place.take(50)
    place.leave()
    place.take(50)
    assert room.num_bytes == 0
    dropped = room.place()
    dropped.take(50)
    del dropped
    assert room.num_bytes == 0
