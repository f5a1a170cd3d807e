"""Which tokens may come next in a transcript, as ``generate`` of transformers has it for Whisper.

Some tokens are never sampled, others not as the first one. Where a prompt ends at
``<|startoftranscript|>``, a language, ``<|transcribe|>`` and ``<|notimestamps|>`` come first. A
prompt that ends at a task asks for times: they come in pairs and do not decrease, and one comes
where all times together are more probable than any other token.

Source: Radford et al., 2022; OpenAI's ``ApplyTimestampRules``.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rayfin.actors.media.whisper import SpeechTokens
from rayfin.actors.messages import Int32Array, NewRequest, SchedulerInfo
from rayfin.actors.runner.batch import StepInputs
from rayfin.actors.runner.observers import Observer
from rayfin.actors.runner.parts.whisper.split_step import SplitStep

NEVER = -float("inf")


@dataclass(slots=True)
class SpokenRow:
    """The tokens of one request behind its clip."""

    tokens: Int32Array  # [positions of the decoder]; those behind the known ones are anything
    begin: int  # of them are in front of the text
    times: bool  # the answer has times
    controls: tuple[list[int], ...] = ()  # the last so many in front of it are sampled from these
    free: bool = False  # it asks how probable a control token is, and no rule holds

    def control(self, known: int) -> list[int]:
        """The only tokens that may come behind the first ``known`` ones; empty: any."""
        at = known - (self.begin - len(self.controls))
        return self.controls[at] if 0 <= at < len(self.controls) else []


@dataclass(frozen=True, slots=True)
class RuleTokens:
    """Tokens with a rule."""

    tokens: SpeechTokens
    end: int  # of text; text tokens are below it
    never: list[int] = field(default_factory=list)
    never_first: list[int] = field(default_factory=list)
    most_first_time: int | None = None  # index of the last time that may come first

    @classmethod
    def of(cls, tokens: SpeechTokens, settings: Any, vocabulary: int) -> "RuleTokens":
        """Those of a model's generation config, where they are in its vocabulary.

        A config that transformers makes where a folder has none may name tokens of another model.
        """

        def known(name: str) -> list[int]:
            ids = getattr(settings, name, None) or []
            return [token for token in ids if 0 <= token < vocabulary]

        # In OpenAI's vocabularies the end comes right before the start of a transcript.
        end = settings.eos_token_id or settings.bos_token_id or tokens.start - 1
        return cls(
            tokens,
            end[0] if isinstance(end, list) else end,
            known("suppress_tokens"),
            known("begin_suppress_tokens"),
            getattr(settings, "max_initial_timestamp_index", None),
        )


class TranscriptRules(Observer):
    """The rules on logits, and the tokens so far that they depend on.

    Tokens pass through the model in order, so each forward shows those that it was given; what a
    request knows when it enters is in its history.

    Args:
        clip_tokens: in front of each prompt.
        positions: of the decoder.
    """

    def __init__(self, rules: RuleTokens, clip_tokens: int, positions: int) -> None:
        self._rules, self._clip_tokens, self._positions = rules, clip_tokens, positions
        self._slots: dict[int, SpokenRow] = {}

    def before(self, info: SchedulerInfo) -> None:
        for slot in info.finished:
            self._slots.pop(slot, None)
        for new in info.new_requests:
            self._slots.pop(new.handle, None)
            if new.history is not None:
                self.enter(new)

    def enter(self, new: NewRequest) -> None:
        """Takes a request into its slot."""
        assert new.history is not None
        known = new.history[self._clip_tokens :]
        tokens = np.zeros(self._positions, np.int32)
        tokens[: len(known)] = known[: self._positions]
        begin = new.prompt_len - self._clip_tokens
        last = int(tokens[begin - 1]) if 0 < begin <= self._positions else -1
        speech = self._rules.tokens
        if speech.languages and last == speech.start:
            controls = (
                list(speech.languages.values()),
                [speech.tasks["transcribe"]],
                [speech.no_times],
            )
            row = SpokenRow(tokens, begin + len(controls), False, controls)
        else:
            row = SpokenRow(tokens, begin, last in (speech.start, *speech.tasks.values()))
        row.free = new.sampling.allowed == (speech.no_speech,)
        self._slots[new.handle] = row

    def close(self) -> None:
        self._slots.clear()

    def applied(self, logits: torch.Tensor, inputs: StepInputs, step: SplitStep) -> torch.Tensor:
        """The logits [S, V] after the rules, which may change them in place."""
        rows = self._rows(inputs, step)
        controls = {index: row.control(known) for index, (row, known) in rows.items()}
        kept = {index: logits[index, ids].clone() for index, ids in controls.items() if ids}
        free = {index: logits[index].clone() for index, (row, _) in rows.items() if row.free}
        if self._rules.never:
            logits[:, self._rules.never] = NEVER
        for index, (row, known) in rows.items():
            if index in free:
                logits[index] = free[index]
            elif index in kept:
                logits[index].fill_(NEVER)
                logits[index, controls[index]] = kept[index]
            else:
                self._apply(logits[index], row, known)
        return logits

    def _rows(self, inputs: StepInputs, step: SplitStep) -> dict[int, tuple[SpokenRow, int]]:
        """By row of the logits: the request, and how many of its tokens they are behind.

        The tokens of the step become known.
        """
        if inputs.slots is None or step.text is None:
            return {}
        starts = np.asarray(inputs.batch.query_start_cpu, np.int64)
        ends = np.asarray(inputs.batch.kv_len_cpu, np.int64) - self._clip_tokens
        ids = inputs.input_ids.cpu().numpy()
        for row, slot in enumerate(inputs.slots.tolist()):
            spoken = self._slots.get(slot)
            if spoken is not None and ends[row] > 0:
                count = int(min(starts[row + 1] - starts[row], ends[row]))
                first = int(ends[row]) - count
                last = starts[row + 1]
                step_ids = ids[last - count : last]
                spoken.tokens[first : ends[row]] = step_ids[: self._positions - first]
        rows: dict[int, tuple[SpokenRow, int]] = {}
        sampled = inputs.sampled.cpu().numpy()
        for index, row in enumerate((np.searchsorted(starts, sampled, side="right") - 1).tolist()):
            spoken = self._slots.get(int(inputs.slots[row]))
            if spoken is not None:
                behind = int(sampled[index]) - int(starts[row + 1])  # -1: the last one
                rows[index] = spoken, int(ends[row]) + behind + 1
        return rows

    def _apply(self, logits: torch.Tensor, row: SpokenRow, known: int) -> None:
        """Changes the logits [V] behind the first ``known`` tokens."""
        rules = self._rules
        is_first = known == row.begin
        if is_first and rules.never_first:
            logits[rules.never_first] = NEVER
        if row.times:
            self._apply_times(logits, row.tokens[row.begin : known], is_first=is_first)

    def _apply_times(self, logits: torch.Tensor, said: Int32Array, *, is_first: bool) -> None:
        first_time = self._rules.tokens.first_time
        logits[self._rules.tokens.no_times] = NEVER
        is_time = said >= first_time
        last = bool(is_time[-1:].any())
        last_two = last and (len(said) < 2 or bool(is_time[-2]))
        if last_two:
            logits[first_time:] = NEVER
        elif last:
            logits[: self._rules.end] = NEVER
        if is_time.any():
            latest = int(said[is_time][-1])
            # The end of a segment may be the start of the next one; any other time is later.
            lowest = latest if last and not last_two else latest + 1
            logits[first_time:lowest] = NEVER
        if is_first:
            logits[:first_time] = NEVER
            if self._rules.most_first_time is not None:
                logits[first_time + self._rules.most_first_time + 1 :] = NEVER
        log_probs = torch.log_softmax(logits.float(), -1)
        if log_probs[first_time:].logsumexp(-1) > log_probs[:first_time].max():
            logits[:first_time] = NEVER
