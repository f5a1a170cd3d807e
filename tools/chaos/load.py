"""The load of a case: open streams and short requests at a steady rate, all recorded.

Open loop: a short request is sent at its time, no matter whether earlier ones have ended.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import drawn_pictures
import httpx
from history import Event, Record

from rayfin.deployments.bench.endpoint import DONE, event_data

VOCABULARY = range(259, 1999)  # of prompts: ids of the demo model's tokenizer that are whole words
PATIENCE = 120.0  # seconds that a client waits; the checker allows less
STARTS = [[300 + (7 * i + 13 * k) % 1500 for i in range(96)] for k in range(4)]
"""Common prefixes of prompts: some pages are in the cache, some are not."""
RESUME_SECONDS = 0.5  # before a client resumes a broken stream
STOPS = ["ing", " the", "er", "tion"]
PLACES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Kyoto"]
TRIP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 24},
        "stops": {
            "type": "array",
            "minItems": 5,
            "maxItems": 9,
            "items": {
                "type": "object",
                "properties": {
                    "city": {"enum": PLACES},
                    "nights": {"type": "integer", "minimum": 1, "maximum": 30},
                    "booked": {"type": "boolean"},
                },
                "required": ["city", "nights", "booked"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["title", "stops"],
    "additionalProperties": False,
}
"""A form that an answer has, or the parameters of the call that it makes."""

TOOL = "plan_trip"
TOOLS = [{"type": "function", "function": {"name": TOOL, "parameters": TRIP}}]
CHOICE = {"type": "function", "function": {"name": TOOL}}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the current weather for a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "minLength": 200, "maxLength": 300}},
        "required": ["city"],
    },
}
"""A function that the demo model calls by itself; its arguments are long."""

FORM = {"json": TRIP, "disable_any_whitespace": True}
LONGEST_FORM = 600  # tokens


@dataclass(slots=True, frozen=True)
class Ask:
    """One request, with everything that determines its answer."""

    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    stream: bool = True
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)  # temperature, penalties, form
    question: str = ""  # of a chat; then there is no prompt
    pictures: tuple[int, ...] = ()  # of a chat; without any it must call TOOL
    free: bool = False  # the chat may call WEATHER, or answer in words
    adapter: str = ""  # name of a LoRA adapter; "": the base model

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.question else "/v1/completions"

    @property
    def calls(self) -> bool:
        """Whether it is a chat with tools: it must call TOOL, or may call WEATHER."""
        return bool(self.question) and not self.pictures

    @property
    def form(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, or of the arguments of its calls."""
        if self.free:
            return None
        return TRIP if self.calls or "structured_outputs" in self.settings else None

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [{"type": "function", "function": WEATHER}] if self.free else TOOLS

    @property
    def tool_choice(self) -> Any:
        return "auto" if self.free else CHOICE

    def body(self, model: str) -> dict[str, Any]:
        """The body of the HTTP request."""
        asked: dict[str, Any] = {"prompt": list(self.prompt)}
        if self.question:
            asked = {"messages": self.messages}
        if self.calls:
            asked |= {"tools": self.tools, "tool_choice": self.tool_choice}
        body = {
            "model": self.adapter or model,
            **asked,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "n": self.n,
            "ignore_eos": not self.free,
            "return_token_ids": True,
            **self.settings,
        }
        if self.stop:
            body["stop"] = list(self.stop)
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    @property
    def messages(self) -> list[dict[str, Any]]:
        if not self.pictures:
            return [{"role": "user", "content": self.question}]
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": drawn_pictures.address(number)}}
            for number in self.pictures
        ]
        return [{"role": "user", "content": [*parts, {"type": "text", "text": self.question}]}]


