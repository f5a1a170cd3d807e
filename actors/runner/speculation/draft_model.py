"""A small model drafts: its layers are more layers of the cache, on the pages of the large one.

So prefix hits, forks, swaps and the budget of pages need nothing for it; where all layers of the
large model keep states, pages are for it alone. It computes every prompt beside the large model. Of
the tokens that follow it computes what it has missed when it next drafts: where it is not asked, it
costs nothing. What its layers hold decides drafts only, never tokens. (Leviathan et al., 2023;
drafts are its likeliest tokens.)
"""

import time
from dataclasses import replace

import numpy as np
import torch

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import InvalidConfig, RayfinError
from rayfin.actors.messages import Int32Array, Int64Array, NewRequest, SchedulerInfo
from rayfin.actors.runner.batch import StepInputs, build_inputs
from rayfin.actors.runner.loading import BASE, LoadedModel, load
from rayfin.actors.runner.models.dtypes import DTYPES
from rayfin.actors.runner.models.step_model import StepModel
from rayfin.actors.runner.request_slots import RequestSlots
from rayfin.actors.runner.speculation.interface import DraftPart, Drafts, TokenTable
from rayfin.actors.settings.choices import Dtype
from rayfin.actors.step_cost import StepCost
from rayfin.actors.weights.tensors import draft_version
from rayfin.actors.weights.version import WeightVersion
from rayfin.cache.kv_tensors import KVLayout, KVTensors
from rayfin.kernels.shapes import PagedBatch

CLASSES = (0.4, 0.55, 0.65, 0.75, 0.85, 0.93, 0.98)
"""Chances that the draft model itself gives its first draft, above which it is trusted more."""


MISSED_TOKENS = 64
"""Sampled tokens of a request that comes back from swap space which are computed again."""


class DraftedModel:
    """A ``StepModel`` whose cache has the layers of a draft model behind its own.

    The draft model computes the prompts of each step too; ``seen`` [slots] counts the tokens of
    each slot that its layers hold.
    """

    def __init__(self, target: StepModel, draft: StepModel, positions: int | None) -> None:
        self.target = target
        self.draft = draft
        self.draft_positions = positions  # None: no limit
        self.layouts: list[KVLayout] = [*target.layouts, *draft.layouts]
        self.dtype = target.dtype
        self.seen: Int64Array = np.zeros(0, np.int64)

    def bind(self, cache: KVTensors) -> None:
        """Makes the layers of both keep their keys and values in ``cache``."""
        target_layers = len(self.target.layouts)
        self.target.bind(cache.layers(0, target_layers))
        self.draft.bind(cache.layers(target_layers, len(self.layouts)))

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """The logits [S, V] of the tokens at ``inputs.sampled``; the cache gets all T tokens."""
        logits = self.target.forward(inputs)
        first = inputs.first_prompt
        ends = np.asarray(inputs.batch.kv_len_cpu[first:])
        if len(ends) and self._fits(ends):
            self.draft.forward(prompts_of(inputs))
            if inputs.slots is not None and len(self.seen):
                counts = np.diff(inputs.batch.query_start_cpu[first:])
                self._note(inputs.slots[first:], ends - counts, ends)
        return logits

    def _note(self, slots: Int32Array, starts: np.ndarray, ends: np.ndarray) -> None:
        """The draft model has computed the tokens from ``starts`` [N] to ``ends`` [N] of slots."""
        joined = starts <= self.seen[slots]
        self.seen[slots[joined]] = ends[joined]

    def _fits(self, lengths: np.ndarray) -> bool:
        """Whether the draft model has positions for all of these requests."""
        limit = self.draft_positions
        return limit is None or int(np.max(lengths)) <= limit


