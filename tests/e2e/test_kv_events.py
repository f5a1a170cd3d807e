"""A router outside hears which pages an engine of actors has."""

from typing import Any

import pytest

from event_reader import EventReader
from rayfin import LLM, SamplingParams
from rayfin.actors.errors import InvalidConfig

PROMPT = list(range(5, 70))


def test_a_router_hears_of_pages(cluster: None, settings: dict[str, Any], tmp_path: Any) -> None:
    zmq = pytest.importorskip("zmq")
    place, reader = f"ipc://{tmp_path}/", EventReader()
    events = {"enable_kv_cache_events": True, "replay_endpoint": place + "replay"}
    events |= {"endpoint": place + "pub", "topic": "kv@pod@m"}
    own = {**settings, "kv_events_config": events}
    with pytest.raises(InvalidConfig, match="executor"):
        LLM(**own)
    with (
        LLM(executor="ray", **own) as llm,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as ask,
    ):
        llm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=2), use_tqdm=False)
        ask.set(zmq.RCVTIMEO, 30_000)
        ask.set(zmq.LINGER, 0)
        ask.connect(place + "replay")
        while not reader.pages:
            ask.send_multipart([b"", (0).to_bytes(8, "big")])
            while (message := ask.recv_multipart())[3]:
                assert message[1] == b"kv@pod@m"
                assert reader.read(int.from_bytes(message[2], "big"), message[3])
    tokens = [token for _, tokens in reader.pages.values() for token in tokens]
    assert tokens and tokens == PROMPT[: len(tokens)]
