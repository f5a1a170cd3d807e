"""Streams that outlive their engines: real schedulers on runners without a model, no Ray."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from fake_stream import Stream
from rayfin.actors.errors import (
    DeadlineExceeded,
    EngineAsleep,
    EngineUnavailable,
    NotFound,
    Overloaded,
    RayfinError,
    RequestFailed,
)
from rayfin.actors.guidance import CallGrammar, Guidance
from rayfin.actors.messages import (
    BeamParams,
    Command,
    EngineRequest,
    Receipt,
    Sampling,
    SessionRef,
    StopRules,
    TokenDelta,
)
from rayfin.deployments.client import connection as engine_link
from rayfin.deployments.client import pool as ray_client
from rayfin.deployments.client import routing
from rayfin.deployments.client.moves import MOST_COMPUTED_TOKENS
from rayfin.deployments.client.pool import EnginePool, Patience

pytestmark = pytest.mark.anyio
VOCABULARY = 50
PATIENCE = 30.0  # seconds; only a failure waits so long
Make = Callable[..., Any]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def client(
    world: Any, monkeypatch: pytest.MonkeyPatch, anyio_backend: str
) -> AsyncIterator[EnginePool]:
    for name in ("REGISTRY_REFRESH_SECONDS", "REGISTRY_SEARCH_SECONDS", "APPLICATION_END_SECONDS"):
        monkeypatch.setattr(ray_client, name, 0.001)
    monkeypatch.setattr(ray_client, "REPLAY_PAUSE_SECONDS", (0.001, 0.01))
    monkeypatch.setattr(engine_link, "RECONNECT_SECONDS", 0.001)
    monkeypatch.setattr(engine_link, "HEARTBEAT_SECONDS", 0.005)
    monkeypatch.setattr(engine_link, "SILENCE_TICK_SECONDS", 0.01)
    monkeypatch.setattr(engine_link, "ENGINE_SILENT_SECONDS", 0.1)
    client = EnginePool("edge", lambda: world.registered, patience=Patience(PATIENCE, PATIENCE))
    yield client
    client.close()


NUMBERS: Iterator[int] = iter(range(1000, 10**6))


def request(max_tokens: int = 30, **settings: Any) -> EngineRequest:
    number = next(NUMBERS)
    prompt = np.array([number % VOCABULARY, 3, 5, number % 7, 11, 13], np.int32)
    names = ("logprobs", "prompt_logprobs")
    asked = {name: settings.pop(name, None) for name in names}
    guidance = settings.pop("guidance", None)
    stops = frozenset(settings.pop("stops", ()))
    return EngineRequest(
        f"r{number}",
        prompt,
        Sampling(seed=number, **asked),
        StopRules(max_tokens, stops),
        key=number,
        parts=() if guidance is None else (guidance,),
        **settings,
    )


async def until(happened: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not happened():
            await asyncio.sleep(0)


class Reader:
    """Reads one stream, and holds it against the fake model."""

    def __init__(self, client: EnginePool, source: EngineRequest) -> None:
        self.source = source
        self.deltas: list[TokenDelta] = []
        self.task = asyncio.create_task(self._read(client))

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]

    async def _read(self, client: EnginePool) -> None:
        async for delta in client.stream(self.source):
            self.deltas.append(delta)

    async def check(self) -> None:
        """It has ended, with every token and log probability just once."""
        async with asyncio.timeout(PATIENCE):
            await self.task
        oracle = Stream(self.source, VOCABULARY)
        tokens, reason, stop = oracle.outcome()
        assert self.tokens == tokens[len(self.source.output) :]
        assert (self.deltas[-1].finish_reason, self.deltas[-1].stop_reason) == (reason, stop)
        assert [delta for delta in self.deltas[:-1] if delta.finish_reason] == []
        oracle.tokens = tokens
        for delta in self.deltas:
            oracle.logprobs += delta.logprobs or []
            for position, entry in delta.prompt_logprobs.items():
                assert position == len(oracle.prompt_logprobs) + 1, "delivered twice, or not at all"
                oracle.prompt_logprobs.append(entry)
        oracle.check_logprobs()


def mixed(length: int = 30) -> list[EngineRequest]:
    fork_parent = request(length)
    younger = [request(length, parent_key=fork_parent.key) for _ in range(2)]
    for own in younger:
        own.prompt = fork_parent.prompt
    return [
        fork_parent,
        *younger,
        request(length),
        request(60, stops=range(5)),
        request(length, logprobs=2),
        request(length, prompt_logprobs=1),
        request(length, output=[1, 2, 3]),
        request(length, timeout=100.0),
        request(length, guidance=Guidance("a grammar")),
        request(60, guidance=Guidance(calls=CallGrammar((1,), "of calls")), output=[4, 4]),
    ]


@pytest.mark.parametrize("how", ["dies", "fails", "closes", "freezes", "hands back"])
@pytest.mark.parametrize("after", [0, 1, 7])
async def test_every_token_once(world: Any, client: EnginePool, how: str, after: int) -> None:
    """Whatever becomes of their engine, and however far it got."""
    first = world.start("app/engine/0", num_pages=200)
    readers = [Reader(client, source) for source in mixed()]
    await until(lambda: first.taken)
    await until(lambda: sum(len(reader.tokens) > after for reader in readers) > 2)
    second = world.start("app/engine/1", num_pages=200)
    if how == "dies":
        world.kill("app/engine/0")
    elif how == "fails":
        first.fail()
        del world.registered["app/engine/0"]
    elif how == "closes":
        for name in list(first._readers):
            first._unsubscribe(name)
    elif how == "freezes":
        first.frozen = True
    else:
        first.hand_back()
    for reader in readers:
        await reader.check()
    if how in ("dies", "fails", "freezes", "hands back"):
        assert second.taken
    deaths = {own.deaths for own in second.taken if own.output}
    assert deaths <= ({1} if how in ("dies", "fails") else {0})
    assert not second.engine.has_work
    second.engine.check_integrity()


async def test_a_lost_engine_is_one_line_of_the_log(
    world: Any, client: EnginePool, caplog: pytest.LogCaptureFixture
) -> None:
    """However many streams it had; none has an error or a traceback of its own."""
    world.start("app/engine/0", num_pages=200)
    readers = [Reader(client, request(40)) for _ in range(12)]
    await until(lambda: all(reader.tokens for reader in readers))
    world.start("app/engine/1", num_pages=200)
    caplog.clear()
    world.kill("app/engine/0")
    for reader in readers:
        await reader.check()
    (line,) = [own for own in caplog.records if own.name.startswith("rayfin")]
    assert "app/engine/0" in line.getMessage() and line.exc_info is None


async def test_frozen_engine_that_wakes_up_is_not_believed(world: Any, client: EnginePool) -> None:
    """Its late tokens are dropped, what it still held is aborted, and it may serve again."""
    first = world.start("app/engine/0")
    reader = Reader(client, request(60))
    await until(lambda: len(reader.tokens) > 5)
    first.frozen = True
    await until(lambda: not client._any_ready.is_set())
    second = world.start("app/engine/1")
    await until(lambda: second.taken)
    second.steps_left = 3
    first.frozen = False
    await until(lambda: client._connections["app/engine/0"].ready)
    await until(lambda: not first.engine.has_work)
    assert first.engine.stats().finished == {"abort": 1}
    second.steps_left = -1
    await reader.check()


async def test_no_other_engine(world: Any, client: EnginePool) -> None:
    """Streams wait for the next one, and so do newcomers."""
    world.start("app/engine/0")
    reader = Reader(client, request(50))
    await until(lambda: len(reader.tokens) > 3)
    world.kill("app/engine/0")
    await until(lambda: not client._any_ready.is_set())
    newcomer = Reader(client, request())
    await asyncio.sleep(0.05)
    assert not newcomer.deltas and not reader.task.done()
    world.start("app/engine/2")
    await reader.check()
    await newcomer.check()


async def test_nobody_waits_when_all_is_over(world: Any, client: EnginePool) -> None:
    world.start("app/engine/0")
    reader = Reader(client, request(50))
    await until(lambda: len(reader.tokens) > 3)
    world.kill("app/engine/0")
    newcomer = Reader(client, request())
    await asyncio.sleep(0.05)
    assert not reader.task.done() and not newcomer.task.done()
    client._source.is_over = lambda: True
    for waiting in (reader, newcomer):
        with pytest.raises(EngineUnavailable, match="being stopped"):
            await waiting.task


async def test_waiting_ends(world: Any, client: EnginePool) -> None:
    """With an error, after the patience for streams or the request's own deadline."""
    client._patience = Patience(newcomer=60.0, stream=0.2)
    first = world.start("app/engine/0")
    first.steps_left = 8
    stream = Reader(client, request(50))
    hasty = Reader(client, request(50, timeout=0.1))
    await until(lambda: stream.tokens and (hasty.tokens or hasty.task.done()))
    world.kill("app/engine/0")
    with pytest.raises(DeadlineExceeded):
        await hasty.task
    with pytest.raises(EngineUnavailable, match=r"no engine has taken the request for 0\.2 s"):
        await stream.task
    assert client._streams == {}


