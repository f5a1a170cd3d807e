"""Holds guided requests to their grammar, their calls and their thought, as bits of tokens."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import GrammarFailed, GrammarTooSlow, InvalidRequest, RequestFailed
from rayfin.actors.guidance import GRAMMAR_FAILED, GrammarUsage, Guidance
from rayfin.actors.messages import NewRequest
from rayfin.actors.parts import Need
from rayfin.actors.runner.parts.grammars.book import WORD, GrammarBook, Vocabulary, WordArray
from rayfin.actors.runner.parts.grammars.guided_row import GuidedRow
from rayfin.actors.runner.parts.model_part import ModelPart
from rayfin.actors.runner.sampling.device_rules import DeviceRules
from rayfin.actors.runner.sampling.processor import Masks, Rows
from rayfin.actors.timing import MASK_OVERTIME_SECONDS, MASK_SECONDS
from rayfin.kernels.shapes import TokenBits, to_device

SLOWER_THAN_FORWARD = 2.0
"""A mask may take so many times the forward before it."""


NOTHING_LEFT = "no token is left that the request's grammar lets through"
BARRED = "the masks of the request's grammar have held up steps; it is refused for some minutes"


def mask_threads() -> int:
    """Threads that make masks: few, since the model's own threads compute before and after."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(min(4, (cores or 1) // 4), 1)


class GuidanceProcessor:
    """A `TokenMasker`: a state for each guided slot, which is a function of its tokens.

    Args:
        limited: masks that take too long fail their row. Not in groups of ranks: they must agree.
    """

    def __init__(
        self,
        device: torch.device,
        book: GrammarBook,
        *,
        limited: bool = True,
        threads: int | None = None,
    ) -> None:
        self._device = device
        self._book = book
        self._limited = limited
        self._threads = threads or mask_threads()
        self._pool: ThreadPoolExecutor | None = None
        self._rows: dict[int, GuidedRow] = {}
        self._since = 0.0  # when the step began, or its last masks were ready
        self._mask_seconds: list[float] = []

    def begin_step(self) -> None:
        if self._rows:
            self._since = time.perf_counter()

    def add(self, slot: int, request: NewRequest) -> bool:
        guidance = request.part(Guidance)
        if guidance is None or not changes_rows(guidance, request.prompt_len):
            return False
        assert request.history is not None, "a guided request comes without its history"
        self._book.hold(guidance.grammars)
        if guidance.quick:
            self._book.begin(guidance.grammars)
        output = request.history[request.prompt_len :].tolist()
        row = self._rows[slot] = GuidedRow(guidance, self._book, output)
        if not output and self._book.bars(guidance.grammars):
            row.error = GrammarTooSlow(BARRED)  # one that has begun goes on after a preemption
        return True

    def remove(self, slot: int) -> None:
        self._book.release(self._rows.pop(slot).guidance.grammars)

    def is_active(self, slot: int, position: int) -> bool:
        return self._rows[slot].is_active(position)

    def masks(self, rows: Rows, vocabulary: int) -> Masks:
        started = time.perf_counter()
        forward, self._since = started - self._since, started
        limit = max(MASK_SECONDS, SLOWER_THAN_FORWARD * forward) if self._limited else np.inf
        guided = [self._rows[slot] for slot in rows.slots]
        width = self._width(guided) or -(-vocabulary // WORD)
        words: WordArray = np.empty((len(guided), width), np.uint32)
        by_grammar: dict[str, list[int]] = {}
        for place, row in enumerate(guided):
            by_grammar.setdefault(row.grammar, []).append(place)

        def fill(places: Sequence[int]) -> None:
            before = time.thread_time()
            for place in places:
                _fill(guided[place], words[place], rows.positions[place])
                after = time.thread_time()
                if after - before > limit:
                    _add_overtime(guided[place], after - before - limit)
                before = after

        if self._threads == 1 or len(by_grammar) == 1:
            for places in by_grammar.values():
                fill(places)
        else:  # one thread for a grammar: its matchers share a lexer behind a lock
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "masks")
            list(self._pool.map(fill, by_grammar.values()))
        for place in np.flatnonzero(~words.any(axis=1)).tolist():
            guided[place].error = guided[place].error or GrammarFailed(NOTHING_LEFT)
        errors: dict[int, RequestFailed] = {}
        for place, row in enumerate(guided):
            if row.error is not None:
                words[place] = 0
                if isinstance(row.error, GrammarTooSlow) and row.overtime:
                    self._book.bar(row.guidance.grammars)
                errors[rows.index[place]] = row.error
        self._since = time.perf_counter()
        self._mask_seconds.append(self._since - started)
        index = to_device(np.array(rows.index, np.int64), self._device)
        return Masks(TokenBits(index, to_device(words.view(np.int32), self._device)), errors)

    def accept(self, slot: int, tokens: Sequence[int]) -> None:
        row = self._rows[slot]
        for token in tokens:
            row.accept(token)

    def rollback(self, slot: int, count: int) -> None:
        self._rows[slot].rollback(count)

    def device_rules(self, slot: int) -> DeviceRules | None:
        guidance = self._rows[slot].guidance
        if guidance.grammars or (guidance.thinking and guidance.thinking.budget is not None):
            return None
        return DeviceRules(
            banned=guidance.forbidden,
            banned_early=guidance.ends if guidance.ends_from else (),
            banned_until=guidance.ends_from if guidance.ends else 0,
        )

    def take_usage(self) -> GrammarUsage | None:
        """What was done with grammars since the last call, or None if it is nothing."""
        compile_seconds, hits, misses = self._book.take_counts()
        if not (compile_seconds or hits or misses or self._mask_seconds):
            return None
        usage = GrammarUsage(
            loaded=len(self._book),
            hits=hits,
            misses=misses,
            compile_seconds=compile_seconds,
            mask_seconds=tuple(self._mask_seconds),
        )
        self._mask_seconds.clear()
        return usage

    def _width(self, guided: Sequence[GuidedRow]) -> int:
        """Words of a mask; 0 where no vocabulary can be loaded, and every row has failed."""
        try:
            return self._book.vocabulary.words
        except RequestFailed as error:
            for row in guided:
                row.error = row.error or error
            return 0


