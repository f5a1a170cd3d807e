"""Prints how the code is kept: sizes, rooms, imports, names, and what is over its limit.

    python tools/house.py            # the table; exit status 1 if a limit is broken
    python tools/house.py --places 40

Every row names its goal, and a row that misses it the places. `tests/test_house.py` holds the rows
that are marked with *.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("actors", "cache", "deployments", "kernels")
MAX_FUNCTION, MAX_METHODS, MAX_README = 60, 20, 60
SMALL_FILE = 60  # lines; a smaller one with a single importer is a part of that
FEATURE_WORDS = re.compile(r"adapter|image|embed|clip|draft|grammar|whisper|lora", re.IGNORECASE)
CORE = (
    "actors/scheduler/engine.py",
    "actors/runner/model_runner.py",
    "actors/scheduler/lifecycle.py",
    "actors/messages.py",
)
MAX_STEP_METHODS = 7  # of ModelRunner: what runs a step is in actors/runner/execution
LORA = re.compile(r"(?<![a-z])lora(?![a-z])", re.IGNORECASE)
MAX_LORA_FILES = 31
MAX_SHARED = 6
SHARED_NAMES = {"run", "close", "start", "stop", "forward", "add"}
# Each hides the subject of its sentence: who sends what to whom, and who holds it.
FORBIDDEN_WORDS = re.compile(
    r"\b(?:nobody|whoever|in vain|none of ours|told|untold|gone on with|as it were"
    r"|of its own accord)\b",
    re.IGNORECASE,
)
# A variable is named after the thing that it is.
VAGUE_NAMES = {"own", "most", "made", "found"}
MAX_VAGUE_NAMES = 0
EXCEPTIONS_ELSEWHERE = {
    "cache/errors.py": "cache imports nothing",
    "kernels/cpu/library.py": "kernels import nothing",
    "deployments/cli/group.py": "subclasses of click's",
}
TIMING_ELSEWHERE = {
    "actors/scheduler/policy/multi_step.py": "measured: the overhead of a call",
    "actors/scheduler/queues/queue_limits.py": "measured: the rate at which requests end",
    "deployments/serve/autoscaling.py": "a target for the time to the first token",
    "deployments/bench/endpoint.py": "the load generator is no part of the system",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    value: str
    goal: str
    broken: list[str] = field(default_factory=list)
    held: bool = True  # by tests/test_house.py


@dataclass(frozen=True)
class Source:
    """A file of the product."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @property
    def room(self) -> str:
        return self.path.parent.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    def imported(self) -> Iterator[str]:
        """Dotted names of all imports."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tracked(*patterns: str) -> list[Path]:
    """Files of the repository that git knows or would add."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "--", *patterns]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())


def product() -> list[Source]:
    """The Python files that the package installs."""
    return [Source(path) for path in tracked(*(f"{folder}/*.py" for folder in PRODUCT))]


def sizes(sources: list[Source]) -> Iterator[Row]:
    lines = sum(source.lines for source in sources)
    yield Row("lines of product Python", f"{lines:,}", "78,000", _over(lines, 78_000), held=False)
    count = len(sources)
    yield Row("files of product Python", str(count), "430", _over(count, 430), held=False)
    functions = [
        f"{source.name}:{node.lineno} {node.name}: {_length(node)}"
        for source in sources
        if not source.name.startswith("kernels/")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _length(node) > MAX_FUNCTION
    ]
    yield Row("functions over 60 lines", str(len(functions)), "0", functions)
    words = [f"{name}: {len(uses)}" for name, uses in feature_words(sources).items() if uses]
    yield Row("core files with a feature's word", str(len(words)), "0", words)
    steps = [name for name, arguments in _runner_methods(sources) if "SchedulerInfo" in arguments]
    over = steps if len(steps) > MAX_STEP_METHODS else []
    yield Row("methods of ModelRunner over a step", str(len(steps)), str(MAX_STEP_METHODS), over)
    lora = [source.name for source in sources if LORA.search(source.text)]
    yield Row("files that mention LoRA", str(len(lora)), "25", _over(len(lora), 25), held=False)
    grown = lora if len(lora) > MAX_LORA_FILES else []
    yield Row("the same, which may not grow", str(len(lora)), str(MAX_LORA_FILES), grown)


