"""Requests go where their prompt's head is cached, unless there is too much to do."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rayfin.actors.adapters.part import AdapterRef, short
from rayfin.actors.messages import (
    BeamParams,
    EngineRequest,
    PagesAt,
    Sampling,
    SessionRef,
    StopRules,
)
from rayfin.actors.timing import SENT_SECONDS
from rayfin.cache.page_tables import PageTables
from rayfin.cache.prefix_index import HashChain, digests_of
from rayfin.deployments.client.routing import (
    ADAPTER_TOKENS,
    CACHED_WEIGHT,
    RUNNING_TOKENS,
    Candidate,
    LeastLoaded,
    PrefixAware,
    Router,
    SentPages,
)

PAGE = 4
TWO = [Candidate(name, page_size=PAGE, num_pages=1000) for name in "ab"]


def request(prompt: Any, **settings: Any) -> EngineRequest:
    tokens = np.array(prompt, np.int32)
    return EngineRequest("r", tokens, Sampling(), StopRules(3), **settings)


def loaded(name: str, running: int) -> Candidate:
    return Candidate(name, running=running, page_size=PAGE, num_pages=1000)


def test_prompts_that_begin_alike_stay_together() -> None:
    router = PrefixAware()
    heads = [[head] * 9 for head in range(8)]
    homes = [router.pick(request(head), TWO).name for head in heads]
    assert homes == ["a", "b"] * 4
    for turn in range(3):
        for head, home in zip(heads, homes, strict=True):
            assert router.pick(request([*head, 100 + turn, turn]), TWO).name == home


def test_it_says_who_has_more_of_a_prompt() -> None:
    """Where load sends a request elsewhere; the engine that it goes to reads the pages there."""
    router = PrefixAware()
    assert router.pick(request([1] * 17), TWO).name == "a"
    asked = request([1] * 17 + [2] * 8)
    assert router.pick(asked, [loaded("a", 0), loaded("b", 0)]).name == "a"
    assert asked.pages_at is None
    asked = request([1] * 17 + [3] * 8)
    assert router.pick(asked, [loaded("a", 9), loaded("b", 0)]).name == "b"
    assert asked.pages_at == PagesAt("a", 4)
    assert router.pick(asked, [loaded("a", 9), loaded("b", 0)]).name == "b"
    assert asked.pages_at is None, "a hint of the attempt before"
    asked.pages_at = PagesAt("a", 4)
    assert router.pick(asked, [loaded("b", 0)]).name == "b"
    assert asked.pages_at is None, "an engine that is gone"


@pytest.mark.parametrize("router", [LeastLoaded(), PrefixAware()])
def test_an_engine_that_has_the_adapter_is_preferred(router: Router) -> None:
    """As long as its work is not more than reading the adapter elsewhere would cost."""
    ref = AdapterRef("5e" * 32, "sql", "/sql")
    asked = request([1, 2, 3])
    asked.use(ref)
    holder = replace(loaded("b", 0), adapters=frozenset({short(ref.digest)}))
    most = ADAPTER_TOKENS // RUNNING_TOKENS  # requests
    for running, chosen in ((0, "b"), (most - 1, "b"), (most + 1, "a")):
        candidates = [loaded("a", 0), replace(holder, running=running)]
        assert router.pick(asked, candidates).name == chosen
    assert router.pick(request([1, 2, 3]), [loaded("a", 0), replace(holder, running=1)]).name == "a"


def test_only_what_the_cache_would_share_counts() -> None:
    """Full pages, under equal salts."""
    router = PrefixAware()
    assert router.pick(request([1] * 8, extra_keys=("salt",)), TWO).name == "a"
    assert router.pick(request([1] * 8, extra_keys=("other",)), TWO).name == "b"
    assert router.pick(request([1] * 8, extra_keys=("salt",)), TWO).name == "a"
    assert router.pick(request([1] * 3), TWO).name == "b"
    assert router.pick(request([1] * 3), TWO).name == "a"


def test_an_engine_with_too_much_to_do_is_left() -> None:
    router = PrefixAware()
    prompt = request([1] * 64)
    assert router.pick(prompt, TWO).name == "a"
    worth = CACHED_WEIGHT * 64 // RUNNING_TOKENS  # requests
    assert router.pick(prompt, [loaded("a", worth - 1), loaded("b", 0)]).name == "a"
    assert router.pick(prompt, [loaded("a", worth + 1), loaded("b", 0)]).name == "b"
    assert router.pick(prompt, [loaded("a", 1), loaded("b", 0)]).name == "b"  # both have it now


def test_what_is_remembered_is_bounded() -> None:
    """As the engine's cache: the least recently used goes, tails before heads."""
    sent, chains = SentPages(), [[b"%d.%d" % (own, page) for page in range(4)] for own in range(3)]
    sent.add(chains[0], 10)
    sent.add(chains[1], 10)
    sent.add(chains[0], 10)
    sent.add(chains[2], 10)
    assert [sent.match(chain) for chain in chains] == [4, 2, 4]
    router = PrefixAware()
    small = [Candidate(name, page_size=PAGE, num_pages=10) for name in "ab"]
    rng = random.Random(0)
    for _ in range(200):
        router.pick(request(rng.choices(range(50), k=rng.randrange(60))), small)
    assert {len(sent) for sent in router._sent.values()} == {10}


