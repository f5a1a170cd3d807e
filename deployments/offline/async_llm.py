"""``AsyncLLM``: a model for many coroutines, with the names of vLLM's."""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from rayfin.actors.errors import EngineUnavailable, InvalidConfig, InvalidRequest
from rayfin.actors.messages import Command
from rayfin.actors.model_files.pooling_recipe import PoolingTask
from rayfin.actors.profile import ProfileOrder
from rayfin.actors.sampling_params import RequestOutputKind, SamplingParams
from rayfin.actors.timing import WEIGHTS_POLL_SECONDS
from rayfin.actors.weights.version import EngineOrder, KeptPages, NewRequests, PauseMode
from rayfin.deployments.client.weights import (
    UpdateOptions,
    WeightsClient,
    call_workers,
    sleep_command,
    states_as_json,
)
from rayfin.deployments.generation.choice import Prompt
from rayfin.deployments.generation.generation import Generation, off_loop
from rayfin.deployments.generation.plan import AnswerRules, OutputPlan, plan_answers, plan_text
from rayfin.deployments.generation.prompt_forms import WrittenPrompt, truncated
from rayfin.deployments.generation.prompts import chat_prompt
from rayfin.deployments.generation.running import RunningRequests
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.guidance.fields import read_structured_outputs
from rayfin.deployments.guidance.tool_choice import read_tool_choice
from rayfin.deployments.guidance.tools import declared_tools
from rayfin.deployments.http.caller import ANONYMOUS, Caller
from rayfin.deployments.offline.arguments import special_tokens
from rayfin.deployments.offline.async_engines import (
    ActorModel,
    InlineModel,
    ModelSource,
)
from rayfin.deployments.offline.llm import Prompt as AnyPrompt
from rayfin.deployments.offline.lora import LoRARequest, parts_of, write_adapter
from rayfin.deployments.offline.media import OfflineMedia, list_prompts, list_texts
from rayfin.deployments.offline.outputs import OutputWriter, RequestOutput
from rayfin.deployments.offline.pooling import (
    PooledRequest,
    PoolingOutput,
    PoolingParams,
    pooling_inputs,
)
from rayfin.deployments.pooling.gather import pool
from rayfin.deployments.serve.model_args import ModelArgs, one_model
from rayfin.deployments.text.messages import count_calls
from rayfin.deployments.vllm.lacks import no_async_method

if TYPE_CHECKING:  # for it takes a good part of a second
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

SHUT_DOWN = "this AsyncLLM was shut down"
SOURCES: dict[str, Callable[[ModelArgs], ModelSource]] = {"inline": InlineModel, "ray": ActorModel}


