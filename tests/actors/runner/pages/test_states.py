"""States of recurrent layers come back with the pages before them, or neither does."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rayfin.actors.messages import PagesAt
from rayfin.actors.runner.pages.peers import PageServer, Peers
from rayfin.actors.runner.pages.records import state_name
from rayfin.actors.runner.pages.transfers import PageTransfers
from rayfin.cache.prefix_index import HashChain

Make = Callable[..., Any]
PROMPT = [(11 * i + i * i // 5) % 50 for i in range(150)]
SAVED = 148  # tokens of PROMPT behind which there is a state
GREETING = b"g" * 32


@pytest.fixture
def make(tiny_model: Make, served: Make) -> Make:
    folder = tiny_model("qwen3_next").folder

    def make(**settings: Any) -> Any:
        return served(folder, max_model_len=256, num_pages=160, **settings)

    return make


@pytest.fixture
def written(make: Make, request_of: Make, tmp_path: Path) -> tuple[Any, list[int]]:
    """The settings of an engine that has stored PROMPT, and its answer."""
    settings = {"kv_disk_path": str(tmp_path / "pages")}
    engine = make(**settings)
    answer = engine.run(request_of(0, PROMPT, 9))[0]
    engine.engine.step()
    return settings, answer


def test_after_a_restart(written: Any, make: Make, request_of: Make) -> None:
    settings, answer = written
    engine = make(**settings)
    assert engine.run(request_of(0, PROMPT, 9))[0] == answer
    assert engine.cached[0] == SAVED
    turn = [*PROMPT, *answer, 3, 4]
    expected = make().run(request_of(0, turn, 9))[0]
    assert engine.run(request_of(1, turn, 9))[1] == expected, (
        "it goes on from the state it has read"
    )
    assert engine.cached[1] >= SAVED


@pytest.mark.parametrize("damage", ["gone", "flip", "page"])
def test_without_its_state_or_a_page(
    damage: str, written: Any, make: Make, request_of: Make
) -> None:
    settings, answer = written
    engine = make(**settings)
    request = request_of(0, PROMPT, 9)
    folder = engine.config.page_folder
    chain = HashChain(engine.config.page_size, request.prefix_keys)
    chain.extend(request.prompt)
    state = folder.file(state_name(chain.hashes[SAVED // engine.config.page_size - 1]))
    assert state.exists() and len(list(folder.files())) > 30
    if damage == "gone":
        state.unlink()
    elif damage == "flip":
        data = bytearray(state.read_bytes())
        data[-5] ^= 1
        state.write_bytes(data)
    else:
        folder.file(chain.hashes[3]).write_bytes(b"torn")
    assert engine.run(request)[0] == answer
    assert engine.cached[0] == 0
    snapshots = engine.engine.lifecycle.state.snapshots
    assert snapshots._lent == 0


@pytest.fixture
def pair(make: Make) -> tuple[Any, Any]:
    source, reader = make(kv_peers=True), make(kv_peers=True)
    server = PageServer(source.runner.names, lambda: source.executor._pages, lambda: GREETING)
    peers = Peers(lambda engine: server.address(), lambda: GREETING)
    for engine, its in ((source, None), (reader, peers)):
        runner, executor = engine.runner, engine.executor
        executor._pages = PageTransfers(
            0, executor._next_step, runner.overwritten, runner.names, its
        )
        executor._pages.use(runner.cache, executor.epoch, None, runner.states)
    return source, reader


def test_from_another_engine(pair: tuple[Any, Any], request_of: Make) -> None:
    source, reader = pair
    answer = source.run(request_of(0, PROMPT, 9))[0]
    asked = replace(request_of(0, PROMPT, 9), pages_at=PagesAt("other", 39))
    assert reader.run(asked)[0] == answer
    assert reader.cached[0] == SAVED
    turn = [*PROMPT, *answer, 3, 4]
    asked = replace(request_of(1, turn, 9), pages_at=PagesAt("other", 39))
    assert reader.run(asked)[1] == source.run(request_of(1, turn, 9))[1]


def test_the_other_engine_has_saved_over_its_state(pair: tuple[Any, Any], request_of: Make) -> None:
    """It has the pages still, which are of no use alone."""
    source, reader = pair
    answer = source.run(request_of(0, PROMPT, 9))[0]
    for names in list(source.runner.names._states.values()):
        source.runner.names.drop_state(*names)
    asked = replace(request_of(0, PROMPT, 9), pages_at=PagesAt("other", 39))
    assert reader.run(asked)[0] == answer
    assert reader.cached[0] == 0
    assert reader.engine.lifecycle.state.snapshots._lent == 0


def test_a_state_that_changes_while_it_is_copied(
    pair: tuple[Any, Any], request_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, reader = pair
    source.run(request_of(0, PROMPT, 9))
    names, transfers = source.runner.names, source.executor._pages
    ((page_hash, (snapshot,)),) = names._states.items()
    rows = transfers._states[1]
    read = rows.read

    def change(row: int) -> Any:
        content = read(row)
        names.drop_state(snapshot)
        names.add_state(snapshot, page_hash)
        return content

    monkeypatch.setattr(rows, "read", change)
    assert transfers.state(page_hash) is None