@pytest.mark.parametrize("error", [RequestFailed("poison"), DeadlineExceeded("late", "timeout")])
async def test_the_requests_own_fault_is_told(
    world: Any, client: EnginePool, error: RayfinError
) -> None:
    world.start("app/engine/0").refusal = error
    other = world.start("app/engine/1")
    other.refusal = error
    with pytest.raises(type(error)):
        await Reader(client, request()).task


async def test_full_queue(world: Any, client: EnginePool) -> None:
    """A newcomer tries every engine once; a stream that lost its own is not turned away."""
    full = world.start("app/engine/0")
    full.refusal = Overloaded("full", retry_after=7)
    with pytest.raises(Overloaded) as caught:
        await Reader(client, request()).task
    assert caught.value.retry_after == 7
    free = world.start("app/engine/1")
    await until(lambda: len(client._ready()) == 2)
    readers = [Reader(client, request(60)) for _ in range(4)]
    await until(lambda: all(reader.tokens for reader in readers))
    world.kill("app/engine/1")
    await until(lambda: not client._connections["app/engine/0"]._streams)
    await asyncio.sleep(0.05)
    assert free.taken and not full.taken and not any(reader.task.done() for reader in readers)
    full.refusal = None
    for reader in readers:
        await reader.check()


async def test_siblings_stay_together_and_others_spread(world: Any, client: EnginePool) -> None:
    engines = [world.start(f"app/engine/{n}") for n in range(2)]
    await until(lambda: len(client._ready()) == 2)
    fork_parent = request()
    younger = [request(parent_key=fork_parent.key) for _ in range(3)]
    for own in younger:
        own.prompt = fork_parent.prompt
    readers = [Reader(client, source) for source in (fork_parent, *younger, request(), request())]
    for reader in readers:
        await reader.check()
    ids = [{own.request_id for own in engine.taken} for engine in engines]
    family = {own.request_id for own in (fork_parent, *younger)}
    assert sorted(ids, key=len) == [{own.source.request_id for own in readers[4:]}, family]


