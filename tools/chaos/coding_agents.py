"""A coding agent does a task while the processes under it are killed, one after the other."""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from batch import kill_one
from cluster import FAKES, Unavailable
from history import Record
from load import Ask
from nemesis import Nemesis

sys.path.append(str(FAKES))

from agent_programs import (
    CLAUDE,
    CODEX,
    FIXED,
    MEND,
    NpmUnreachable,
    call,
    installed,
    new_place,
    run_claude,
    run_codex,
)

VICTIMS = ("runner", "scheduler", "ingress", "engine", "proxy")
LOG = "log.txt"  # has a line for each turn until all are killed
IN_ANSWER = 1.0  # seconds after a turn's tool has run: the next one is being said
LAST = "It is fixed."
MODEL = "gpt-5.5"  # Codex knows it


@dataclass(frozen=True, slots=True)
class Agent:
    package: str
    run: Callable[[Path, Path, str], str]
    shell: Callable[[str], str]  # the call that runs a command
    edit: str  # the call that mends calc.py
    tool: str  # that the main conversation has

    @property
    def script(self) -> list[str]:
        logs = [self.shell(f"echo turn {i} >> {LOG}") for i in range(len(VICTIMS) + 1)]
        return [*logs, self.edit, self.shell(f"python3 calc.py >> {LOG}"), LAST]


AGENTS = {
    "claude": Agent(
        CLAUDE,
        run_claude,
        lambda command: call("Bash", command=command, description="Runs it"),
        call("Bash", command="sed -i 's/a - b/a + b/' calc.py", description="Mends it"),
        "Edit",
    ),
    "codex": Agent(
        CODEX,
        run_codex,
        lambda command: call("exec_command", cmd=command),
        call("apply_patch", input=MEND),
        "apply_patch",
    ),
}


def make_model(folder: Path) -> None:
    """Saves the tokenizer, a model's config and the scripts for script_runner.py."""
    from transformers import LlamaConfig

    from scripted_agent import make_tokenizer  # imports transformers

    inner = make_tokenizer().inner
    inner.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(inner), max_position_embeddings=2**17, eos_token_id=inner.eos_token_id
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    scripts = {agent.tool: agent.script for agent in AGENTS.values()}
    (folder / "scripts.json").write_text(json.dumps(scripts))


def agent_under_kills(name: str) -> Callable[[Nemesis], Awaitable[None]]:
    """Kills each of VICTIMS in another turn of the agent's, which must not show."""
    agent = AGENTS[name]

    async def act(nemesis: Nemesis) -> None:
        folder = Path(nemesis.cluster.folder, name)
        try:
            programs = await asyncio.to_thread(installed, folder, agent.package)
        except NpmUnreachable as reason:
            raise Unavailable(str(reason)) from None
        place = new_place(folder)
        url = nemesis.cluster.url
        work = asyncio.create_task(asyncio.to_thread(agent.run, programs, place, url))
        for number, victim in enumerate(VICTIMS, 1):
            await _reach(nemesis, work, place, number)
            await asyncio.sleep(IN_ANSWER)
            await kill_one(nemesis, victim)
            record = Record(victim, time.monotonic(), stream=False, done=True, status=200)
            await _reach(nemesis, work, place, number + 1)
            record.ended = time.monotonic()
            nemesis.load.records.append((Ask(victim, (), 0, 0, stream=False, n=0), record))
        nemesis.complaints += await _wrong(work, place)

    return act


async def _reach(nemesis: Nemesis, work: "asyncio.Task[str]", place: Path, lines: int) -> None:
    """Waits until the agent has logged so many lines, or ends."""
    log = place / LOG

    def reached() -> bool:
        return work.done() or (log.exists() and log.read_text().count("\n") >= lines)

    await nemesis.until(reached, f"turn {lines} of the agent", 150)


async def _wrong(work: "asyncio.Task[str]", place: Path) -> list[str]:
    """Returns what is not as it would be without kills."""
    try:
        said = await work
    except Exception as error:
        return [f"the agent failed: {error}"]
    turns = [f"turn {i}\n" for i in range(len(VICTIMS) + 1)]
    right = {"calc.py": FIXED, LOG: "".join([*turns, "5\n"])}
    files = {path.name: path.read_text() for path in sorted(place.iterdir())}
    return [
        *([f"it says {said[-200:]!r}"] if said.strip() != LAST else []),
        *([f"its files are {files}"] if files != right else []),
    ]
