"""The right answer of every request."""

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import tokenizers
from history import Choice, Expected
from load import Ask, written

from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.serve.preflight import DEMO_FOLDER
from rayfin.deployments.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from rayfin import LoRARequest, RequestOutput

FIRST, VOCAB_SIZE = 259, 2048
"""The hash runner's tokens (worker/hash_runner.py): whole words of the demo model's tokenizer."""


class Oracle(Protocol):
    """Answers requests as if each ran alone and without faults."""

    def expect(self, asks: Sequence[Ask]) -> list[Expected]: ...


class HashOracle:
    """The hash runner's answers: the next token is a hash of the context and the choice's seed."""

    def __init__(self) -> None:
        self._backend = tokenizers.Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json"))

    def expect(self, asks: Sequence[Ask]) -> list[Expected]:
        return [
            Expected([self._choice(ask, index) for index in range(ask.n)], len(ask.prompt))
            for ask in asks
        ]

    def _choice(self, ask: Ask, index: int) -> Choice:
        state = zlib.crc32(np.array(ask.prompt, np.int32).tobytes(), ask.seed + index)
        tokens: list[int] = []
        reason = "length"
        while len(tokens) < ask.max_tokens:
            token = hashed_token(state)
            state = zlib.crc32(np.int32(token).tobytes(), state)
            tokens.append(token)
            if token in ask.stop_token_ids:
                return Choice(tokens, self._text(ask, tokens[:-1]), "stop")
            if ask.stop and (text := self._stopped(ask, tokens)) is not None:
                return Choice(tokens, text, "stop")
        return Choice(tokens, self._text(ask, tokens), reason)

    def _stopped(self, ask: Ask, tokens: list[int]) -> str | None:
        """Returns the text before the stop string that the last token completes, or None."""
        text = self._text(ask, tokens)
        ends = [(at + len(stop), at) for stop in ask.stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)[1]] if ends else None

    def _text(self, ask: Ask, tokens: list[int]) -> str:
        return IncrementalDetokenizer(self._backend, ask.prompt).whole(tokens)


class ModelOracle:
    """A real model's answers, from the same engine in this process."""

    def __init__(self, model: str, adapters: Mapping[str, str] | None = None) -> None:
        from rayfin import LLM  # imports torch

        self._adapters = adapters or {}  # folders by name
        memory = 256 * 1024**2
        lora = bool(adapters)
        self._llm = LLM(model=model, threads=1, kv_cache_memory=memory, enable_lora=lora)

    def expect(self, asks: Sequence[Ask]) -> list[Expected]:
        texts = [ask for ask in asks if not ask.question]
        answers: dict[str, RequestOutput] = {}
        if texts:
            prompts = [{"prompt_token_ids": list(ask.prompt)} for ask in texts]
            params = [sampling_of(ask) for ask in texts]
            adapters = [self._adapter(ask.adapter) for ask in texts] if self._adapters else None
            outputs = self._llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
            answers |= {ask.name: output for ask, output in zip(texts, outputs, strict=True)}
        for calls, free in ((True, False), (True, True), (False, False)):
            alike = calls, free
            chats = [ask for ask in asks if ask.question and (ask.calls, ask.free) == alike]
            if chats:
                outputs = self._llm.chat(
                    [ask.messages for ask in chats],
                    [sampling_of(ask) for ask in chats],
                    tools=chats[0].tools if calls else None,
                    tool_choice=chats[0].tool_choice if calls else None,
                    use_tqdm=False,
                )
                answers |= {ask.name: output for ask, output in zip(chats, outputs, strict=True)}
        return [expected_of(ask, answers[ask.name]) for ask in asks]

    def _adapter(self, name: str) -> "LoRARequest | None":
        from rayfin import LoRARequest

        return LoRARequest(name, 1, self._adapters[name]) if name else None


def sampling_of(ask: Ask) -> SamplingParams:
    return SamplingParams(
        max_tokens=ask.max_tokens,
        seed=ask.seed,
        n=ask.n,
        stop=list(ask.stop) or None,
        stop_token_ids=list(ask.stop_token_ids) or None,
        ignore_eos=not ask.free,
        **ask.settings,
    )


def expected_of(ask: Ask, output: "RequestOutput") -> Expected:
    choices = []
    for one in output.outputs:
        text, called, ids = written({"content": one.text, "tool_calls": one.tool_calls})
        tokens, reason = list(one.token_ids), one.finish_reason
        choice = Choice(tokens, text, reason, list(ids), ask.calls, called)
        choices.append(choice)
    return Expected(choices, len(output.prompt_token_ids), ask.form)


def hashed_token(state: int) -> int:
    """The token of a context's hash."""
    return FIRST + state % VOCAB_SIZE % (VOCAB_SIZE - FIRST)