def changes_rows(guidance: Guidance, prompt_len: int) -> bool:
    """Whether it may ever forbid a token."""
    thinking = guidance.thinking
    return bool(
        guidance.grammars
        or guidance.forbidden
        or (guidance.ends and guidance.ends_from > prompt_len)
        or (thinking is not None and thinking.budget is not None)
    )


def _add_overtime(row: GuidedRow, seconds: float) -> None:
    row.overtime += seconds
    if row.overtime > MASK_OVERTIME_SECONDS and row.error is None:
        row.error = GrammarTooSlow(
            f"the masks of the request's grammar took {row.overtime:.1f} s longer than they may"
        )


def _fill(row: GuidedRow, words: WordArray, position: int) -> None:
    """Fills a row's mask; where there is none, the row has an error."""
    try:
        row.fill(words, position)
    except RequestFailed:
        words[:] = 0


class GrammarsPart(ModelPart):
    """Masks of the tokens that a form lets through. The vocabulary loads with the first grammar.

    Args:
        limited: masks that take too long fail their row. Not in groups of ranks: they must agree.
    """

    follows_weights = True

    def __init__(self, args: EngineArgs, vocab_size: int, *, limited: bool) -> None:
        self.book = GrammarBook(lambda: Vocabulary.load(args, vocab_size))
        self._limited = limited
        self.processors = (self._make_processor,)

    def prepare(self, needs: Sequence[Need], *, at_once: bool = False) -> None:
        grammars = [need.what for need in needs if isinstance(need.what, str)]
        if grammars or not needs:
            try:
                self.book.prepare(grammars, at_once)
            except GrammarFailed as error:
                raise InvalidRequest(error.message, None, GRAMMAR_FAILED) from error

    def _make_processor(self, device: torch.device) -> GuidanceProcessor:
        return GuidanceProcessor(device, self.book, limited=self._limited)
