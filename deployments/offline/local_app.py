"""The HTTP API over an engine in this process: the routes' own checks and answers, no socket."""

import asyncio
from dataclasses import replace
from types import TracebackType

from fastapi import FastAPI

from rayfin.actors.errors import InvalidConfig
from rayfin.deployments.adapters.names import AdapterNames
from rayfin.deployments.api.app import build_api
from rayfin.deployments.generation.reply_settings import ReplySettings
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.layers import HttpSettings
from rayfin.deployments.offline.llm import UNLIMITED
from rayfin.deployments.offline.local_client import LocalClient
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.model_service import load_text
from rayfin.deployments.serve.preflight import check_model, located

MAX_BODY_BYTES = 16 * 2**20


class LocalApp:
    """An ASGI application of one model: ``async with LocalApp(model) as local: local.app``.

    Raises:
        InvalidConfig: the model cannot be served in this process.
    """

    def __init__(self, model: ModelArgs) -> None:
        engine = replace(model.engine, **UNLIMITED)  # type: ignore[arg-type]
        self._model = replace(model, engine=engine)
        self._client: LocalClient | None = None
        self._names: AdapterNames | None = None
        self.app: FastAPI

    async def __aenter__(self) -> "LocalApp":
        model = self._model
        if model.server.data_parallel_size > 1:
            raise InvalidConfig(
                "data_parallel_size over 1 needs a server: see --url", "data_parallel_size"
            )
        check_model(model.engine)
        text = await asyncio.to_thread(load_text, model)
        self._client = await LocalClient.load(located(model.engine))
        info = await self._client.info()
        service = OpenAIService(
            client=self._client,
            adapters=await self._adapters(self._client),
            model_names=model.names,
            max_model_len=info.max_model_len,
            **text.fields(),
            template_defaults=model.server.default_chat_template_kwargs or {},
            edge=HttpSettings(max_body_bytes=MAX_BODY_BYTES, web=False),
            replies=ReplySettings(
                trust_chat_templates=model.server.trust_request_chat_template,
                prompt_tokens_details=model.server.enable_prompt_tokens_details,
                hide_barred_tools=model.server.exclude_tools_when_tool_choice_none,
            ),
        )
        self.app = build_api(service)
        return self

    async def _adapters(self, client: LocalClient) -> AdapterNames | None:
        """The adapters by name, which are read from their folders; None if none is served."""
        if (flags := self._model.adapters) is None:
            return None
        from rayfin.deployments.adapters.registry import AdapterContents  # imports Ray

        contents = AdapterContents(max_rank=flags.max_rank, root=flags.root)
        self._names = await AdapterNames.of(flags, contents, client.prepare)
        return self._names

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._names is not None:
            self._names.close()
        if self._client is not None:
            self._client.close()
