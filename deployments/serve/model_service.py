"""One model of an ingress: its tokenizer and templates, and the connections to its engines."""

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from rayfin.actors.errors import RAISED, EngineUnavailable, InvalidConfig
from rayfin.actors.media.load import load_processor
from rayfin.actors.messages import EngineInfo
from rayfin.actors.metrics.hub import HubSettings, start_hub
from rayfin.actors.metrics.ledger import CounterReport
from rayfin.actors.model_files.pooling_folder import read_recipe
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.timing import HANDOVER_POLL_SECONDS, HANDOVER_SETTLE_SECONDS
from rayfin.deployments.adapters.names import AdapterNames
from rayfin.deployments.adapters.registry import RegistryClient
from rayfin.deployments.client.engine_names import INGRESS, engine_prefix, find_engines
from rayfin.deployments.client.metered import MeteredEngineClient
from rayfin.deployments.client.pool import EnginePool, Patience
from rayfin.deployments.client.wait_for_engine import WaitingRoom, starter
from rayfin.deployments.client.weights import RemoteWeights
from rayfin.deployments.generation.build_requests import sampling_defaults
from rayfin.deployments.generation.service import OpenAIService, ServedModels
from rayfin.deployments.guidance.grammar_check import ProcessChecker
from rayfin.deployments.media.read_embeds import EmbedsReader
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.media.sound import audio_off
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.preflight import (
    end_tokens,
    generation_config_path,
    located,
    needs_auto_classes,
    read_template,
    shipped,
    tokenizer_path,
)
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.telemetry.hub_client import HubClient
from rayfin.deployments.telemetry.ingress_counters import INGRESS_METRICS, IngressCounters
from rayfin.deployments.telemetry.request_log import RequestLog
from rayfin.deployments.text.parsing.detect import Detected, detect
from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # its packages are an extra
    from rayfin.deployments.telemetry.tracing import Tracing

FAILED = "failed to start"  # in what Serve says of a deployment
NO_TRACING = "otlp_traces_endpoint needs some packages: pip install -e '.[tracing]'"


logger = logging.getLogger(__name__)


class TextSide(NamedTuple):
    """What a model's service needs of its folder."""

    tokenizer: Tokenizer
    chat_template: str | None  # in place of the model's own
    formats: Detected
    defaults: dict[str, Any]  # of sampling
    recipe: PoolingRecipe | None  # of a model that pools
    media: MediaReader | None = None  # of a model that reads images, or hears
    embeds: EmbedsReader | None = None  # with --enable-prompt-embeds

    def fields(self) -> dict[str, Any]:
        """Its fields of OpenAIService."""
        return {
            "tokenizer": self.tokenizer,
            "chat_template": self.chat_template,
            "formats": self.formats,
            "sampling_defaults": self.defaults,
            "recipe": self.recipe,
            "media": self.media,
            "embeds": self.embeds,
        }


async def model_service(
    place: int,
    model: ModelArgs,
    engines: DeploymentHandle[Any],
    shared: dict[str, Any],
    adjust: Callable[[CounterReport], CounterReport] = lambda report: report,
) -> OpenAIService:
    """The service of an ingress' model number ``place``, when its first engine is ready.

    ``engines`` is the deployment of its engines, ``shared`` the fields of OpenAIService that all
    models of the ingress have in common. ``adjust`` changes the reports of its counters.
    """
    server = model.server
    name, context = model.names[0], serve.get_replica_context()
    caller = f"ingress-{context.replica_id.unique_id}-{os.getpid()}"
    client = engine_pool(caller, model, engines, context.app_name)
    text = await _text_side(model, client)
    logger.info("%s: %s", name, text.formats.why)
    tracing = start_tracing(server.otlp_traces_endpoint, name)
    load = shared["load"]
    # Requests of the whole ingress are counted once.
    counts = IngressCounters(lambda: load.in_flight if place == 0 else 0)
    counts.reads(*text.formats.names)
    if text.media is not None:
        counts.media = text.media.counts
    port = None if server.metrics_port is None else server.metrics_port + place
    prefix = engine_prefix(context.app_name, model.deployment)
    hub = HubSettings(prefix, name, server.metrics_alias, port, INGRESS_METRICS)
    link = HubClient(
        partial(start_hub, context.app_name, hub), ray.kill, lambda: adjust(counts.report())
    )
    info = await _first_info(client)
    checker = ProcessChecker(
        text.tokenizer,
        info.vocab_size,
        max_bytes=server.max_grammar_bytes,
        on_verdict=counts.checked,
        on_restart=counts.warden_restarted,
    )
    metered = MeteredEngineClient(client, counts, name, link, server.metrics_alias, tracing)
    service = OpenAIService(
        client=metered,
        adapters=await adapter_names(context.app_name, model, client),
        counts=counts,
        model_names=model.names,
        max_model_len=info.max_model_len,
        **text.fields(),
        template_defaults=server.default_chat_template_kwargs or {},
        tracing=tracing,
        checker=checker,
        settings=model.shown(),
        request_log=_request_log(server, text.tokenizer),
        weights=RemoteWeights(context.app_name, model.deployment, model.engine),
        **shared,
    )

    def limit(info: EngineInfo) -> None:  # engines of other settings may replace the first ones
        service.max_model_len = info.max_model_len

    client.events.limits_changed = limit
    if text.recipe is None:
        checker.start()  # its process loads the vocabulary beside the first requests
    return service