class Asks:
    """Draws requests of every kind from one seed."""

    def __init__(
        self,
        seed: int,
        length: tuple[int, int] = (150, 450),
        *,
        forms: bool = False,
        adapters: Sequence[str] = (),
        images: bool = False,
    ) -> None:
        self._random = random.Random(seed)
        self._adapters = adapters  # names; requests take one of them, or none
        self._length = length
        self._forms = forms  # most streams follow a grammar
        self._images = images  # most streams, and half of the short requests, are about pictures
        self._count = 0

    def stream(self) -> Ask:
        """A long stream: greedy or sampled, with penalties, stops, two choices, or a grammar."""
        draw = self._random
        if self._forms and draw.random() < 0.8:
            return draw.choice([self.formed, self.calling, self.asking])()
        if self._images and draw.random() < 0.8:
            return self.looking()
        kind = draw.choice(["greedy", "greedy", "seeded", "penalties", "stop", "two"])
        settings: dict[str, Any] = {"temperature": 0 if kind == "greedy" else 0.9}
        if kind == "penalties":
            settings |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        return self._ask(
            kind,
            draw.randint(*self._length),
            n=2 if kind == "two" else 1,
            stop=tuple(draw.sample(STOPS, 2)) if kind == "stop" else (),
            stop_token_ids=(draw.choice(VOCABULARY),) if kind == "seeded" else (),
            settings=settings,
        )

    def formed(self) -> Ask:
        """A stream of JSON that follows a schema."""
        temperature, n = self._random.choice([(0, 1), (0.9, 1), (0.9, 2)])
        settings = {"temperature": temperature, "structured_outputs": FORM}
        return self._ask("formed", LONGEST_FORM, n=n, settings=settings)

    def calling(self) -> Ask:
        """A chat that calls a tool; two in five words of its question are its own."""
        draw = self._random
        question = f"Plan trip {draw.randrange(10_000)} to {draw.choice(PLACES)}."
        settings = {"temperature": draw.choice([0, 0.9])}
        return self._ask("calling", LONGEST_FORM, question=question, settings=settings)

    def asking(self) -> Ask:
        """A chat that may call a tool."""
        question = f"What is the weather in {self._random.choice(PLACES)}?"
        settings = {"temperature": 0}  # drawn, it may also write words behind the call
        return self._ask("asking", LONGEST_FORM, question=question, free=True, settings=settings)

    def looking(self, *, new: bool = False) -> Ask:
        """A stream about one or two pictures; a ``new`` one is in no other request."""
        draw = self._random
        shown = draw.choices(range(drawn_pictures.SHARED), k=draw.randint(1, 2))
        if new:
            shown = [drawn_pictures.SHARED + self._count]
        temperature, n = draw.choice([(0, 1), (0.9, 1), (0.9, 2)])
        return self._ask(
            "looking",
            draw.randint(*self._length),
            n=n,
            settings={"temperature": temperature},
            question=self._question(),
            pictures=tuple(shown),
        )

    def _question(self) -> str:
        return f"What is in picture {self._random.randrange(10_000)}?"

    def short(self) -> Ask:
        """A short request without streaming."""
        draw, settings = self._random, {"temperature": 0}
        length = draw.randint(1, 12)
        if not self._images or draw.random() < 0.5:
            return self._ask("short", length, stream=False, settings=settings)
        return self._ask(
            "short",
            length,
            stream=False,
            settings=settings,
            question=self._question(),
            pictures=(draw.randrange(drawn_pictures.SHARED),),
        )

    def line(self, longest: int = 64) -> Ask:
        """A line of a batch: greedy or sampled, of at least 16 tokens."""
        settings = {"temperature": self._random.choice([0, 0.9])}
        return self._ask("line", self._random.randint(16, longest), stream=False, settings=settings)

    def long_prompt(self, tokens: int) -> Ask:
        """A request whose prompt takes several steps."""
        prompt = tuple(self._random.choices(VOCABULARY, k=tokens))
        return self._ask("prefill", 16, prompt=prompt, settings={"temperature": 0})

    def endless(self) -> Ask:
        """A request with an answer that no client reads to its end."""
        return self._ask("endless", 4000, settings={"temperature": 0})

    def poison(self, token: int) -> Ask:
        """A request whose prompt ends with a token that no other prompt has."""
        prompt = (*self._random.choices(VOCABULARY, k=8), token)
        return self._ask("poison", 40, prompt=prompt, settings={"temperature": 0})

    def _ask(
        self, kind: str, max_tokens: int, prompt: tuple[int, ...] = (), **settings: Any
    ) -> Ask:
        draw = self._random
        self._count += 1
        if not prompt and "question" not in settings:
            start = draw.choice(STARTS)[: draw.randint(0, 96)]
            prompt = (*start, *draw.choices(VOCABULARY, k=draw.randint(1, 40)))
        seed = draw.getrandbits(31) * 2  # the second choice uses seed + 1
        if self._adapters:
            settings["adapter"] = draw.choice(["", *self._adapters])
        return Ask(f"{kind}-{self._count}", prompt, max_tokens, seed, **settings)