def test_what_engines_say_counts() -> None:
    """A router that has sent nothing knows it too, and hints at it after a scale-up."""
    chain = HashChain(PAGE)
    chain.extend(np.arange(40, dtype=np.int32))
    tables = PageTables(1, 100, PAGE, prefix_caching=True)
    assert tables.grow(0, 40)
    tables.publish(0, chain, np.arange(28, dtype=np.int32))
    assert tables.index is not None and tables.index.digests(6) is None
    held = tables.index.digests(7)
    a, b = (replace(own, held=np.zeros(0, np.uint64)) for own in TWO)
    assert PrefixAware().pick(request(range(40)), [a, replace(b, held=held)]).name == "b"
    asked = request(range(40))
    assert PrefixAware().pick(asked, [a, replace(b, held=held, running=9)]).name == "a"
    assert asked.pages_at == PagesAt("b", 7)
    tables.reset_prefix_cache()
    assert (
        PrefixAware().pick(request(range(40)), [a, replace(b, held=tables.index.digests(7))]) == a
    )


def test_what_was_sent_counts_until_engines_must_have_it() -> None:
    now = 0.0
    router = PrefixAware(lambda: now)
    says = [replace(own, held=np.zeros(0, np.uint64)) for own in TWO]
    assert router.pick(request([1] * 64), says).name == "a"
    now = SENT_SECONDS - 1
    assert router.pick(request([1] * 64), says).name == "a"
    now += SENT_SECONDS + 1
    assert router.pick(request([1] * 64), says).name == "b", "a does not hold it"


def test_one_engine_is_not_asked_about() -> None:
    router = PrefixAware()
    assert router.pick(request([1] * 100), TWO[:1]).name == "a"
    assert not router._sent


def test_sessions_stay_where_their_pages_are_kept() -> None:
    """Whatever they ask, and whichever ingress; until the queue there costs more."""
    engines = [Candidate(name, page_size=PAGE, num_pages=100, unclaimed=50) for name in "abcd"]
    routers = [PrefixAware(), PrefixAware()]
    homes = {}
    for number in range(40):
        session = SessionRef(f"s{number}")
        asked = request([number] * 36, session=session)
        homes[number] = routers[0].pick(asked, engines).name
        assert routers[1].pick(asked, engines).name == homes[number]  # with nothing heard yet
        kept = [
            replace(engine, sessions=frozenset([session.digest("")]))
            if engine.name == homes[number]
            else engine
            for engine in engines
        ]
        changed = request([99 - number] * 36, session=session)
        for running, stays in ((0, True), (1, True), (2, False)):
            busy = [
                replace(own, running=running * (own in kept and own.sessions != frozenset()))
                for own in kept
            ]
            assert (PrefixAware().pick(changed, busy).name == homes[number]) == stays
        other = request([1] * 36, session=session, tenant="other")
        names = {PrefixAware().pick(other, kept).name for _ in range(2)}
        assert len(names) == 1  # tenants choose labels for themselves only
    assert set(homes.values()) == set("abcd")


