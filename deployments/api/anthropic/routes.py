"""Anthropic's Messages API; https://docs.anthropic.com/en/api/messages."""

from fastapi import FastAPI, Request, Response

from rayfin.deployments.api.anthropic.bodies import MessagesRequest, PromptBody
from rayfin.deployments.api.anthropic.messages import MessagesAdapter, prompt_of
from rayfin.deployments.api.anthropic.replies import TokenCount
from rayfin.deployments.api.anthropic.tools import answer_rules
from rayfin.deployments.generation.route import GenerationRoute
from rayfin.deployments.generation.service import ServedModels
from rayfin.deployments.http.json_body import ignored_header, read_body


def add_message_routes(app: FastAPI, models: ServedModels) -> None:
    @app.post("/v1/messages")
    async def create(request: Request) -> Response:
        body = await read_body(request, MessagesRequest)
        headers = ignored_header(body.ignored_fields())
        service = await models.resolve_model(request, body.model)
        return await GenerationRoute(MessagesAdapter(service, body)).answer(request, headers)

    @app.post("/v1/messages/count_tokens")
    async def count(request: Request, response: Response) -> TokenCount:
        body = await read_body(request, PromptBody)
        service = await models.resolve_model(request, body.model)
        response.headers.update(ignored_header(body.ignored_fields()))
        answer_rules(body)  # checks the fields that leave the prompt as it is
        prompt = await prompt_of(service, body, any_length=True)
        return TokenCount(input_tokens=len(prompt.chat.ids))