class AsyncEngineArgs:
    """The settings of an ``AsyncLLM``: those of ``LLM``, by Rayfin's names or vLLM's.

    Raises:
        InvalidConfig: a setting is unknown or invalid.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        self.model_args: ModelArgs = one_model({"model": model, **settings})


class AsyncLLM:
    """A model for coroutines of one event loop; each call is a request of its own.

    Make one with :meth:`from_engine_args`, or with ``rayfin.connect`` for a model that is served.
    The engine starts at the first call, or with ``async with``. A generator that is closed or
    cancelled aborts its request.
    """

    def __init__(self, source: ModelSource, caller: Caller = ANONYMOUS) -> None:
        self._source = source
        self._caller = caller
        self._opening: asyncio.Task[OpenAIService] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running = RunningRequests()
        self._adapters: dict[int, LoRARequest] = {}
        # Of adapters out of tensors: the one before is still there for requests that run with it.
        self._folders: dict[str, list[TemporaryDirectory[str]]] = {}
        self._closed = False
        self._dead: EngineUnavailable | None = None

    @classmethod
    def from_engine_args(
        cls,
        engine_args: AsyncEngineArgs,
        *,
        executor: str = "inline",
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: object = None,
        enable_log_requests: bool = False,
        disable_log_stats: bool = False,
    ) -> "AsyncLLM":
        """Makes one with an engine of its own.

        Args:
            executor: "inline" runs the engine in this process; "ray" as actors, which are replaced
                when they die: no request is lost.
            start_engine_loop, usage_context, stat_loggers, enable_log_requests,
                disable_log_stats: vLLM's, without effect.

        Raises:
            InvalidConfig: the model cannot be served.
        """
        if executor not in SOURCES:
            raise InvalidConfig(f"executor must be 'inline' or 'ray', got {executor!r}", "executor")
        return cls(SOURCES[executor](engine_args.model_args))

    async def generate(
        self,
        prompt: AnyPrompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        prompt_text: str | None = None,
        trace_headers: object = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Completes a prompt; yields outputs of the kind ``sampling_params.output_kind``.

        A CUMULATIVE or DELTA output is that of one choice.

        Args:
            sampling_params: None uses the model's defaults.
            request_id: None makes one.
            priority: the lowest first; it counts with ``policy="priority"``.
            tokenization_kwargs: ``add_special_tokens`` alone.
            prompt_text: shown as the prompt of token ids.
            trace_headers, data_parallel_rank: vLLM's, without effect.

        Raises:
            InvalidRequest: the prompt does not fit, or a setting has no meaning for the model.
            ValueError: a request of that id runs.
            EngineUnavailable: the engine is lost for good.
        """
        service = await self._service()
        params = self._params(service, sampling_params)
        written, ids = await self._written(service, prompt, special_tokens(tokenization_kwargs))
        ids = truncated(ids, params, service.max_model_len, uncut=written.uncut)
        media = OfflineMedia(service.media, service.embeds)
        embeds = media.embeds(written, await service.client.info(), params)
        shown = Prompt(ids, written.param, "", written.cache_salt, written.images, embeds)
        plan = await plan_text(service, _rules(params), self._caller.tenant)
        text = written.text or written.shown or prompt_text
        answer = self._answer(
            service, shown, text, params, plan, request_id, lora_request, priority
        )
        async with aclosing(answer):
            async for output in answer:
                yield output

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answers a conversation, as :meth:`generate` does; arguments are those of ``LLM.chat``.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or bad tools.
        """
        service = await self._service()
        if chat_template is not None:
            trusting = replace(service.replies, trust_chat_templates=True)
            service = replace(service, replies=trusting)
        params = self._params(service, sampling_params)
        said, declared = list(messages), declared_tools(tools)
        rendered = await chat_prompt(
            service,
            said,
            tools=declared.shown,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            variables=chat_template_kwargs,
            embeds=True,
        )
        choice = read_tool_choice(tool_choice, declared.functions)
        rules = replace(_rules(params), tools=declared.functions, choice=choice)
        plan = await plan_answers(
            service,
            rules,
            rendered.opening,
            earlier_calls=count_calls(said),
            tenant=self._caller.tenant,
        )
        prompt = replace(Prompt.of(rendered, "messages"), embeds=rendered.embeds)
        text = None if rendered.embeds else service.tokenizer.decode(rendered.ids, False)
        answer = self._answer(
            service, prompt, text, params, plan, request_id, lora_request, priority
        )
        async with aclosing(answer):
            async for output in answer:
                yield output

    async def stream(
        self,
        prompt: AnyPrompt | Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **settings: Any,
    ) -> AsyncGenerator[str, None]:
        """Yields the text of one answer in pieces, to a prompt or to a conversation.

        Args:
            settings: those of :meth:`generate`, or of :meth:`chat`.
        """
        params = self._params(await self._service(), sampling_params).clone()
        params.output_kind, params.n, params.best_of = RequestOutputKind.DELTA, 1, None
        talk = isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping)
        ask: Any = self.chat if talk else self.generate
        async with aclosing(ask(prompt, params, **settings)) as outputs:
            async for output in outputs:
                if text := output.outputs[0].text:
                    yield text

    async def encode(
        self,
        prompt: AnyPrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        task: PoolingTask | None = None,
    ) -> AsyncGenerator[PooledRequest, None]:
        """Yields one output: what the model pools of the prompt, as ``LLM.encode`` does.

        Raises:
            InvalidRequest: the prompt does not fit, or the model generates.
        """
        service = await self._service()
        if service.recipe is None:
            message = "this model generates: load it with convert='embed' to pool it"
            raise InvalidRequest(message, "model")
        params, request_id = pooling_params or PoolingParams(), request_id or _new_id()
        (written,) = list_texts([prompt])
        inputs = pooling_inputs(
            lambda: service.tokenizer, service.recipe, service.max_model_len, [written], params
        )
        pooled = await pool(
            *(service, inputs, [written.param], self._caller),
            request_id=request_id,
            task=task,
            priority=priority,
            cache_salt=written.cache_salt,
        )
        yield PooledRequest(request_id, PoolingOutput(pooled.vectors[0]), inputs[0].ids)

    async def asgi_app(self) -> ASGIApp:
        """Returns the HTTP API over this engine, without a socket, as an ASGI application."""
        from rayfin.deployments.api.app import build_api

        app, caller = build_api(await self._service()), self._caller
        if caller == ANONYMOUS:
            return app

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            state = {"tenant": caller.tenant, "background": caller.background}
            await app({**scope, "state": {**scope.get("state", {}), **state}}, receive, send)

        return call

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their last output has the finish reason "abort"."""
        self._running.abort([request_id] if isinstance(request_id, str) else request_id)

    async def check_health(self) -> None:
        """Returns if the engine makes progress.

        Raises:
            EngineUnavailable: with the reason.
        """
        await (await self._service()).client.check_health()

    @property
    def is_running(self) -> bool:
        """Whether requests can come."""
        return not self._closed and not self.errored

    @property
    def is_stopped(self) -> bool:
        """Whether it was shut down."""
        return self._closed

    @property
    def errored(self) -> bool:
        """Whether a request has lost its engine for good."""
        return self._dead is not None

    @property
    def dead_error(self) -> Exception:
        """The error of that request, or of one that would come."""
        return self._dead or EngineUnavailable("the engine is not lost")

    async def get_tokenizer(self) -> "PreTrainedTokenizerFast":
        """Returns transformers' tokenizer of the model."""
        return (await self._service()).tokenizer.inner

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """Returns what the model does: "generate", or what it pools."""
        recipe = (await self._service()).recipe
        return ("generate",) if recipe is None else (recipe.kind, "encode")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Removes cached prefixes that no running request holds; returns True.

        Args:
            reset_running_requests, reset_connector: vLLM's, without effect.
        """
        await self._manage(Command.RESET_CACHE)
        return True

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Frees the memory of the KV cache; requests wait, and cached prefixes are lost.

        Args:
            level: 0 and 1 keep the weights. 2 drops them: the engine loads what it serves when it
                wakes, or before new weights are compared with it.
            mode: vLLM's, without effect: requests go on when it wakes.
        """
        await self._manage(sleep_command(level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocates the KV cache again.

        Args:
            tags: vLLM's. "weights" alone loads the weights after a sleep of level 2.
        """
        whole = tags is None or "kv_cache" in tags
        await self._manage(Command.WAKE if whole else Command.LOAD)

    async def update_weights(
        self,
        weights: Any,
        version: str = "",
        *,
        mode: PauseMode = "keep",
        kv: KeptPages = "recompute",
        new: NewRequests = "wait",
        partial: bool = False,
        dtype: Literal["bfloat16", "float16", "float32"] | None = None,
        order: EngineOrder = "together",
        target: Literal["model", "draft"] = "model",
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Makes all engines compute by other weights, or none; requests go on.

        Args:
            weights, version, partial, dtype, target: those of ``LLM.update_weights``.
            mode, kv, new: what requests do meanwhile (docs/rollouts.md).
            order: all engines pause together, or "in_turn", while the others serve.
            timeout: seconds after which it is given up, unless it is decided.

        Raises:
            InvalidRequest: the tensors are not those of this model; nothing has changed.
            EngineBusy: another update is amid, or this one took longer than its ``timeout``.
        """
        options = UpdateOptions(mode, kv, new, partial, dtype, order, target, timeout)
        return await (await self._weights()).update(weights, version, options)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Carries out a method that workers of vLLM have: no code of a caller's.

        Args:
            method: "reload_weights" with ``weights_path``, "checksum", "sleep", "wake_up" or
                "reset_prefix_cache".
            timeout: vLLM's, without effect.

        Raises:
            InvalidRequest: it is another one.
        """
        return await call_workers(await self._weights(), self._manage, method, args, kwargs)

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Returns when no engine has a request.

        Raises:
            TimeoutError: one still has after ``drain_timeout`` seconds.
        """
        client = (await self._service()).client
        async with asyncio.timeout(drain_timeout):
            while any(
                engine.stats.running + engine.stats.waiting for engine in await client.engines()
            ):
                await asyncio.sleep(WEIGHTS_POLL_SECONDS)

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool = False,
        clear_cache: bool = True,
    ) -> None:
        """Pauses all engines between two steps, until :meth:`resume_generation`.

        Args:
            mode: requests that run end ("abort"), finish before ("wait"), or go on later ("keep").
            wait_for_inflight_requests: the mode "wait".
            clear_cache: removes cached prefixes.
        """
        await (await self._weights()).pause("wait" if wait_for_inflight_requests else mode)
        if clear_cache:
            await self._manage(Command.RESET_CACHE)

    async def resume_generation(self) -> None:
        """Ends a pause."""
        await (await self._weights()).resume()

    async def is_paused(self) -> bool:
        """Returns whether all engines are paused."""
        return bool(states_as_json(await (await self._weights()).states())["paused"])

    async def get_weight_version(self) -> str:
        """Returns the name of the weights that the engines compute by."""
        return str(states_as_json(await (await self._weights()).states())["version"])

    async def _weights(self) -> WeightsClient:
        weights = (await self._service()).weights
        assert weights is not None, "an engine of a program has weights that change"
        return weights

    async def is_sleeping(self) -> bool:
        """Returns whether an engine sleeps."""
        reports = await (await self._service()).client.engines()
        return any(report.state == "asleep" for report in reports)

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter before requests have it; returns True.

        Raises:
            InvalidRequest: it does not fit the model.
        """
        await self._service()
        (parts,) = await asyncio.to_thread(parts_of, [lora_request])
        await self._source.prepare(parts[0])
        self._adapters[lora_request.lora_int_id] = lora_request
        return True

    async def update_adapter(
        self, name: str, tensors: Any, config: Any, *, lora_int_id: int | None = None
    ) -> LoRARequest:
        """Loads an adapter out of a trainer's tensors, in place of the one of that name.

        Nothing pauses: a request ends with the adapter that it began with.

        Args:
            tensors: A and B by peft's names, or ``named_parameters()`` of peft's model.
            config: peft's LoraConfig, or what its adapter_config.json holds.
            lora_int_id: for ``list_loras``; None makes one.

        Returns:
            What :meth:`generate` takes; other clients of a served model call it by ``name``.

        Raises:
            InvalidRequest: it does not fit the model; what the name meant stays.
        """
        adapters = (await self._service()).adapters
        folder = TemporaryDirectory(prefix="rayfin-adapter-")
        files = await asyncio.to_thread(write_adapter, Path(folder.name), tensors, config)
        number = lora_int_id or max(self._adapters, default=0) + 1
        request = LoRARequest(name, number, folder.name)
        if adapters is None:
            await self._source.prepare(parts_of([request])[0][0])
        else:
            await adapters.load(name, folder.name, in_place=True, files=files)
        self._adapters = {i: lora for i, lora in self._adapters.items() if lora.lora_name != name}
        self._adapters[number] = request
        self._folders[name] = [*self._folders.get(name, [])[-1:], folder]
        return request

    async def remove_lora(self, lora_id: int) -> bool:
        """Forgets an adapter of :meth:`add_lora`; returns whether there was one."""
        return self._adapters.pop(lora_id, None) is not None

    async def list_loras(self) -> set[int]:
        """Returns the numbers of the adapters of :meth:`add_lora`."""
        return set(self._adapters)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Profiles the next steps into ``profile_dir``, until :meth:`stop_profile`.

        Raises:
            NotFound: the engine has no ``profile_dir``.
            EngineBusy: a profile is being taken.
        """
        await self._service()
        await self._source.prepare(ProfileOrder(prefix=profile_prefix or ""))

    async def stop_profile(self) -> None:
        """Ends the profile and writes it.

        Raises:
            EngineBusy: none is being taken.
        """
        await self._service()
        await self._source.prepare(ProfileOrder(stop=True))

    async def do_log_stats(self) -> None:
        """Logs what the engine does, in one line."""
        for report in await (await self._service()).client.engines():
            stats = report.stats
            logger.info("%s: %d running, %d waiting", report.name, stats.running, stats.waiting)

    def shutdown(self, timeout: float | None = None) -> None:
        """Aborts what runs, and frees or leaves the engine.

        Args:
            timeout: vLLM's, without effect.
        """
        if self._closed:
            return
        self._closed = True
        self._running.abort()
        if self._opening is not None:
            self._opening.cancel()
        self._source.close()

    async def __aenter__(self) -> "AsyncLLM":
        await self._service()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.shutdown()

    def __getattr__(self, name: str) -> Any:
        """Says what works instead of a method of vLLM's that is missing here."""
        return no_async_method(name)

    async def _service(self) -> OpenAIService:
        """The service of the model, which the first caller opens."""
        if self._closed:
            raise RuntimeError(SHUT_DOWN)
        loop = asyncio.get_running_loop()
        if self._opening is None:
            self._loop, self._opening = loop, asyncio.create_task(self._open())
        if loop is not self._loop:
            raise RuntimeError("an AsyncLLM belongs to the event loop of its first call")
        try:
            return await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            if self._closed:
                raise RuntimeError(SHUT_DOWN) from None
            raise

    async def _open(self) -> OpenAIService:
        try:
            return await self._source.open()
        except Exception:
            self._source.close()
            raise

    async def _manage(self, command: Command) -> None:
        await (await self._service()).client.manage(command, None)

    def _params(self, service: OpenAIService, given: SamplingParams | None) -> SamplingParams:
        return SamplingParams(**service.sampling_defaults) if given is None else given

    async def _written(
        self, service: OpenAIService, prompt: AnyPrompt, special: bool
    ) -> tuple[WrittenPrompt, list[int]]:
        """A prompt of any form, and its tokens; a thread makes those of a long one."""
        listed = list_prompts([prompt], embeds=True)
        media = OfflineMedia(service.media, service.embeds)
        work = partial(media.tokens, listed[0], service.tokenizer, service.max_model_len, special)
        ids = await off_loop(len(listed[0].text or ""), work)
        if not listed[0].given:
            return listed[0], ids
        placed, tokens = await asyncio.to_thread(media.place, listed, [ids])
        return placed[0], tokens[0]

    async def _answer(
        self,
        service: OpenAIService,
        prompt: Prompt,
        text: str | None,
        params: SamplingParams,
        plan: OutputPlan,
        request_id: str | None,
        lora_request: LoRARequest | None,
        priority: int,
    ) -> AsyncGenerator[RequestOutput, None]:
        request_id = _new_id() if request_id is None else request_id
        if request_id in self._running:
            raise ValueError(f"a request {request_id!r} runs")
        if lora_request is not None:
            known = {} if service.adapters is None else service.adapters.refs
            ref = known.get(lora_request.lora_name)
            if ref is None or ref.path != lora_request.lora_path:
                ((ref,),) = await asyncio.to_thread(parts_of, [lora_request])
            service = service.with_adapter(ref, lora_request.lora_name)
        generation = await Generation.prepare(
            service,
            [prompt],
            params,
            request_id=request_id,
            priority=priority,
            caller=self._caller,
            plan=plan,
        )
        shown = OfflineMedia(service.media, None).shown(generation.choices[0].request.prompt)
        writer = OutputWriter(params, service.tokenizer, request_id, (text, shown), lora_request)
        kind = RequestOutputKind.of(params.output_kind)
        write = writer.delta if kind is RequestOutputKind.DELTA else writer.so_far
        if kind is RequestOutputKind.FINAL_ONLY and not params.stop and plan.parser() is None:
            for choice in generation.choices:
                choice.request.whole = choice.request.is_plain
        deltas = self._running.run(request_id, generation)
        left = len(generation.choices)
        try:
            if kind is RequestOutputKind.FINAL_ONLY or params.best_of is not None:
                await generation.finish(deltas)
                yield writer.whole(generation.choices)
                return
            async with aclosing(deltas):
                async for choice, delta in deltas:
                    left -= delta.finish_reason is not None
                    if delta.token_ids or delta.text or delta.finish_reason:  # not of the prompt
                        yield write(choice, delta, left == 0)
        except EngineUnavailable as error:
            self._dead = error
            raise


def _rules(params: SamplingParams) -> AnswerRules:
    if params.structured_outputs is None:
        return AnswerRules()
    form = read_structured_outputs(params.structured_outputs, "structured_outputs")
    return AnswerRules(structured=form.outputs, structured_param=form.param)


def _new_id() -> str:
    return uuid.uuid4().hex
