"""The prompt of a response: earlier responses, input and instructions."""

from collections.abc import Sequence

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.responses.bodies import ResponsePromptBody
from rayfin.deployments.api.responses.conversations import ConversationState
from rayfin.deployments.api.responses.items import chat_messages
from rayfin.deployments.api.responses.replies import (
    CallItem,
    CallOutput,
    Item,
    OutputMessage,
)
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.api.responses.tools import template_variables
from rayfin.deployments.generation.prompts import chat_prompt, shown_tools
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.generation_prompt import ChatPrompt


async def history_of(
    store: ResponseStoreClient, body: ResponsePromptBody, tenant: str
) -> tuple[list[Item], str]:
    """Returns the items of the responses before this one, and the first one's id; or the items of
    its conversation, and "".

    Raises:
        NotFound: there is no such response, or conversation.
        InvalidRequest: the previous response has not ended yet.
    """
    if conversation_id := body.conversation_id():
        known: ConversationState = await store.call(
            "conversation", conversation_id, tenant, "conversation"
        )
        return known.items, ""
    if not body.previous_response_id:
        return [], ""
    param = "previous_response_id"
    previous = await store.get(body.previous_response_id, tenant, param)
    if not previous.done:
        raise InvalidRequest("The previous response is still in progress.", param)
    return previous.conversation(), previous.root or previous.id


async def prompt_of(
    service: OpenAIService,
    body: ResponsePromptBody,
    items: list[Item],
    room: int = 1,
    least: int = 1,
    *,
    any_length: bool = False,
) -> ChatPrompt:
    """Returns the prompt of a conversation; with ``any_length`` also of one that is too long.

    ``truncation: auto`` leaves out as many of the oldest items as must go for ``room`` tokens of
    output, of half the context at most. The rest starts with a user's message; the last of these
    always stays.

    Args:
        least: items that stay in any case.

    Raises:
        InvalidRequest: the chat template refuses it, or it cannot fit.
    """
    auto = body.truncation == "auto"
    tools = shown_tools(service, body.declared_tools, body.tool_choice == "none")
    variables = template_variables(body)

    async def render(kept: list[Item]) -> ChatPrompt:
        return await chat_prompt(
            service,
            chat_messages(kept, body.instructions),
            "input",
            tools=tools,
            variables=variables,
            any_length=auto or any_length,
        )

    whole = await render(items)
    starts = [start for start in cuts(items) if len(items) - start >= least]
    room = min(room, service.max_model_len // 2)
    if not auto or not starts or len(whole.ids) + room <= service.max_model_len:
        return whole
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        kept = await render(items[starts[middle] :])
        fits = len(kept.ids) + room <= service.max_model_len
        low, high = (low, middle) if fits else (middle + 1, high)
    return await render(items[starts[low] :])


def cuts(items: Sequence[Item]) -> list[int]:
    """Returns where the beginning may be cut off: before user messages.

    No call is cut off from its output.
    """
    called: dict[str, int] = {}  # id -> the last call that has it
    reaches = list(range(len(items)))  # how far back an item needs the others
    for i, item in enumerate(items):
        if isinstance(item, CallItem):
            called[item.call_id] = i
        elif isinstance(item, CallOutput):
            reaches[i] = called.get(item.call_id, i)
    places = []
    earliest = len(items)
    for i in range(len(items) - 1, 0, -1):
        item = items[i]
        earliest = min(earliest, reaches[i])
        if isinstance(item, OutputMessage) and item.role == "user" and earliest == i:
            places.append(i)
    return places[::-1]
