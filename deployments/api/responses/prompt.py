"""The prompt of a response: earlier responses, input and instructions."""

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.responses.bodies import ResponsePromptBody
from rayfin.deployments.api.responses.items import chat_messages
from rayfin.deployments.api.responses.replies import OutputMessage
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.generation.prompts import chat_ids
from rayfin.deployments.generation.service import OpenAIService


async def history_of(
    store: ResponseStoreClient, body: ResponsePromptBody, tenant: str
) -> list[OutputMessage]:
    """Returns the items of the responses before this one.

    Raises:
        NotFound: there is no such response.
        InvalidRequest: the previous response has not ended yet.
    """
    if body.previous_response_id is None:
        return []
    param = "previous_response_id"
    previous = await store.get(body.previous_response_id, tenant, param)
    if not previous.done:
        raise InvalidRequest("The previous response is still in progress.", param)
    return previous.conversation()


async def prompt_ids(
    service: OpenAIService,
    body: ResponsePromptBody,
    items: list[OutputMessage],
    room: int = 1,
    *,
    any_length: bool = False,
) -> list[int]:
    """Returns the token ids of a conversation; with ``any_length`` also of one that is too long.

    ``truncation: auto`` leaves out as many of the oldest items as must go for ``room`` tokens of
    output. The rest starts with a user's message; the last of these always stays.

    Raises:
        InvalidRequest: the chat template refuses it, or it cannot fit.
    """
    auto = body.truncation == "auto"

    async def render(kept: list[OutputMessage]) -> list[int]:
        return await chat_ids(
            service,
            chat_messages(kept, body.instructions),
            "input",
            variables=body.chat_template_kwargs,
            any_length=auto or any_length,
        )

    ids = await render(items)
    starts = [i for i, item in enumerate(items) if i > 0 and item.role == "user"]
    if not auto or not starts or len(ids) + room <= service.max_model_len:
        return ids
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        fits = len(await render(items[starts[middle] :])) + room <= service.max_model_len
        low, high = (low, middle) if fits else (middle + 1, high)
    return await render(items[starts[low] :])
