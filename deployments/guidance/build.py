"""From a grammar, tool calls and a thought to the rules that travel with a request."""

from functools import lru_cache

from rayfin.actors.guidance import Guidance, Thinking
from rayfin.actors.structured_outputs import StructuredOutputs
from rayfin.deployments.guidance.calls import CallRules
from rayfin.deployments.guidance.fields import check_size
from rayfin.deployments.guidance.grammar import Grammar, form_from, form_text, make_grammar
from rayfin.deployments.guidance.schema.lint import MAX_BYTES
from rayfin.deployments.text.tokenizer import Tokenizer

FREE = CallRules()
KNOWN_FORMS = 128  # forms that were read lately: a program sends its own each time


def answer_grammar(
    outputs: StructuredOutputs, param: str, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES
) -> Grammar:
    """Returns the grammar of a form; a form that was seen lately is not read again.

    Raises:
        InvalidRequest: as ``make_grammar``.
    """
    check_size(outputs, param, max_bytes)
    try:
        text = form_text(outputs)
    except (TypeError, ValueError, RecursionError):  # offline: no JSON, which make_grammar refuses
        special_tokens = tokenizer.added_ids
        return make_grammar(outputs, param, special_tokens=special_tokens, max_bytes=max_bytes)
    return _known_grammar(text, param, tokenizer, max_bytes)


@lru_cache(KNOWN_FORMS)
def _known_grammar(text: str, param: str, tokenizer: Tokenizer, max_bytes: int) -> Grammar:
    special_tokens = tokenizer.added_ids
    return make_grammar(form_from(text), param, special_tokens=special_tokens, max_bytes=max_bytes)


def build_guidance(
    *, grammar: str = "", calls: CallRules = FREE, thinking: Thinking | None = None
) -> Guidance | None:
    """Returns the rules of all choices of a request, or None if their tokens are free.

    ``build_requests`` adds the ends, which depend on the prompt. A thought without a budget
    matters only where a grammar or calls follow it.

    Args:
        grammar: of the whole answer after its thought, forced calls included.
        calls: of calls in an answer that is free otherwise.
    """
    thinks = thinking is not None and thinking.budget is not None
    if not (grammar or calls.calls or calls.forbidden or thinks):
        return None
    return Guidance(grammar, calls.calls, calls.forbidden, thinking, names=calls.names)