async def first_services(
    loading: Mapping["asyncio.Task[OpenAIService]", ModelArgs], *, early: bool = False
) -> ServedModels:
    """The models of an ingress: all, or those that can be served if the others have failed.

    Those join when their engines come up all the same. An update waits for all of its models, so
    that the ones before it stay.

    Args:
        early: the first ingress of an application does not wait for models that only start.

    Raises:
        RayfinError: of a model; its ingress cannot start.
    """
    app, waiting = serve.get_replica_context().app_name, set(loading)
    failed: dict[asyncio.Task[OpenAIService], str] = {}
    reasons: dict[asyncio.Task[OpenAIService], str | None] = {}
    why = why_absent if early else why_failed
    while waiting and not (reasons and all(reasons.values())):
        done, waiting = await asyncio.wait(waiting, timeout=HANDOVER_POLL_SECONDS)
        for task in done:
            if (error := task.exception()) is not None:
                failed[task] = f"has failed: {error}"
                if len(failed) == len(loading) or not await asyncio.to_thread(is_first, app):
                    raise error
        reasons = {}
        if len(waiting) + len(failed) < len(loading):
            for task in waiting:
                reasons[task] = await asyncio.to_thread(why, app, loading[task].deployment)
    absent: dict[str, str] = {}
    for task, said in (failed | reasons).items():
        logger.warning("%s is not served yet: it %s", loading[task].names[0], said)
        absent |= dict.fromkeys(loading[task].names, said or "")
    there = [task.result() for task in loading if task not in waiting and task not in failed]
    served = ServedModels(there, absent, [name for each in loading.values() for name in each.names])

    async def follow() -> None:
        while not all(task.done() for task in waiting):
            await asyncio.sleep(HANDOVER_SETTLE_SECONDS)
            for task in waiting:
                said = await asyncio.to_thread(why_failed, app, loading[task].deployment)
                for name in served.absent.keys() & set(loading[task].names):
                    served.absent[name] = said or served.absent[name]

    following = asyncio.create_task(follow())  # its end, where all are there, is at once
    for task in waiting:
        task.add_done_callback(partial(_join, served, loading[task], following))
    return served


def _join(
    served: ServedModels,
    model: ModelArgs,
    following: "asyncio.Task[None]",
    task: "asyncio.Task[OpenAIService]",
) -> None:
    """Adds a model that is ready; the task ``following`` is held until then."""
    if task.cancelled():
        return
    if (error := task.exception()) is not None:
        logger.error("%s cannot join: %s", model.names[0], error)
        served.absent.update(dict.fromkeys(model.names, f"has failed: {error}"))
        return
    served.join(task.result())
    logger.info("%s is served now", task.result().name)


def why_failed(app: str, deployment: str) -> str | None:
    """What Serve says of engines that cannot start; None if they may, or if some are there."""
    status = serve.status().applications.get(app)
    if status is None or deployment not in status.deployments:
        return None
    message = status.deployments[deployment].message
    if FAILED not in message or find_engines(app, deployment):
        return None
    said = RAISED.findall(message)
    return f"has failed: {said[-1][1] if said else message.strip().splitlines()[-1]}"


def why_absent(app: str, deployment: str) -> str | None:
    """As ``why_failed``; also of engines that have not come up, while no ingress serves."""
    if (said := why_failed(app, deployment)) is not None:
        return said
    status = serve.status().applications.get(app)
    engines = None if status is None else status.deployments.get(deployment)
    if engines is None or "RUNNING" in engines.replica_states or not is_first(app):
        return None
    return "is starting"


