"""A fake engine behind the real HTTP layer; no sockets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack

import httpx
import pytest
from openai import AsyncOpenAI
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from rayfin.actors.adapters.part import AdapterRef
from rayfin.actors.errors import InvalidRequest, NotFound, RayfinError
from rayfin.actors.messages import (
    BeamParams,
    Command,
    EngineInfo,
    EngineRequest,
    Hypothesis,
    TokenDelta,
    TokenLog,
    TokenLogprob,
)
from rayfin.actors.metrics.snapshot import EngineSnapshot
from rayfin.deployments.api.app import build_api
from rayfin.deployments.api.responses.store import ResponseStore
from rayfin.deployments.api.responses.store_client import ResponseStoreClient
from rayfin.deployments.client.engine_client import EngineReport
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.text.tokenizer import Tokenizer

REPLY = "Sure — here you go: 👩‍👩‍👧 مرحبا.\n\nEND of it"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LIKELIEST = ((5, -0.25), (6, -0.5), (7, float("-inf")))  # beside each token


class FakeEngine:
    """Says ``reply`` over and over; the next token depends on the length of the context only."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.reply = tokenizer.encode(REPLY, False)
        self.eos = tokenizer.inner.eos_token_id
        self.delay = 0.0  # seconds before each delta
        self.gate: asyncio.Event | None = None  # the first delta waits for it
        self.pause_after: tuple[int, asyncio.Event] | None = None  # so many deltas
        self.taken = 0  # deltas that were taken, of all requests
        self.lease = 1  # tokens in a delta
        self.named: dict[int, float] = {}  # log probabilities of tokens that a request names
        self.ending: tuple[str, str] | None = None  # reasons in place of length
        self.refusal: RayfinError | None = None  # raised before the first delta
        self.failure: tuple[int, Exception] | None = None  # raised after so many deltas
        self.unhealthy: RayfinError | None = None
        self.seen: list[EngineRequest] = []
        self.waits: tuple[float, float] | None = None  # what the first delta says of its times
        self.logs: dict[str, TokenLog] = {}  # by request id
        self.shown: list[EngineSnapshot] = []
        self.reports: list[EngineReport] = []
        self.commands: list[tuple[Command, str | None]] = []
        self.open: set[str] = set()
        self.aborted: list[str] = []
        self.limits = EngineInfo("engine", 128, tokenizer.vocab_size, 1000, 4)
        self.bad_adapters: set[str] = set()
        self.closed = False

    def close(self) -> None:
        self.closed = True

    async def info(self) -> EngineInfo:
        return self.limits

    async def stream(self, request: EngineRequest) -> AsyncGenerator[TokenDelta, None]:
        self.seen.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.open.add(request.request_id)
        done = False
        said = list(request.output)
        try:
            if self.gate is not None:
                await self.gate.wait()
            for number, delta in enumerate(self._deltas(request)):
                await asyncio.sleep(self.delay)
                if self.failure is not None and number == self.failure[0]:
                    raise self.failure[1]
                if self.pause_after is not None and number == self.pause_after[0]:
                    await self.pause_after[1].wait()
                done = delta.finish_reason is not None
                self.taken += 1
                said += delta.tokens
                self._log(request, said, delta)
                yield delta
        finally:
            self.open.discard(request.request_id)
            if not done:
                self.aborted.append(request.request_id)

    def _log(self, request: EngineRequest, said: list[int], last: TokenDelta) -> None:
        if request.receipt is not None:
            self.logs[request.request_id] = TokenLog(
                request.receipt,
                request.sampling.seed,
                list(said),
                last.finish_reason,
                last.stop_reason,
                last.cached_tokens,
            )

    async def recall(self, tenant: str, request_ids: Sequence[str]) -> list[TokenLog | None]:
        assert tenant == ""
        return [self.logs.get(request_id) for request_id in request_ids]

    async def snapshots(self) -> list[EngineSnapshot]:
        return self.shown

    async def engines(self) -> list[EngineReport]:
        return self.reports

    async def manage(self, command: Command, engine: str | None) -> list[EngineReport]:
        if engine not in (None, *(own.engine for own in self.reports)):
            raise NotFound(f"There is no engine {engine!r}.", "engine")
        self.commands.append((command, engine))
        return [own for own in self.reports if engine in (None, own.engine)]

    async def prepare(self, adapter: AdapterRef) -> None:
        if adapter.name in self.bad_adapters:
            raise InvalidRequest("it does not fit", "lora_path", "invalid_adapter")

    def latency(self) -> dict[str, tuple[float, int]]:
        return {"ttft": (0.5, 2), "itl": (0.25, 5)}

    def _deltas(self, request: EngineRequest) -> list[TokenDelta]:
        rules = request.stopping
        if request.beams is not None:
            return [self._searched(request, request.beams)]
        tokens = [*self.reply, self.eos] * (1 + rules.max_tokens // (len(self.reply) + 1))
        tokens = tokens[: rules.max_tokens]
        reason: str = "length"
        stop: int | str | None = None
        for i, token in enumerate(tokens):
            if token in rules.stop_token_ids:
                tokens, reason = tokens[: i + 1], "stop"
                stop = None if token in rules.eos_token_ids else token
                break
        if reason == "length" and self.ending is not None:
            reason, stop = self.ending
        tokens = tokens[len(request.output) :]
        groups = [tokens[i : i + self.lease] for i in range(0, len(tokens), self.lease)]
        deltas = [TokenDelta(request.request_id, group, cached_tokens=2) for group in groups]
        deltas[-1].finish_reason, deltas[-1].stop_reason = reason, stop
        if self.waits is not None:
            deltas[0].queued, deltas[0].first_token = self.waits
        if request.sampling.logprobs is not None:  # the likelier the higher the seed's last digit
            for delta in deltas:
                ids = request.sampling.logprob_ids if self.named else ()
                top = tuple((token, self.named[token]) for token in ids) or LIKELIEST
                reported = TokenLogprob(request.sampling.seed % 10 - 10.0, 1, top)
                delta.logprobs = [reported] * len(delta.tokens)
        if request.sampling.prompt_logprobs is not None:  # position i has -i
            reported = {
                i: TokenLogprob(-float(i), i, LIKELIEST) for i in range(1, len(request.prompt))
            }
            deltas.insert(0, TokenDelta(request.request_id, [], prompt_logprobs=reported))
        return deltas

    def _searched(self, request: EngineRequest, beams: BeamParams) -> TokenDelta:
        """Hypothesis i is the reply without its last i tokens; the first one stops."""
        hypotheses = [
            Hypothesis(self.reply[: len(self.reply) - i], -float(i), "length")
            for i in range(beams.width)
        ]
        hypotheses[0] = Hypothesis([*self.reply, self.eos], 0.0, "stop")
        delta = TokenDelta(request.request_id, [], "stop", cached_tokens=2)
        delta.hypotheses = hypotheses
        return delta

    async def check_health(self) -> None:
        if self.unhealthy is not None:
            raise self.unhealthy

    async def metrics(self) -> bytes:
        return b"rayfin_steps_total 7\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["hello world of tokens here you go user assistant"], trainer)
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    inner.chat_template = TEMPLATE
    return Tokenizer(inner)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
def service(engine: FakeEngine, tokenizer: Tokenizer) -> OpenAIService:
    return OpenAIService(engine, tokenizer, ["org/tiny", "tiny"], engine.limits.max_model_len)


@pytest.fixture
def stored() -> ResponseStore:
    """The stored responses of ``http``."""
    return ResponseStore()


@pytest.fixture
async def http(
    service: OpenAIService, stored: ResponseStore, anyio_backend: str
) -> AsyncIterator[httpx.AsyncClient]:
    app = build_api(service, responses=ResponseStoreClient(store=stored))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://rayfin") as client:
        yield client


@pytest.fixture
async def openai(http: httpx.AsyncClient) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncExitStack() as stack:
        client = AsyncOpenAI(
            api_key="none", base_url="http://rayfin/v1", http_client=http, max_retries=0
        )
        yield await stack.enter_async_context(client)
