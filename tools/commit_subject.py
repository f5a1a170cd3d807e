"""Checks the subject of a commit: `room: verb ...`, imperative, at most 72 characters.

    python tools/commit_subject.py .git/COMMIT_EDITMSG

`.pre-commit-config.yaml` calls it for each commit.
"""

import re
import sys
from pathlib import Path

LENGTH = 72

SUBJECT = re.compile(r"(?P<room>[a-z0-9][\w./-]*(?:, [\w./-]+)*): (?P<verb>[a-z]+)\b")
"""Rooms are folders or documents, with commas between several."""

BY_GIT = re.compile(r"(Merge|Revert|fixup!|squash!|amend!) ")

IMPERATIVES = frozenset(
    "address bias bring bypass compress discuss embed express feed focus need pass press process"
    " seed shed speed stress wed witness".split()
)
"""Verbs that end as a past tense, a participle or a third person does, and are none."""


def complaint(message: str) -> str | None:
    """Returns what is wrong with the message's first line, or None if it is well formed."""
    subject = message.lstrip("\n").partition("\n")[0].rstrip()
    if BY_GIT.match(subject):
        return None
    if len(subject) > LENGTH:
        return f"The subject has {len(subject)} characters; {LENGTH} is the limit."
    parts = SUBJECT.match(subject)
    if parts is None:
        return 'The subject must be "room: verb ...", in lower case up to the verb.'
    verb = parts["verb"]
    if verb not in IMPERATIVES and re.search(r"(ed|ing|[^s]s)$", verb):
        return f'"{verb}" must be an imperative: "add", not "adds" or "added".'
    if subject.endswith("."):
        return "The subject must end without a full stop."
    return None


def main() -> int:
    """Prints what is wrong with the message in the file that the command names."""
    wrong = complaint(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if wrong is not None:
        print(wrong, file=sys.stderr)
    return wrong is not None


if __name__ == "__main__":
    sys.exit(main())
