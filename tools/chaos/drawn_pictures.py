"""Pictures that clients ask about, as data: addresses."""

import base64
import io
from functools import lru_cache

import numpy as np
from PIL import Image

SHARED = 24
"""Pictures that many requests ask about; numbers from here on are of one request each."""


@lru_cache(maxsize=256)
def address(number: int) -> str:
    """The address of a PNG of random blocks, 40 to 80 pixels wide and high."""
    draw = np.random.default_rng(number)
    height, width = draw.integers(4, 9, 2).tolist()
    blocks = draw.integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(blocks.repeat(10, 0).repeat(10, 1), "RGB").save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
