"""What the store keeps and what it lets go."""

import logging
import pickle
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rayfin.actors.errors import InvalidConfig, InvalidRequest, NotFound, Overloaded
from rayfin.deployments.api.responses.conversations import ConversationState
from rayfin.deployments.api.responses.events import events_from
from rayfin.deployments.api.responses.items import input_items, texts_of
from rayfin.deployments.api.responses.replies import OutputMessage, Response
from rayfin.deployments.api.responses.state import OVERHEAD, ResponseState
from rayfin.deployments.api.responses.store import ResponseStore
from rayfin.deployments.api.responses.store_log import StoreLog
from rayfin.deployments.generation.logprobs import ChatTokenLogprob
from rayfin.deployments.text.parsing.events import Event

WANTED: dict[str, Any] = {
    "created_at": 0,
    "status": "in_progress",
    "model": "tiny",
    "background": False,
    "store": True,
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "metadata": {},
}
ABSENT = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)


def response(name: str, tenant: str = "", text: str = "hello", done: bool = True) -> ResponseState:
    created = Response(id=name, **WANTED, **dict.fromkeys(ABSENT))
    state = ResponseState(created, tenant, [], input_items(text), 3)
    if done:
        state.finish("completed")
    return state


def held(store: ResponseStore, *names: str) -> list[str]:
    """Which of the names are there, by tenants that are their first letter."""
    found = []
    for name in names:
        try:
            found.append(store.get(name, name[0]).id)
        except NotFound:
            continue
    return found


def settle(store: ResponseStore, state: ResponseState) -> None:
    store.grow(state.id, state.tenant, state.progress())


def test_a_tenant_sees_its_own() -> None:
    store = ResponseStore()
    store.add("owner", response("a1", "a"))
    assert store.get("a1", "a").id == "a1"
    for name, tenant in (("a1", "b"), ("a1", ""), ("a2", "a")):
        with pytest.raises(NotFound):
            store.get(name, tenant)
    store.remove("a1", "a")
    assert held(store, "a1") == [] and len(store) == 0


def test_the_largest_tenants_oldest_goes_first() -> None:
    store = ResponseStore(max_responses=4)
    for name in ("b1", "a1", "a2", "a3", "a4"):
        store.add("owner", response(name, name[0]))
    assert held(store, "b1", "a1", "a2", "a3", "a4") == ["b1", "a2", "a3", "a4"]
    store.add("owner", response("b2", "b"))
    assert held(store, "b1", "a2", "a3", "a4", "b2") == ["b1", "a3", "a4", "b2"]


def test_what_still_runs_stays() -> None:
    store = ResponseStore(max_responses=2)
    running = [response(f"a{i}", "a", done=False) for i in range(2)]
    for state in running:
        store.add("owner", state)
    with pytest.raises(Overloaded):
        store.add("owner", response("a9", "a"))
    running[1].finish("completed")
    settle(store, running[1])
    store.add("owner", response("a9", "a"))
    assert held(store, "a0", "a1", "a9") == ["a0", "a9"]


def test_bytes_are_bounded() -> None:
    """By what goes in, and by what a response has become at its end."""
    text = "x" * 10_000
    size = 2 * OVERHEAD + sys.getsizeof(text) + sys.getsizeof("")
    store = ResponseStore(max_bytes=2 * size)
    for name in ("a1", "a2", "a3"):
        store.add("owner", response(name, "a", text))
    assert held(store, "a1", "a2", "a3") == ["a2", "a3"]
    growing = response("b1", "b", done=False)
    store.add("owner", growing)
    assert held(store, "a2", "a3", "b1") == ["a3", "b1"]
    growing.append([Event("content", text)], 5, 0)
    growing.finish("completed")
    settle(store, growing)
    assert held(store, "a3", "b1") == ["a3"]  # what grew is the larger one
    with pytest.raises(InvalidRequest):
        store.add("owner", response("a4", "a", text * 4))
    assert held(store, "a3") == ["a3"]


def test_tools_count_in_bytes() -> None:
    plain, with_tools = response("a1", "a"), response("a2", "a")
    with_tools.created.tools = [{"name": "f", "parameters": {"description": "x" * 10_000}}]
    assert with_tools.size() > plain.size() + 10_000
    plain.created.user = "x" * 100_000
    assert plain.size() > with_tools.size()


def test_old_ones_go_when_they_have_ended() -> None:
    now = 0.0
    store = ResponseStore(max_age=10, clock=lambda: now)
    running = response("a2", "a", done=False)
    for state in (response("a1", "a"), running):
        store.add("owner", state)
    now = 9.0
    store.add("owner", response("a3", "a"))
    assert held(store, "a1", "a2", "a3") == ["a1", "a2", "a3"]
    now = 10.0
    assert held(store, "a1", "a2", "a3") == ["a2", "a3"]
    running.finish("failed")
    assert held(store, "a2", "a3") == ["a3"]


def test_the_books_are_empty_when_the_store_is() -> None:
    store = ResponseStore()
    states = [response(f"{tenant}{i}", tenant) for tenant in "abc" for i in range(3)]
    for state in states:
        store.add("owner", state)
        settle(store, state)
    for state in states:
        store.remove(state.id, state.tenant)
        store.remove(state.id, state.tenant)  # twice does nothing
        settle(store, state)
    books = store._states
    assert (books._items, books._sizes, books._births, books._bytes) == ({}, {}, {}, {})