def is_first(app: str) -> bool:
    """Whether no ingress of an application serves."""
    status = serve.status().applications.get(app)
    door = None if status is None else status.deployments.get(INGRESS)
    return door is not None and "RUNNING" not in door.replica_states


async def adapter_names(app: str, model: ModelArgs, client: EnginePool) -> AdapterNames | None:
    """The adapters of a served model, which all processes of an application know by their names."""
    flags = model.adapters
    if flags is None:
        return None
    name = f"{app}/{model.deployment}-adapters"
    registry = RegistryClient(name, flags.max_rank, flags.root)
    return await AdapterNames.of(flags, registry, client.prepare)


def engine_pool(
    caller: str, model: ModelArgs, engines: DeploymentHandle[Any], app: str
) -> EnginePool:
    """The engines of a served model, for a process that calls itself ``caller``."""
    server, args = model.server, model.engine
    return EnginePool(
        caller,
        partial(find_engines, app, model.deployment),
        patience=Patience(
            server.cold_start_timeout if model.from_zero else server.engine_timeout,
            server.replay_timeout,
        ),
        room=WaitingRoom(
            args.max_waiting_requests,
            args.max_waiting_tokens,
            starter(engines) if model.from_zero else None,
        ),
        identity=shipped(args).identity,
        is_over=partial(is_deleted, app),
    )


def _request_log(server: ServerArgs, tokenizer: Tokenizer) -> RequestLog | None:
    if not server.enable_log_requests:
        return None
    return RequestLog(server.max_log_len, tokenizer.decode, outputs=server.enable_log_outputs)


def is_deleted(app: str) -> bool:
    """Whether Serve takes the application down."""
    status = serve.status().applications.get(app)
    return status is None or status.status is ApplicationStatus.DELETING


def start_tracing(endpoint: str | None, model: str) -> "Tracing | None":
    """Spans that go to an OTLP collector, if there is one.

    Raises:
        InvalidConfig: the packages for it are not installed.
    """
    if endpoint is None:
        return None
    try:
        from rayfin.deployments.telemetry.tracing import Tracing
    except ImportError:
        raise InvalidConfig(NO_TRACING, "otlp_traces_endpoint") from None
    return Tracing.to(endpoint, model)


def prepare_text(models: Sequence[ModelArgs]) -> None:
    """Imports what ``load_text`` needs of all models, before several threads call it."""
    whole = False
    for model in models:  # all of them: this imports their tokenizers' classes
        whole |= needs_auto_classes(model.engine)
    Tokenizer.prepare(whole)


def load_text(model: ModelArgs) -> TextSide:
    """Reads files and renders templates; takes a second."""
    server, args = model.server, model.engine
    settings = (server.generation_config, server.override_generation_config)
    tokenizer = Tokenizer.load(
        tokenizer_path(args),
        args.trust_remote_code,
        ends=end_tokens(*settings, args),
        **args.tokenizer_hub,
    )
    template = read_template(server.chat_template)
    processor = load_processor(located(args))
    if processor is not None and template is None and not tokenizer.inner.chat_template:
        template = processor.chat_template
    formats = detect(
        tokenizer,
        template,
        tool_parser=server.tool_call_parser,
        reasoning_parser=server.reasoning_parser,
        tool_guidance=server.tool_guidance,
        reasoning_field=server.reasoning_field,
        content_format=server.chat_template_content_format,
        plugin=args.plugin,
    )
    defaults = sampling_defaults(
        generation_config_path(server.generation_config, args),
        server.override_generation_config,
        **args.hub,
    )
    media = None
    if processor is not None:
        off = audio_off() if processor.kind == "audio" else None
        if off is not None:
            logger.warning("%s hears, but audio is off: %s", args.model, off)
        media = MediaReader(processor, server.media_settings(), ray.put, off=off)
    recipe = read_recipe(located(args))
    embeds = EmbedsReader(ray.put) if args.enable_prompt_embeds else None
    return TextSide(tokenizer, template, formats, defaults, recipe, media, embeds)


async def _text_side(model: ModelArgs, client: EnginePool) -> TextSide:
    try:
        return await asyncio.to_thread(load_text, model)
    except Exception as error:
        logger.warning("%s: %s", model.names[0], error)
        await _first_info(client)  # its files may come with its engine
        return await asyncio.to_thread(load_text, model)


async def _first_info(client: EnginePool) -> EngineInfo:
    """Waits for the engine, however long its model takes to load."""
    while True:
        try:
            return await client.info()
        except EngineUnavailable:
            continue
