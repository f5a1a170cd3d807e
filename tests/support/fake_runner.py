"""Runners without a model: the oracle of the scheduler's tests, of the simulator and fault tests.

The next token is a hash of the whole context, which the fake reads back from its pages: whatever
goes wrong on the way there (a page lost, shared wrongly, written too late) gives other tokens. It
follows the steps by their diffs only, and asserts that they say enough and say it right. It uses
ids just as a model's runner does: it writes all rows before it reads any, and runs leases.
"""

import math
import pickle
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from operator import itemgetter

import numpy as np

from fake_disk import FakeFolder, FakeTransfer, fake_folder
from fake_prepare import FakePrepare
from fake_stream import (
    Mirror,
    Stream,
    guided_token,
    model_seed,
    next_logprobs,
    next_token,
    score_prompt,
    tell,
)
from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.config import EngineConfig
from rayfin.actors.errors import RequestFailed, RunnerGroupFailed
from rayfin.actors.guidance import Guidance
from rayfin.actors.messages import (
    NO_TOKEN,
    SAMPLED_LAST_STEP,
    SWAP_IN,
    SWAP_OUT,
    Float32Array,
    Int32Array,
    NewRequest,
    PageTransfer,
    SchedulerInfo,
    StepResult,
)
from rayfin.actors.parts import Need, first_of
from rayfin.actors.runner.page_names import PageNames
from rayfin.actors.speculation import DraftUsage
from rayfin.actors.weights.version import WeightVersion
from rayfin.cache.prefix_index import HashChain
from step_checks import check_form, check_limits, check_parts

UNWRITTEN = -7  # a slot of a page not written since it was allocated
JUNK_TOKEN = 0
WRONG = -8  # what a draft that was wrong leaves in its row's pages
JUNK = -9  # what a row leaves in its own pages that goes on after its end
EMPTY = (UNWRITTEN, WRONG, JUNK)  # images have other ids below zero


@dataclass(slots=True)
class _FakeStep:
    executor: "FakeExecutor"
    info: SchedulerInfo
    sent: bytes
    submitted: float  # when

    def result(self) -> StepResult:
        assert pickle.dumps(self.info) == self.sent, "a step was changed after it was submitted"
        result = self.executor.run(self.info)
        self.executor.check_deadlines(self.info, self.submitted)
        return result