def test_what_is_stored_outlives_its_process(tmp_path: Path) -> None:
    """A background response that ran there has failed, once; a torn record is left out."""
    store = ResponseStore.over(str(tmp_path))
    for name in ("done", "gone", "runs"):
        state = response(name, done=False)
        state.created.created_at = int(time.time())
        state.created.background = name == "runs"
        store.add("a", state)
        if name != "runs":
            state.append([Event("content", "hi")], 1, 0)
            state.finish("completed")
            settle(store, state)
    store.remove("gone", "")
    store.add_conversation(ConversationState("c", "", {"a": "b"}, input_items("hello")))
    store.change_conversation("c", "", {"added": input_items("you")})
    log = tmp_path / "responses.jsonl"
    assert log.stat().st_mode & 0o777 == 0o600
    with log.open("ab") as file:
        file.write(b'["forget", "done"')
    for _ in range(2):
        again = ResponseStore.over(str(tmp_path))
        (message,) = again.get("done", "").response().output
        assert isinstance(message, OutputMessage) and texts_of(message) == ["hi"]
        assert again.get("runs", "").status == "failed"
        assert len(again.conversation("c", "").items) == 2
        with pytest.raises(NotFound):
            again.get("gone", "")
        assert len(list(StoreLog(tmp_path).records())) == 3
        assert log.stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidConfig, match="response_dir"):
        ResponseStore.over(str(log))


def ran(name: str, background: bool = False) -> ResponseState:
    state = response(name, done=False)
    state.created.created_at, state.created.background = int(time.time()), background
    return state


def test_a_response_outlives_the_store_alone(tmp_path: Path) -> None:
    """The replica that runs it reports its end to the next store, or has gone with the other."""
    now = 0.0
    store = ResponseStore.over(str(tmp_path), alone=True)
    runs, lost = ran("runs", True), ran("lost", True)
    store.add("a", runs)
    store.add("b", lost)
    for _ in range(2):
        store = ResponseStore(log=StoreLog(tmp_path), alone=True, clock=lambda: now)
    assert not store.get("runs", "").done
    runs.finish("completed")
    settle(store, runs)
    now = 31.0
    assert [store.get(name, "").status for name in ("runs", "lost")] == ["completed", "failed"]
    assert ResponseStore.over(str(tmp_path)).get("runs", "").status == "completed"


def test_a_conversation_that_goes_on_stays(tmp_path: Path) -> None:
    store = ResponseStore.over(str(tmp_path))
    for name in ("used", "left"):
        state = ConversationState(name, "", {}, [], created_at=0, changed_at=0)
        store.add_conversation(state)
    store.change_conversation("used", "", {"added": input_items("hello")})
    again = ResponseStore.over(str(tmp_path))
    assert len(again.conversation("used", "").items) == 1
    with pytest.raises(NotFound):
        again.conversation("left", "")


def test_a_full_disk_loses_what_it_has_no_room_for(tmp_path: Path) -> None:
    store = ResponseStore.over(str(tmp_path))
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name in ("a", "b", "c"):
        if name == "b":
            room = (tmp_path / "responses.jsonl").stat().st_size + 99
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
        try:
            state = ran(name)
            store.add("owner", state)
            state.finish("completed")
            settle(store, state)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert [store.get(name, "").status for name in "abc"] == ["completed"] * 3
    again = ResponseStore.over(str(tmp_path))
    assert len(again) == 2 and again.get("c", "").done


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("ran"),)


def test_no_line_of_a_file_runs_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pickle, of this file or of one of earlier versions, and lines that say nothing known."""
    monkeypatch.chdir(tmp_path)
    store = ResponseStore.over("kept")
    store.add_conversation(ConversationState("c", "", {}, []))
    hostile = pickle.dumps(Hostile())
    Path("kept", "responses.log").write_bytes(hostile)
    with Path("kept", "responses.jsonl").open("ab") as file:
        file.write(hostile + b'\n["keep", null, {}]\n["later", "c"]\n')
    store.add_conversation(ConversationState("d", "", {}, []))
    with caplog.at_level(logging.WARNING):
        again = ResponseStore.over("kept")
    assert again.conversation("c", "").id == "c" and again.conversation("d", "").id == "d"
    assert not Path("ran").exists()
    assert "responses.log" in caplog.text and "Line 4" in caplog.text


def test_all_that_a_response_holds_is_kept(tmp_path: Path) -> None:
    state = ran("r")
    state.items = input_items(
        [
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
            {"type": "tool_search_call", "call_id": "t", "arguments": {"query": [1, None]}},
            {"type": "tool_search_output", "call_id": "t", "tools": []},
            {"type": "function_call", "call_id": "f", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "f", "output": "z"},
        ]
    )
    store = ResponseStore.over(str(tmp_path))
    store.add("owner", state)
    entry = ChatTokenLogprob(token="\ufffd", logprob=-0.5, bytes=[240], top_logprobs=[])
    state.append([Event("reasoning", "hm"), Event("content", "h\0\u2028")], 2, 1, logprobs=[entry])
    state.finish("incomplete")
    settle(store, state)
    again = ResponseStore.over(str(tmp_path)).get("r", "")
    assert again.response() == state.response()
    said = [[item.model_dump() for item in each.conversation()] for each in (again, state)]
    assert said[0] == said[1]
    assert list(events_from(again, 0)) == list(events_from(state, 0))


def test_what_a_bound_has_dropped_stays_away(tmp_path: Path) -> None:
    store = ResponseStore(max_responses=1, log=StoreLog(tmp_path))
    for name in ("a", "b"):
        store.add_conversation(ConversationState(f"of {name}", "", {}, []))
        store.add("owner", state := ran(name))
        state.finish("completed")
        settle(store, state)
    again = ResponseStore.over(str(tmp_path))
    assert len(again) == 1 and again.get("b", "").done
    assert again.conversation("of b", "").items == []
    with pytest.raises(NotFound):
        again.conversation("of a", "")
