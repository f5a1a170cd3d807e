"""OpenAI's Responses API; https://platform.openai.com/docs/api-reference/responses."""

from fastapi import FastAPI, Request, Response

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.api.responses.bodies import (
    ResponsePromptBody,
    ResponseRequest,
    check_include,
)
from rayfin.deployments.api.responses.compact import CompactAdapter, compaction_of
from rayfin.deployments.api.responses.conversations import add_conversation_routes, page_of
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
from rayfin.deployments.http.query import number_of, tenant_of, word_of


def add_response_routes(app: FastAPI, models: ServedModels, store: ResponseStoreClient) -> None:
    """Adds the routes; ``store`` has the responses and conversations of all models."""
    add_conversation_routes(app, store)

    @app.post("/v1/responses")
    async def create(request: Request) -> Response:
        body = await read_body(request, ResponseRequest)
        headers = ignored_header(body.ignored_fields())
        service = await models.resolve_model(request, body.model)
        adapter = ResponseAdapter(service, store, body, tenant_of(request))
        if body.background:
            return await adapter.start(request, headers)
        return await GenerationRoute(adapter).answer(request, headers)

    @app.post("/v1/responses/compact")
    async def compact(request: Request) -> Response:
        body = await read_body(request, ResponseRequest)
        headers = ignored_header(body.ignored_fields())
        service = await models.resolve_model(request, body.model)
        asked = compaction_of(body, service.max_model_len)
        adapter = CompactAdapter(service, store, asked, tenant_of(request))
        return await GenerationRoute(adapter).answer(request, headers)

    @app.post("/v1/responses/input_tokens")
    async def count(request: Request, response: Response) -> InputTokens:
        body = await read_body(request, ResponsePromptBody)
        body.check()
        service = await models.resolve_model(request, body.model)
        response.headers.update(ignored_header(body.ignored_fields()))
        items = input_items(body.input)
        history, _ = await history_of(store, body, tenant_of(request))
        check_calls(history, items)
        answer_rules(body, history + items)  # checks the fields that leave the prompt as it is
        prompt = await prompt_of(service, body, history + items, any_length=True)
        return InputTokens(input_tokens=len(prompt.ids))

    _add_stored_routes(app, models, store)


def _add_stored_routes(app: FastAPI, models: ServedModels, store: ResponseStoreClient) -> None:
    async def find(request: Request, response_id: str) -> ResponseState:
        return await store.get(response_id, tenant_of(request))

    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        state = await find(request, response_id)
        for name in ("include", "include[]"):  # all of them are always included
            check_include(request.query_params.getlist(name))
        after = number_of(request, "starting_after", -1, 0)
        if word_of(request, "stream", ("false", "true")) == "true":
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
        state = await find(request, response_id)
        return page_of(request, [*state.history, *state.items])
