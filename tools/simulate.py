"""Whole lives of an engine without a model: clients, faults and a virtual clock from one seed.

    python tools/simulate.py --seeds 1000          # lives 0 .. 999
    python tools/simulate.py --seed 17             # one of them again
    python tools/simulate.py --requests 100000     # one long life

A life is a random configuration, workload and series of faults on a ``FakeExecutor``. Every stream
must get exactly its tokens and one end, and the pages must add up after every step.
"""

import argparse
import hashlib
import heapq
import math
import random
import resource
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from fake_disk import FakeFolder, fake_folder
from fake_stream import Stream
from harness import make_harness
from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import (
    EnginePaused,
    EngineUnavailable,
    InvalidRequest,
    Overloaded,
    RequestHandedBack,
    RequestQuarantined,
)
from rayfin.actors.guidance import CallGrammar, Guidance
from rayfin.actors.media.part import VIRTUAL_TOKENS, MediaInput
from rayfin.actors.media.virtual_ids import virtual_ids
from rayfin.actors.messages import COPY, BeamParams, Command, PagesAt, Pin, SessionRef
from rayfin.actors.parts import all_of
from rayfin.actors.settings.bidirectional import Bidirectional
from rayfin.actors.timing import PAGE_READ_SECONDS, PREPARE_SECONDS
from rayfin.actors.weights.version import WeightVersion
from rayfin.cache.window_tables import WindowGroups

