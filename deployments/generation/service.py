"""What the routes of one ingress share."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request

from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import (
    EngineUnavailable,
    InvalidConfig,
    ModelNotFound,
    ModelNotSupported,
    NotPermitted,
)
from rayfin.actors.media.kinds import MediaKind
from rayfin.actors.model_files.pooling_recipe import PoolingRecipe
from rayfin.actors.parts import RequestPart
from rayfin.actors.weights.version import WantedWeights
from rayfin.deployments.adapters.names import AdapterNames
from rayfin.deployments.client.engine_client import EngineClient
from rayfin.deployments.client.weights import WeightsClient
from rayfin.deployments.generation.limits import ReplySettings
from rayfin.deployments.generation.quotas import TokenQuotas
from rayfin.deployments.guidance.compile_check import GrammarChecker, InlineChecker
from rayfin.deployments.http.anthropic_errors import CLAUDE
from rayfin.deployments.http.idempotency import AnswerStore
from rayfin.deployments.http.layers import HttpSettings
from rayfin.deployments.media.read_embeds import EmbedsReader
from rayfin.deployments.media.reader import MediaReader
from rayfin.deployments.telemetry.ingress_counters import IngressCounters
from rayfin.deployments.telemetry.load import Load
from rayfin.deployments.telemetry.request_log import RequestLog
from rayfin.deployments.text.parsing.detect import Detected
from rayfin.deployments.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # its packages are an extra
    from rayfin.deployments.telemetry.tracing import Tracing


ROUTES = {
    "generate": ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    "embed": ("/v1/embeddings", "/v2/embed", "/score", "/rerank", "/pooling"),
    "classify": ("/classify", "/score", "/rerank", "/pooling"),
    "write down": ("/v1/audio/transcriptions", "/v1/audio/translations"),
}
"""The routes of each kind of model."""


@dataclass(slots=True)
class OpenAIService:
    """One model: its engines, its text side, and the names it is served under."""

    client: EngineClient
    tokenizer: Tokenizer
    model_names: list[str]  # the first one is the name in answers
    max_model_len: int
    chat_template: str | None = None  # in place of the model's own
    sampling_defaults: dict[str, Any] = field(default_factory=dict)
    template_defaults: Mapping[str, Any] = field(default_factory=dict)  # variables
    replies: ReplySettings = ReplySettings()
    edge: HttpSettings = field(default_factory=HttpSettings)
    load: Load = field(default_factory=Load)
    counts: IngressCounters = field(default_factory=IngressCounters)
    answers: AnswerStore = field(default_factory=AnswerStore)
    settings: Mapping[str, Any] = field(default_factory=dict)  # shown to operators
    request_log: RequestLog | None = None  # None: requests are not logged
    weights: WeightsClient | None = None  # None: they cannot change
    quotas: TokenQuotas | None = None  # None: unlimited
    tracing: "Tracing | None" = None
    created: int = field(default_factory=lambda: int(time.time()))
    formats: Detected = field(default_factory=Detected)  # how the model writes calls and thoughts
    recipe: PoolingRecipe | None = None  # of a model that pools: it generates no text
    adapters: AdapterNames | None = None  # None: requests name no adapter
    parts: tuple[RequestPart, ...] = ()  # that all its requests have: the adapter of its name
    media: MediaReader | None = None  # of a model that reads images, or hears
    embeds: EmbedsReader | None = None  # with --enable-prompt-embeds
    checker: GrammarChecker = None  # type: ignore[assignment]  # None: grammars compile in this process

    def __post_init__(self) -> None:
        if self.checker is None:
            self.checker = InlineChecker(self.tokenizer)

    @property
    def reads(self) -> MediaKind | None:
        """What the model reads beside text."""
        return None if self.media is None else self.media.kind

    @property
    def only_hears(self) -> bool:
        """Whether the model writes down speech, and does nothing else."""
        return self.media is not None and self.media.speech is not None

    def check_priority(self, priority: int, tenant: str) -> None:
        """Raises:
        NotPermitted: ``tenant`` may not set a priority other than 0.
        """
        allowed = self.edge.priority_tenants
        if priority != 0 and allowed is not None and tenant not in allowed:
            raise NotPermitted("Your API key may not set a priority.", "priority")

    def with_adapter(self, adapter: AdapterRef, name: str) -> "OpenAIService":
        """The same model under an adapter's name, and the ``name`` that a request has for it; its
        requests compute with the adapter."""
        names = [adapter.name, name]
        return replace(self, parts=(adapter,), model_names=names, adapters=None)

    def with_weights(self, label: str | None) -> "OpenAIService":
        """The same model, whose requests begin with the weights of a label; None: with any."""
        if label is None:
            return self
        return replace(self, parts=(*self.parts, WantedWeights(label)))

    @property
    def name(self) -> str:
        """The name in answers, whichever of its names a request has."""
        return self.model_names[0]


class ServedModels:
    """One service for each model: its names, its text side and its engines.

    What the whole ingress shares (its edge, load, quotas and stored answers) is
    the same object in all of them. The first model is for requests that name none.

    Args:
        absent: what is said of models that have no engine, by their names; they may join later.
        names: all names in order, of those that are there and of those that are absent.

    Raises:
        InvalidConfig: two models have the same name.
    """

    def __init__(
        self,
        services: Sequence[OpenAIService],
        absent: Mapping[str, str] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.services: tuple[OpenAIService, ...] = ()
        self.absent = dict(absent or {})
        given = names or [name for service in services for name in service.model_names]
        self._places = {name: place for place, name in enumerate(given)}
        self.joined: Callable[[OpenAIService], object] = lambda service: None  # called with each
        self._by_name: dict[str, OpenAIService] = {}
        for service in services:
            self.join(service)

    def join(self, service: OpenAIService) -> None:
        """Adds a model, which may have been absent.

        Raises:
            InvalidConfig: another one has its name.
        """
        for name in service.model_names:
            if name in self._by_name:
                raise InvalidConfig(
                    f"served_model_name {name!r} is used twice", "served_model_name"
                )
            self._by_name[name] = service
            self.absent.pop(name, None)
        self.services = tuple(sorted((*self.services, service), key=self._place))
        self.joined(service)

    @property
    def first(self) -> OpenAIService:
        return self.services[0]

    @property
    def names(self) -> list[str]:
        """All names, in the order of the models."""
        return [name for service in self.services for name in service.model_names]

    def _place(self, service: OpenAIService) -> int:
        return self._places.get(service.name, len(self._places))

    @property
    def max_upload_bytes(self) -> int:
        """Of a recording, for any of the models; 0: none hears."""
        media = [each.media for each in self.services if each.reads == "audio"]
        open_ = [reader for reader in media if reader is not None and reader.off is None]
        return max((reader.settings.max_upload_bytes for reader in open_), default=0)

    def adapters_of(self, service: OpenAIService) -> list[AdapterRef]:
        """The adapters of a model; names of models come first."""
        known = {} if service.adapters is None else service.adapters.refs
        return [ref for name, ref in known.items() if name not in self._by_name]

    async def listed_adapters(self, service: OpenAIService) -> dict[str, str]:
        """Paths of a model's adapters by the name that lists show.

        That is Ray's ``model:adapter`` of each folder of adapters, whether it is loaded or not.
        """
        folders = {} if service.adapters is None else await service.adapters.folders()
        loaded = {ref.name: ref.path for ref in self.adapters_of(service)}
        others = {name: path for name, path in loaded.items() if folders.get(name) != path}
        return others | {f"{service.name}:{name}": path for name, path in folders.items()}

    def named(self, name: str | None) -> OpenAIService:
        """Returns the model or adapter of that name, or the first model if ``name`` is None.

        Raises:
            ModelNotFound: there is no such model.
            EngineUnavailable: it is absent.
        """
        if name is None:  # never another model in place of the first one
            name = next(iter(self._places), self.first.name)
        if name in self._by_name:
            return self._by_name[name]
        if name in self.absent:
            raise EngineUnavailable(f"the model `{name}` {self.absent[name]}", "model")
        for service, adapter in self._candidates(name):
            if service.adapters is not None and adapter in service.adapters.refs:
                return service.with_adapter(service.adapters.refs[adapter], name)
        raise ModelNotFound(f"The model `{name[:128]}` does not exist.", "model")

    async def look_up(self, name: str | None) -> None:
        """Loads an adapter of that name where it is in the folder of adapters only."""
        if name is None or name in self._by_name:
            return
        for service, adapter in self._candidates(name):
            if service.adapters is not None and await service.adapters.find(adapter) is not None:
                return

    def _candidates(self, name: str) -> Iterator[tuple[OpenAIService, str]]:
        """The models that may have an adapter ``name``, and its name there; also of Ray's form
        ``model:adapter``."""
        for base in sorted(self._by_name, key=len, reverse=True):  # a name may hold a colon
            if name.startswith(f"{base}:"):
                yield self._by_name[base], name.removeprefix(f"{base}:")
        yield from ((service, name) for service in self.services)

    async def resolve_model(self, request: Request, name: str | None) -> OpenAIService:
        """Returns the model that the request names; the request counts among its requests.

        Raises:
            ModelNotFound: there is no such model.
            ModelNotSupported: it pools or only hears, and has no such route.
        """
        service = await self.text_side(request, name)
        if service.recipe is not None or service.only_hears:
            raise _not_supported(service, name)
        return service

    async def resolve_messages(self, request: Request, name: str | None) -> OpenAIService:
        """As ``resolve_model``; the first model for a name of Claude's that is not served."""
        try:
            return await self.resolve_model(request, name)
        except ModelNotFound:
            if name is None or not name.startswith(CLAUDE):
                raise
        return await self.resolve_model(request, None)

    async def resolve_hearing(
        self, request: Request, name: str | None
    ) -> tuple[OpenAIService, MediaReader]:
        """As ``resolve_model``, for a route of models that hear.

        Raises:
            ModelNotFound: there is no such model.
            ModelNotSupported: it does not hear, or audio is off here.
        """
        service = await self.text_side(request, name)
        if service.recipe is not None or service.media is None or service.reads != "audio":
            raise _not_supported(service, name)
        if service.media.off is not None:
            shown = (name or service.model_names[0])[:128]
            raise ModelNotSupported(
                f"The model `{shown}` hears, but this server takes no audio: {service.media.off}.",
                "model",
            )
        return service, service.media

    async def text_side(self, request: Request, name: str | None) -> OpenAIService:
        """As ``resolve_model``, for a route that every model has."""
        await self.look_up(name)
        service = self.named(name)
        request.state.counts = service.counts
        return service

    def resolve_pooling(
        self, request: Request, name: str | None, kind: Literal["embed", "classify", "score", ""]
    ) -> tuple[OpenAIService, PoolingRecipe]:
        """As ``resolve_model``, for a route of models that pool; "" is every such model.

        Raises:
            ModelNotFound: there is no such model.
            ModelNotSupported: it generates, or does not do ``kind``.
        """
        service = self.named(name)
        request.state.counts = service.counts
        recipe = service.recipe
        if recipe is None or (kind in ("embed", "classify") and recipe.kind != kind):
            raise _not_supported(service, name)
        return service, recipe


def _not_supported(service: OpenAIService, name: str | None) -> ModelNotSupported:
    kind = "write down" if service.only_hears else "generate"
    if service.recipe is not None:
        kind = service.recipe.kind
    shown = (name or service.model_names[0])[:128]
    return ModelNotSupported(
        f"The model `{shown}` does not support this API; it has {', '.join(ROUTES[kind])}.", "model"
    )