def test_new_sessions_go_where_there_is_room() -> None:
    engines = [
        Candidate("a", page_size=PAGE, num_pages=100, unclaimed=3),
        Candidate("b", page_size=PAGE, num_pages=100, unclaimed=30, waiting_tokens=20),
    ]
    for number in range(9):
        asked = request([number] * 40, session=SessionRef(f"s{number}"))
        assert PrefixAware().pick(asked, engines).name == "b"
        assert PrefixAware().pick(request([number] * 40), engines).name == "a"
    late = [engines[0], replace(engines[1], waiting_tokens=30)]
    assert PrefixAware().pick(asked, late).name == "a"


HOME = replace(
    Candidate("a", page_size=PAGE, num_pages=1000, unclaimed=900, running=8, prompt_seconds=3.0),
    read_seconds={"": 0.1},
)
AWAY = Candidate("prefill-0", page_size=PAGE, num_pages=1000, prefill=True, prompt_seconds=3.0)


@pytest.mark.parametrize(
    ("tokens", "home", "away", "apart"),
    [
        (1000, {}, {}, True),
        (100, {}, {}, True),
        (36, {}, {}, False),  # it takes as long to compute what a stream that moves has not
        (24, {"running": 0, "waiting_tokens": 900}, {}, False),  # nor in a queue of short ones
        (1000, {"running": 0}, {}, False),  # no stream waits meanwhile
        (1000, {}, {"waiting_tokens": 9000}, False),
        (1000, {"waiting_tokens": 9000}, {"waiting_tokens": 9000}, True),
        (1000, {"read_seconds": {"": 99.0}}, {}, False),  # a slow network
        (1000, {"read_seconds": {"": 99.0, "prefill-0": 0.1}}, {}, True),
        (1000, {"read_seconds": {"": 0.1, "prefill-0": np.inf}}, {}, False),  # it gave nothing
        (1000, {"read_seconds": {}}, {}, False),  # it reads from none
        (1000, {"unclaimed": 100}, {}, False),  # no pages are free
        (1000, {"unclaimed": None}, {}, False),
        (1000, {"prompt_seconds": 0.0}, {}, True),
        (1000, {"prompt_seconds": 0.0}, {"prompt_seconds": 0.0}, False),  # neither knows
        (1000, {}, {"prompt_seconds": 90.0}, False),  # a slow machine
    ],
)
def test_prompts_are_computed_where_it_costs_least(
    tokens: int, home: dict[str, Any], away: dict[str, Any], apart: bool
) -> None:
    engines = [replace(HOME, **home), replace(AWAY, **away)]
    asked = request(range(tokens))
    assert PrefixAware().pick(asked, engines).name == ("prefill-0" if apart else "a")


def test_only_what_is_not_cached_is_computed_apart() -> None:
    chain = HashChain(PAGE)
    chain.extend(np.arange(1000, dtype=np.int32))
    warm = replace(HOME, held=np.sort(digests_of(chain.hashes)))
    assert PrefixAware().pick(request(range(1010)), [warm, AWAY]).name == "a"
    longer = request(range(2000))
    assert PrefixAware().pick(longer, [warm, AWAY]).name == "prefill-0"
    assert longer.pages_at == PagesAt("a", 250), "it reads what is there"


