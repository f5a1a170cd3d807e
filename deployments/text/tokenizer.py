"""The model's tokenizer, thread-safe."""

import copy
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from rayfin.actors.grammar_limits import BYTE_OF
from rayfin.actors.messages import Int32Array
from rayfin.actors.model_files.fast_tokenizer import load_fast
from rayfin.actors.model_files.files import end_token_ids, generation_config
from rayfin.deployments.text.detokenizer import HALF, IncrementalDetokenizer, byte_tokens

if TYPE_CHECKING:  # it imports torch, which takes seconds: ``load`` does
    from transformers import PreTrainedTokenizerFast

BRACKETED = re.compile(r"<\S+>|\[\S+\]")  # the form of tokens that mark a turn


class Tokenizer:
    """A transformers fast tokenizer, used read-only, so that threads can share it.

    ``encode`` and ``decode`` call the Rust backend directly: the Python wrapper sets options on it
    per call, which fails when two threads do so at once.

    Args:
        inner: the fast tokenizer; its truncation and padding are switched off.
        eos_token_ids: ids that end a sequence, besides the tokenizer's own.
    """

    def __init__(self, inner: "PreTrainedTokenizerFast", eos_token_ids: Iterable[int] = ()) -> None:
        self.inner = inner
        self.backend: tokenizers.Tokenizer = inner.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        own_eos = () if inner.eos_token_id is None else (inner.eos_token_id,)
        self.eos_token_ids = frozenset(eos_token_ids) | frozenset(own_eos)
        inner.chat_control_tokens = self._control_tokens()
        self.vocab_size = len(inner)  # added tokens included; the model's may be larger (padding)

    @staticmethod
    def prepare(whole: bool = True) -> None:
        """Imports what ``load`` needs; to be called once before several threads call ``load``.

        A package that replaces itself in ``sys.modules``, as transformers does, is not safe to
        import first in two threads at once: the second one gets the module that was replaced.

        Args:
            whole: some folder needs ``AutoTokenizer``, which imports torch.
        """
        if whole:
            from transformers import AutoTokenizer  # noqa: F401
        else:
            from transformers import PreTrainedTokenizerFast  # noqa: F401

    @classmethod
    def load(
        cls,
        model: str | Path,
        trust_remote_code: bool = False,
        *,
        ends: Iterable[int] | None = None,
        **hub: Any,
    ) -> "Tokenizer":
        """Loads the tokenizer of a model folder, or of a name on the ``hub`` (``EngineArgs.hub``).

        Args:
            ends: ids that end a sequence, besides the tokenizer's own; default: what the same
                folder says.

        Raises:
            InvalidConfig: no tokenizer, or none with a fast form.
        """
        inner = load_fast(str(model), trust_remote_code, **hub)
        if ends is None:
            ends = end_token_ids(generation_config(model, **hub))
        return cls(inner, ends)

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that ``skip_special_tokens`` leaves out."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token for token, content in added.items() if content.special)

    @cached_property
    def special_texts(self) -> frozenset[str]:
        """The texts of special tokens."""
        special = self.special_token_ids
        return frozenset(text for text, number in self.added_ids.items() if number in special)

    @cached_property
    def added_ids(self) -> dict[str, int]:
        """The id of each added token by its text."""
        added = self.backend.get_added_tokens_decoder()
        return {str(token.content): number for number, token in added.items()}

    @cached_property
    def control_tokens(self) -> re.Pattern[str]:
        """Matches tokens that only a chat template may write: special and bracketed added ones.

        Tags that come in pairs (``<think>``, ``</think>``) are a model's own words inside a turn.
        """
        return re.compile("|".join(map(re.escape, self._control_tokens())) or "(?!)")

    @cached_property
    def paired_tags(self) -> re.Pattern[str]:
        """Matches the added tokens that come in pairs, which no message of a user's may hold."""
        return re.compile("|".join(map(re.escape, self._paired_tags())) or "(?!)")

    @cached_property
    def literal_inner(self) -> "PreTrainedTokenizerFast":
        """The same tokenizer, for conversations in which paired tags are literal text."""
        inner = copy.copy(self.inner)
        inner.chat_control_tokens = [*self._control_tokens(), *self._paired_tags()]
        return inner

    def _paired_tags(self) -> list[str]:
        texts = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        closed = {text for text in texts if f"</{text[1:]}" in texts}
        return sorted(closed | {f"</{text[1:]}" for text in closed})

    def _control_tokens(self) -> list[str]:
        added = self.backend.get_added_tokens_decoder().values()
        tags = set(self._paired_tags())
        declared = frozenset(self.inner.chat_control_tokens or ())
        return sorted(
            token.content
            for token in added
            if token.content not in tags
            and (token.special or token.content in declared or BRACKETED.fullmatch(token.content))
        )

    @cached_property
    def longest_token(self) -> int:
        """Characters in the longest token: a text holds at least its length over this in tokens."""
        return max((len(token) for token in self.backend.get_vocab()), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the ids of ``text``; special tokens in it are parsed as such."""
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def with_special_tokens(self, ids: Sequence[int]) -> list[int]:
        """``ids`` between the tokens that ``encode`` puts before and after a text."""
        probe = self.backend.encode("a", add_special_tokens=True)
        start = probe.special_tokens_mask.index(0)
        tail = probe.special_tokens_mask[::-1].index(0)
        return [*probe.ids[:start], *ids, *probe.ids[len(probe.ids) - tail :]]

    def token_text(self, token: int) -> str:
        """Returns the text of one token inside a text, including its leading space.

        Incomplete characters are replacement characters.
        """
        text = self._token_texts.get(token)
        if text is None:
            before = self.backend.decode([self._letter], skip_special_tokens=False)
            both = self.backend.decode([self._letter, token], skip_special_tokens=False)
            whole = self.backend.decode([token], skip_special_tokens=False)
            text = both[len(before) :] if both.startswith(before) else whole
            self._token_texts[token] = text
        return text

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes of one token, even if they are an incomplete character."""
        text = self.token_text(token)
        if HALF not in text:
            return text.encode()
        if token in self.byte_of:
            return bytes([self.byte_of[token]])
        written = self.backend.id_to_token(token) or ""
        if all(character in BYTE_OF for character in written):
            return bytes(BYTE_OF[character] for character in written)
        return text.encode()

    @cached_property
    def byte_of(self) -> dict[int, int]:
        """The byte of each token that stands for one."""
        return byte_tokens(self.backend)

    @cached_property
    def openings(self) -> dict[str, list[int]]:
        """Generation prompts that :mod:`opening` has found."""
        return {}

    @cached_property
    def _letter(self) -> int:
        """A token that is plain text."""
        ids: list[int] = self.backend.encode("a", add_special_tokens=False).ids
        return ids[-1]

    @cached_property
    def _token_texts(self) -> dict[int, str]:
        return {}

    def strings(self, ids: Sequence[int]) -> list[str]:
        """Returns each token's form in the vocabulary, or "" for an unknown id."""
        return [self.backend.id_to_token(token) or "" for token in ids]

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Returns the text of ``ids``; unknown ids (a model's padding rows) are skipped."""
        if skip_special_tokens or spaces_between_special_tokens:
            text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
            return text
        return self.detokenizer((), False, False).whole(ids)

    def detokenizer(
        self,
        prompt: Sequence[int] | Int32Array = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> IncrementalDetokenizer:
        """Returns a detokenizer of the tokens that follow ``prompt``."""
        return IncrementalDetokenizer(
            self.backend,
            prompt,
            skip=self.special_token_ids if skip_special_tokens else frozenset(),
            join_added=not (skip_special_tokens or spaces_between_special_tokens),
            byte_of=self.byte_of,
        )
