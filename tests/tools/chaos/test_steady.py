"""Whose processes a server's are."""

import os
import socket
from itertools import islice

import pytest
from steady import TOKENS, bodies, listener, parents


def test_who_listens_is_found_among_all_processes() -> None:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        port = door.getsockname()[1]
        with pytest.raises(ProcessLookupError, match=str(port)):
            listener(port, [os.getpid()])
        door.listen()
        assert listener(port, [os.getpid()]) == os.getpid()
    assert (os.getpid(), os.getppid()) in list(parents())


def test_each_request_has_a_prompt_of_its_own() -> None:
    asks = list(islice(bodies(0), 100))
    assert len({str(ask["prompt"]).split()[0] for ask in asks}) == 100
    assert {ask["max_tokens"] for ask in asks} <= set(range(TOKENS[0], TOKENS[1] + 1))
    assert asks == list(islice(bodies(0), 100))
