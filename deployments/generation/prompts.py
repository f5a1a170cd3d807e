"""From what clients write to the token ids of a prompt; every route that reads text goes here."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from rayfin.actors.errors import InvalidRequest, TemplateTooSlow
from rayfin.actors.timing import INLINE_TEMPLATE_SECONDS
from rayfin.deployments.generation.generation import off_loop
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.requests.prompts import WrittenPrompt, check_length, prompt_ids
from rayfin.deployments.text.chat_template import render_chat


async def text_ids(
    service: OpenAIService,
    text: str,
    param: str,
    *,
    add_special_tokens: bool = True,
    any_length: bool = False,
) -> list[int]:
    """The ids of a text.

    Args:
        param: the caller's name of the text, for errors.
        any_length: a text that cannot fit the context is tokenized all the same.

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
    """The ids of a prompt in any of its forms; otherwise as :func:`text_ids`."""
    work = partial(
        prompt_ids,
        prompt,
        service.tokenizer,
        None if any_length else service.max_model_len,
        add_special_tokens=add_special_tokens,
    )
    return await off_loop(len(prompt.text or ""), work)


async def chat_ids(
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
) -> list[int]:
    """The ids of a conversation, through the chat template.

    Args:
        messages: OpenAI's chat messages, which nobody need have checked.
        param: the caller's name of the conversation as a whole, for errors.
        add_generation_prompt: None adds it, unless the final message is continued.
        add_special_tokens: puts the tokenizer's own around what the template wrote.
        variables: the template's further variables.
        any_length: as in :func:`text_ids`.

    Raises:
        InvalidRequest: bad messages, tools or variables, no template, or its refusal.
        ContextLengthExceeded: they cannot fit.
    """
    continued = bool(continue_final_message)
    render = partial(
        render_chat,
        service.tokenizer,
        messages,
        tools=tools,
        add_generation_prompt=not continued
        if add_generation_prompt is None
        else add_generation_prompt,
        continue_final_message=continued,
        chat_template=service.chat_template,
        variables=variables,
    )
    characters = _characters(messages)
    if not any_length:
        check_length(characters, service.tokenizer, service.max_model_len, param)
    try:
        try:
            ids = await off_loop(characters, partial(render, seconds=INLINE_TEMPLATE_SECONDS))
        except TemplateTooSlow:  # it may have its time, but not the event loop's
            ids = await asyncio.to_thread(render)
    except InvalidRequest as error:
        if error.param == "messages":
            error.param = param
        raise
    return service.tokenizer.with_special_tokens(ids) if add_special_tokens else ids


def _characters(messages: object) -> int:
    """The length of all texts in ``messages``, which nobody has checked yet."""
    if isinstance(messages, str):
        return len(messages)
    if isinstance(messages, dict):
        return sum(map(_characters, messages.values()))
    return sum(map(_characters, messages)) if isinstance(messages, list) else 0