async def test_draining_engine_gets_nothing_new(world: Any, client: EnginePool) -> None:
    drains, other = world.start("app/engine/0"), world.start("app/engine/1")
    await until(lambda: len(client._ready()) == 2)
    drains.draining = True
    await until(lambda: len(client._ready()) == 1)
    for reader in [Reader(client, request()) for _ in range(4)]:
        await reader.check()
    assert not drains.taken and len(other.taken) == 4


async def test_streams_leave_an_engine_that_drains(world: Any, client: EnginePool) -> None:
    """Each token comes once, and only the last pages are computed again."""
    moves: list[tuple[str, str]] = []
    client.events.moved = lambda reason, result: moves.append((reason, result))
    first = world.start("app/engine/0", **PEERS)
    readers = [Reader(client, source) for source in mixed(100)]
    await until(lambda: all(len(own.tokens) > 40 or own.task.done() for own in readers))
    first.steps_left = 0
    second = world.start("app/engine/1", **PEERS)
    await until(lambda: len(client._ready()) == 2)
    first.engine.drain()
    await until(lambda: not first.engine.lifecycle.state.live)
    first.steps_left = -1
    assert second.taken and all(len(own.output) > 40 for own in second.taken)
    for reader in readers:
        await reader.check()
    stats = second.engine.stats()
    assert ("drain", "moved") in moves and stats.pages_read["p2p", "arrived"] > 0
    computed = stats.prefix_queries - stats.prefix_hits
    assert 0 < computed <= len(second.taken) * (MOST_COMPUTED_TOKENS + 10)
    for engine in (first.engine, second.engine):
        await until(lambda engine=engine: not engine.has_work)
        engine.check_integrity()


