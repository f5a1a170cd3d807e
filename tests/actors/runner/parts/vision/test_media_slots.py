"""Which requests a model that reads images computes otherwise than text."""

import numpy as np

from rayfin.actors.media.part import MediaInput
from rayfin.actors.messages import NewRequest, Sampling
from rayfin.actors.runner.parts.vision.media_slots import MediaSlots


def test_text_is_altered_only_where_prompts_see_ahead() -> None:
    slots, ids = MediaSlots(None), np.array([0, 2], np.int32)
    assert slots.alters(ids) is None
    history = np.array([5, -7, -8, 6], np.int32)
    image = MediaInput(b"", 1, 2, {})
    slots.enter(NewRequest(2, Sampling(), 9, history=history, prompt_len=4, parts=(image,)))
    altered = slots.alters(ids)
    assert altered is not None and altered.tolist() == [False, True]
    slots.ahead = "prompt"
    slots.close()
    altered = slots.alters(ids)
    assert altered is not None and altered.all()
