"""A scrape gets fresh numbers, and waits for them for a moment only."""

import threading
from collections.abc import Iterator

import httpx
import pytest

from rayfin.actors.metrics.hub import CONTENT_TYPE, Puller, listen

LONG = 60.0  # seconds; only a failure waits so long


class Source:
    """Pulls wait for ``gate``; ``fails`` makes the next one raise."""

    def __init__(self) -> None:
        self.pulls = 0
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.fails = False

    def pull(self) -> None:
        self.pulls += 1
        self.begun.set()
        assert self.gate.wait(LONG)
        if self.fails:
            self.fails = False
            raise ValueError("the registry is away")


@pytest.fixture
def source() -> Iterator[Source]:
    source = Source()
    yield source
    source.gate.set()


@pytest.fixture
def puller(source: Source) -> Puller:
    puller = Puller(source.pull, LONG)
    puller.start()
    return puller


def test_a_refresh_is_a_pull_that_begins_after_it(puller: Puller, source: Source) -> None:
    source.gate.set()
    for number in (1, 2, 3):
        assert puller.refresh(LONG)
        assert source.pulls == number


def test_a_slow_pull_is_not_waited_for(puller: Puller, source: Source) -> None:
    assert not puller.refresh(0.0)
    assert source.begun.wait(LONG)
    assert not puller.refresh(0.001) and source.pulls == 1  # the one that runs is too old
    source.gate.set()
    assert puller.refresh(LONG)
    assert source.pulls in (2, 3)


def test_many_share_a_pull(puller: Puller, source: Source) -> None:
    puller.refresh(0.0)
    assert source.begun.wait(LONG)
    fresh: list[bool] = []
    waiting = [
        threading.Thread(target=lambda: fresh.append(puller.refresh(LONG))) for _ in range(9)
    ]
    for thread in waiting:
        thread.start()
    source.gate.set()
    for thread in waiting:
        thread.join(LONG)
    assert fresh == [True] * 9 and source.pulls <= 11


def test_a_pull_that_fails_is_not_the_last(puller: Puller, source: Source) -> None:
    source.gate.set()
    source.fails = True
    assert puller.refresh(LONG) and puller.refresh(LONG)
    assert source.pulls == 2


def test_it_pulls_without_being_asked(source: Source) -> None:
    source.gate.set()
    Puller(source.pull, 0.001).start()
    assert source.begun.wait(LONG)


def test_the_port_tells_the_text_as_it_is_now() -> None:
    texts = iter((b"one", b"two"))
    server = listen(0, lambda: next(texts))
    try:
        for expected in (b"one", b"two"):
            answer = httpx.get(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60)
            assert answer.content == expected and answer.headers["content-type"] == CONTENT_TYPE
            assert "content-encoding" not in answer.headers
        with pytest.raises(OSError, match="in use"):
            listen(server.server_port, lambda: b"")
    finally:
        server.shutdown()
        server.server_close()
