"""``GrammarsPart``: a model whose answers have a form."""

from collections.abc import Sequence

import torch

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import GrammarFailed, InvalidRequest
from rayfin.actors.guidance import GRAMMAR_FAILED
from rayfin.actors.parts import Need
from rayfin.actors.runner.parts.grammars.book import GrammarBook, Vocabulary
from rayfin.actors.runner.parts.grammars.masker import GuidanceProcessor
from rayfin.actors.runner.parts.model_part import ModelPart


class GrammarsPart(ModelPart):
    """Masks of the tokens that a form lets through. The vocabulary loads with the first grammar.

    Args:
        limited: masks that take too long fail their row. Not in groups of ranks: they must agree.
    """

    follows_weights = True

    def __init__(self, args: EngineArgs, vocab_size: int, *, limited: bool) -> None:
        self.book = GrammarBook(lambda: Vocabulary.load(args, vocab_size))
        self._limited = limited
        self.processors = (self._make_processor,)

    def prepare(self, needs: Sequence[Need], *, at_once: bool = False) -> None:
        grammars = [need.what for need in needs if isinstance(need.what, str)]
        if grammars or not needs:
            try:
                self.book.prepare(grammars, at_once)
            except GrammarFailed as error:
                raise InvalidRequest(error.message, None, GRAMMAR_FAILED) from error

    def _make_processor(self, device: torch.device) -> GuidanceProcessor:
        return GuidanceProcessor(device, self.book, limited=self._limited)
