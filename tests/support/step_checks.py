"""What every step must look like, whatever is in it: for tests, and for the fake runner."""

from collections.abc import Mapping

import numpy as np

from rayfin.actors.adapters.part import AdapterFacts, AdapterRef
from rayfin.actors.config import EngineConfig
from rayfin.actors.media.part import MediaInput
from rayfin.actors.messages import COPY, SWAP_IN, SWAP_OUT, NewRequest, SchedulerInfo
from rayfin.actors.parts import all_of, first_of


def check_form(info: SchedulerInfo, groups: int = 1) -> None:
    """Checks shapes, types, and fields against each other."""
    rows = len(info.ids)
    assert rows > 0, "an empty step"
    for name in ("chunk_idx", "chunk_len", "kv_len", "kv_page_len", "last_pos"):
        array = getattr(info, name)
        assert array.shape == (rows,) and array.dtype == np.int32, name
    for name in ("ids", "merge_prompt", "new_pages", "new_pages_len"):
        assert getattr(info, name).dtype == np.int32, name
    assert info.is_decoding.dtype == np.bool_
    assert len(set(info.ids.tolist())) == rows, "a handle twice in one step"
    assert info.decoding_batch + info.prefill_batch == rows
    assert info.is_decoding.tolist() == [i < info.decoding_batch for i in range(rows)]
    assert (info.chunk_len >= 1).all()
    assert info.chunk_idx.tolist() == (np.cumsum(info.chunk_len) - info.chunk_len).tolist()
    assert info.chunk_len.sum() == len(info.merge_prompt)
    assert (info.chunk_len[info.is_decoding] == 1).all()
    assert (info.last_pos[info.is_decoding] == 0).all()
    assert info.new_pages_len.sum() * groups == len(info.new_pages)
    assert (info.new_pages_len >= 0).all()
    if info.grants is not None:
        assert info.grants.shape == (rows,) and info.grants.dtype == np.int32
        assert (info.grants[~info.is_decoding] == (info.last_pos[~info.is_decoding] >= 0)).all()
    assert info.moves.dtype == np.int32 and info.moves.shape == (len(info.moves), 3)
    assert np.isin(info.moves[:, 0], (COPY, SWAP_OUT, SWAP_IN)).all()
    assert info.num_steps == 1 or (info.num_steps > 1 and not info.prefill_batch), (
        "a prompt in a lease"
    )


def check_limits(info: SchedulerInfo, config: EngineConfig) -> None:
    """I8: no step is larger than the engine was built for."""
    limits = config.limits
    assert len(info.merge_prompt) <= limits.max_batch_tokens
    assert len(info.ids) <= limits.max_decoding_batch
    assert info.prefill_batch <= limits.max_prefill_batch
    assert info.num_steps <= config.max_lease
    most = config.num_speculative_tokens
    assert (info.grants is None) == (not most or not info.decoding_batch)
    if info.grants is not None:
        assert info.grants.max() <= info.num_steps * (1 + most)
    if config.scheduler == "v0":
        assert not (info.decoding_batch and info.prefill_batch), "V0 mixes"


def check_parts(info: SchedulerInfo, known: Mapping[int, NewRequest], config: EngineConfig) -> None:
    """No more adapters than a step has; one image that begins beside streams; none cut if whole."""
    rows = [known[handle] for handle in info.ids.tolist()]
    adapters = (new.part(AdapterRef) for new in rows)
    digests = {adapter.digest for adapter in adapters if adapter is not None}
    facts = first_of(config.parts, AdapterFacts)
    assert len(digests) <= (0 if facts is None else facts.at_once or 0), (
        "too many adapters in a step"
    )
    begun = tokens = 0
    for row, new in enumerate(rows):
        if info.is_decoding[row]:
            continue
        start = int(info.kv_len[row])
        end = start + int(info.chunk_len[row])
        for image in all_of(new.parts, MediaInput):
            first, last = image.start, image.start + image.length
            begun += start <= first < end
            tokens += image.length if first < end and start < last else 0
            whole = config.uncut.ahead == "image"
            assert not whole or not first < end < last, "an image is cut"
    assert not info.decoding_batch or begun <= 1, "a token waits for two images"
    assert info.span_tokens == tokens
