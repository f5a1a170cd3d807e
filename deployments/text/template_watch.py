"""Limits a chat template's processor time and output.

Templates come with models. Their sandbox keeps them from the system, not from loops: two nested
``range(99999)`` take minutes. Python code cannot be stopped from outside, so a trace function sees
every line of the template, and no other line.
"""

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from rayfin.actors.errors import TemplateTooLong, TemplateTooSlow

TEMPLATE_FILE = "<template>"  # Jinja's file name for a template from a string
LINES_PER_CHECK = 64  # reading the clock costs as much as several lines

T = TypeVar("T")


def watched(render: Callable[[], T], seconds: float, characters: int) -> T:
    """Returns what ``render`` returns; runs it in this thread.

    Args:
        seconds: of processor time, so that a busy machine does not count against a template.
        characters: of output, at most.

    Raises:
        TemplateTooSlow, TemplateTooLong: the template was stopped.
    """
    deadline = time.thread_time() + seconds
    lines, written = 0, 0

    def on_call(frame: FrameType, event: str, arg: Any) -> Any:
        return on_line if frame.f_code.co_filename == TEMPLATE_FILE else None

    def on_line(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines, written
        if event == "line":
            lines += 1
            if not lines % LINES_PER_CHECK and time.thread_time() > deadline:
                raise TemplateTooSlow(
                    f"The chat template takes more than {seconds:g} s for these messages.",
                    "messages",
                )
        elif event == "return" and isinstance(arg, str):  # a template yields what it writes
            written += len(arg)
            if written > characters:
                raise TemplateTooLong(
                    f"The chat template writes more than {characters} characters for these "
                    "messages.",
                    "messages",
                )
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        return render()
    finally:
        sys.settrace(before)
