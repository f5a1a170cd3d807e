"""POST /tokenize and /detokenize, with vLLM's bodies."""

from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict

from rayfin.actors.errors import InvalidRequest
from rayfin.deployments.generation.generation import off_loop
from rayfin.deployments.generation.members import check_members
from rayfin.deployments.generation.prompts import chat_ids, text_ids, thinking_variables
from rayfin.deployments.generation.service import OpenAIService, ServedModels
from rayfin.deployments.guidance.tools import declared_tools
from rayfin.deployments.http.json_body import ignored_header, read_body
from rayfin.deployments.text.checks import missing

PLACES = (
    "vocab_file",
    "merges_file",
    "tokenizer_file",
    "name_or_path",
)  # of files, on this machine


class TokenizeRequest(BaseModel):
    """A text, or a conversation; None is the same as leaving a field out."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None  # True for a text, False for a conversation
    return_token_strs: bool | None = None
    # Of a conversation
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None  # see --trust-request-chat-template
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    tools: Any = None

    def check(self) -> None:
        check_members("tokenize", self.model_extra)
        if self.prompt is None and self.messages is None:
            raise missing("prompt")
        if self.prompt is not None and self.messages is not None:
            raise InvalidRequest("prompt and messages exclude each other.", "messages")


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    tokens: list[int]


def tokenizer_info(service: OpenAIService) -> dict[str, Any]:
    """The tokenizer's settings, its class and its chat template, as vLLM shows them."""
    inner = service.tokenizer.inner
    info = {name: _plain(value) for name, value in inner.init_kwargs.items() if name not in PLACES}
    info["tokenizer_class"] = type(inner).__name__
    if template := service.chat_template or inner.chat_template:
        info["chat_template"] = template
    return info


def _plain(value: Any) -> Any:
    """A setting as JSON; added tokens, and all that JSON has no form for, are text."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


def add_tokenize_routes(app: FastAPI, models: ServedModels) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request, response: Response) -> Tokens:
        body = await read_body(request, TokenizeRequest)
        service = await models.text_side(request, body.model)
        response.headers.update(ignored_header(list(body.model_extra or {})))
        ids = await _ids(service, body)
        tokens = Tokens(count=len(ids), max_model_len=service.max_model_len, tokens=ids)
        if body.return_token_strs:
            tokens.token_strs = await off_loop(len(ids), partial(service.tokenizer.strings, ids))
        return tokens

    @app.post("/detokenize")
    async def detokenize(request: Request, response: Response) -> Detokenized:
        body = await read_body(request, DetokenizeRequest)
        service = await models.text_side(request, body.model)
        response.headers.update(ignored_header(list(body.model_extra or {})))
        vocab_size = (await service.client.info()).vocab_size
        for i, token in enumerate(body.tokens):
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"Token id {str(token)[:24]} is out of vocabulary: ids are in "
                    f"[0, {vocab_size}).",
                    f"tokens[{i}]",
                    "invalid_token_id",
                )
        decode = partial(service.tokenizer.decode, body.tokens, skip_special_tokens=False)
        text = await off_loop(len(body.tokens), decode)
        return Detokenized(prompt=text)

    if models.first.edge.tokenizer_info:

        @app.get("/tokenizer_info")
        async def info(request: Request, model: str | None = None) -> dict[str, Any]:
            return tokenizer_info(await models.text_side(request, model))


async def _ids(service: OpenAIService, body: TokenizeRequest) -> list[int]:
    body.check()
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        return await text_ids(
            service, body.prompt, "prompt", add_special_tokens=special, any_length=True
        )
    return await chat_ids(
        service,
        body.messages,
        tools=declared_tools(body.tools).shown,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        variables=thinking_variables(body.chat_template_kwargs, None, body.documents),
        chat_template=body.chat_template or None,
        any_length=True,
    )
