"""Texts and conversations to the token ids of a prompt, for every route."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rayfin.actors.errors import InvalidRequest, TemplateTooSlow
from rayfin.actors.media.part import PromptEmbeds
from rayfin.actors.media.processed import WORDS, ProcessedMedia
from rayfin.actors.timing import INLINE_TEMPLATE_SECONDS, TEMPLATE_SECONDS
from rayfin.deployments.generation.generation import off_loop
from rayfin.deployments.generation.prompt_forms import WrittenPrompt, check_length, prompt_ids
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.guidance.tools import DeclaredTools
from rayfin.deployments.media.embeds_parts import place_embeds, read_parts
from rayfin.deployments.media.embeds_tensor import FIELD as EMBEDS
from rayfin.deployments.text.generation_prompt import ChatPrompt, render_prompt
from rayfin.deployments.text.markers import Marked
from rayfin.deployments.text.messages import (
    PlainTools,
    has_parts,
    is_part,
    media_of,
    without_images,
)
from rayfin.deployments.text.repair import NO_RULES

_KIMI_EFFORTS = {"minimal": "low", "xhigh": "max"}


def thinking_variables(
    variables: Mapping[str, Any] | None,
    effort: str | None,
    documents: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Returns a template's variables with those of ``reasoning_effort``, and ``documents``.

    Templates name the switch either way. What the request sets itself stays.
    """
    chosen = dict(variables or {})
    if documents:
        chosen["documents"] = documents
    if effort is not None:
        thinks = effort != "none"
        for name in ("enable_thinking", "thinking"):
            chosen.setdefault(name, chosen.get("enable_thinking", thinks))
        chosen.setdefault("reasoning_effort", effort)
        if thinks:  # Kimi K3's name
            chosen.setdefault("thinking_effort", _KIMI_EFFORTS.get(effort, effort))
    return chosen


async def text_ids(
    service: OpenAIService,
    text: str,
    param: str,
    *,
    add_special_tokens: bool = True,
    any_length: bool = False,
) -> list[int]:
    """Returns the ids of a text.

    Args:
        param: the name of the field, for errors.
        any_length: also tokenizes a text that cannot fit the context.

    Raises:
        ContextLengthExceeded: it cannot fit.
    """
    return await written_ids(
        service,
        WrittenPrompt(param, text=text),
        add_special_tokens=add_special_tokens,
        any_length=any_length,
    )


async def written_ids(
    service: OpenAIService,
    prompt: WrittenPrompt,
    *,
    add_special_tokens: bool = True,
    any_length: bool = False,
) -> list[int]:
    """Returns the ids of a prompt, a text or ids; otherwise as :func:`text_ids`."""
    work = partial(
        prompt_ids,
        prompt,
        service.tokenizer,
        None if any_length else service.max_model_len,
        add_special_tokens=add_special_tokens,
    )
    return await off_loop(len(prompt.text or ""), work)


async def chat_ids(
    service: OpenAIService, messages: Any, param: str = "messages", **settings: Any
) -> list[int]:
    """Returns the ids of a conversation; otherwise as :func:`chat_prompt`."""
    return (await chat_prompt(service, messages, param, **settings)).ids


