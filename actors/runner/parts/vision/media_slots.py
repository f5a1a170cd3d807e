"""Images and clips of the running requests, by slot, and positions of the tokens around them."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from rayfin.actors.media.part import VIRTUAL_TOKENS, MediaInput
from rayfin.actors.messages import BoolArray, Int32Array, Int64Array, NewRequest, SchedulerInfo
from rayfin.actors.parts import all_of
from rayfin.actors.runner.observers import Observer
from rayfin.actors.settings.choices import SeesAhead


class Placed(NamedTuple):
    """An image or clip, and the positions [N] of tokens that stand for its embeddings, rising."""

    image: MediaInput
    at: Int64Array


@dataclass(frozen=True, slots=True)
class SlotMedia:
    """The images and clips of one request."""

    placed: tuple[Placed, ...]
    rope: Int64Array | None  # [3, P] of the prompt's tokens, in time, height and width
    delta: int = 0  # from a position behind the prompt to that of its rotary embedding
    whole: tuple[
        tuple[int, int], ...
    ] = ()  # first and last positions of tokens that see each other

    def sees_to(self, start: int, count: int) -> Int64Array:
        """The last position [count] that each token from position ``start`` on sees."""
        ends = np.arange(start, start + count)
        for first, last in self.whole:
            inside = slice(max(first - start, 0), max(last + 1 - start, 0))
            ends[inside] = last
        return ends

    def rope_positions(self, start: int, count: int) -> Int64Array:
        """Rotary positions [3, count] of the tokens from position ``start`` on."""
        assert self.rope is not None
        behind = np.arange(start, start + count) + self.delta
        whole = np.broadcast_to(behind, (3, count)).copy()
        known = self.rope[:, start : start + count]
        whole[:, : known.shape[1]] = known
        return whole


class RopeIndex(Protocol):
    """Gives the rotary positions [3, P] of a prompt [P] with ``images``."""

    def __call__(self, prompt: Int32Array, images: tuple[MediaInput, ...]) -> Int64Array: ...


class MediaSlots(Observer):
    """Mirrors which running requests have images or clips, by the diffs of steps."""

    in_turn = False  # no step with a new image is queued ahead

    def __init__(self, rope_index: RopeIndex | None) -> None:
        self._rope_index = rope_index
        self.ahead: SeesAhead = "nothing"  # which later tokens those of a prompt see
        self._slots: dict[int, SlotMedia] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, slot: int) -> SlotMedia | None:
        """Those of the slot's request, if it has any."""
        return self._slots.get(slot)

    def shifts(self, slots: Int32Array) -> Int64Array | None:
        """From positions [R] behind prompts to those of rotary embeddings; None: all are equal."""
        media = [self._slots.get(slot) for slot in slots.tolist()] if self._slots else []
        if all(one is None or one.rope is None for one in media):
            return None
        return np.array([0 if one is None else one.delta for one in media], np.int64)

    def alters(self, slots: Int32Array) -> BoolArray | None:
        """Finds which of the ``slots`` [R] compute otherwise than text does; None: none."""
        if self.ahead == "prompt":
            return np.ones(len(slots), np.bool_)
        return np.isin(slots, list(self._slots)) if self._slots else None

    def before(self, info: SchedulerInfo) -> None:
        for slot in info.finished:
            self._slots.pop(slot, None)
        for new in info.new_requests:
            self.enter(new)

    def enter(self, new: NewRequest) -> None:
        """Takes a request into its slot."""
        self._slots.pop(new.handle, None)
        images = all_of(new.parts, MediaInput)
        if images or self.ahead == "prompt":
            self._slots[new.handle] = self._read(new, images)

    def close(self) -> None:
        self._slots.clear()

    def _read(self, new: NewRequest, images: tuple[MediaInput, ...]) -> SlotMedia:
        if not images:
            return SlotMedia((), None, whole=((0, new.prompt_len - 1),))
        assert new.history is not None
        prompt = new.history[: new.prompt_len]
        placed = []
        for image in images:
            ids = prompt[image.start : image.start + image.length]
            placed.append(Placed(image, image.start + np.flatnonzero(ids < VIRTUAL_TOKENS)))
        whole: list[tuple[int, int]] = []
        if self.ahead == "prompt":
            whole = [(0, new.prompt_len - 1)]
        elif self.ahead == "image":
            whole = [run for _, at in placed for run in _runs(at)]
        if self._rope_index is None:
            return SlotMedia(tuple(placed), None, whole=tuple(whole))
        rope = self._rope_index(prompt, images)
        delta = int(rope.max()) + 1 - len(prompt)
        return SlotMedia(tuple(placed), rope, delta, tuple(whole))


def _runs(at: Int64Array) -> list[tuple[int, int]]:
    """First and last of the neighbouring positions among ``at`` [N], which rise."""
    parts = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    return [(int(part[0]), int(part[-1])) for part in parts]


class ModelRope:
    """``RopeIndex`` by the model's own ``get_rope_index``."""

    def __init__(self, model: Any, media_token_id: int) -> None:
        self._model, self._media_token_id = model, media_token_id

    def __call__(self, prompt: Int32Array, images: tuple[MediaInput, ...]) -> Int64Array:
        virtual = prompt < VIRTUAL_TOKENS
        ids = torch.from_numpy(np.where(virtual, self._media_token_id, prompt).astype(np.int64))
        positions, _ = self._model.get_rope_index(
            input_ids=ids.unsqueeze(0),
            mm_token_type_ids=torch.from_numpy(virtual.astype(np.int32)).unsqueeze(0),
            image_grid_thw=torch.tensor([image.grid for image in images]),
        )
        rope: Int64Array = positions[:, 0].numpy()
        return rope
