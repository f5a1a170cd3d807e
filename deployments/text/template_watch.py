"""A chat template may neither run without end nor write without end.

Templates come with models. The sandbox they run in keeps them from the system, not from loops: two
nested ``range(99999)`` take minutes. Nothing outside can stop Python code, so it is watched from
within: a trace function sees every line of the template, and of nothing else.
"""

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from rayfin.actors.errors import TemplateTooLong, TemplateTooSlow

TEMPLATE_FILE = "<template>"  # what Jinja calls the code of a template that is no file
LINES_PER_LOOK = 64  # a look at the clock costs as much as several lines

T = TypeVar("T")


def watched(render: Callable[[], T], seconds: float, characters: int) -> T:
    """The result of ``render``, in this thread.

    Args:
        seconds: of processor time, so that a busy machine does not count against a template.
        characters: of output.

    Raises:
        TemplateTooSlow, TemplateTooLong: it was stopped.
    """
    deadline = time.thread_time() + seconds
    lines, written = 0, 0

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        return ran if frame.f_code.co_filename == TEMPLATE_FILE else None

    def ran(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal lines, written
        if event == "line":
            lines += 1
            if not lines % LINES_PER_LOOK and time.thread_time() > deadline:
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
        return ran

    before = sys.gettrace()
    sys.settrace(called)
    try:
        return render()
    finally:
        sys.settrace(before)
