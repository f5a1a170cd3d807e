"""A router outside, which follows the pages of one engine by vLLM's events of KV caches."""

from typing import Any

import msgpack


class EventReader:
    """What the messages of an engine tell; it is strict about their schema."""

    def __init__(self) -> None:
        self.pages: dict[int, tuple[int | None, tuple[int, ...]]] = {}  # parent, tokens
        self.next = 0

    def read(self, number: int, batch: bytes) -> bool:
        """Follows a message; False if one is missing before it."""
        if number not in (0, self.next):
            return False
        self.next = number + 1
        seconds, events, rank = msgpack.unpackb(batch)
        assert isinstance(seconds, float) and rank == 0
        for event in events:
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    assert event["medium"] == "GPU"
                    for name in event["block_hashes"]:
                        self.pages.pop(name, None)
                case "AllBlocksCleared":
                    self.pages.clear()
                case other:
                    raise AssertionError(other)
        return True

    def _store(self, event: dict[str, Any]) -> None:
        names, size, tokens = event["block_hashes"], event["block_size"], event["token_ids"]
        assert len(tokens) == size * len(names) and len(event["extra_keys"]) == len(names)
        assert event["lora_id"] is None and event["medium"] == "GPU"
        parent = event["parent_block_hash"]
        for number, name in enumerate(names):
            self.pages[name] = parent, tuple(tokens[number * size : (number + 1) * size])
            parent = name
