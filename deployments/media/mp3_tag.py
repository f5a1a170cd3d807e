"""An MP3 that a decoder reads to its end.

A decoder takes the length from a tag in the first frame ("Xing" or "Info", with a number of
frames). Without one it guesses from the bit rate of that frame: where the rate varies it may stop
in the middle. With a tag whose number is never reached it does not.

Source: ISO/IEC 11172-3 and 13818-3 for the frame's header; http://gabriel.mp3-tech.org/mp3infotag.html
for the tag.
"""

from typing import NamedTuple

TAGS = (b"Xing", b"Info")
MOST_FRAMES = 2**31 - 1  # of a tag; years of sound
WITH_FRAMES = 1  # the flag of a tag that has a number of frames
FURTHEST = 4 + 2 + 32  # bytes before a tag, at most: header, check sum, side information
RATES = (44_100, 48_000, 32_000)  # samples a second of MPEG 1; 2 has half of them, 2.5 a quarter
LAYER_3 = 1
MPEG_1, MPEG_2, MPEG_2_5 = 3, 2, 0


class Mp3(NamedTuple):
    """A file to decode."""

    data: bytes
    samples: int | None  # of a channel, by its own tag; None: it has none


def endless_mp3(data: bytes, start: int) -> Mp3 | None:
    """The file, with a tag that never ends it.

    Args:
        start: where the first frame is: behind other tags.

    Returns:
        None: there is no frame of layer III.
    """
    header = data[start : start + 4]
    if len(header) < 4 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return None
    version, layer, rate = header[1] >> 3 & 3, header[1] >> 1 & 3, header[2] >> 2 & 3
    if version not in (MPEG_1, MPEG_2, MPEG_2_5) or layer != LAYER_3 or rate >= len(RATES):
        return None
    head = data[start : start + FURTHEST + 4]
    tag = max(head.find(name) for name in TAGS)
    if tag < 0:
        return Mp3(data[:start] + _frame(header) + data[start:], None)
    tag += start
    flags, count = (int.from_bytes(data[tag + at : tag + at + 4], "big") for at in (4, 8))
    if not flags & WITH_FRAMES:
        return Mp3(data[:start] + _frame(header) + data[start:], None)
    whole = data[: tag + 8] + MOST_FRAMES.to_bytes(4, "big") + data[tag + 12 :]
    return Mp3(whole, count * (1152 if version == MPEG_1 else 576))


def _frame(header: bytes) -> bytes:
    """A silent frame with a tag, as the file's own first one otherwise."""
    version, mono = header[1] >> 3 & 3, header[3] >> 6 == 3
    rate = RATES[header[2] >> 2 & 3] >> {MPEG_1: 0, MPEG_2: 1, MPEG_2_5: 2}[version]
    if version == MPEG_1:
        place, bits, side = 9, 144 * 128_000, 17 if mono else 32
    else:
        place, bits, side = 8, 72 * 64_000, 9 if mono else 17
    frame = bytearray(bits // rate)
    frame[:4] = bytes((0xFF, header[1] | 1, place << 4 | header[2] & 0x0C, header[3]))
    tag = b"Xing" + WITH_FRAMES.to_bytes(4, "big") + MOST_FRAMES.to_bytes(4, "big")
    frame[4 + side : 4 + side + len(tag)] = tag
    return bytes(frame)
