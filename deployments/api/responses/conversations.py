"""OpenAI's conversations: items that responses read first, and add to when they end."""

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest, NotFound
from rayfin.deployments.api.responses.items import addresses_of, input_items, item_id, texts_of
from rayfin.deployments.api.responses.replies import Item, ItemList
from rayfin.deployments.http.json_body import read_body
from rayfin.deployments.http.query import number_of, place_behind, tenant_of, word_of
from rayfin.deployments.text.checks import check_metadata

OVERHEAD = 2048  # bytes of an item beside its texts
ROUTE = "/v1/conversations"
MAX_PAGE, PAGE = 100, 20  # items


@dataclass(slots=True, eq=False)
class ConversationState:
    """One conversation, as a store holds it."""

    id: str
    tenant: str
    metadata: dict[str, str]
    items: list[Item] = field(default_factory=list)
    created_at: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    changed_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def done(self) -> bool:
        """It may be dropped."""
        return True

    def size(self) -> int:
        texts = itertools.chain.from_iterable(map(texts_of, self.items))
        addresses = itertools.chain.from_iterable(map(addresses_of, self.items))
        return OVERHEAD * (1 + len(self.items)) + sum(map(sys.getsizeof, [*texts, *addresses]))

    def changed(
        self,
        metadata: dict[str, str] | None = None,
        added: Sequence[Item] = (),
        removed: str = "",
    ) -> "ConversationState":
        """Returns it with other metadata, further items, or without an item."""
        kept = [item for item in self.items if item.id != removed]
        data = self.metadata if metadata is None else metadata
        return replace(self, metadata=data, items=[*kept, *added], changed_at=int(time.time()))


class ConversationReply(BaseModel):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]

    @classmethod
    def of(cls, state: ConversationState) -> "ConversationReply":
        return cls(id=state.id, created_at=state.created_at, metadata=state.metadata)


class ConversationRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    items: Any = None
    metadata: dict[str, str] | None = None

    def new_items(self) -> list[Item]:
        """Raises:
        InvalidRequest: ``param`` is the path of what is wrong.
        """
        return [] if not self.items else input_items(self.items, "items")


class DeletedConversation(BaseModel):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


def page_of(request: Request, given: Sequence[Item]) -> ItemList:
    """Returns the page of items that a query asks for; the newest first if it does not say."""
    limit = number_of(request, "limit", PAGE, 1, MAX_PAGE)
    items = list(given)
    if word_of(request, "order", ("desc", "asc")) == "desc":
        items.reverse()
    start = place_behind(request, [item.id for item in items])
    page = items[start : start + limit]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + limit < len(items),
    )


def add_conversation_routes(app: FastAPI, store: Any) -> None:
    """Adds the routes; ``store`` is a ``ResponseStoreClient``."""

    async def find(request: Request, conversation_id: str) -> ConversationState:
        state: ConversationState = await store.call(
            "conversation", conversation_id, tenant_of(request)
        )
        return state

    async def change(request: Request, conversation_id: str, **changes: Any) -> ConversationReply:
        tenant = tenant_of(request)
        changed = await store.call("change_conversation", conversation_id, tenant, changes)
        return ConversationReply.of(changed)

    @app.post(ROUTE)
    async def create(request: Request) -> ConversationReply:
        body = await read_body(request, ConversationRequest)
        check_metadata(body.metadata or {})
        state = ConversationState(
            item_id("conv"), tenant_of(request), body.metadata or {}, body.new_items()
        )
        await store.call("add_conversation", state)
        return ConversationReply.of(state)

    @app.get(ROUTE + "/{conversation_id}")
    async def retrieve(request: Request, conversation_id: str) -> ConversationReply:
        return ConversationReply.of(await find(request, conversation_id))

    @app.post(ROUTE + "/{conversation_id}")
    async def update(request: Request, conversation_id: str) -> ConversationReply:
        body = await read_body(request, ConversationRequest)
        check_metadata(body.metadata or {})
        return await change(request, conversation_id, metadata=body.metadata or {})

    @app.delete(ROUTE + "/{conversation_id}")
    async def delete(request: Request, conversation_id: str) -> DeletedConversation:
        await store.call("remove_conversation", conversation_id, tenant_of(request))
        return DeletedConversation(id=conversation_id)

    @app.get(ROUTE + "/{conversation_id}/items")
    async def list_items(request: Request, conversation_id: str) -> ItemList:
        return page_of(request, (await find(request, conversation_id)).items)

    @app.post(ROUTE + "/{conversation_id}/items")
    async def add_items(request: Request, conversation_id: str) -> ItemList:
        added = (await read_body(request, ConversationRequest)).new_items()
        if not added:
            raise InvalidRequest("'items' must not be empty.", "items", "empty_array")
        await change(request, conversation_id, added=added)
        first, last = added[0].id, added[-1].id
        return ItemList(data=added, first_id=first, last_id=last, has_more=False)

    @app.get(ROUTE + "/{conversation_id}/items/{item}")
    async def retrieve_item(request: Request, conversation_id: str, item: str) -> Item:
        return _item_of(await find(request, conversation_id), item)

    @app.delete(ROUTE + "/{conversation_id}/items/{item}")
    async def delete_item(request: Request, conversation_id: str, item: str) -> ConversationReply:
        _item_of(await find(request, conversation_id), item)
        return await change(request, conversation_id, removed=item)


def _item_of(state: ConversationState, item_id: str) -> Item:
    for item in state.items:
        if item.id == item_id:
            return item
    raise NotFound(f"The conversation has no item with id {item_id[:128]!r}.", "item_id")