class DraftModelProposer:
    """Drafts with a ``DraftedModel``: one step for each token of a draft, over all rows.

    Args:
        slots: the runner's, for the page tables.
        most_tokens: tokens of the largest step that memory was measured with.
    """

    def __init__(
        self,
        model: DraftedModel,
        slots: RequestSlots,
        *,
        page_size: int,
        max_len: int,
        most_tokens: int,
        device: torch.device,
    ) -> None:
        count = len(slots.last_token)
        self._model = model
        self._slots = slots
        self._page_size = page_size
        self._most_tokens = most_tokens
        self._longest = min(max_len, model.draft_positions or max_len)
        self._device = device
        self._texts = TokenTable(count, max_len)
        self._cost: StepCost | None = None  # until a step has run
        model.seen = np.zeros(count, np.int64)

    def add(self, slot: int, request: NewRequest) -> None:
        """Starts a request with the tokens of its history."""
        assert request.history is not None
        # Tokens of images and of embeddings have no place in its vocabulary.
        self._texts.add(slot, np.maximum(request.history, 0))
        # All but the last token are in pages that were found or come back, or are computed next. Of
        # those that come back the last ones may have been missed.
        known, sampled = len(request.history), len(request.history) - request.prompt_len
        self._model.seen[slot] = known - 1 - min(sampled, MISSED_TOKENS)

    def remove(self, slot: int) -> None:
        """Drops the slot's request."""
        self._texts.remove(slot)

    def accept(self, slots: Int64Array, tokens: Int32Array, counts: Int64Array) -> None:
        """Appends the first ``counts`` [N] of the ``tokens`` [N, W] to the ``slots`` [N]."""
        self._texts.accept(slots, tokens, counts)
        # The last token has not been fed; drafts that were wrong are behind it.
        seen = self._model.seen
        seen[slots] = np.minimum(seen[slots], self._texts.lengths[slots] - 1)

    def seconds(self, rows: int) -> float:
        """What one step of the draft model over so many rows takes; 0 before one has run."""
        return 0.0 if self._cost is None else float(self._cost.seconds(rows))

    def propose(self, slots: Int64Array, room: Int64Array) -> Drafts:
        """Guesses at most ``room`` [N] next tokens of the ``slots`` [N]."""
        lengths = self._texts.lengths[slots]
        room = np.minimum(room, np.maximum(self._longest - lengths, 0))
        missing = lengths - self._model.seen[slots]
        order = np.argsort(missing, kind="stable")
        fitting = np.cumsum(missing[order]) <= self._most_tokens
        rows = np.sort(order[fitting & (room[order] > 0) & (missing[order] > 0)])
        tokens = np.zeros((len(slots), int(room[rows].max(initial=0))), np.int32)
        drafted, trust = np.zeros(len(slots), np.int64), np.zeros(len(slots), np.int64)
        if len(rows):
            tokens[rows, 0], chances = self._catch_up(slots[rows])
            trust[rows] = np.searchsorted(CLASSES, chances)
            drafted[rows] = 1
        for column in range(1, tokens.shape[1]):
            rows = rows[room[rows] > column]
            starts = lengths[rows] + column - 1
            fed = tokens[rows, column - 1]
            tokens[rows, column], _ = self._run(slots[rows], starts, np.ones_like(starts), fed)
            self._model.seen[slots[rows]] = starts + 1
            drafted[rows] += 1
        return Drafts(tokens, drafted, trust)

    def _catch_up(self, slots: Int64Array) -> tuple[Int32Array, np.ndarray]:
        """The next tokens [N] of the slots [N] and their chances, after all that was missed."""
        texts, seen = self._texts, self._model.seen
        starts, ends = seen[slots].copy(), texts.lengths[slots]
        fed = np.concatenate(
            [
                texts.tokens[slot, start:end]
                for slot, start, end in zip(slots, starts, ends, strict=True)
            ]
        )
        drafts = self._run(slots, starts, ends - starts, fed)
        seen[slots] = ends
        return drafts

    @torch.inference_mode()
    def _run(
        self, slots: Int64Array, starts: Int64Array, counts: Int64Array, tokens: Int32Array
    ) -> tuple[Int32Array, np.ndarray]:
        """The likeliest tokens [N] after ``counts`` [N] tokens from ``starts`` [N] on; chances."""
        started = time.perf_counter()
        info = chunks(slots, starts, counts, tokens, self._slots.num_pages[slots])
        inputs, _ = build_inputs(info, self._slots, self._page_size, self._device)
        logits = self._model.draft.forward(inputs).float()
        highest, likeliest = logits.max(dim=-1)
        chances = (highest - logits.logsumexp(dim=-1)).exp()
        drafts = likeliest.cpu().numpy().astype(np.int32), chances.cpu().numpy()
        seconds = time.perf_counter() - started
        if self._cost is None:
            self._cost = StepCost.guessed(len(tokens), seconds, self._most_tokens)
        else:
            self._cost.observe(len(tokens), seconds)
        return drafts