PEERS = {"kv_peers": True, "page_bytes": 1 << 20, "num_pages": 300, "max_decoding_batch": 16}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """It pays to compute any prompt apart."""
    monkeypatch.setattr(routing, "pays_apart", lambda *_: True)


async def test_prompts_that_another_engine_computes(
    world: Any, client: EnginePool, apart: None
) -> None:
    """Their streams begin there, and go on where their pages are read."""
    moves: list[tuple[str, str]] = []
    client.events.moved = lambda reason, result: moves.append((reason, result))
    home, away = world.start("app/engine/0", **PEERS), world.start("app/engine/prefill-0", **PEERS)
    await until(lambda: len(client._ready()) == 2)
    session = SessionRef("s")
    readers = [Reader(client, source) for source in (*mixed(100), request(100, session=session))]
    for reader in readers:
        await reader.check()
    assert len(away.taken) >= 10 and not any(own.session for own in away.taken)
    assert set(moves) >= {("prefill", "moved")}
    assert home.engine.stats().pages_read["p2p", "arrived"] > 0
    assert any(own.session == session for own in home.taken)
    for engine in (home.engine, away.engine):
        await until(lambda engine=engine: not engine.has_work)
        engine.check_integrity()
    assert [own.engine for own in await client.engines()] == ["0", "prefill-0"]


@pytest.mark.parametrize("which", ["home", "away"])
@pytest.mark.parametrize("after", [0, 1, 7])
async def test_death_of_an_engine_that_computes_or_reads_prompts(
    world: Any, client: EnginePool, apart: None, which: str, after: int
) -> None:
    names = {"home": "app/engine/0", "away": "app/engine/prefill-0"}
    engines = {own: world.start(name, **PEERS) for own, name in names.items()}
    await until(lambda: len(client._ready()) == 2)
    readers = [Reader(client, source) for source in mixed(60)]
    await until(lambda: engines["away"].taken)
    await until(lambda: sum(len(reader.tokens) > after for reader in readers) > 2)
    world.kill(names[which])
    for reader in readers:
        await reader.check()


async def test_a_prompt_s_pages_that_do_not_come(
    world: Any, client: EnginePool, apart: None
) -> None:
    """The stream stays where it began."""
    moves: list[tuple[str, str]] = []
    client.events.moved = lambda reason, result: moves.append((reason, result))
    home, away = world.start("app/engine/0"), world.start("app/engine/prefill-0")
    await until(lambda: len(client._ready()) == 2)
    source = request(60)
    source.prompt = np.arange(MOST_COMPUTED_TOKENS + 10, dtype=np.int32) % VOCABULARY
    reader = Reader(client, source)
    await reader.check()
    assert away.taken and not home.taken and set(moves) == {("prefill", "stayed")}


