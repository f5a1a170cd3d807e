"""A rendered conversation, and what its template puts into the model's mouth."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rayfin.actors.errors import InvalidRequest
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.media.part import MediaInput, PromptEmbeds
from rayfin.actors.timing import TEMPLATE_SECONDS
from rayfin.deployments.text.chat_template import HistoryStyle, render_chat
from rayfin.deployments.text.markers import Marked
from rayfin.deployments.text.messages import plain_messages, text_of
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.repair import NO_RULES, repaired
from rayfin.deployments.text.tokenizer import Tokenizer

Render = Callable[[Sequence[Any], bool], list[int]]
"""Messages, and whether the generation prompt is added, to token ids."""

SHORT = ({"role": "user", "content": "x"},)
MAX_KNOWN = 64  # openings; requests choose the variables that they depend on


@dataclass(slots=True, frozen=True)
class ChatPrompt:
    """A rendered conversation."""

    ids: list[int]
    images: tuple[MediaInput, ...] = ()
    embeds: tuple[PromptEmbeds, ...] = ()  # in the order of their positions, where ids are zeros
    opening: str = ""  # what the template puts into the model's mouth, if its thoughts are known
    repairs: tuple[str, ...] = ()  # what of the messages was changed for the template


def render_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Any],
    formats: Detected,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
    seconds: float = TEMPLATE_SECONDS,
    given: list[int] | None = None,
    media: MediaKind | None = None,
    marked: Marked | None = None,
) -> ChatPrompt:
    """Returns a conversation as a prompt; otherwise as :func:`render_chat`.

    Args:
        given: the prompt's ids: the messages are checked, and not rendered.
        media, marked: as in :func:`render_chat`.
    """
    variables = formats.switch.added(variables or {})
    render = partial(
        render_chat,
        tokenizer,
        tools=tools,
        chat_template=chat_template,
        variables=variables,
        seconds=seconds,
        history=HistoryStyle(
            formats.arguments_as_text,
            "openai" if formats.tools is None else formats.tools.id_style,
            formats.content,
            formats.rules,
            formats.tools if formats.writes_tools else None,
        ),
        media=media,
        marked=marked,
    )
    if given is None:
        ids = render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        repairs = repaired(messages, formats.rules)[1] if formats.rules != NO_RULES else ()
        prompt = ChatPrompt(ids, repairs=tuple(repairs))
    else:
        plain_messages(messages, media=media)
        ids = given
        prompt = ChatPrompt(ids)
    if formats.reasoning is None or not (add_generation_prompt or continue_final_message):
        return prompt
    if continue_final_message:
        last = plain_messages(messages, media=media)[-1]
        said = text_of(last["content"])
        return replace(prompt, opening=said if marked is None else marked.without(said))
    depends = repr((chat_template, bool(tools), sorted((variables or {}).items())))
    key = hashlib.sha256(depends.encode("utf-8", "surrogatepass")).hexdigest()

    def with_or_without(said: Sequence[Any], added: bool) -> list[int]:
        return render(said, add_generation_prompt=added)

    shown = messages if given is None else None
    opening = opening_text(tokenizer, ids, shown, with_or_without, key)
    return replace(prompt, opening=opening)


def opening_text(
    tokenizer: Tokenizer, ids: list[int], messages: Sequence[Any] | None, render: Render, key: str
) -> str:
    """Returns the text of the generation prompt at the end of ``ids``, a rendered conversation.

    It is the difference that the generation prompt makes. Where ``ids`` end as a short conversation
    does, that is rendered once; only where they do not, ``messages`` are rendered again.

    Args:
        messages: None if ``ids`` come from elsewhere: then it is the short one's, or nothing.
        key: of what else the rendering depends on: variables, and whether there are tools.
    """
    known = tokenizer.openings.get(key)
    if known is None:
        known = _added(lambda: render(SHORT, True), lambda: render(SHORT, False))
        if len(tokenizer.openings) >= MAX_KNOWN:
            tokenizer.openings.clear()
        tokenizer.openings[key] = known
    if not known or ids[-len(known) :] != known:
        if messages is None:
            return ""
        known = _added(lambda: ids, lambda: render(messages, False))
    return tokenizer.decode([token for token in known if token >= 0], skip_special_tokens=False)


def _added(whole: Callable[[], list[int]], without: Callable[[], list[int]]) -> list[int]:
    """The ids of ``whole`` after those that both begin with; none if a template refuses."""
    try:
        long, short = whole(), without()
    except InvalidRequest:
        return []
    same = 0
    while same < min(len(long), len(short)) and long[same] == short[same]:
        same += 1
    return long[same:]