STARTS = [[(3 * i + i * i // 7) % 50 for i in range(70)], [1] * 70]
"""What prompts begin with, where they begin alike."""


class Life:
    """One seed's engine, and what happens to it when."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.guided = random.Random(f"guided {seed}")
        self.drafting = random.Random(f"drafting {seed}")
        self.pacing = random.Random(f"pacing {seed}")
        self.adapting = random.Random(f"adapters {seed}")
        self.seeing = random.Random(f"images {seed}")
        self.keeping = random.Random(f"disk {seed}")
        self.pausing = random.Random(f"sessions {seed}")
        self.training = random.Random(f"weights {seed}")
        self.asking = random.Random(f"peers {seed}")
        self.sleeping = random.Random(f"sleeps {seed}")
        self.windowed = random.Random(f"windows {seed}")
        self.offloading = random.Random(f"offloading {seed}")
        self.num_sent_on = 0  # to another engine, for this one slept
        self.num_slept = self.num_changed_asleep = 0
        self.num_paused_out = 0  # refused for a pause
        self.num_refused = 0
        self.num_warmed = self.num_moved = 0
        self.num_quarantined = 0  # for the prompt of one that was convicted
        self.harness = make_harness(**self._settings())
        self.refused = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._plan_faults()
        self._plan_drafts()
        self._plan_grammars()
        self._plan_adapters()
        self._plan_images()
        self._plan_disk()
        self._plan_peers()
        self._plan_offloading()
        self._plan_sessions()
        self._plan_weights()
        self._plan_sleeps()
        self._plan_requests()

    def run(self) -> None:
        """The whole life.

        Raises:
            AssertionError: something was not as it must be.
        """
        harness, executor, turns = self.harness, self.harness.executor, 0
        while self._events or harness.engine.has_work:
            if not harness.engine.has_work:
                executor.clock = max(executor.clock, self._events[0][0])
            while self._events and self._events[0][0] <= executor.clock:
                heapq.heappop(self._events)[2]()
            harness.step()
            harness.wait(self._events[0][0] if self._events else math.inf)
            turns += 1
            # Where steps take no time, time still passes for a disk that has pages to write.
            executor.clock += 0.00001 * (turns > 10_000)
            assert turns < 40_000, "the engine does not get done"
        harness.run()
        harness.check()

    def _settings(self) -> dict[str, Any]:
        draw = self.random
        self.model_len = draw.randint(8, 70)
        self.outgrows = draw.random() < 0.4  # short prompts, long outputs: pages run out
        page_size, rows = draw.choice([1, 2, 3, 4, 8, 16]), draw.randint(1, 8)
        pages_of_one = -(-self.model_len // page_size)
        scheduler = draw.choice(["v0", "v1", "v1"])
        uncut = self._uncut()
        settings = {
            "scheduler": scheduler,
            "itl_target": self.pacing.choice([None, None, 0.0003, 0.002]),
            "long_prefill_token_threshold": draw.choice([0, 0, 1, 3, 10]) * (scheduler == "v1"),
            "policy": draw.choice(["fcfs", "priority", "fair"]),
            "priority_aging": draw.choice([0.0, 0.001, 0.02, 30.0]),
            "tenant_weights": draw.choice([{}, {"a": 3.0}, {"a": 0.5, "b": 7.0}]),
            "max_waiting_requests": draw.choice([2, 5, 1000, 1000, 1000]),
            "max_waiting_tokens": draw.choice([None, None, None, 30, 100]),
            "steps_in_flight": draw.randint(1, 2),
            "page_size": page_size,
            "num_pages": pages_of_one + draw.randint(0, draw.choice([2, 3 * pages_of_one])),
            "max_model_len": self.model_len,
            "max_decoding_batch": rows,
            "max_batch_tokens": max(draw.randint(rows, 64), rows + self.most_image_tokens),
            "max_prefill_batch": draw.randint(1, 4),
            "vocab_size": draw.choice([3, 50]),
            "prefix_caching": draw.random() < 0.85,
            "max_lease": draw.choice([1, 3, 7, 16]),
            "num_host_pages": draw.choice([0, 0, 1, 5, 20, 1000]),
            "step_seconds": draw.choice([0.0, 0.0002, 0.0002, 0.001, 0.01]),
            "num_speculative_tokens": self.drafting.choice([0, 0, 1, 2, 5, 8])
            * (scheduler == "v1"),
            "max_loras": self.adapting.choice([0, 0, 1, 2, 8]),
            "uncut": uncut,
            "num_offloaded_pages": self.offloading.choice([0, 0, 1, 5, 30, 300]),
            "page_folder": self._folder(),
            "kv_peers": self.asking.random() < 0.7,
            "page_bytes": 1 << 20,
        }
        return settings | self._windows(settings)

    def _windows(self, settings: dict[str, Any]) -> dict[str, Any]:
        """In some lives layers see windows: what does not go with them is off, as at a load."""
        draw = self.windowed
        if draw.random() >= 0.3:
            return {}
        ahead = settings["steps_in_flight"] * settings["max_lease"]
        ahead *= 1 + settings["num_speculative_tokens"]
        longest = self.model_len if settings["scheduler"] == "v0" else 0
        tokens = max(settings["max_batch_tokens"], longest, ahead) + settings["page_size"]
        groups = WindowGroups(draw.choice([1, 3, 8, 20]), draw.choice([1, 2, 5]))
        groups = groups.with_reach(tokens, settings["page_size"])
        pages = groups.pages(-(-self.model_len // settings["page_size"]))
        return {
            "windows": groups,
            "num_pages": pages + draw.randint(0, draw.choice([2, 3 * pages])),
            **{"num_host_pages": 0, "page_folder": None, "kv_peers": False, "sessions": False},
            "num_offloaded_pages": 0,
        }

    def _plan_faults(self) -> None:
        """Deaths, wrong and late answers; no more than an engine puts up with in a row."""
        draw, executor = self.random, self.harness.executor
        executor.token_seconds = draw.choice([0.0, 0.00005])
        for _ in range(draw.choice([0, 0, 0, 1, 2, 3])):
            kind = draw.choice([executor.fail_at, executor.fail_submit_at, executor.stale_at])
            kind.add(draw.randint(0, 40))
        if draw.random() < 0.2:
            executor.poison.update(draw.sample(range(15), draw.randint(1, 2)))
            executor.poison_raises = draw.random() < 0.5
        for _ in range(draw.choice([0, 0, 1, 2])):
            executor.errors.add((draw.randint(0, 9), draw.randint(0, 8)))
        for _ in range(draw.choice([0, 0, 3])):
            executor.delays[draw.randint(0, 40)] = draw.random() * 0.05

    def _plan_drafts(self) -> None:
        """How often drafts are right."""
        self.harness.executor.share_right = self.drafting.choice([0.0, 0.5, 0.9, 1.0])

    def _plan_grammars(self) -> None:
        """What requests are guided by, how long runners compile it, and what does not compile."""
        draw, executor = self.guided, self.harness.executor
        self.share_guided = draw.choice([0.0, 0.1, 0.5, 1.0])
        self.grammars = [f"grammar {number}" for number in range(draw.randint(1, 9))]
        pauses = draw.choice([[0.0], [0.0, 0.001], [0.0005, 0.004, 0.03], [0.01, math.inf]])
        for grammar in self.grammars:
            executor.prepare_seconds[grammar] = draw.choice(pauses)
        if draw.random() < 0.3:
            executor.grammar_errors.add(draw.choice(self.grammars))

    def _guidance(self) -> Guidance | None:
        draw = self.guided
        if draw.random() >= self.share_guided:
            return None
        grammar = draw.choice(self.grammars)
        if draw.random() < 0.2:
            return Guidance(calls=CallGrammar((1,), grammar))
        return Guidance(grammar if draw.random() < 0.9 else "")

    def _folder(self) -> FakeFolder | None:
        return fake_folder() if self.keeping.random() < 0.4 else None

    def _plan_disk(self) -> None:
        """How long pages take from and to a disk, and when it loses some, or an operator all."""
        draw, folder = self.keeping, self.harness.config.page_folder
        if not isinstance(folder, FakeFolder):
            return
        pauses = [0.0, 0.0001, 0.003, 0.05, 2 * PAGE_READ_SECONDS]
        self.harness.executor.disk_seconds = draw.choice(pauses)

        def lose() -> None:
            for page_hash in draw.sample(sorted(folder.pages), len(folder.pages) // 3):
                (folder.broken.add if draw.random() < 0.5 else folder.pages.pop)(page_hash)

        for _ in range(draw.choice([0, 0, 3])):
            self._at(draw.random() * 0.1, lose)
        if draw.random() < 0.1:
            reset = partial(self.harness.engine.carry_out, Command.RESET_CACHE)
            self._at(draw.random() * 0.1, reset)
        for _ in range(draw.choice([0, 5, 30])):  # the disk has what the device has no more
            self._at(draw.random() * 0.1, self.harness.engine.lifecycle.forget_prefixes)

    def _plan_offloading(self) -> None:
        """When all that is free goes to host memory, as far as it fits."""
        draw, running = self.offloading, self.harness.engine.lifecycle.state.running

        def evict() -> None:
            if len(running):  # the moves go with its next step
                self.harness.evict()

        if self.harness.config.num_offloaded_pages:
            for _ in range(draw.choice([0, 5, 30])):
                self._at(draw.random() * 0.1, evict)

    def _plan_peers(self) -> None:
        """How long pages take from other engines, and when those lose some."""
        draw, executor = self.asking, self.harness.executor
        self.share_hinted, self.reading_pays = draw.choice([0.3, 1.0]), False
        if not self.harness.config.kv_peers:
            return
        self.reading_pays = draw.random() < 0.7  # computing takes so long, and arrivals
        if self.reading_pays:
            executor.token_seconds = 0.03
        if self.harness.config.page_folder is None:
            executor.disk_seconds = draw.choice([0.0, 0.0001, 0.003, 0.05, 2 * PAGE_READ_SECONDS])

        def lose() -> None:
            for folder in (peer.of(executor.digest) for peer in executor.peers.values()):
                for page_hash in draw.sample(sorted(folder.pages), len(folder.pages) // 3):
                    (folder.broken.add if draw.random() < 0.5 else folder.pages.pop)(page_hash)

        for _ in range(draw.choice([0, 0, 5])):
            self._at(draw.random() * 0.1, lose)

    def _warm(self) -> None:
        """A stream that another engine has is to go on here: its pages come first."""
        harness = self.harness
        streams = [stream for stream in harness.streams.values() if harness.may_move(stream)]
        if not streams:
            return
        stream = self.asking.choice(streams)
        harness.executor.share_pages("a")
        if self.asking.random() < 0.7:
            harness.engine.lifecycle.forget_prefixes()
        harness.warm(stream, "a", lambda pages: self._move(stream))

    def _move(self, stream: Stream) -> None:
        self.num_warmed += 1
        if self.harness.may_move(stream):
            self._at(self.harness.executor.clock, partial(self._replay, stream))

    def _replay(self, stream: Stream) -> None:
        if self.harness.may_move(stream) and not self.harness.executor.asleep:
            self.num_moved += 1
            self.harness.move(stream)

    def _pin(self, prompt: list[int]) -> Pin | None:
        """How much of the prompt stays in the cache, if windows are in the way."""
        draw = self.windowed
        if self.harness.config.windows is None or draw.random() >= 0.2:
            return None
        return Pin(draw.randint(1, len(prompt)), draw.choice([0.0005, 0.01, 1.0]))

    def _pages_at(self) -> PagesAt | None:
        """What a router says: right, stale, or of an engine that is gone.

        Before, another engine may get what this one has, and this one lose it.
        """
        draw = self.asking
        if self.harness.config.kv_peers:
            if draw.random() < 0.7:
                self.harness.executor.share_pages(draw.choice("ab"))
            if draw.random() < 0.5:
                self.harness.engine.lifecycle.forget_prefixes()
        if draw.random() >= self.share_hinted:
            return None
        known = [
            engine
            for engine, folder in self.harness.executor.peers.items()
            if folder.of(self.harness.executor.digest).pages
        ]
        right = known if draw.random() < 0.9 else ["c"]
        return PagesAt(draw.choice(right), draw.randint(0, 40)) if right else None

    def _plan_weights(self) -> None:
        """Pauses, most with new weights, and runners that die amid them."""
        draw = self.training
        self.harness.executor.fail_turns = draw.choice([0, 0, 0, 1, 2])
        for _ in range(draw.choice([0, 0, 1, 2, 5])):
            self._at(draw.random() * 0.1, self._pause)

    def _pause(self) -> None:
        draw, updates = self.training, self.harness.engine.updates
        if not updates.state(None).pausing:
            mode = draw.choice(["keep", "keep", "wait", "abort"])
            updates.pause(mode, draw.choice(["wait", "wait", "refuse"]))
            self.harness.step()  # its clients hear of their ends
            self._at(self.harness.executor.clock, self._commit)

    def _commit(self) -> None:
        """Once the engine is paused, it gets new weights, or none; then it goes on."""
        draw, updates = self.training, self.harness.engine.updates
        soon = self.harness.executor.clock + draw.choice([0.0001, 0.001, 0.02])
        if not updates.is_paused:
            self._at(soon, self._commit)
            return
        if draw.random() < 0.8:
            serial = updates.version.serial + 1
            version = WeightVersion(serial, str(serial), f"{serial:064x}", "/nowhere")
            in_place, pages = draw.random() < 0.8, draw.choice(["recompute", "recompute", "keep"])
            updates.commit(version, in_place=in_place, pages=pages)
            self.harness.engine.check_integrity()
        self._at(soon, updates.resume)

    def _plan_sleeps(self) -> None:
        """Sleeps of both levels, amid which others give new weights."""
        for _ in range(self.sleeping.choice([0, 0, 1, 2])):
            self._at(self.sleeping.random() * 0.1, self._sleep)

    def _sleep(self) -> None:
        draw, engine = self.sleeping, self.harness.engine
        deep = draw.random() < 0.5
        try:
            engine.carry_out(Command.SLEEP_DEEP if deep else Command.SLEEP)
        except EngineUnavailable:  # its runners have died: it is awake
            return
        self.num_slept += 1
        self.harness.step()  # its clients get the tokens of the last steps
        serial, soon = engine.updates.version.serial, self.harness.executor.clock
        if draw.random() < 0.5:
            self._at(soon, self._pause)
        for command in (*([Command.LOAD] * deep), Command.WAKE):
            soon += draw.choice([0.0, 0.001, 0.02])
            self._at(soon, partial(self._wake, command, serial))

    def _wake(self, command: Command, serial: int) -> None:
        engine = self.harness.engine
        self.num_changed_asleep += engine.updates.version.serial > serial
        engine.carry_out(command)
        engine.check_integrity()

    def _uncut(self) -> Bidirectional:
        """Whether images are computed whole. Those that are, are small beside a step."""
        self.most_image_tokens = self.seeing.choice([0, 2, 9])
        return Bidirectional(self.seeing.choice(["nothing", "image"]))

    def _plan_adapters(self) -> None:
        """Names of adapters and what they mean at first; how long a runner reads each content."""
        draw, self.adapters = self.adapting, dict[str, AdapterRef]()
        self.num_moved_names = 0
        self.share_adapted = draw.choice([0.3, 0.9]) if self.harness.config.parts else 0.0
        self._pauses = draw.choice([[0.0], [0.0, 0.001], [0.0005, 0.02], [0.01, math.inf]])
        for name in ("x", "y", "z"):
            self._move_name(name)
        for _ in range(draw.randint(0, 6)):
            self._at(draw.random() * 0.1, lambda: self._move_name(draw.choice("xyz")))
            self._at(draw.random() * 0.1, lambda: self._forget_name(draw.choice("xyz")))

    def _move_name(self, name: str) -> None:
        """The name gets another content, or one that an earlier name had: what runs goes on."""
        self.num_moved_names += name in self.adapters
        content = self.adapting.randrange(5)
        digest = hashlib.sha256(b"%d" % content).hexdigest()
        seconds = self.harness.executor.prepare_seconds
        seconds[digest] = self.adapting.choice(self._pauses)
        self.adapters[name] = AdapterRef(digest, digest, f"/adapters/{content}")

    def _forget_name(self, name: str) -> None:
        self.adapters.pop(name, None)

    def _adapter(self) -> AdapterRef | None:
        if not self.adapters or self.adapting.random() >= self.share_adapted:
            return None
        return self.adapting.choice(list(self.adapters.values()))

    def _plan_images(self) -> None:
        """The images that prompts have, as their tokens by digest."""
        self.images: dict[bytes, list[int]] = {}
        for number in range(4 if self.most_image_tokens else 0):
            digest = hashlib.sha256(b"image %d" % number).digest()
            count = self.seeing.randint(1, self.most_image_tokens)
            self.images[digest] = virtual_ids(digest, count).tolist()

    def _see(self, prompt: list[int]) -> tuple[list[int], tuple[MediaInput, ...]]:
        """The prompt with an image or two in place of some tokens, beside those that it has."""
        whole = list(prompt)
        for tokens in self.images.values():
            if len(whole) > len(tokens) and self.seeing.random() < 0.3:
                start = self.seeing.randrange(len(whole) - len(tokens))
                whole[start : start + len(tokens)] = tokens
        media: list[MediaInput] = []
        at = 0
        while at < len(whole):
            for digest, tokens in self.images.items():
                if whole[at : at + len(tokens)] == tokens:
                    media.append(MediaInput(digest, at, len(tokens), None))
                    at += len(tokens)
                    break
            else:
                if whole[at] < VIRTUAL_TOKENS:  # of an image that was cut
                    whole[at] = -whole[at] % self.harness.config.vocab_size
                at += 1
        return whole, tuple(media)

    def _plan_sessions(self) -> None:
        """How many sessions there are, and which share of requests are turns of theirs."""
        self.share_of_turns = self.pausing.choice([0.0, 0.0, 0.5, 0.5, 1.0])
        self.num_sessions = self.pausing.randint(1, 5)
        self.num_turns = 0

    def _session(self) -> SessionRef | None:
        draw = self.pausing
        if draw.random() >= self.share_of_turns:
            return None
        self.num_turns += 1
        name, parent = (f"s{draw.randrange(self.num_sessions)}" for _ in range(2))
        return SessionRef(
            name,
            parent=parent if parent != name and draw.random() < 0.3 else "",
            final=draw.random() < 0.1,
            fresh=draw.random() < 0.1,
            aside=draw.random() < 0.1,
        )

    def _plan_requests(self) -> None:
        draw, now = self.random, 0.0
        pause = draw.choice([0.0, 0.0005, 0.005, 0.03])
        pause = 1.0 if self.reading_pays else pause
        for _ in range(draw.randint(1, 14)):
            now += draw.expovariate(1 / pause) if pause else 0.0
            self._at(now, self._arrive)
        if draw.random() < 0.1:
            self._at(now * draw.random(), lambda: self._abort_client(draw.choice("ab")))

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, len(self._events) + self.random.getrandbits(40), event))

    def _arrive(self) -> None:
        draw, harness = self.random, self.harness
        prompt = self._prompt()[: self.model_len // 4 if self.outgrows else self.model_len - 1]
        limit = 60 if self.outgrows else draw.choice([1, 5, 12, 40])
        longest = min(self.model_len - len(prompt), limit)
        prompt, images = self._see(prompt)
        vocabulary = range(harness.config.vocab_size)
        settings: dict[str, Any] = {
            "stop": draw.sample(vocabulary, draw.choice([0, 0, 1, min(12, len(vocabulary) - 1)])),
            "eos": draw.sample(vocabulary, draw.choice([0, 0, 1])),
            "priority": draw.randint(0, 2),
            "tenant": self._tenant(),
            "timeout": draw.choice([None, None, None, None, 0.0001, 0.003, 0.05, 1.0]),
            "client": draw.choice("ab"),
            "extra_keys": draw.choice([(), (), (), ("salt",)]),
            "logprobs": draw.choice([None, None, None, 0, 3]),
            "prompt_logprobs": draw.choice([None, None, None, None, 2]),
            "deaths": draw.choice([0] * 12 + [1]),
            "adapter": self._adapter(),
            "images": images,
            "session": self._session(),
            "pages_at": self._pages_at(),
            "pin": self._pin(prompt),
        }
        if images:  # refused before it comes here
            settings["prompt_logprobs"] = None
        if draw.random() < 0.12:
            settings["beams"] = BeamParams(
                draw.randint(1, 5),
                draw.choice([1.0, 1.0, 0.0, -0.7, 1.5]),
                draw.choice([False, True, "never"]),
            )
        settings["guidance"] = None if "beams" in settings else self._guidance()
        fork_parent: int | None = None
        for _ in range(draw.choice([1, 1, 1, 2, 5])):  # choices of one prompt
            try:
                stream = self._add(
                    prompt, draw.randint(1, longest), parent_key=fork_parent, **settings
                )
            except InvalidRequest:
                assert "beams" in settings, "refused"
                self.refused += 1
                return
            if stream is None:
                return
            if harness.config.kv_peers and self.asking.random() < 0.5:
                later = self.asking.random() * (1.0 if self.reading_pays else 0.01)
                self._at(harness.executor.clock + later, self._warm)
            fork_parent = stream.source.key if fork_parent is None else fork_parent
            if draw.random() < 0.15:
                later = harness.executor.clock + draw.expovariate(1 / 0.01)
                self._at(later, lambda stream=stream: harness.abort(stream))

    def _tenant(self) -> str:
        return self.random.choice("abc")

    def _add(self, prompt: list[int], max_tokens: int, **wishes: Any) -> Stream | None:
        """The new stream; None if the queue was full."""
        newcomers, config = self.harness.engine.lifecycle.state.queue_limits, self.harness.config
        limit = config.max_waiting_tokens or 10**9
        full = newcomers.num_requests >= config.max_waiting_requests or (
            newcomers.num_requests > 0 and newcomers.num_tokens + len(prompt) > limit
        )
        seats, name = self.harness.engine.lifecycle.seats, wishes.get("session")
        seated = {seat.key for seat in seats.sessions.seated} if seats is not None else set()
        spared = name is not None and (wishes.get("tenant", ""), name.name) in seated
        try:
            stream = self.harness.add(prompt, max_tokens, **wishes)
        except RequestQuarantined:
            assert any(
                stream.source.prompt.tolist() == prompt
                for stream in self.harness.streams.values()
                if stream.ended is not None and isinstance(stream.ended.error, RequestQuarantined)
            ), "refused for another's prompt"
            self.num_quarantined += 1
            return None
        except EnginePaused:
            assert self.harness.engine.updates.state(None).pausing, "refused without a pause"
            self.num_paused_out += 1
            return None
        except RequestHandedBack:
            assert self.harness.executor.asleep, "handed back awake"
            self.num_sent_on += 1
            return None
        except Overloaded:
            assert full, "refused without need"
            self.num_refused += 1
            return None
        assert not full or spared, "taken into a full queue"
        return stream

    def _prompt(self) -> list[int]:
        """A start that others have too, a conversation that goes on, or a prompt of its own."""
        draw, harness = self.random, self.harness
        fresh = [draw.randrange(harness.config.vocab_size) for _ in range(draw.randint(1, 9))]
        match draw.randint(0, 3):
            case 0:
                return fresh * draw.randint(1, 6)
            case 1:
                return draw.choice(STARTS)[: draw.randint(1, self.model_len)] + fresh
            case 2 if harness.streams:
                earlier = draw.choice(list(harness.streams.values()))
                return [*earlier.source.prompt.tolist(), *earlier.tokens, *fresh]
            case _:
                return draw.choice(STARTS)[: draw.randint(1, self.model_len)]

    def _abort_client(self, client: str) -> None:
        self.harness.engine.abort_client(client)
        for stream in self.harness.streams.values():
            if stream.source.client == client:
                stream.aborted = stream.aborted or stream.open


class LongLife(Life):
    """One engine that serves ``requests`` requests, in floods and ebbs; it must not grow old.

    Each stream is held against the oracle when it is over, and forgotten. Tenants come and go.
    """

    SWEEP = 50  # steps between two looks at which streams are over
    MEMORY = 48  # MiB that the process may grow after its first tenth

    def __init__(self, seed: int, requests: int) -> None:
        self.requests = requests
        super().__init__(seed)
        self.harness.integrity_every = 500
        self.harness.keep_history = False

    def run(self) -> None:
        harness, executor = self.harness, self.harness.executor
        turns, steps, young = 0, 0, None
        while self._events or harness.engine.has_work:
            if not harness.engine.has_work:
                executor.clock = max(executor.clock, self._events[0][0])
            while self._events and self._events[0][0] <= executor.clock:
                heapq.heappop(self._events)[2]()
            steps += harness.engine.has_steps  # not while all wait for a lost grammar or adapter
            harness.step()
            harness.wait(self._events[0][0] if self._events else math.inf)
            turns += 1
            if turns % self.SWEEP == 0:
                self._sweep()
            if young is None and harness.num_added > self.requests // 10:
                young = memory()
            assert steps < 100 * self.requests + 10_000, "the engine does not get done"
            assert executor.clock < 2 * PREPARE_SECONDS * self.requests, "requests wait for ever"
        harness.run()
        self._sweep()
        assert not harness.streams, "a stream without an end"
        assert young is None or memory() - young < self.MEMORY, "it grows"
        assert harness.engine.lifecycle.state.queue_limits.num_tokens == 0

    def _sweep(self) -> None:
        for stream in [s for s in self.harness.streams.values() if not s.open]:
            self.harness.check_stream(stream)
            self.harness.forget(stream)

    def _settings(self) -> dict[str, Any]:
        settings = super()._settings()
        self.model_len, self.outgrows = 64, False
        rows = self.random.randint(8, 16)
        return settings | {
            "max_model_len": self.model_len,
            "num_pages": 3 * -(-self.model_len // settings["page_size"]),
            "max_decoding_batch": rows,
            "max_batch_tokens": 64,
            "max_prefill_batch": 8,
            "vocab_size": 50,
            "max_waiting_requests": 30,
            "step_seconds": 0.0005,
            "windows": None,
        }

    def _plan_faults(self) -> None:
        draw, executor, many = self.random, self.harness.executor, self.requests
        executor.token_seconds = 0.00001
        for kind in (executor.fail_at, executor.fail_submit_at, executor.stale_at):
            kind.update(draw.sample(range(2 * many), many // 1000))
        executor.errors.update(
            (draw.randrange(many), draw.randint(0, 8)) for _ in range(many // 99)
        )

    def _plan_requests(self) -> None:
        self._at(0.0, self._arrive)

    def _arrive(self) -> None:
        super()._arrive()
        added = self.harness.num_added
        if added < self.requests:
            pause = 0.0008 if added // 300 % 2 else 0.003
            self._at(self.harness.executor.clock + self.random.expovariate(1 / pause), self._arrive)

    def _tenant(self) -> str:
        draw = self.random
        return draw.choice("aaab") if draw.random() < 0.8 else f"tenant {self.harness.num_added}"


def memory() -> float:
    """MiB that this process has taken at most."""
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return taken / (2**20 if sys.platform == "darwin" else 2**10)


def simulate(seed: int) -> Counter[str]:
    """Lives one life; says what happened in it.

    Raises:
        AssertionError: something was not as it must be.
    """
    life = Life(seed)
    life.run()
    harness = life.harness
    happened = account(life)
    happened["searches"] = sum(
        stream.ended is not None and bool(stream.ended.hypotheses)
        for stream in harness.streams.values()
    )
    happened["forks"] = sum(int((info.moves[:, 0] == COPY).sum()) for info in harness.executor.log)
    happened["leases"] = sum(info.num_steps > 1 for info in harness.executor.log)
    happened["adapters"] = sum(
        stream.source.part(AdapterRef) is not None for stream in harness.streams.values()
    )
    happened["names moved"] = life.num_moved_names
    happened["images"] = sum(
        len(all_of(stream.source.parts, MediaInput)) for stream in harness.streams.values()
    )
    happened["guided"] = sum(
        stream.source.part(Guidance) is not None for stream in harness.streams.values()
    )
    return happened


def account(life: Life) -> Counter[str]:
    """What the engine's counters say of a life."""
    harness, stats = life.harness, life.harness.engine.stats()
    happened = Counter(stats.finished)
    happened["steps"] = stats.steps
    happened["new weights"] = stats.weight_serial
    happened["requests carried over"] = sum(stats.carried_requests.values())
    happened["sleeps"] = life.num_slept
    happened["sent on asleep"] = life.num_sent_on
    happened["weights changed asleep"] = life.num_changed_asleep
    happened["refused for a pause"] = life.num_paused_out
    happened["calls"] = harness.executor.num_run
    happened["preemptions"] = stats.preemptions
    happened["swaps"] = stats.preemptions_by_swap
    happened["pages swapped in"] = stats.swapped_in
    happened["queue full"] = life.num_refused
    happened["restarts"] = harness.executor.epoch
    happened["poisons found"] = sum(
        stream.ended is not None and isinstance(stream.ended.error, RequestQuarantined)
        for stream in harness.streams.values()
    )
    happened["prompts blocked"] = life.num_quarantined
    happened["drafts"] = stats.spec_drafts
    happened["right drafted tokens"] = stats.spec_accepted_tokens
    happened["prefix hits"] = stats.prefix_hits
    happened["turns of sessions"] = life.num_turns
    happened["lapses"] = sum(stats.session_lapses.values())
    happened["pages written"] = stats.disk_pages_written
    happened["pages read"] = stats.pages_read.get(("disk", "arrived"), 0)
    happened["pages unreadable"] = stats.pages_read.get(("disk", "missing"), 0)
    happened["pages of peers"] = stats.pages_read.get(("p2p", "arrived"), 0)
    happened["pages peers lack"] = stats.pages_read.get(("p2p", "missing"), 0)
    happened["pages in host memory"] = stats.page_bytes.get(("host", "written"), 0) >> 20
    happened["pages of host memory"] = stats.pages_read.get(("host", "arrived"), 0)
    happened["pages it lacks"] = stats.pages_read.get(("host", "missing"), 0)
    happened["streams warmed"] = life.num_warmed
    happened["streams moved"] = life.num_moved
    happened["searches refused"] = life.refused
    happened["waits for grammars"] = stats.histograms["grammar_wait_seconds"].count
    happened["grammars failed"] = stats.grammar_failures.get("compile", 0)
    return happened


def live_long(seed: int, requests: int) -> None:
    """Lives one long life, and prints what happened in it."""
    life, started = LongLife(seed, requests), time.monotonic()
    life.run()
    config = life.harness.config
    print(
        f"{life.harness.num_added:,} requests in {time.monotonic() - started:.1f} s "
        f"(seed {seed}: {config.scheduler}, {config.policy}), at most {memory():.0f} MiB:"
    )
    print("  " + ", ".join(f"{value:,} {name}" for name, value in account(life).items()))


def main() -> int:
    parser = argparse.ArgumentParser(description="Random lives of an engine without a model.")
    parser.add_argument("--seeds", type=int, default=1000, help="how many lives (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first one's seed (default 0)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--requests", type=int, help="one long life of so many requests")
    options = parser.parse_args()
    if options.requests is not None:
        live_long(options.seed or 0, options.requests)
        return 0
    first, count = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    happened: Counter[str] = Counter()
    started = time.monotonic()
    for seed in range(first, first + count):
        try:
            happened += simulate(seed)
        except Exception:
            traceback.print_exc()
            print(f"\nSeed {seed} failed. Again: python tools/simulate.py --seed {seed}")
            return 1
    print(f"{count} lives in {time.monotonic() - started:.1f} s:")
    print("  " + ", ".join(f"{value:,} {name}" for name, value in happened.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