def feature_words(sources: list[Source]) -> dict[str, list[str]]:
    """Lists every use of a feature's word in the files that know no feature, by file."""
    return {s.name: FEATURE_WORDS.findall(s.text) for s in sources if s.name in CORE}


def _runner_methods(sources: list[Source]) -> Iterator[tuple[str, str]]:
    """Yields the methods of ModelRunner with the text of their arguments."""
    runner = next(source for source in sources if source.name == CORE[1])
    for _, node in _classes([runner]):
        for item in node.body:
            if node.name == "ModelRunner" and isinstance(item, ast.FunctionDef):
                yield item.name, ast.unparse(item.args)


def rooms(sources: list[Source]) -> Iterator[Row]:
    counts = Counter(source.room for source in sources)
    yield Row("rooms", str(len(counts)), "45", _over(len(counts), 45), held=False)
    unmapped = [problem for room in sorted(counts) for problem in _map_problems(room, sources)]
    yield Row("rooms without a map", str(len(unmapped)), "0", unmapped)
    pairs = sorted(_mutual(sources))
    yield Row("rooms that import each other", str(len(pairs)), "0", pairs)
    satellites = sorted(_satellites(sources))
    yield Row("files under 60 lines with one importer", str(len(satellites)), "0", satellites)


def classes(sources: list[Source]) -> Iterator[Row]:
    big = [
        f"{source.name} {node.name}: {len(methods)}"
        for source, node in _classes(sources)
        if len(methods := _methods(node)) > MAX_METHODS
    ]
    yield Row("classes over 20 methods", str(len(big)), "0", big, held=False)
    owners: defaultdict[str, list[str]] = defaultdict(list)
    names: defaultdict[str, list[str]] = defaultdict(list)
    for source, node in _classes(sources):
        names[node.name].append(source.name)
        protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and not protocol:
                if not item.name.startswith("_") and not _is_override(node):
                    owners[item.name].append(node.name)
    shared = [
        f"{name}: {', '.join(holders)}"
        for name, holders in sorted(owners.items())
        if len(holders) > MAX_SHARED and name not in SHARED_NAMES
    ]
    yield Row("method names in more than 6 classes", str(len(shared)), "0", shared, held=False)
    twice = [f"{name}: {', '.join(files)}" for name, files in names.items() if len(files) > 1]
    twice = [line for line in twice if not line.startswith("_")]
    yield Row("class names used twice", str(len(twice)), "0", twice)


def homes(sources: list[Source]) -> Iterator[Row]:
    known = {"Exception", "BaseException", "RuntimeError", "ValueError", "AssertionError"}
    errors = next(source for source in sources if source.name == "actors/errors.py")
    known |= {node.name for node in errors.tree.body if isinstance(node, ast.ClassDef)}
    strays = [
        f"{source.name} {node.name}"
        for source, node in _classes(sources)
        if source is not errors and source.name not in EXCEPTIONS_ELSEWHERE
        if any(ast.unparse(base) in known for base in node.bases)
    ]
    yield Row("exceptions outside of errors.py", str(len(strays)), "0", strays)
    constants = [
        f"{source.name}:{node.lineno} {target.id}"
        for source in sources
        if source.name != "actors/timing.py"
        and source.name not in TIMING_ELSEWHERE
        and not source.name.startswith("kernels/")
        for node in source.tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id.endswith("_SECONDS")
    ]
    yield Row("timing constants outside of timing.py", str(len(constants)), "0", constants)


def variables(sources: list[Source]) -> Iterator[Row]:
    vague = [
        f"{source.name}:{line} {name}" for source in sources for line, name in _vague_names(source)
    ]
    over = vague if len(vague) > MAX_VAGUE_NAMES else []
    row = "variables called own, most, made, found"
    yield Row(row, str(len(vague)), str(MAX_VAGUE_NAMES), over)