class FakeExecutor:
    """An ``Executor`` on a virtual clock; its knobs are plain attributes.

    Calls are counted over all epochs, from 0. Requests are known by the seed of their sampling,
    which is therefore different for each in ``streams``.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.epoch = 0
        self.config = config
        self._groups = 1 if config.windows is None else config.windows.pages_per_entry
        self.streams: dict[int, Stream] = {}  # by seed: what the runner does not receive
        self.fail_at: set[int] = set()  # calls during which the group dies
        self.fail_submit_at: set[int] = set()  # calls that find it dead
        self.fail_restarts = 0  # restarts to come that fail
        self.stale_at: set[int] = set()  # calls answered with the answer to another
        self.errors: set[tuple[int, int]] = set()  # (seed, output index) that fail their row
        self.poison: set[int] = set()  # seeds whose rows kill the group
        self.poison_raises = False  # it does not die, but says that the step has failed
        self.deaths: Counter[int] = Counter()  # by seed: deaths of the group by its poison ...
        self.killed_alone: Counter[int] = Counter()  # ... and for other reasons, while it was alone
        self.step_seconds = 0.0  # of each step of a call ...
        self.token_seconds = 0.0  # ... and of each of its tokens
        self.delays: dict[int, float] = {}  # call -> seconds that its answer takes longer
        self.prepare_seconds: dict[str, float] = {}  # grammar -> until it is compiled; inf: lost
        self.grammar_errors: set[str] = set()  # grammars that do not compile
        self.prepared: list[str] = []  # grammars in the order in which they were sent ...
        self.preparing: list[FakePrepare] = []  # ... and those that are not compiled yet
        self.disk_seconds = 0.0  # that pages take from or to a disk
        self.peers: dict[str, FakeFolder] = {}  # pages of other engines, by name
        self.transfers: list[FakeTransfer] = []  # those that are not done
        self.share_right = 0.5  # of drafts: this proposer reads the future
        self.clock = 0.0
        self.version, self.digest = 0, ""  # of the weights
        self.fail_turns = 0  # changes of the weights to come amid which the group dies
        self.log: list[SchedulerInfo] = []
        self.left: list[int] = []  # seeds of the handles that were forgotten, in order
        self.entered: list[int] = []  # seeds of new requests, in order
        self.live: dict[int, Mirror] = {}
        self.names = PageNames()
        rows = (config.limits.max_decoding_batch, config.max_pages_per_request)
        self._page_tables = np.zeros(rows, np.int32)
        self.num_submitted = 0
        self.num_run = 0
        self._dead = False
        self._restart()

    def submit(self, info: SchedulerInfo) -> _FakeStep:
        self.num_submitted += 1
        if self._dead or self.num_submitted - 1 in self.fail_submit_at:
            self._dead = True
            raise RunnerGroupFailed("the runner is gone")
        self._last_submitted = info.step
        return _FakeStep(self, info, pickle.dumps(info), self.clock)

    def prepare(self, needs: Sequence[Need]) -> FakePrepare:
        whats = [need.what for need in needs]
        grammars = [what.name if isinstance(what, AdapterRef) else str(what) for what in whats]
        seconds = max(self.prepare_seconds.get(grammar, 0.0) for grammar in grammars)
        pending = FakePrepare(self, tuple(grammars), self.clock + seconds, self.epoch)
        self.prepared += grammars
        self.preparing = [own for own in (*self.preparing, pending) if not own.done()]
        return pending

    def transfer(self, what: PageTransfer) -> FakeTransfer:
        due = self.clock + self.disk_seconds
        before = [self.content(page) for page in what.pages]
        assert not what.write or not np.isin(before, EMPTY).any(), "what is stored holds nothing"
        transfer = FakeTransfer(self, what, due, self.epoch, self._last_submitted, before)
        if not (what.forget and transfer.done()):
            self.transfers = [own for own in (*self.transfers, transfer) if own.moved is None]
        return transfer

    def has_run(self, step: int) -> bool:
        return self._next_step > step

    def fill(self, page: int, content: Int32Array, made: int) -> None:
        """A page gets its content from elsewhere, as a version of the weights has made it."""
        self.names.overwritten(np.array([page]))
        self._memory[page] = content
        self._made[page] = made
        self._spoiled.discard(page)
        self._moved.discard(page)

    def keep(self, moves: Int32Array) -> None:
        """A transfer takes pages to host memory that it is about to fill."""
        leaving = self.names.moving(moves)
        for kind, source, target in moves.tolist():
            assert kind == SWAP_OUT
            self._host[target], self._host_made[target] = self._memory[source], self._made[source]
        self.names.moved(leaving)

    def in_host(self, page_hash: bytes) -> tuple[Int32Array, Int32Array] | None:
        """What host memory has under a name, and by which weights it was made."""
        if (entry := self.names.find_in_host(page_hash)) is None:
            return None
        return np.array(self._host[entry[0]]), np.array(self._host_made[entry[0]])

    def content(self, page: int) -> Int32Array:
        return np.array(self._memory[page])

    def share_pages(self, engine: str) -> None:
        """An engine has all that pages here have names for."""
        self.transfers = [own for own in self.transfers if not own.done()]  # some bring names
        pages = self.peers.setdefault(engine, fake_folder()).of(self.digest).pages
        for page, name in self.names.all().items():
            pages[name.page_hash] = np.frombuffer(name.tokens, np.int32), self.content(page)

    @property
    def next_prepared(self) -> float:
        """When the next grammar is compiled or page is moved, if nothing comes between."""
        waiting: list[FakePrepare | FakeTransfer] = [*self.preparing, *self.transfers]
        return min((own.due for own in waiting if not own.done()), default=math.inf)

    @property
    def is_dead(self) -> bool:
        return self._dead

    def restart(self) -> None:
        if self.fail_restarts:
            self.fail_restarts -= 1
            raise RunnerGroupFailed("the runner died while it started")
        self.epoch += 1
        self._restart()

    wake = restart

    def turn(self, version: WeightVersion, *, in_place: bool) -> None:
        """Has other weights: all of a client's tokens so far are those of the version before."""
        assert version.serial > self.version, "an older version"
        self.version, self.digest = version.serial, version.digest
        for stream in self.streams.values():
            if stream.open:
                stream.turn(version.serial)
        if self.fail_turns:
            self.fail_turns -= 1
            self._dead = True
            raise RunnerGroupFailed("the runner died amid new weights")
        self.epoch += 1
        self._next_step, self._last_submitted = 0, -1
        self.names.turn()
        for mirror in self.live.values():
            mirror.kept = True
        if not in_place:
            self._restart()

    def sleep(self, *, deep: bool = False) -> None:
        self.asleep, self.deep = True, deep
        self.names.turn()

    def load(self) -> None:
        self.deep = False

    def adopt(self) -> None:
        """Belongs to a new scheduler: it forgets all requests, and keeps what pages hold."""
        assert not self._dead and not self.asleep
        self.epoch += 1
        self._next_step, self._last_submitted = 0, -1
        self._start_names()
        self._moved.clear()
        self._shared.clear()
        self.live.clear()

    def _start_names(self) -> None:
        flight = self.config.steps_in_flight
        self.names.start(self._page_tables, self.config.page_size, flight)

    def check_names(self) -> None:
        """M1: a page that has a name holds what the name says, of the weights that there are."""
        for page, name in self.names.all().items():
            held = np.frombuffer(name.tokens, np.int32)
            before = name.parent or HashChain(len(held), name.keys).root
            assert sha256(before + name.tokens).digest() == name.page_hash, "another page before it"
            differ = set((self._memory[page] ^ held).tolist())
            assert len(differ) == 1, "other tokens in a page that has a name"
            assert (self._made[page] == self.version).all(), "a name of other weights"
            assert page not in self._spoiled, "a name of a page that was not written"
        for page, name in self.names.all_in_host().items():
            held = np.frombuffer(name.tokens, np.int32)
            differ = set((self._host[page] ^ held).tolist())
            assert len(differ) == 1, "other tokens in a host page that has a name"
            assert (self._host_made[page] == self.version).all(), "a host page of other weights"

    def run(self, info: SchedulerInfo) -> StepResult:
        """One call: checks the step, runs it, lets the time pass that it takes."""
        call = self.num_run
        self.num_run += 1
        self.clock += self.delays.get(call, 0.0)
        if self._dead or call in self.fail_at or self._is_poisoned(info):
            self._count_death(info)
            self._dead = True
            says_so = self.poison_raises and call not in self.fail_at
            raise RunnerGroupFailed("the runner died", caused_by_step=says_so)
        assert (info.epoch, info.step) == (self.epoch, self._next_step) and not self.asleep
        self._next_step += 1
        self.log.append(info)
        check_form(info, self._groups)
        check_limits(info, self.config)
        leaving = self.names.moving(info.moves)
        self._moved |= self._move_pages(info)
        self.names.moved(leaving)
        self._take_news(info)
        for handle in info.ids.tolist():
            pages = self.live[handle].pages
            self._page_tables[handle, : len(pages)] = pages
        self.names.before(info)
        check_parts(info, {handle: own.new for handle, own in self.live.items()}, self.config)
        if call in self.stale_at:
            self._count_death(info)
        self._width = info.num_steps if info.grants is None else int(info.grants.max(initial=1))
        tokens = np.full((len(info.ids), self._width), NO_TOKEN, np.int32)
        result = StepResult(info.epoch, info.step - (call in self.stale_at), tokens)
        self._told: list[tuple[int, int, Float32Array]] = []  # (place, token, log probabilities)
        columns = self._run_rows(info, result)
        result.num_steps = columns
        self.names.after(info, result)
        if self._told:
            asked = (mirror.new.sampling.logprobs or 0 for mirror in self.live.values())
            result.logprobs = tell(sorted(self._told, key=itemgetter(0)), max(asked))
        tokens_run = len(info.merge_prompt) + int((tokens[:, 1:] >= 0).sum())
        result.seconds = columns * self.step_seconds + tokens_run * self.token_seconds
        self.clock += result.seconds
        return result

    def _seeds(self, info: SchedulerInfo) -> set[int]:
        seeds = {handle: mirror.new.sampling.seed for handle, mirror in self.live.items()}
        seeds |= {new.handle: new.sampling.seed for new in info.new_requests}
        return {seeds[handle] for handle in info.ids.tolist()}

    def _is_poisoned(self, info: SchedulerInfo) -> bool:
        return bool(self.poison) and not self.poison.isdisjoint(self._seeds(info))

    def _count_death(self, info: SchedulerInfo) -> None:
        if self._dead:
            return
        seeds = self._seeds(info)
        self.deaths.update(seeds & self.poison)
        if len(seeds) == 1:
            self.killed_alone.update(seeds - self.poison)

    def check_deadlines(self, info: SchedulerInfo, submitted: float) -> None:
        """I14: no row of the step that just ran was due when it was submitted."""
        for handle in info.ids.tolist():
            stream = self.live[handle].stream
            assert stream is None or submitted < stream.deadline, "it runs after its deadline"

    def _restart(self) -> None:
        size = (self.config.num_pages, self.config.page_size)
        self._memory = np.full(size, UNWRITTEN, np.int32)
        host_pages = self.config.num_host_pages + self.config.num_offloaded_pages
        self._host = np.full((host_pages, size[1]), UNWRITTEN, np.int32)
        self._made = np.zeros_like(self._memory)  # by which version of the weights
        self._host_made = np.zeros_like(self._host)
        self._moved: set[int] = set()  # pages that moves wrote, and no table has taken since
        self._spoiled: set[int] = set()  # pages that a row which failed was to write
        self._shared: dict[int, list[Mirror]] = {}  # page -> its holders, where they are several
        self._dead = self.asleep = False
        self._next_step = 0
        self._last_submitted = -1
        self.names.turn()
        self._start_names()
        self.live.clear()

    def _move_pages(self, info: SchedulerInfo) -> set[int]:
        """The moves one by one; returns the pages that they wrote.

        A page that is read is held by a request, or a move wrote it; a page that is written has no
        holder. What comes back from a host page went there before, and comes back once.
        """
        held = {page for mirror in self.live.values() for page in mirror.pages}
        # A fork may begin behind the token that its parent has computed last.
        beside = (row for mirror in self.live.values() for row in mirror.beside)
        held.update(page for row in beside for page in row)
        kept = {
            page
            for handle, mirror in self.live.items()
            if handle not in info.finished
            for page in self._held(mirror)
        }
        moved: set[int] = set()
        for kind, source, target in info.moves.tolist():
            content = (self._host if kind == SWAP_IN else self._memory)[source]
            made = (self._host_made if kind == SWAP_IN else self._made)[source]
            spoiled = content[0] == JUNK or (kind != SWAP_IN and source in self._spoiled)
            assert source >= 0, "what is moved holds nothing"
            assert content[0] not in EMPTY or spoiled, "what is moved holds nothing"
            if kind != SWAP_OUT:
                (self._spoiled.add if spoiled else self._spoiled.discard)(target)
            evicts = kind == SWAP_OUT and self.config.num_offloaded_pages
            assert kind == SWAP_IN or evicts or source in held | moved, (
                "a page is moved that no request holds"
            )
            if kind == SWAP_OUT:
                assert target >= 0
                self._host[target], self._host_made[target] = content, made
                continue
            assert target >= 0 and target not in kept, "a page is moved onto one that is held"
            self._memory[target], self._made[target] = content, made
            moved.add(target)
            if kind == SWAP_IN:
                self._host[source] = UNWRITTEN
        return moved

    def _held(self, mirror: Mirror) -> list[int]:
        """Its pages, and those beside them in the window of its next token."""
        return [*mirror.pages, *(page for row in self._seen(mirror) for page in row)]

    def _seen(self, mirror: Mirror) -> list[list[int]]:
        return mirror.beside[self._first_seen(mirror) :]

    def _first_seen(self, mirror: Mirror) -> int:
        windows, position = self.config.windows, max(mirror.num_tokens, 0)
        return 0 if windows is None else windows.first_entry(position, self.config.page_size)

    def _store(self, mirror: Mirror, position: int, content: int) -> None:
        """What a token leaves in its pages."""
        entry, at = divmod(position, self.config.page_size)
        for page in (mirror.pages[entry], *(mirror.beside[entry] if mirror.beside else ())):
            self._memory[page, at] = content

    def _check_windows(self, mirror: Mirror, count: int, context: Int32Array) -> None:
        """What the last ``count`` tokens see in their windows is what the full group has."""
        windows, size = self.config.windows, self.config.page_size
        if windows is None:
            return
        start = max(mirror.num_tokens - count - windows.window + 1, 0)
        entries = np.arange(start // size, -(-mirror.num_tokens // size))
        for group in range(windows.beside):
            pages = [mirror.beside[entry][group] for entry in entries]
            seen = self._memory[pages].reshape(-1)[start % size :][: mirror.num_tokens - start]
            assert np.array_equal(seen, context[start:]), "other tokens in a window"

    def _take_news(self, info: SchedulerInfo) -> None:
        for handle in info.finished:
            assert handle in self.live, "forgets an unknown handle"
            self.left.append(self.live.pop(handle).new.sampling.seed)
        held_before = {page for mirror in self.live.values() for page in self._held(mirror)}
        for new in info.new_requests:
            self._enter(new)
        fresh: list[int] = []
        start = 0
        for row, handle in enumerate(info.ids.tolist()):
            end = start + int(info.new_pages_len[row]) * self._groups
            rows = info.new_pages[start:end].reshape(-1, self._groups).tolist()
            pages, start = [page for page, *_ in rows], end
            mirror = self.live[handle]
            if mirror.num_tokens < 0:
                mirror.num_tokens = int(info.kv_len[row])
                private = self._moved.difference(
                    fresh
                )  # others may find what came back for a row above
                shared = self._num_shared(info, row, pages, private)
            else:
                shared = 0
            fresh += pages[shared:]
            mirror.pages += pages
            if self._groups > 1:
                fresh += [page for _, *beside in rows[shared:] for page in beside]
                mirror.beside += [beside for _, *beside in rows]
        assert all(mirror.num_tokens >= 0 for mirror in self.live.values()), "new, and not in it"
        assert len(set(fresh)) == len(fresh), "a page is given to two requests"
        assert not held_before & set(fresh), "a page is given away that is held"
        assert all(0 <= page < self.config.num_pages for page in fresh)
        self._memory[[page for page in fresh if page not in self._moved]] = UNWRITTEN
        self._spoiled.difference_update(page for page in fresh if page not in self._moved)
        self._moved.difference_update(fresh)
        self._check_sharing()

    def _enter(self, new: NewRequest) -> None:
        assert 0 <= new.handle < self.config.limits.max_decoding_batch
        assert new.handle not in self.live, "a live handle is given away"
        assert new.history is not None or not self.config.num_speculative_tokens
        stream, known = self.streams.get(new.sampling.seed), 0
        if stream is not None:
            source = stream.source
            if source.beams is None:
                assert new.sampling == source.sampling
                assert new.parts == source.parts
                self._check_history(new, stream)
            assert new.cap == len(source.prompt) + source.stopping.max_tokens
            assert new.stop_token_ids == source.stopping.stop_token_ids
            known = len(source.prompt) + len(stream.tokens)
        if stream is None or stream.source.beams is None:
            self.live[new.handle] = mirror = Mirror(new, stream, None, known)
            if new.part(Guidance) is not None:
                assert new.history is not None, "a guided request without its history"
                mirror.history = new.history.tolist()
        else:
            self.live[new.handle] = Mirror(new, None, stream.source, known)
        self.entered.append(new.sampling.seed)

    def _check_history(self, new: NewRequest, stream: Stream) -> None:
        needed = new.sampling.needs_history or any(part.needs_history for part in new.parts)
        if needed or self.config.num_speculative_tokens:
            prompt = len(stream.source.prompt)
            known = prompt + len(stream.tokens)
            assert new.history is not None and new.prompt_len == prompt
            assert len(new.history) >= known, "tokens that the client has are not sent back"
            assert np.array_equal(new.history, stream.truth(len(new.history)))
        else:
            assert new.history is None, "a history without a use"

    def _num_shared(self, info: SchedulerInfo, row: int, pages: list[int], moved: set[int]) -> int:
        """How many of a request's first ``pages`` it found in the cache.

        What its first row says of the tokens there: full pages that were found, then pages that
        moves have written for it, of which the last may be full in part.
        """
        cached, size = int(info.kv_len[row]), self.config.page_size
        filled = pages[: -(-cached // size)]
        shared = [page for page in filled if page not in moved]
        mirror = self.live[int(info.ids[row])]
        assert not info.is_decoding[row] or mirror.beams is not None
        assert shared == filled[: len(shared)], "a page that was found follows one that was moved"
        assert shared != filled or cached % size == 0, "a part of a page is shared"
        forks = mirror.beams is not None or (
            mirror.stream is not None and mirror.stream.source.parent_key is not None
        )
        assert not shared or self.config.prefix_caching or forks
        assert mirror.stream is None or cached < mirror.known, "nothing is left to compute"
        return len(shared)

    def _check_sharing(self) -> None:
        """I3: a page is in two tables only if all that it depends on is equal, up to its end."""
        holders: dict[int, list[Mirror]] = {}
        for mirror in self.live.values():
            assert len(set(mirror.pages)) == len(mirror.pages), "a page twice in one table"
            for page in mirror.pages:
                holders.setdefault(page, []).append(mirror)
        self._shared = {page: group for page, group in holders.items() if len(group) > 1}
        for page, group in self._shared.items():
            index = group[0].pages.index(page)
            assert all(mirror.pages.index(page) == index for mirror in group)
            delivered = [mirror for mirror in group if mirror.stream is not None]
            for first, other in pairwise(delivered):
                assert first.stream is not None and other.stream is not None
                assert first.stream.source.prefix_keys == other.stream.source.prefix_keys
                end = (index + 1) * self.config.page_size
                assert np.array_equal(first.stream.truth(end), other.stream.truth(end)), (
                    f"page {page} is shared by requests that differ"
                )

    def _run_rows(self, info: SchedulerInfo, result: StepResult) -> int:
        """All rows, step by step of the lease; returns how many steps it took."""
        rows: list[int] = []
        for row in range(len(info.ids)):
            mirror = self.live[int(info.ids[row])]
            self._check_pages(info, row, mirror)
            if mirror.new.sampling.prompt_logprobs is not None and not info.is_decoding[row]:
                self._score(info, row, mirror, result)
            if mirror.over_since is None:
                rows.append(row)
            else:
                self._run_on(info, row, mirror, result)
        chunks = {row: self._resolve(info, row) for row in rows}
        counts = dict.fromkeys(rows, 0)  # tokens of this call
        for step in range(info.num_steps):
            mirrors = {row: self.live[int(info.ids[row])] for row in rows}
            for row in rows:  # all are written before any is read, as a layer of a model does
                self._write(mirrors[row], chunks[row])
            for row in rows:
                self._sample(info, row, counts[row], result)
                counts[row] += 1
                if info.grants is not None and info.is_decoding[row]:
                    self._draft(info, row, counts, result)
            if step + 1 < info.num_steps:
                rows = [row for row in rows if self._goes_on(mirrors[row])]
                if info.grants is not None:
                    rows = [row for row in rows if counts[row] < info.grants[row]]
            chunks = {row: [int(result.tokens[row, counts[row] - 1])] for row in rows}
            if not rows:
                break
        return step + 1

    def _draft(
        self, info: SchedulerInfo, row: int, counts: dict[int, int], result: StepResult
    ) -> None:
        """More tokens of a decode step by drafts that are right, then what wrong ones leave."""
        assert info.grants is not None
        mirror, most = self.live[int(info.ids[row])], self.config.num_speculative_tokens
        drafts = min(most, int(info.grants[row]) - counts[row])
        draw = zlib.crc32(bytes((self.num_run % 251, row, counts[row])), mirror.num_tokens)
        drafts, right = draw % (drafts + 1), 0
        while right < drafts and self._goes_on(mirror):
            draw = zlib.crc32(b"right", draw)
            if draw % 1000 >= 1000 * self.share_right:
                break
            self._write(mirror, [int(result.tokens[row, counts[row] - 1])])
            self._sample(info, row, counts[row], result)
            counts[row] += 1
            right += 1
        before = first_of(result.usage, DraftUsage) or DraftUsage()
        if drafts and mirror.sampled is not None:
            size = self.config.page_size
            for position in range(mirror.num_tokens, mirror.num_tokens + drafts - right):
                page = mirror.pages[position // size]
                assert page not in self._shared, "a draft in a shared page"
                self._store(mirror, position, WRONG)
            accepted = np.zeros(max(len(before.accepted), right), np.int64)
            accepted[: len(before.accepted)] = before.accepted
            accepted[:right] += 1
            right_by_place = tuple(accepted.tolist())
            now = DraftUsage(before.drafts + 1, before.tokens + drafts, right_by_place)
            result.usage = [now]

    def _check_pages(self, info: SchedulerInfo, row: int, mirror: Mirror) -> None:
        kv_len, size = int(info.kv_len[row]), self.config.page_size
        assert info.kv_page_len[row] == len(mirror.pages) <= self.config.max_pages_per_request
        written = int(info.chunk_len[row])
        if info.is_decoding[row]:
            room = mirror.new.cap - kv_len - 1
            assert room > 0, "decodes past its last token"
            written = min(info.num_steps, room)
            if info.grants is not None:
                written = int(info.grants[row])
                assert 0 < written <= room, "more is granted than the request may have"
                assert mirror.beams is None or written == 1, "a beam with drafts"
        assert len(mirror.pages) * size >= kv_len + written, "pages are missing"

    def _run_on(self, info: SchedulerInfo, row: int, mirror: Mirror, result: StepResult) -> None:
        """A row that is over, which the scheduler does not know yet: whatever it says is dropped.

        It writes to pages of its own, which no other row may read.
        """
        assert mirror.over_since is not None
        assert self.num_run - mirror.over_since < self.config.steps_in_flight, "it is known"
        count = min(info.num_steps, mirror.new.cap - int(info.kv_len[row]) - 1)
        if info.grants is not None:
            count = int(info.grants[row])
        for position in range(int(info.kv_len[row]), int(info.kv_len[row]) + count):
            page = mirror.pages[position // self.config.page_size]
            assert page not in self._shared, "junk in a shared page"
            self._store(mirror, position, JUNK)
        result.tokens[row, :count] = 0

    def _resolve(self, info: SchedulerInfo, row: int) -> list[int]:
        """The row's tokens; a placeholder only where this runner sampled just that token."""
        mirror = self.live[int(info.ids[row])]
        chunk: list[int] = info.chunk_prompt(row).tolist()
        at_most = info.grants is not None and chunk[0] == SAMPLED_LAST_STEP
        assert info.kv_len[row] == mirror.num_tokens or (
            at_most and info.kv_len[row] > mirror.num_tokens
        ), "it stands elsewhere"
        if not info.is_decoding[row]:
            assert SAMPLED_LAST_STEP not in chunk, "a placeholder in a prompt"
            return chunk
        if mirror.beams is not None:
            assert chunk[0] != SAMPLED_LAST_STEP, "a beam decodes a token that was not picked"
            return chunk
        assert mirror.sampled is not None, "decodes before it has sampled"
        assert chunk[0] in (SAMPLED_LAST_STEP, mirror.sampled)
        return [mirror.sampled]

    def _write(self, mirror: Mirror, tokens: list[int]) -> None:
        size = self.config.page_size
        if self._fails(mirror, mirror.num_tokens + len(tokens)):  # before it has written anything
            first, last = mirror.num_tokens, mirror.num_tokens + len(tokens) - 1
            entries = slice(first // size, last // size + 1)
            beside = [page for row in mirror.beside[entries] for page in row]
            pages = [*mirror.pages[entries], *beside]
            self._spoiled.update(pages)
            self._memory[pages] = JUNK
            mirror.num_tokens += len(tokens)
            mirror.sampled = None
            return
        for position, token in enumerate(tokens, start=mirror.num_tokens):
            page = mirror.pages[position // size]
            if mirror.beams is not None and position >= len(mirror.beams.prompt):
                assert page not in self._shared, "a beam writes to a shared page"
            holders = [] if page in self._spoiled else self._shared.get(page, [])
            for holder in holders:  # I4
                truth = token if holder.stream is None else holder.stream.truth(position + 1)[-1]
                assert token == truth, "another token is written to a shared page"
            self._store(mirror, position, token ^ mark(mirror.new.extra_keys))
            self._made[page, position % size] = self.version
        mirror.num_tokens += len(tokens)
        mirror.sampled = None

    def _sample(self, info: SchedulerInfo, row: int, column: int, result: StepResult) -> None:
        """Reads the row's context back from its pages, and says what comes next."""
        mirror = self.live[int(info.ids[row])]
        new, stream, end = mirror.new, mirror.stream, mirror.num_tokens
        seed = model_seed(new.sampling.seed, new.part(AdapterRef), self.version)
        context = self._memory[mirror.pages].reshape(-1)[:end] ^ np.int32(mark(new.extra_keys))
        if not self._spoiled.isdisjoint(mirror.pages) and not self._fails(mirror, end):
            self._sample_junk(info, row, column, mirror, result)
            return
        made = self._made[mirror.pages].reshape(-1)[:end]
        fits = mirror.kept or bool((made == self.version).all()) or self._fails(mirror, end)
        assert fits, "pages of other weights"
        good = stream is None or np.array_equal(context, stream.truth(end))
        assert good or self._fails(mirror, end), "other tokens in pages"
        if good:
            count = 1 if info.is_decoding[row] else int(info.chunk_len[row])
            self._check_windows(mirror, count, self._memory[mirror.pages].reshape(-1)[:end])
        samples = info.last_pos[row] != NO_TOKEN
        if stream is not None:
            assert samples == (end >= mirror.known), "samples before its prompt ends, or not at all"
        if not samples:
            assert self.config.scheduler != "v0", "V0 splits a prompt"
            return
        assert column or info.last_pos[row] == info.chunk_len[row] - 1
        if self._fails(mirror, end):
            result.errors[row] = RequestFailed("planted")
            mirror.over_since = self.num_run
            return
        mirror.sampled = self._next(mirror, context)
        result.tokens[row, column] = mirror.sampled
        if mirror.new.part(Guidance) is not None:
            mirror.history.append(mirror.sampled)
        if mirror.new.sampling.logprobs is not None:
            delivered = next_logprobs(context, seed, self.config.vocab_size)
            self._told.append((row * self._width + column, mirror.sampled, delivered))

    def _next(self, mirror: Mirror, context: Int32Array) -> int:
        """The token after ``context`` [N]; a grammar knows the tokens that it was sent, alone."""
        sampling, size = mirror.new.sampling, self.config.vocab_size
        seed = model_seed(sampling.seed, mirror.new.part(AdapterRef), self.version)
        token = next_token(context, seed, size)
        guidance = mirror.new.part(Guidance)
        if guidance is not None:
            assert len(mirror.history) == len(context), "its history lacks tokens"
            for grammar in guidance.grammars:
                token = guided_token(token, mirror.history, grammar, size)
        return token

    def _fails(self, mirror: Mirror, end: int) -> bool:
        """Whether the row that ends at ``end`` is planted to fail."""
        source = mirror.beams if mirror.stream is None else mirror.stream.source
        if source is None or not self.errors or end < mirror.known:
            return False
        return (mirror.new.sampling.seed, end - len(source.prompt)) in self.errors

    def _sample_junk(
        self, info: SchedulerInfo, row: int, column: int, mirror: Mirror, result: StepResult
    ) -> None:
        """It stands on what was never written: its output must not be delivered."""
        if info.last_pos[row] != NO_TOKEN:
            mirror.sampled = JUNK_TOKEN
            result.tokens[row, column] = JUNK_TOKEN
            if mirror.new.sampling.logprobs is not None:
                delivered = next_logprobs(np.array(mirror.pages), 0, self.config.vocab_size)
                self._told.append((row * self._width + column, JUNK_TOKEN, delivered))

    def _score(self, info: SchedulerInfo, row: int, mirror: Mirror, result: StepResult) -> None:
        """What the model thinks of the prompt tokens that follow those of the row's chunk."""
        delivered = score_prompt(info, row, mirror.new, self.config.vocab_size, self.version)
        if delivered is not None:
            result.prompt_logprobs[row] = delivered

    def _goes_on(self, mirror: Mirror) -> bool:
        """Whether a row of a lease samples again; ``RequestSlots.still_decoding`` says the same."""
        if mirror.sampled is None:
            return False
        if mirror.sampled in mirror.new.stop_token_ids:
            mirror.over_since = self.num_run
            return False
        return mirror.num_tokens + 1 < mirror.new.cap


def mark(extra_keys: tuple[str, ...]) -> int:
    """What tokens in pages are marked with: an adapter's keys and values are no other one's."""
    return (zlib.crc32(repr(extra_keys).encode()) & 0x3FFF) << 16 if extra_keys else 0