async def chat_prompt(
    service: OpenAIService,
    messages: Any,
    param: str = "messages",
    *,
    tools: Any = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    add_special_tokens: bool | None = None,
    variables: Mapping[str, Any] | None = None,
    any_length: bool = False,
    chat_template: str | None = None,
    given: list[int] | None = None,
    embeds: bool = False,
    read: list[ProcessedMedia] | None = None,
) -> ChatPrompt:
    """Returns a conversation, rendered by the chat template.

    Args:
        messages: OpenAI's chat messages, unchecked.
        param: the name of the conversation's field, for errors.
        add_generation_prompt: None adds it, unless the final message is continued.
        add_special_tokens: adds the tokenizer's special tokens to the rendered text.
        variables: the template's further variables.
        any_length: as in :func:`text_ids`.
        chat_template: of the request, in place of the service's.
        given: the prompt's ids, which stand for the messages.
        embeds: messages may have parts that are embeddings.
        read: the images or clips in the messages, where they have been read already.

    Raises:
        InvalidRequest: bad messages, tools or variables, no template, or its refusal.
        ContextLengthExceeded: they cannot fit.
    """
    continued = bool(continue_final_message)
    variables = {**service.template_defaults, **(variables or {})}
    _check_template(service, chat_template)
    formats = service.formats
    if chat_template is not None:  # whose rules and place for tools are not known
        formats = replace(formats, rules=NO_RULES, writes_tools=False)
    characters = _characters(messages)
    if not (any_length or given):  # before media are decoded, which takes far longer
        check_length(characters, service.tokenizer, service.max_model_len, param)
    media = await _read_media(service, messages, param, given) if read is None else read
    marked = Marked(messages, EMBEDS) if embeds and has_parts(messages, EMBEDS) else None
    rows = [] if marked is None else await _read_embeds(service, marked, given)

    def render(seconds: float) -> ChatPrompt:
        prompt = render_prompt(
            service.tokenizer,
            _readable(service, messages if marked is None else marked.messages),
            formats,
            tools=tools,
            add_generation_prompt=not continued
            if add_generation_prompt is None
            else add_generation_prompt,
            continue_final_message=continued,
            chat_template=service.chat_template if chat_template is None else chat_template,
            variables=variables,
            seconds=seconds,
            given=given,
            media=service.reads,
            marked=marked,
        )
        if add_special_tokens and not given:
            prompt = replace(prompt, ids=service.tokenizer.with_special_tokens(prompt.ids))
        return _placed(service, prompt, media, rows, param)

    try:
        try:
            size = characters + _tool_characters(tools) + _items(variables)
            return await off_loop(size, partial(render, INLINE_TEMPLATE_SECONDS))
        except TemplateTooSlow:  # may run longer, but not in the event loop
            return await asyncio.to_thread(render, TEMPLATE_SECONDS)
    except InvalidRequest as error:
        if error.param == "messages":
            error.param = param
        raise


def shown_tools(service: OpenAIService, tools: DeclaredTools, barred: bool) -> PlainTools | None:
    """Returns the tools that the chat template sees.

    Args:
        barred: ``tool_choice`` lets the answer call none.
    """
    return None if barred and service.replies.hide_barred_tools else tools.shown


def _readable(service: OpenAIService, messages: Any) -> Any:
    drops = service.replies.drop_images and service.reads != "image"
    return without_images(messages) if drops else messages


def _tool_characters(tools: object) -> int:
    """Counts the characters of a request's tools, checked or not."""
    return tools.characters if isinstance(tools, PlainTools) else _characters(tools)


def _items(variables: object) -> int:
    """Counts the characters of all texts in template variables, and all else as one each."""
    if isinstance(variables, str):
        return len(variables)
    if isinstance(variables, dict):
        return len(variables) + sum(map(_items, variables.values()))
    return 1 + sum(map(_items, variables)) if isinstance(variables, list | tuple) else 1


def _check_template(service: OpenAIService, template: str | None) -> None:
    if template is not None and not service.replies.trust_chat_templates:
        raise InvalidRequest(
            "chat_template is refused in requests: this server was not started with "
            "--trust-request-chat-template.",
            "chat_template",
            "unsupported_parameter",
        )


async def _read_media(
    service: OpenAIService, messages: Any, param: str, given: list[int] | None
) -> list[ProcessedMedia]:
    if service.media is None:
        return []
    media = await service.media.read(messages, param)
    if media and given is not None:
        words = WORDS[service.media.kind][1]
        raise InvalidRequest(f"Token ids of a prompt do not go with {words}.", param)
    return media


async def _read_embeds(
    service: OpenAIService, marked: Marked, given: list[int] | None
) -> list[PromptEmbeds]:
    if given is not None:
        message = "Token ids of a prompt do not go with parts that are embeddings."
        raise InvalidRequest(message, marked.parts[0].path)
    return await read_parts(marked, service.embeds, await service.client.info())


def _placed(
    service: OpenAIService,
    prompt: ChatPrompt,
    media: list[ProcessedMedia],
    rows: list[PromptEmbeds],
    param: str,
) -> ChatPrompt:
    """The prompt with its embeddings and the tokens of its media in their places."""
    if rows:
        ids, placed = place_embeds(prompt.ids, rows)
        return replace(prompt, ids=ids, embeds=placed)
    if service.media is None or not media:
        return prompt
    ids, inputs = service.media.place(prompt.ids, media, param)
    return replace(prompt, ids=ids, images=inputs)


def _characters(messages: object) -> int:
    """Counts the characters of all texts in unchecked ``messages`` or tools."""
    if isinstance(messages, str):
        return len(messages)
    if media_of(messages) is not None or is_part(messages, EMBEDS):
        return 0
    if isinstance(messages, dict):
        return sum(map(_characters, messages.values()))
    return sum(map(_characters, messages)) if isinstance(messages, list) else 0
