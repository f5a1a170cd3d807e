"""The figures of a case, and whether it kept the promise."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cases import Case
from history import Expected, Record, check, longest_gap
from load import Ask

LOST_ON_ITS_WAY = "unavailable"
"""The proxy's error when the answering replica dies: the answer may have been counted."""

WRONG = ("lost", "duplicated", "altered", "after", "malformed", "renamed")


@dataclass(slots=True)
class Result:
    """One row of the table. Times are seconds except the gap."""

    name: str
    row: str
    fault: str
    total: int = 0  # requests of clients that stayed connected
    failed: int = 0
    allowed: int = 0  # failures that the case allows
    recovery: float | None = (
        None  # longest time from a fault to the first answer of a later request
    )
    gap_ms: float = 0.0  # longest silence of an open stream
    wrong: int = 0  # requests with a token lost, duplicated or altered, or a broken form
    leaked: int = 0  # pages held when idle; -1: no answer
    violations: list[str] = field(default_factory=list)
    skipped: str = ""  # why the case did not run
    streams: int = 0  # open at all times
    seed: int = 0
    load: float = 0.0  # the machine's load average over the last minute

    @property
    def held(self) -> bool:
        return not self.violations and not self.skipped

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    case: Case,
    struck: Sequence[float],
    asked: Sequence[tuple[Ask, Record]],
    expected: Sequence[Expected],
    leaked: int,
    counted_successes: float | None,
    until: float,
) -> Result:
    """Computes the figures and violations of a case.

    Args:
        struck: the times of faults.
        expected: the oracle's answers to ``asked``, in the same order.
        counted_successes: growth of the server's count of successes; None if unknown.
    """
    result = Result(case.name, case.row, case.fault, leaked=leaked)
    stayed = [(ask, record) for ask, record in asked if not record.left]
    result.total = len(stayed)
    for (ask, record), right in zip(asked, expected, strict=True):
        violations = check(record, right, until)
        result.wrong += any(violation.kind in WRONG for violation in violations)
        result.violations += map(str, violations)
        if record.failed:
            result.failed += 1
            allowed = case.allows(ask, record)
            result.allowed += allowed
            if not allowed:
                why = record.broken or record.error or f"status {record.status}"
                result.violations.append(f"{record.name}: failed: {why}")
    streamed = [record for _, record in stayed if record.stream]
    result.gap_ms = 1000 * max((longest_gap(record)[0] for record in streamed), default=0.0)
    result.recovery = recovery(struck, [record for _, record in stayed])
    if struck and result.recovery is None:
        result.violations.append("never recovered: no later request was answered")
    if leaked:
        result.violations.append(f"{leaked} pages are held" if leaked > 0 else "no engine answers")
    pairs = list(zip((record for _, record in asked), expected, strict=True))
    answered = sum(len(right.choices) for record, right in pairs if record.answered)
    # Clients that left or were cut off may have been answered without receiving it, and clients
    # that resumed may have been answered twice.
    unknown = sum(
        len(right.choices)
        for record, right in pairs
        if record.left or record.broken or record.again or record.error == LOST_ON_ITS_WAY
    )
    if counted_successes is not None and counted_successes > answered + unknown:
        result.violations.append(f"{counted_successes:.0f} successes counted, {answered} answers")
    return result


def recovery(struck: Sequence[float], records: Sequence[Record]) -> float | None:
    """Returns the longest time from a fault to the first answer of a request sent after it."""
    longest: float | None = None
    for at in struck:
        later = [r.ended for r in records if r.started >= at and r.answered and r.ended is not None]
        if not later:
            return None
        longest = max(longest or 0.0, min(later) - at)
    return longest