@pytest.mark.parametrize(("seconds", "result"), [(9.0, "stayed"), (0.1, "moved")])
async def test_streams_without_pages_move_only_if_they_are_computed_in_no_time(
    world: Any, client: EnginePool, seconds: float, result: str
) -> None:
    moves: list[tuple[str, str]] = []
    client.events.moved = lambda reason, result: moves.append((reason, result))
    first = world.start("app/engine/0")
    reader = Reader(client, request(100))
    await until(lambda: len(reader.tokens) > 40)
    first.steps_left = 0
    second = world.start("app/engine/1")
    second.seconds_to_compute = seconds
    await until(lambda: len(client._ready()) == 2)
    first.engine.drain()
    await until(lambda: moves)
    first.steps_left = -1
    await reader.check()
    assert bool(second.taken) == (result == "moved") and set(moves) == {("drain", result)}


async def test_sleeping_engine_gets_nothing_new_and_loses_nothing(
    world: Any, client: EnginePool
) -> None:
    """Running requests pause; without another engine new ones are refused at once."""
    sleeper = world.start("app/engine/0")
    readers = [Reader(client, request(40)) for _ in range(3)]
    await until(lambda: all(len(reader.tokens) > 5 for reader in readers))
    (reported,) = await client.manage(Command.SLEEP, "0")
    assert (reported.engine, reported.state, reported.stats.pages_held) == ("0", "asleep", 0)
    with pytest.raises(EngineAsleep):
        await Reader(client, request()).task
    other = world.start("app/engine/1")
    await until(lambda: client._ready())
    for reader in [Reader(client, request()) for _ in range(4)]:
        await reader.check()
    assert len(sleeper.taken) == 3 and len(other.taken) == 4
    assert not any(reader.task.done() for reader in readers)
    assert [own.state for own in await client.engines()] == ["asleep", "ready"]
    await client.manage(Command.WAKE, None)
    for reader in readers:
        await reader.check()
    with pytest.raises(NotFound):
        await client.manage(Command.WAKE, "7")


async def test_stream_whose_engine_is_replaced_waits_beside_one_that_sleeps(
    world: Any, client: EnginePool
) -> None:
    world.start("app/engine/0")
    first = world.start("app/engine/1")
    await until(lambda: len(client._ready()) == 2)
    await client.manage(Command.SLEEP, "0")
    first.steps_left = 8
    reader = Reader(client, request(40))
    await until(lambda: not first.steps_left)
    world.kill("app/engine/1")
    await until(lambda: list(client._connections) == ["app/engine/0"])
    assert client._all_asleep and not reader.task.done() and reader.tokens
    world.start("app/engine/1")
    await reader.check()


async def test_engine_that_sleeps_unseen_sends_newcomers_away(
    world: Any, client: EnginePool
) -> None:
    """Another ingress has put it to sleep, and this one has yet to hear of it."""
    sleeper = world.start("app/engine/0")
    await until(lambda: client._ready())
    sleeper.engine.carry_out(Command.SLEEP)
    with pytest.raises(EngineAsleep):
        await Reader(client, request()).task


async def test_another_model_s_engine_gets_no_request(world: Any, client: EnginePool) -> None:
    """A stream whose engine goes waits for one that gives the same tokens."""
    client._source.identity = "model=a"
    first, foreign = world.start("app/engine/0"), world.start("app/engine/1")
    first.identity, foreign.identity = "model=a", "model=b"
    readers = [Reader(client, request(60)) for _ in range(4)]
    await until(lambda: all(len(reader.tokens) > 5 for reader in readers))
    assert [own.engine for own in await client.engines()] == ["0"]
    world.kill("app/engine/0")
    await until(lambda: "app/engine/0" not in client._connections)
    world.start("app/engine/2").identity = "model=a"
    for reader in readers:
        await reader.check()
    assert not foreign.taken


