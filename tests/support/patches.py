"""Codex's patches: the grammar that it sends, and a parser that knows nothing of grammars."""

APPLY_PATCH = """\
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""Its words as Codex 0.171 sends them."""

TOOL = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH},
}


def parse_patch(text: str) -> list[tuple[str, str, list[str]]]:
    """Returns what a patch does: an action, a path, and lines.

    Raises:
        ValueError: it is no patch.
    """
    lines = text.removesuffix("\n").split("\n")
    if lines[0] != "*** Begin Patch" or lines[-1] != "*** End Patch" or len(lines) < 3:
        raise ValueError("it has no begin or no end")
    hunks: list[tuple[str, str, list[str]]] = []
    for line in lines[1:-1]:
        action = next(
            (a for a in ("Add", "Delete", "Update") if line.startswith(f"*** {a} File: ")), ""
        )
        if action:
            path = line.removeprefix(f"*** {action} File: ")
            if not path or (hunks and hunks[-1][0] == "Add" and not hunks[-1][2]):
                raise ValueError("a hunk is empty")
            hunks.append((action, path, []))
            continue
        if not hunks or hunks[-1][0] == "Delete":
            raise ValueError(f"a line is in no file: {line!r}")
        kind, _, said = hunks[-1]
        moves = line.startswith("*** Move to: ") and not said and len(line) > len("*** Move to: ")
        if kind == "Add" and line[:1] != "+":
            raise ValueError(f"a file that is added has the line {line!r}")
        context = line == "@@" or (line.startswith("@@ ") and len(line) > 3)
        if kind == "Update" and not (line[:1] in "+- " and line or context or moves):
            if line != "*** End of File" or not said:
                raise ValueError(f"a file that is changed has the line {line!r}")
        said.append(line)
    if hunks and hunks[-1][0] == "Add" and not hunks[-1][2]:
        raise ValueError("a hunk is empty")
    return hunks
