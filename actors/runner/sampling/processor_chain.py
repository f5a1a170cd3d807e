"""All logits processors of a runner, in order.

vLLM's order: allowed tokens, bad words, minimum length and bias, then penalties. Temperature and
the filters come after (`kernels/sampling`). The tokens that a masker forbids are left out where the
token is picked: no other rule can bring them back.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import BoolArray, Int32Array, SchedulerInfo
from rayfin.actors.parts import PartUsage
from rayfin.actors.runner.sampling.device_rules import (
    DeviceRules,
    RowTokenRules,
    make_row_token_rules,
)
from rayfin.actors.runner.sampling.own_processor import OwnProcessor
from rayfin.actors.runner.sampling.penalties import Penalties
from rayfin.actors.runner.sampling.processor import (
    LogitsProcessor,
    Masks,
    ProcessorFactory,
    Rows,
    SlotRules,
    TokenMasker,
)
from rayfin.actors.runner.sampling.token_rules import TokenRules

DEFAULT_PROCESSORS: tuple[ProcessorFactory, ...] = (TokenRules, Penalties)


class ProcessorChain:
    """Knows which slots have which processors. A slot without any costs nothing.

    ``extra`` processors come before the default ones. One of them may be a masker.
    """

    def __init__(self, device: torch.device, extra: Sequence[ProcessorFactory] = ()) -> None:
        processors = [make(device) for make in (*extra, *DEFAULT_PROCESSORS)]
        self._processors = [
            processor for processor in processors if not isinstance(processor, TokenMasker)
        ]
        self.extra = len(self._processors) > len(DEFAULT_PROCESSORS)
        """Whether there are more than the default ones and a masker: any request may have them."""
        maskers = [processor for processor in processors if isinstance(processor, TokenMasker)]
        assert len(maskers) <= 1, "two processors mask tokens"
        self._masker = maskers[0] if maskers else None
        self._slots: dict[int, list[LogitsProcessor]] = {}
        self._masked: set[int] = set()  # slots that the masker knows

    def __len__(self) -> int:
        """Slots with a processor."""
        return len(self._slots.keys() | self._masked)

    def has_rules(self, slots: Int32Array) -> BoolArray:
        """[R] which of the slots have a processor or a masker."""
        if not (self._slots or self._masked):
            return np.zeros(len(slots), np.bool_)
        ruled = self._slots.keys() | self._masked
        return np.array([slot in ruled for slot in slots.tolist()])

    def apply_diff(self, info: SchedulerInfo) -> None:
        """Removes the step's finished requests, then adds its new ones."""
        if self._masker is not None and self._masked:
            self._masker.begin_step()
        for slot in info.finished:
            self._remove(slot)
        for new in info.new_requests:
            self._remove(new.handle)
            if self._masker is not None and new.parts and self._masker.add(new.handle, new):
                self._masked.add(new.handle)
            added = [processor for processor in self._processors if processor.add(new.handle, new)]
            if added:
                self._slots[new.handle] = added

    def accept(self, slots: Int32Array, tokens: Int32Array) -> None:
        """Appends the token [R] that each of the slots [R] sampled; negative ones are none."""
        if not (self._slots or self._masked):
            return
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if token >= 0:
                for rules in self._rules_of(slot):
                    rules.accept(slot, (token,))

    def rollback(self, slots: Int32Array, tokens: Int32Array) -> None:
        """Takes back what ``accept`` appended with the same arguments, the last ones first."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if token >= 0:
                for rules in self._rules_of(slot):
                    rules.rollback(slot, 1)

    def masks(self, slots: Int32Array, positions: Int32Array, vocabulary: int) -> Masks | None:
        """What the slots [S] may sample at their positions [S], or None if they may sample all."""
        masker = self._masker
        if masker is None or not self._masked:
            return None
        rows = [
            (row, slot, position)
            for row, (slot, position) in enumerate(
                zip(slots.tolist(), positions.tolist(), strict=True)
            )
            if slot in self._masked and masker.is_active(slot, position)
        ]
        if not rows:
            return None
        index, of_slots, at = (list(column) for column in zip(*rows, strict=True))
        return masker.masks(Rows(index, of_slots, at), vocabulary)

    def process(
        self, logits: torch.Tensor, slots: Int32Array, positions: Int32Array
    ) -> torch.Tensor:
        """Logits [S, V] of the slots [S], each about to sample the token of its position [S].

        Returns:
            The same tensor if no processor is active for a row; else a new one, fp32.
        """
        if not self._slots:
            return logits
        active: dict[LogitsProcessor, list[tuple[int, int, int]]] = {}
        for row, slot in enumerate(slots.tolist()):
            for processor in self._slots.get(slot, ()):
                if processor.is_active(slot, position := int(positions[row])):
                    active.setdefault(processor, []).append((row, slot, position))
        if not active:
            return logits
        changed = logits.to(torch.float32, copy=True)
        for processor in self._processors:
            if rows := active.get(processor):
                index, of_slots, at = (list(column) for column in zip(*rows, strict=True))
                processor.apply(changed, Rows(index, of_slots, at))
        return changed

    def take_usage(self) -> PartUsage | None:
        """What the masker did since the last call, or None if it is nothing."""
        return self._masker.take_usage() if self._masker is not None and self._masked else None

    def needs_host(self, slots: Int32Array) -> BoolArray:
        """[R] which of the slots have a processor that works on the host at every token."""
        if not (self._slots or self._masked):
            return np.zeros(len(slots), np.bool_)
        return np.array([self._device_rules(slot) is None for slot in slots.tolist()])

    def row_token_rules(self, slots: Int32Array, num_steps: int) -> RowTokenRules | None:
        """The rules of the slots [R] for a GPU, or None if no slot has any.

        No slot may be one of those that need the host.
        """
        rules = {
            row: merged
            for row, slot in enumerate(slots.tolist() if self._slots or self._masked else ())
            if (slot in self._slots or slot in self._masked)
            and (merged := self._device_rules(slot)) is not None
        }
        return make_row_token_rules(len(slots), rules, num_steps) if rules else None

    def leaves_none(self, slot: int, position: int) -> bool:
        """Whether the rules of a slot that a GPU applies leave no token at a position."""
        rules = self._device_rules(slot)
        return rules is not None and rules.leaves_none(position)

    def failure(self, slot: int) -> RequestFailed | None:
        """What a processor of a user's own has raised for the slot."""
        plugins = [each for each in self._slots.get(slot, ()) if isinstance(each, OwnProcessor)]
        return next((error for each in plugins if (error := each.failure(slot))), None)

    def _rules_of(self, slot: int) -> Sequence[SlotRules]:
        changing = self._slots.get(slot, [])
        if slot in self._masked and self._masker is not None:
            return [self._masker, *changing]
        return changing

    def _device_rules(self, slot: int) -> DeviceRules | None:
        merged: DeviceRules | None = DeviceRules()
        for processor in self._rules_of(slot):
            rules = processor.device_rules(slot)
            if rules is None or merged is None:
                return None
            merged = merged.merged(rules)
        return merged

    def _remove(self, slot: int) -> None:
        for rules in self._rules_of(slot):
            rules.remove(slot)
        self._slots.pop(slot, None)
        self._masked.discard(slot)