async def test_beam_search_starts_again(world: Any, client: EnginePool) -> None:
    search = request(6, beams=BeamParams(width=2))
    first = world.start("app/engine/0")
    first.steps_left = 4
    reader = Reader(client, search)
    await until(lambda: first.taken and not first.steps_left)
    assert not reader.deltas
    world.kill("app/engine/0")
    world.start("app/engine/0")
    await reader.task
    (delta,) = reader.deltas
    assert delta.hypotheses == Stream(search, VOCABULARY).search[0]


async def test_every_token_once_through_many_deaths(world: Any, client: EnginePool) -> None:
    world.start("app/engine/0")
    readers = [Reader(client, source) for source in mixed()]
    for number in range(1, 8):
        before = sum(len(reader.tokens) for reader in readers)
        await until(
            lambda before=before: (
                sum(len(reader.tokens) for reader in readers) > before + 6
                or all(reader.task.done() for reader in readers)
            )
        )
        world.kill(f"app/engine/{number - 1}")
        world.start(f"app/engine/{number}")
    for reader in readers:
        await reader.check()


async def test_recall_takes_the_longest_log(world: Any, client: EnginePool) -> None:
    """An engine that was taken for lost may know less of a request than the one that went on."""
    first, second = world.start("app/engine/0"), world.start("app/engine/1")
    await until(lambda: len(client._ready()) == 2)
    receipt = Receipt("cmpl-1", 1, b"")
    old = request(9, tenant="me", receipt=receipt, client="other")
    new = request(9, tenant="me", receipt=receipt, client="other")
    new.request_id = old.request_id
    new.output = [4, 5, 6]
    first.engine.add(old)
    second.engine.add(new)
    (log, unknown) = await client.recall("me", [old.request_id, "r0"])
    assert log is not None and log.tokens[:3] == [4, 5, 6] and unknown is None
    await until(lambda: not first.engine.has_work and not second.engine.has_work)
    assert await client.recall("you", [old.request_id]) == [None]


async def test_registry_that_is_away_costs_nothing(
    world: Any, client: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start("app/engine/0")
    await until(client._ready)
    asked = 0

    def fail() -> dict[str, Any]:
        nonlocal asked
        asked += 1
        raise ActorUnavailableError("no registry", None)

    monkeypatch.setattr(client._source, "find", fail)
    await until(lambda: asked > 2)
    await Reader(client, request()).check()


async def test_engines_have_short_names_in_metrics(world: Any, client: EnginePool) -> None:
    """The number at the end of the name, or the first one that is free."""
    for name in ("app/engine/k3x9", "app/engine/1", "app/engine/zz"):
        world.start(name)
        await until(
            lambda name=name: name in client._connections and client._connections[name].ready
        )
        assert set(await client.stats()) <= {"0", "1", "2"}
    assert set(await client.stats()) == {"0", "1", "2"}
    world.kill("app/engine/k3x9")
    await until(lambda: "app/engine/k3x9" not in client._connections)
    world.start("app/engine/new")
    await until(lambda: len(client._ready()) == 3)
    assert set(await client.stats()) == {"0", "1", "2"}


async def test_each_whole_answer_tells_its_time_on_the_way(client: EnginePool, world: Any) -> None:
    """Also after a replay: of the attempt that came to its end."""
    reported: list[float] = []
    client.events.transported = reported.append
    one = world.start("one")
    readers = [Reader(client, request()) for _ in range(3)]
    await until(lambda: all(reader.tokens for reader in readers))
    world.kill("one")
    world.start("two")
    for reader in readers:
        await reader.check()
    assert len(reported) == len(readers) and all(0 <= seconds < 20 for seconds in reported)
    assert not one.alive