@pytest.mark.parametrize(
    "more",
    [{"beams": BeamParams(2)}, {"background": True}, {"sampling": Sampling(prompt_logprobs=1)}],
)
def test_some_requests_stay_in_one_place(more: dict[str, Any]) -> None:
    asked = replace(request(range(1000)), **more)
    assert PrefixAware().pick(asked, [HOME, AWAY]).name == "a"


def test_roles_are_soft() -> None:
    """Without the others those that prefill do all; streams that run there go on elsewhere."""
    router, asked = PrefixAware(), request(range(9))
    two = [AWAY, replace(AWAY, name="prefill-1")]
    assert router.pick(asked, two).prefill
    assert router.next_home(asked, AWAY, [two[1]]) is None
    assert router.next_home(asked, replace(AWAY, draining=True), [two[1]]) == two[1]
    assert router.next_home(request(range(1000)), AWAY, [HOME, two[1]]) == HOME
    assert router.next_home(request(range(1000)), replace(HOME, draining=True), [two[1]]) == two[1]
    assert router.next_home(asked, HOME, [replace(HOME, name="b")]) is None


class Cache:
    """An engine's cache, of which requests hold pages for a while."""

    def __init__(self, name: str, num_pages: int, held: int) -> None:
        self.name, self.num_pages = name, num_pages
        self.tables = PageTables(held + 1, num_pages, PAGE, prefix_caching=True)
        self.running: deque[int] = deque()
        self.free = deque(range(held + 1))
        self.asked = self.hit = 0

    def candidate(self) -> Candidate:
        running = len(self.running)
        return Candidate(self.name, running=running, page_size=PAGE, num_pages=self.num_pages)

    def run(self, source: EngineRequest) -> None:
        chain = HashChain(PAGE)
        chain.extend(source.prompt)
        pages = self.tables.match(chain, source.prompt)
        self.asked += len(source.prompt)
        self.hit += PAGE * len(pages)
        slot = self.free.popleft()
        self.tables.share(slot, pages)
        while not self.tables.grow(slot, len(source.prompt)):
            self.end()
        self.tables.publish(slot, chain, source.prompt)
        self.running.append(slot)

    def end(self) -> None:
        slot = self.running.popleft()
        self.tables.release(slot)
        self.free.append(slot)


class AtRandom(Router):
    """What a balancer does that knows nothing."""

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def pick(self, request: EngineRequest, candidates: Sequence[Candidate]) -> Candidate:
        return self._rng.choice(candidates)


def hit_rate(router: Router, caches: list[Cache]) -> float:
    """Of prompts with 24 heads of 20 pages, some of which are asked for more often."""
    rng = random.Random(7)
    by_name = {own.name: own for own in caches}
    for number in range(1500):
        head = min(int(rng.expovariate(0.12)), 23)
        tail = [1000 + number, *rng.choices(range(50), k=rng.randrange(12))]
        source = request([head] * (20 * PAGE) + tail)
        by_name[router.pick(source, [own.candidate() for own in caches]).name].run(source)
        for own in caches:
            while len(own.running) > 4:
                own.end()
            if own.running and rng.random() < 0.5:
                own.end()
    return sum(own.hit for own in caches) / sum(own.asked for own in caches)


@pytest.mark.parametrize("pages", [360, 600])
def test_two_engines_find_nearly_what_one_with_all_the_memory_finds(pages: int) -> None:
    def halves() -> list[Cache]:
        return [Cache(name, pages // 2, 6) for name in "ab"]

    whole = hit_rate(PrefixAware(), [Cache("a", pages, 12)])
    routers: list[Router] = [PrefixAware(), LeastLoaded(), AtRandom()]
    aware, blind, any_ = (hit_rate(router, halves()) for router in routers)
    print(f"one {whole:.3f}; two: by prefix {aware:.3f}, by load {blind:.3f}, random {any_:.3f}")
    assert aware >= 0.9 * whole
    assert max(blind, any_) < aware
