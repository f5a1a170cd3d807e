"""A model that follows a script, behind the real HTTP layer at a port of 127.0.0.1."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from fake_server import listening
from rayfin.actors.errors import RequestFailed
from rayfin.actors.messages import EngineInfo, EngineRequest, TokenDelta
from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.parsing.detect import detect
from rayfin.deployments.text.tokenizer import Tokenizer

CONTEXT = 400_000  # tokens, of about two characters each
MARK = "<|turn|>"
NAMES = ["scripted", "gpt-5.5"]  # of the model: Codex knows the second one
COMPACTIONS = ("summary of the conversation", "CONTEXT CHECKPOINT COMPACTION")  # agents ask so
NEAR_END = 8000  # characters
TEMPLATE = """\
{%- if tools %}TOOLS {% for tool in tools %}{{ tool.function.name }} {% endfor %}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}
{{- raise_exception('System message first.') }}
{%- endif %}
{{- '<|turn|>' + m.role + '\\n' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"""
"""It wants the system message first, as Qwen 3.5's does."""

TEXTS = (TEMPLATE, __doc__ or "", "the file was edited by a tool")


class ScriptedEngine:
    """Answers a conversation with the line of its script that comes next.

    A conversation is one of the script if its tools are there; others get a short text.

    Args:
        tool: the name of a tool that the agent's main conversation has.
    """

    def __init__(
        self, tokenizer: Tokenizer, script: Sequence[str], tool: str, context: int
    ) -> None:
        self._tokenizer, self._script, self._tool = tokenizer, script, tool
        self.limits = EngineInfo("engine", context, tokenizer.vocab_size, 100_000, 16)
        self._known: dict[str, str] = {}  # prompt -> answer
        self.compactions = 0
        self.fails_at: set[int] = set()  # requests, from 1, that fail within their answer
        self.prompts: list[str] = []
        self.answers: list[str] = []

    async def info(self) -> EngineInfo:
        return self.limits

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        prompt = self._tokenizer.decode(request.prompt.tolist(), False)
        said = self._answer(prompt)
        self.prompts.append(prompt)
        self.answers.append(said)
        eos = self._tokenizer.inner.eos_token_id
        tokens = self._tokenizer.encode(said, False)
        fails = len(self.prompts) in self.fails_at
        for token in tokens[: 2 if fails else None]:
            await asyncio.sleep(0)
            yield TokenDelta(request.request_id, [token])
        if fails:
            raise RequestFailed("The engine is lost.")
        yield TokenDelta(request.request_id, [eos], "stop")

    def _answer(self, prompt: str) -> str:
        """Returns the next line of the script; the same again for a prompt that is sent again."""
        if prompt in self._known:
            return self._known[prompt]
        names = prompt.partition("\n")[0].split()
        if any(words in prompt[-NEAR_END:] for words in COMPACTIONS):
            self.compactions += 1
            return "<summary>We read the files, and go on.</summary>"
        if names[:1] != ["TOOLS"] or self._tool not in names:
            return "Fine."
        step = min(len(self._known), len(self._script) - 1)
        self._known[prompt] = self._script[step]
        return self._script[step]

    async def check_health(self) -> None: ...

    async def metrics(self) -> bytes:
        return b""

    def close(self) -> None: ...


def make_tokenizer(texts: Sequence[str] = TEXTS, size: int = 1000) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=[MARK, "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    inner.chat_template = TEMPLATE
    return Tokenizer(inner)


def scripted_service(
    script: Sequence[str], tool: str, context: int = CONTEXT, tokenizer: Tokenizer | None = None
) -> tuple[OpenAIService, ScriptedEngine]:
    tokenizer = tokenizer or make_tokenizer()
    engine = ScriptedEngine(tokenizer, script, tool, context)
    client: Any = engine
    service = OpenAIService(client, tokenizer, NAMES, context, formats=detect(tokenizer))
    assert service.formats.rules.system_first and service.formats.tools is not None
    return service, engine


@contextmanager
def served(
    script: Sequence[str], tool: str, context: int = CONTEXT, tokenizer: Tokenizer | None = None
) -> Iterator[tuple[str, ScriptedEngine]]:
    """Serves a script; gives the address and the engine."""
    service, engine = scripted_service(script, tool, context, tokenizer)
    with listening(build_api(service)) as url:
        yield url, engine