def with_draft(loaded: LoadedModel, args: EngineArgs, version: WeightVersion = BASE) -> LoadedModel:
    """The model with the layers of the draft model that ``args`` names, if any.

    Args:
        version: of the weights, whose tensors of the draft model count before those of its folder.

    Raises:
        InvalidConfig: the draft model cannot be loaded, has another vocabulary, or keeps states
            of its own.
    """
    draft_args = args.draft_model
    if draft_args is None:
        return loaded
    threads = torch.get_num_threads()
    dtypes: dict[torch.dtype, Dtype] = {dtype: name for name, dtype in DTYPES.items()}  # type: ignore[misc]
    try:
        with draft_version(draft_args, version) as drafted:
            draft_args = replace(draft_args, dtype=dtypes[loaded.model.dtype])
            draft = load(draft_args, None, drafted)
    except RayfinError as error:
        raise InvalidConfig(f"speculative_config model: {error}", "speculative_config") from None
    torch.set_num_threads(threads)
    why = None
    if draft.recurrent is not None:
        # They would have to go back with each wrong draft, as the model's do.
        why = f"the layers of {draft_args.model} keep states; a draft model has attention alone"
    elif not loaded.samples:
        why = f"{args.model} gives vectors"
    if why:
        raise InvalidConfig(
            f"speculative_config model {draft_args.model} cannot draft for {args.model}: {why}",
            "speculative_config",
        )
    sizes = [one.config.get_text_config(decoder=True).vocab_size for one in (loaded, draft)]
    if sizes[0] != sizes[1]:
        raise InvalidConfig(
            f"speculative_config model {draft_args.model} has {sizes[1]} tokens in its vocabulary, "
            f"and {args.model} has {sizes[0]}: they must be of one family",
            "speculative_config",
        )
    pair = DraftedModel(loaded.model, draft.model, draft.max_position)
    part = DraftPart(len(loaded.model.layouts), gpu_model=draft.gpu_model)
    return replace(loaded, model=pair, parts=(*loaded.parts, part))


def prompts_of(inputs: StepInputs) -> StepInputs:
    """The rows from ``inputs.first_prompt`` on, as a step of their own; its logits are not used."""
    first, batch = inputs.first_prompt, inputs.batch
    starts = np.asarray(batch.query_start_cpu[first:])
    start = int(starts[0])
    part = PagedBatch(
        query_start=batch.query_start[first:] - start,
        kv_len=batch.kv_len[first:],
        page_tables=batch.page_tables[first:],
        slots=batch.slots[start:],
        positions=batch.positions[start:],
        query_start_cpu=starts - start,
        kv_len_cpu=batch.kv_len_cpu[first:],
        decoding=0,
        page_size=batch.page_size,
    )
    sampled = torch.zeros(1, dtype=torch.int64, device=inputs.sampled.device)
    return StepInputs(input_ids=inputs.input_ids[start:], batch=part, sampled=sampled)


def chunks(
    slots: Int64Array,
    starts: Int64Array,
    counts: Int64Array,
    tokens: Int32Array,
    pages: Int32Array,
) -> SchedulerInfo:
    """A step that computes ``counts`` [N] tokens of each of the slots [N] behind ``starts`` [N].

    Args:
        tokens: of all slots, one after the other.
        pages: [N] that each slot has.
    """
    lengths = counts.astype(np.int32)
    single = int(counts.max()) == 1
    return SchedulerInfo(
        epoch=0,
        step=0,
        ids=slots.astype(np.int32),
        chunk_idx=(np.cumsum(lengths) - lengths).astype(np.int32),
        chunk_len=lengths,
        merge_prompt=tokens.astype(np.int32),
        kv_len=starts.astype(np.int32),
        kv_page_len=pages.astype(np.int32),
        last_pos=lengths - 1,
        is_decoding=np.full(len(slots), single),
        decoding_batch=len(slots) if single else 0,
        prefill_batch=0 if single else len(slots),
        new_pages=np.zeros(0, np.int32),
        new_pages_len=np.zeros(len(slots), np.int32),
    )
