"""A checker of grammars whose limits are words."""

from collections.abc import Iterable

from rayfin.deployments.guidance.compile_check import InlineChecker, Verdict
from rayfin.deployments.text.tokenizer import Tokenizer


class Wary(InlineChecker):
    """Refuses grammars that hold all of some words, as a checker whose limits they meet."""

    def __init__(self, tokenizer: Tokenizer, *words: str) -> None:
        super().__init__(tokenizer)
        self._words = words

    async def check(self, texts: Iterable[str], param: str | None, tenant: str = "") -> None:
        texts = list(texts)
        if any(all(word in text for word in self._words) for text in texts):
            Verdict("too_complex").check(param)
        await super().check(texts, param, tenant)


def animals(*strict: str) -> list[dict[str, object]]:
    """Two tools, whose arguments are a zebra and a yak; those that are named are strict."""
    functions = [
        {
            "name": f"see_{name}",
            "parameters": {
                "type": "object",
                "properties": {name: {"type": "string", "maxLength": 4}},
            },
            "strict": name in strict,
        }
        for name in ("zebra", "yak")
    ]
    return [{"type": "function", "function": function} for function in functions]