def _vague_names(source: Source) -> Iterator[tuple[int, str]]:
    """Yields where a variable or argument is bound to a name that says nothing of it."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.arg) and node.arg in VAGUE_NAMES:
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and node.id in VAGUE_NAMES:
            if isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id


def prose() -> Iterator[Row]:
    uses = forbidden_words()
    yield Row("forbidden words", str(len(uses)), "0", uses)


def forbidden_words() -> list[str]:
    """Each use of a word that hides the subject, in Python files and pages."""
    # The first three list the words; the fourth is text that the demo model was trained on.
    skip = {"tools/house.py", "tests/test_house.py", "docs/contributing.md"}
    skip |= {"examples/demo_model/facts.py"}
    return [
        f"{path.relative_to(ROOT).as_posix()}:{number}: {line.strip()[:80]}"
        for path in tracked("*.py", "*.md", "*.cpp", "*.h", "*.yaml")
        if path.relative_to(ROOT).as_posix() not in skip
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FORBIDDEN_WORDS.search(line)
    ]


def _over(value: int, goal: int) -> list[str]:
    return [f"{value - goal:,} over"] if value > goal else []


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    start = node.body[0]
    is_docstring = isinstance(start, ast.Expr) and isinstance(start.value, ast.Constant)
    docstring = (start.end_lineno or 0) - start.lineno + 1 if is_docstring else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring


def _map_problems(room: str, sources: list[Source]) -> Iterator[str]:
    """What is wrong with the README.md of a room: none, too long, or a file it does not name."""
    page = ROOT / room / "README.md"
    if not page.exists():
        yield f"{room}: no README.md"
        return
    text = page.read_text()
    if len(text.splitlines()) > MAX_README:
        yield f"{room}/README.md: {len(text.splitlines())} lines"
    files = [source.path.name for source in sources if source.room == room]
    yield from (f"{room}/README.md: {name} is missing" for name in files if f"`{name}`" not in text)
    named = set(re.findall(r"^[-|*] *`(\w+\.py)`", text, re.MULTILINE))
    yield from (f"{room}/README.md: {name} is not there" for name in sorted(named - set(files)))


def _modules(sources: list[Source]) -> dict[str, Source]:
    """Finds the file of each dotted name."""
    return {"rayfin." + s.name.removesuffix(".py").replace("/", "."): s for s in sources}


def _satellites(sources: list[Source]) -> Iterator[str]:
    """Finds short files that only one other file imports."""
    modules = _modules(sources)
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for source in sources:
        for name in source.imported():
            target = modules.get(name) or modules.get(name.rpartition(".")[0])
            if target is not None:
                importers[target.name].add(source.name)
    for source in sources:
        if source.lines < SMALL_FILE and len(importers[source.name]) == 1:
            yield f"{source.name}: {source.lines}, of {next(iter(importers[source.name]))}"


def _mutual(sources: list[Source]) -> Iterator[str]:
    """Pairs of rooms, neither inside the other, of which each imports the other."""
    modules = _modules(sources)
    arrows: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for source in sources:
        for name in source.imported():
            target = modules.get(name) or modules.get(name.rpartition(".")[0])
            if target is not None and target.room != source.room:
                arrows[source.room, target.room].add(f"{source.path.name} -> {target.path.name}")
    for a, b in arrows:
        nested = a.startswith(f"{b}/") or b.startswith(f"{a}/")
        if a < b and (b, a) in arrows and not nested:
            one, other = sorted(arrows[a, b])[0], sorted(arrows[b, a])[0]
            yield f"{a} and {b}: {one}; {other}"


def _classes(sources: Iterable[Source]) -> Iterator[tuple[Source, ast.ClassDef]]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                yield source, node


def _methods(node: ast.ClassDef) -> list[str]:
    return [
        item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _is_override(node: ast.ClassDef) -> bool:
    """Whether the class implements an interface of ours: then its names are the interface's."""
    return any(isinstance(base, ast.Name) and base.id != "Protocol" for base in node.bases)


def table() -> list[Row]:
    """All rows that need no run."""
    sources = product()
    parts: tuple[Callable[[list[Source]], Iterator[Row]], ...]
    parts = (sizes, rooms, classes, homes, variables)
    return [row for part in parts for row in part(sources)] + list(prose())


def main() -> int:
    parser = argparse.ArgumentParser(description="How the code is kept.")
    parser.add_argument("--places", type=int, default=8, help="places named for each broken row")
    options = parser.parse_args()
    rows = table()
    for row in rows:
        mark = "*" if row.held else " "
        state = "" if not row.broken else "  <-"
        print(f"{mark} {row.name:<40} {row.value:>8}   goal {row.goal:>7}{state}")
    for row in rows:
        if row.broken:
            print(f"\n{row.name}:")
            print("\n".join(f"  {place}" for place in row.broken[: options.places]))
            if len(row.broken) > options.places:
                print(f"  ... and {len(row.broken) - options.places} more")
    return 1 if any(row.broken and row.held for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
