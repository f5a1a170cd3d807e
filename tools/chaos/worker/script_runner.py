"""A ModelRunner that follows the scripts of coding agents: scripts.json, beside the tokenizer.

What it says is a function of the context in its pages, as in hash_runner.py: the line of the script
whose number is the number of the assistant's earlier messages.
"""

import json
from pathlib import Path

import hash_runner
import numpy as np
from tokenizers import Tokenizer

from fake_runner import FakeExecutor
from fake_stream import Mirror
from rayfin.actors.config import EngineConfig
from rayfin.actors.messages import Int32Array

SCRIPTS = "scripts.json"
TURN = "<|turn|>", "assistant\n"  # begins a message of the assistant's: a token, and a text
END = "<|end|>"
FIRST_LINE = 4000  # tokens that hold it: the names of tools
ANSWER = "Fine."  # to what is no main conversation


class ScriptExecutor(FakeExecutor):
    """Follows the script of the tool that the prompt names first."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        FakeExecutor.__init__(self, config)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._scripts: dict[str, list[str]] = json.loads((folder / SCRIPTS).read_text())
        self._turn = [self._tokenizer.token_to_id(TURN[0]), *self._ids(TURN[1])]
        self._end = self._tokenizer.token_to_id(END)

    def _next(self, mirror: Mirror, context: Int32Array) -> int:
        size = len(self._turn)
        begun = np.lib.stride_tricks.sliding_window_view(context, size) == self._turn
        turns = begun.all(axis=1).nonzero()[0]
        said = len(context) - int(turns[-1]) - size  # tokens of this answer
        ids = self._ids(self._answer(context, len(turns) - 1))
        return ids[said] if said < len(ids) else self._end

    def _answer(self, context: Int32Array, turn: int) -> str:
        start = self._tokenizer.decode(context[:FIRST_LINE].tolist(), skip_special_tokens=False)
        names = start.partition("\n")[0].split()
        for tool, script in self._scripts.items():
            if names[:1] == ["TOOLS"] and tool in names:
                return script[min(turn, len(script) - 1)]
        return ANSWER

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


class ModelRunner(hash_runner.ModelRunner):
    """As hash_runner.py's."""

    model_len = 2**17

    def new_executor(self, config: EngineConfig) -> FakeExecutor:
        return ScriptExecutor(config, Path(self._args.model))