class Load:
    """Sends requests to a server; ``records`` holds them in order of their start."""

    def __init__(
        self,
        url: str,
        model: str,
        asks: Asks,
        patience: float = PATIENCE,
        resumes: bool = False,
    ) -> None:
        self.asks = asks
        self._resumes = resumes  # whether clients resume broken streams
        self.records: list[tuple[Ask, Record]] = []
        self._url = url
        self._model = model
        self._patience = patience
        self._stopping = asyncio.Event()
        self._over = False  # the load has ended, and all clients are cancelled
        self._tasks: list[asyncio.Task[Any]] = []
        self._http: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def running(self, streams: int, rate: float) -> AsyncIterator["Load"]:
        """Keeps ``streams`` streams open and sends ``rate`` short requests per second."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(2 * self._patience, pool=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=timeout, limits=limits) as http:
            self._http = http
            self._tasks = [asyncio.create_task(self._stream_on()) for _ in range(streams)]
            self._tasks.append(asyncio.create_task(self._send_short(rate)))
            try:
                yield self
            finally:
                self._stopping.set()
                await asyncio.wait(self._tasks, timeout=self._patience)
                self._over = True
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def all_streaming(self, streams: int, seconds: float = PATIENCE) -> None:
        """Waits until this many streams have received a token; they may have ended since.

        On an overloaded machine, some streams always wait for their first token.

        Raises:
            TimeoutError: too few streams received one.
        """
        try:
            async with asyncio.timeout(seconds):
                while sum(r.stream and bool(r.events) for _, r in self.records) < streams:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise TimeoutError(
                f"fewer than {streams} streams received a token: {self._summary()}"
            ) from None

    def _summary(self) -> str:
        records = [record for _, record in self.records]
        first = [r.events[0].at - r.started for r in records if r.stream and r.events]
        whole = [r.ended - r.started for r in records if r.stream and r.ended and not r.failed]
        ends = Counter(r.error or r.broken or "answered" for r in records if r.ended is not None)
        waits = [not r.events for r in records if r.stream and r.ended is None]
        return (
            f"{len(waits)} open, {sum(waits)} of them without a token; {dict(ends)};"
            f" median time to first token {median(first or [0]):.2f} s,"
            f" to the end {median(whole or [0]):.2f} s"
        )

    async def ask(self, ask: Ask) -> Record:
        """Sends one request and reads its answer to the end."""
        record = Record(ask.name, time.monotonic(), ask.stream)
        self.records.append((ask, record))
        try:
            await self._try(ask, record)
            end = time.monotonic() + self._patience
            while self._resumes and ask.stream and record.failed and time.monotonic() < end:
                await asyncio.sleep(RESUME_SECONDS)
                record.broken = record.error = None
                record.again += 1
                await self._try(ask, record)
        except asyncio.CancelledError:
            record.left = (
                not self._over
            )  # cancelled at the end of the load: a stream that never ended
            raise
        return record

    async def _try(self, ask: Ask, record: Record) -> None:
        """Sends the request once, or resumes it."""
        record.ended = None
        try:
            await (self._read_stream if ask.stream else self._read_whole)(ask, record)
        except httpx.HTTPError as error:
            record.broken = f"{type(error).__name__}: {error}"
        record.ended = time.monotonic()

    def start(self, ask: Ask) -> asyncio.Task[Record]:
        """Sends another request in the background."""
        task = asyncio.create_task(self.ask(ask))
        self._tasks.append(task)
        return task

    async def _stream_on(self) -> None:
        while not self._stopping.is_set():
            record = await self.ask(self.asks.stream())
            if record.failed:  # a client backs off after an error
                await asyncio.sleep(0.5)

    async def _send_short(self, rate: float) -> None:
        sent: set[asyncio.Task[Record]] = set()
        due = time.monotonic()
        while rate and not self._stopping.is_set():
            due += 1 / rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            sent.add(asyncio.create_task(self.ask(self.asks.short())))
            sent = {task for task in sent if not task.done()}
        if sent:
            await asyncio.wait(sent)

    async def _read_whole(self, ask: Ask, record: Record) -> None:
        assert self._http is not None
        reply = await self._http.post(ask.path, json=ask.body(self._model))
        record.bytes_at.append(time.monotonic())
        record.status, record.done = reply.status_code, True
        answer = parsed(reply.text)
        add_events(record, answer)
        if reply.status_code != 200:
            record.error = error_code(answer)

    async def _read_stream(self, ask: Ask, record: Record) -> None:
        assert self._http is not None
        body = ask.body(self._model)
        headers = {"Accept": "text/event-stream"}  # events have ids
        headers |= {"Last-Event-ID": record.last_id} if record.last_id else {}
        posted = self._http.stream("POST", ask.path, json=body, headers=headers)
        async with posted as reply:
            record.status = reply.status_code
            if reply.status_code != 200:
                record.error = error_code(parsed((await reply.aread()).decode()))
                return
            async for line in reply.aiter_lines():
                record.bytes_at.append(time.monotonic())
                if line.startswith("id: "):
                    record.last_id = line[4:]
                elif (data := event_data(line)) == DONE:
                    record.done = True
                elif data is not None:
                    add_events(record, parsed(data))
        if not record.done and record.error is None:
            record.broken = "the stream ended without [DONE]"


def parsed(text: str) -> dict[str, Any]:
    """Parses a JSON object; returns an empty one for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def error_code(answer: dict[str, Any]) -> str | None:
    """Returns the code of an error body, or None if it is not an error."""
    error = answer.get("error")
    return str(error.get("code") or error.get("type")) if isinstance(error, dict) else None


