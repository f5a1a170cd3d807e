"""Which way NCCL has connected ranks, out of its log."""

import logging
import os
from pathlib import Path

import pytest

from rayfin.actors.runner.parallel.groups import TransportLog, channels

LOG = """\
node:12:34 [0] NCCL INFO comm 0x55 rank 0 nranks 3 cudaDev 0 nvmlDev 0 busId 1000 - Init START
node:12:34 [0] NCCL INFO Channel 00/02 :    0   1   2
node:12:40 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node:12:40 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node:12:40 [0] NCCL INFO Channel 00 : 0[0] -> 2[2] via SHM/direct/direct
node:12:40 [0] NCCL INFO Channel 00/0 : 2[0] -> 0[0] [receive] via NET/IB/0/GDRDMA
"""


def test_channels_of_each_pair() -> None:
    assert channels(LOG) == {
        (0, 1): {"P2P/CUMEM": 2},
        (0, 2): {"SHM/direct/direct": 1},
        (2, 0): {"NET/IB/0/GDRDMA": 1},
    }
    assert channels("") == {}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    return monkeypatch


def test_what_is_new_is_logged_once(
    environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = TransportLog()
    file = Path(os.environ["NCCL_DEBUG_FILE"])
    log.tell()
    assert os.environ["NCCL_DEBUG"] == "INFO" and not caplog.messages
    with file.open("a") as written:
        written.write(LOG)
    log.tell()
    assert caplog.messages[0] == "NCCL connects rank 0 to rank 1 by P2P/CUMEM (2 channels)"
    assert len(caplog.messages) == 3
    log.tell()
    assert len(caplog.messages) == 3
    file.unlink()


def test_a_log_of_the_user_is_left(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("NCCL_DEBUG", "WARN")
    TransportLog().tell()
    assert os.environ["NCCL_DEBUG"] == "WARN" and "NCCL_DEBUG_FILE" not in os.environ
