"""Which of a kernel's pointers are read or written before `griddepcontrol.wait`, from its PTX.

A value carries the names of the kernel's pointers that it was computed from; what is loaded carries
none. A block of code has waited if it was waited on every path to it.
"""

import re
from dataclasses import dataclass, field

REGISTER = re.compile(r"%[a-z]+\d+")
WAIT, LAUNCH = "griddepcontrol.wait", "griddepcontrol.launch_dependents"


@dataclass(slots=True)
class BeforeWait:
    """What a kernel does before it has waited for the kernel before it."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    ends: bool = False  # a path through the kernel never waits
    launches: bool = False  # it lets the next kernel start, before or after
    launches_before: bool = False


@dataclass(slots=True)
class _Block:
    code: list[str] = field(default_factory=list)
    next: list[str] = field(default_factory=list)


def before_wait(ptx: str, pointers: list[str | None]) -> BeforeWait:
    """Follows all paths of a kernel.

    Args:
        pointers: the names of its parameters, None for one that is no pointer.
    """
    blocks = _blocks(ptx)
    first = next(iter(blocks))
    waited: dict[str, bool] = {first: False}
    origins: dict[str, dict[str, frozenset[str]]] = {first: {}}
    found, todo = BeforeWait(), [first]
    while todo:
        label = todo.pop()
        state, has_waited = dict(origins[label]), waited[label]
        for instruction in blocks[label].code:
            found.launches |= instruction.startswith(LAUNCH)
            if instruction.startswith(WAIT):
                has_waited = True
            elif not has_waited:
                _note(found, instruction, state)
            _follow(instruction, state, pointers)
        for after in blocks[label].next:
            known = origins.get(after)
            merged = dict(known or {})
            for register, origin in state.items():
                merged[register] = merged.get(register, frozenset()) | origin
            both = has_waited and waited.get(after, True)
            if known is None or merged != known or both != waited[after]:
                origins[after], waited[after] = merged, both
                todo.append(after)
    return found


def _blocks(ptx: str) -> dict[str, _Block]:
    """The code between labels and branches, by label; the first one is the entry."""
    body = re.sub(
        r"//[^\n]*|(?m:^\s*\.loc\s[^\n]*)", "", ptx[ptx.index("{", ptx.index(".entry")) + 1 :]
    )
    body = re.sub(r"(\$L[\w]+):", r";\1:;", body)
    label = "entry"
    blocks = {label: _Block()}
    for number, text in enumerate(body.split(";")):
        text = " ".join(text.split())
        if text.endswith(":") and text.startswith("$"):
            blocks[label].next.append(text[:-1])
            label = text[:-1]
            blocks[label] = _Block()
            continue
        guard, _, code = text.rpartition("@")[2].partition(" ") if "@" in text else ("", "", text)
        if not code:
            continue
        if code.startswith("bra"):
            blocks[label].next.append(code.split()[-1])
        else:
            blocks[label].code.append(code)
        if code.startswith(("bra", "ret")):
            rest = f"{label}.{number}"
            if guard:
                blocks[label].next.append(rest)
            label = rest
            blocks[label] = _Block()
    return blocks


def _note(found: BeforeWait, instruction: str, state: dict[str, frozenset[str]]) -> None:
    name = instruction.split()[0]
    pointers = frozenset().union(
        *(state.get(register, frozenset()) for register in _addresses(instruction))
    )
    if name.startswith(LAUNCH):
        found.launches_before = True
    elif name.startswith(("st.global", "atom.global", "red.global")):
        found.writes |= pointers
    elif name.startswith(("ld.global", "cp.async")):
        found.reads |= pointers
    elif name.startswith("ret"):
        found.ends = True


def _addresses(instruction: str) -> list[str]:
    return [
        register
        for inner in re.findall(r"\[([^\]]*)\]", instruction)
        for register in REGISTER.findall(inner)
    ]


def _follow(instruction: str, state: dict[str, frozenset[str]], pointers: list[str | None]) -> None:
    """Notes of the instruction's result which pointers it comes from."""
    if instruction.startswith("ld.param"):
        match = re.search(r"(%\w+), \[\s*\w+_param_(\d+)", instruction)
        number = int(match[2]) if match else len(pointers)  # Triton adds some of its own
        if match and number < len(pointers) and (name := pointers[number]) is not None:
            state[match[1]] = frozenset({name})
        return
    registers = REGISTER.findall(instruction)
    if not registers:
        return
    if instruction.startswith(("ld.", "st.", "cp.", "atom.", "red.")):
        for register in set(registers) - set(_addresses(instruction)):
            state.pop(register, None)
        return
    result, *sources = registers
    union = frozenset().union(*(state.get(source, frozenset()) for source in sources))
    if union:
        state[result] = union
    else:
        state.pop(result, None)
