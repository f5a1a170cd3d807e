"""OpenAI's Responses API; https://platform.openai.com/docs/api-reference/responses."""

from itertools import islice

from fastapi import FastAPI, Request, Response

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.responses.bodies import (
    ResponsePromptBody,
    ResponseRequest,
    check_include,
)
from rayfin.deployments.api.responses.compact import CompactAdapter, compaction_of
from rayfin.deployments.api.responses.handler import ResponseAdapter, event_stream, reply
from rayfin.deployments.api.responses.items import check_calls, input_items
from rayfin.deployments.api.responses.prompt import history_of, prompt_of
from rayfin.deployments.api.responses.replies import Deleted, InputTokens, ItemList
from rayfin.deployments.api.responses.state import ResponseState
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.api.responses.tools import answer_rules
from rayfin.deployments.generation.route import GenerationRoute
from rayfin.deployments.generation.service import ServedModels
from rayfin.deployments.http.json_body import ignored_header, read_body

MAX_PAGE = 100  # items
PAGE = 20
MAX_DIGITS = 12  # of a number in a query


def add_response_routes(app: FastAPI, models: ServedModels, store: ResponseStoreClient) -> None:
    """Adds the routes; ``store`` has the responses of all models."""

    async def find(request: Request, response_id: str) -> ResponseState:
        return await store.get(response_id, _tenant(request))

    @app.post("/v1/responses")
    async def create(request: Request) -> Response:
        body = await read_body(request, ResponseRequest)
        headers = ignored_header(body.ignored_fields())
        service = await models.resolve_model(request, body.model)
        adapter = ResponseAdapter(service, store, body, _tenant(request))
        if body.background:
            return await adapter.start(request, headers)
        return await GenerationRoute(adapter).answer(request, headers)

    @app.post("/v1/responses/compact")
    async def compact(request: Request) -> Response:
        body = await read_body(request, ResponseRequest)
        headers = ignored_header(body.ignored_fields())
        service = await models.resolve_model(request, body.model)
        adapter = CompactAdapter(service, store, compaction_of(body), _tenant(request))
        return await GenerationRoute(adapter).answer(request, headers)

    @app.post("/v1/responses/input_tokens")
    async def count(request: Request, response: Response) -> InputTokens:
        body = await read_body(request, ResponsePromptBody)
        body.check()
        service = await models.resolve_model(request, body.model)
        response.headers.update(ignored_header(body.ignored_fields()))
        items = input_items(body.input)
        history = await history_of(store, body, _tenant(request))
        check_calls(history, items)
        answer_rules(body, history + items)  # checks the fields that leave the prompt as it is
        prompt = await prompt_of(service, body, history + items, any_length=True)
        return InputTokens(input_tokens=len(prompt.ids))

    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        state = await find(request, response_id)
        for name in ("include", "include[]"):  # all of them are always included
            check_include(request.query_params.getlist(name))
        after = _number(request, "starting_after", -1, 0)
        if _choice(request, "stream", ("false", "true")) == "true":
            seconds = models.first.replies.comment_seconds
            return event_stream(store.follow(state, after + 1), comment_seconds=seconds)
        return reply(state)

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> Deleted:
        state = await find(request, response_id)
        await store.remove(state)
        return Deleted(id=state.id)

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        state = await find(request, response_id)
        if not state.created.background:
            raise InvalidRequest("Only background responses can be cancelled.", "response_id")
        await store.cancel(state)
        return reply(state)

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(request: Request, response_id: str) -> ItemList:
        return _page(request, await find(request, response_id))


def _tenant(request: Request) -> str:
    """Returns the tenant of the request's API key; it is empty without keys."""
    return getattr(request.state, "tenant", "")


def _page(request: Request, state: ResponseState) -> ItemList:
    """Returns the input items, including those of earlier responses."""
    limit = _number(request, "limit", PAGE, 1, MAX_PAGE)
    items = [*state.history, *state.items]
    if _choice(request, "order", ("desc", "asc")) == "desc":
        items.reverse()
    after = request.query_params.get("after")
    start = 0
    if after is not None:
        places = [i for i, item in enumerate(items) if item.id == after]
        if not places:
            raise InvalidRequest(f"There is no item with id {after[:128]!r}.", "after")
        start = places[0] + 1
    page = list(islice(items, start, start + limit))
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=start + limit < len(items),
    )


def _number(request: Request, name: str, default: int, low: int, high: int = 10**MAX_DIGITS) -> int:
    written = request.query_params.get(name)
    if written is None:
        return default
    if not (written.isascii() and written.isdecimal() and len(written) <= MAX_DIGITS):
        raise InvalidRequest(f"{name} must be a whole number.", name, "invalid_type")
    if not low <= int(written) <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {written}.", name)
    return int(written)


def _choice(request: Request, name: str, choices: tuple[str, ...]) -> str:
    """Returns the query parameter, by default the first of ``choices``."""
    word = request.query_params.get(name, choices[0])
    if word not in choices:
        raise InvalidRequest(f"{name} must be one of {', '.join(choices)}.", name)
    return word