def add_events(record: Record, answer: dict[str, Any]) -> None:
    now = time.monotonic()
    if "error" in answer:
        record.error = error_code(answer)
    for choice in answer.get("choices", ()):
        tokens = tuple(choice.get("token_ids") or ())
        said = choice.get("delta", choice.get("message", {"content": choice.get("text")}))
        text, called, ids = written(said)
        reason = choice.get("finish_reason")
        record.events.append(Event(now, choice["index"], tokens, text, reason, ids, called))
    if usage := answer.get("usage"):
        record.usage = (usage["prompt_tokens"], usage["completion_tokens"])


def written(said: Mapping[str, Any]) -> tuple[str, str, tuple[str, ...]]:
    """The words of a message of a chat, or of a part of one; its calls as text; their ids.

    Apart, since a stream may have words behind a call, and a whole message does not say where.
    """
    called, ids = "", []
    for call in said.get("tool_calls") or ():
        function = call.get("function", {})
        if call.get("id"):
            ids.append(call["id"])
        called += name_of_call(function["name"]) if function.get("name") else ""
        called += function.get("arguments") or ""
    return said.get("content") or "", called, tuple(ids)


def name_of_call(name: str) -> str:
    """How a call begins in the text of an answer."""
    return f"<{name}>"


def shorts(records: list[tuple[Ask, Record]]) -> Iterator[Record]:
    """The records of short requests."""
    return (record for ask, record in records if not ask.stream)
