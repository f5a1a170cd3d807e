"""Virtual ids belong to an image alone; a prompt's places are filled in order."""

from pathlib import Path

import numpy as np
import pytest

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.part import VIRTUAL_TOKENS
from rayfin.actors.media.processed import ProcessedMedia, digest, put_media
from rayfin.actors.media.virtual_ids import put_virtual_ids, virtual_ids
from vision_models import IMAGE, VisionModel, picture


def test_virtual_ids() -> None:
    first, second = virtual_ids(b"a", 500), virtual_ids(b"b", 500)
    assert first.dtype == np.int32 and (first < VIRTUAL_TOKENS).all()
    assert (virtual_ids(b"a", 20) == first[:20]).all(), "a token depends on those behind it"
    assert len(set(first.tolist()) | set(second.tolist())) > 990


def test_digest_sees_names_types_shapes_and_bytes() -> None:
    array = np.arange(6, dtype=np.float32)
    seen = {
        digest({"a": array}),
        digest({"b": array}),
        digest({"a": array.reshape(2, 3)}),
        digest({"a": array.astype(np.float64)}),
        digest({"a": array + 1}),
    }
    assert len(seen) == 5 and digest({"a": array.copy()}) in seen


def test_places_are_filled_in_order() -> None:
    images = [ProcessedMedia(name, {}, [7, IMAGE, 8, IMAGE, 9]) for name in (b"a", b"b")]
    ids, inputs = put_media([5, IMAGE, 6, IMAGE], images, IMAGE, "messages")
    assert [(image.digest, image.start, image.length) for image in inputs] == [
        (b"a", 2, 3),
        (b"b", 8, 3),
    ]
    assert ids == [5, 7, IMAGE, 8, IMAGE, 9, 6, 7, IMAGE, 8, IMAGE, 9]
    virtual = put_virtual_ids(np.array(ids, np.int32), inputs, IMAGE)
    assert virtual[virtual >= 0].tolist() == [5, 7, 8, 9, 6, 7, 8, 9]
    assert virtual[[2, 4]].tolist() == virtual_ids(b"a", 2).tolist()
    assert virtual[[8, 10]].tolist() == virtual_ids(b"b", 2).tolist()
    for count in (0, 1, 3):
        with pytest.raises(InvalidRequest, match="places for 2 images"):
            put_media([5, IMAGE, 6, IMAGE], (images * 2)[:count], IMAGE, "messages")


def test_equal_pictures_have_equal_tokens(tmp_path: Path) -> None:
    model = VisionModel("llava", tmp_path)
    once, again, other = (model.processor.process(picture(seed)) for seed in (1, 1, 2))
    assert once.digest == again.digest != other.digest and once.ids == other.ids
