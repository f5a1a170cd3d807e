"""POST /v1/responses/compact: a conversation as one message, which stands for it from then on."""

from typing import Literal

from pydantic import BaseModel

from rayfin.actors.errors import RequestFailed
from rayfin.deployments.api.responses.bodies import ResponseRequest
from rayfin.deployments.api.responses.handler import ResponseAdapter
from rayfin.deployments.api.responses.items import input_items, item_id
from rayfin.deployments.api.responses.replies import InputText, Item, OutputMessage, ResponseUsage
from rayfin.deployments.api.responses.state import ResponseState
from rayfin.deployments.generation.generation import Generation

SUMMARY_TOKENS = 4096  # of the message, where a request names no limit
ASK = (
    "Summarise this conversation for an assistant that will continue it without having read it: "
    "what the user wants, what was done and found, files, commands and facts that matter, and "
    "what is left to do. Write the summary only, and call no tool."
)
BEGINS = "Summary of the conversation so far:\n\n"


class CompactedResponse(BaseModel):
    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[Item]
    usage: ResponseUsage | None


def compaction_of(body: ResponseRequest, max_model_len: int) -> ResponseRequest:
    """The request that makes the summary; its prompt begins as those of the conversation do."""
    asked = {
        "stream": None,
        "store": False,
        "background": None,
        "text": None,
        "truncation": "auto",
        "tool_choice": "none",
        # A conversation as long as the context loses as much at its beginning.
        "max_output_tokens": body.max_output_tokens or min(SUMMARY_TOKENS, max_model_len // 4),
    }
    return body.model_copy(update=asked)


class CompactAdapter(ResponseAdapter):
    """One compaction: a response to a last message that asks for a summary."""

    least_items = 2  # what the message asks about, and itself

    def items(self) -> list[Item]:
        ask = OutputMessage(id=item_id("msg"), role="user", content=[InputText(text=ASK)])
        body = self._body
        continues = body.input is None and (body.previous_response_id or body.conversation)
        return [*([] if continues else input_items(body.input)), ask]

    async def _keep(self, ended: ResponseState) -> None:
        """The conversation stays as it is: its client puts the summary into its place."""

    def reply(self, generation: Generation) -> str:
        response = self._state.response()
        said = generation.choices[0].content or ""
        if not said.strip():
            raise RequestFailed("The model wrote no summary within max_output_tokens.")
        content = [InputText(text=BEGINS + said.strip())]
        return CompactedResponse(
            id=response.id,
            created_at=response.created_at,
            output=[OutputMessage(id=item_id("msg"), role="user", content=list(content))],
            usage=response.usage,
        ).model_dump_json()
