"""Prompts to checked engine requests, and their tokens to one stream of texts."""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TypeVar

from rayfin.actors.errors import InvalidRequest, Overloaded, RayfinError, RequestFailed
from rayfin.actors.messages import EngineRequest, TokenDelta
from rayfin.actors.sampling_params import BeamSearchParams, SamplingParams
from rayfin.actors.timing import RETRY_AFTER_SECONDS
from rayfin.deployments.generation.beam_requests import build_searches
from rayfin.deployments.generation.beams import check_search, hypothesis_deltas
from rayfin.deployments.generation.best_of import (
    candidates,
    likeliest,
    request_logprobs,
)
from rayfin.deployments.generation.build_requests import build_requests
from rayfin.deployments.generation.choice import Choice, ParsedAnswer, Prompt
from rayfin.deployments.generation.plan import NO_PLAN, OutputPlan
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.generation.usage import (
    CompletionTokensDetails,
    PromptTokensDetails,
    RequestMetrics,
    RequestTimes,
    Usage,
)
from rayfin.deployments.http.caller import ANONYMOUS, Caller
from rayfin.deployments.http.sse import cancelled
from rayfin.deployments.text.output import OutputText, TextDelta
from rayfin.deployments.text.repair import REPAIRED

LOGPROB_CHARACTERS = 50  # of JSON, at least, for a log probability
LONG_TEXT = 16 * 1024  # characters from which tokenizing leaves the event loop ...
SHORT_TEXT = 1024  # ... and from which it lets others run first
LEAST_TIMEOUT = 1e-3  # seconds, which an engine refuses as over; it takes none of 0
MAX_PROMPT_LOGPROBS = 2**18  # of all prompts of one HTTP request: tens of megabytes of JSON

T = TypeVar("T")


Deltas = AsyncGenerator[tuple[Choice, TextDelta], None]


class Generation:
    """The choices of one HTTP request; all are checked before the first one runs.

    Raises:
        InvalidRequest: a prompt or a setting that this engine cannot run.
        RateLimited: the tenant has no tokens left.
    """

    def __init__(
        self,
        service: OpenAIService,
        prompts: Sequence[Prompt],
        requests: Sequence[Sequence[EngineRequest]],
        params: SamplingParams,
        search: BeamSearchParams | None = None,
        caller: Caller = ANONYMOUS,
        plan: OutputPlan = NO_PLAN,
    ) -> None:
        self._client, self._counts = service.client, service.counts
        self._quotas, self._tenant = service.quotas, caller.tenant
        self._replies = service.replies
        self.comment_seconds = service.replies.comment_seconds
        self._log = service.request_log
        self.headers: dict[str, str] = {}  # of the reply: the rest of the tenant's quota
        if self._quotas is not None:
            self.headers = self._quotas.admit(
                caller.tenant, sum(len(prompt.ids) for prompt in prompts)
            )
        self._started = False  # an engine has sent something
        self._searches = search is not None
        self._wanted, count = params.n, params.best_of or params.n  # choices of each prompt
        self.prompts = prompts
        self.choices = [
            Choice(
                index=i * count + j,
                prompt=prompt,
                request=request,
                output=OutputText(service.tokenizer, params, request, plan.parser()),
                parsed=ParsedAnswer(plan, request.request_id),
                text=[prompt.echo],
            )
            for i, prompt in enumerate(prompts)
            for j, request in enumerate(requests[i])
        ]
        self._candidates = self.choices  # all that run; ``best_of`` drops some at the end
        # As in vLLM: times are those of one choice, or of none.
        if service.replies.metrics and len(self.choices) == 1 and search is None:
            self.choices[0].times, self.choices[0].request.timed = RequestTimes(), True

    @classmethod
    async def prepare(
        cls,
        service: OpenAIService,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int,
        caller: Caller = ANONYMOUS,
        search: BeamSearchParams | None = None,
        plan: OutputPlan = NO_PLAN,
    ) -> "Generation":
        """Checks and builds the requests: ``params.n`` for each prompt, or one for a ``search``."""
        service.replies.check(params, len(prompts))
        service.check_priority(priority, caller.tenant)
        info = await service.client.info()
        arrival = time.monotonic() if caller.arrival is None else caller.arrival
        requests = []
        each = candidates(params) if params.best_of else params
        for i, prompt in enumerate(prompts):
            build: Callable[..., list[EngineRequest]] = partial(
                build_requests, prompt.ids, each, guidance=plan.guidance
            )
            if search is not None:
                check_search(plan)
                build = partial(build_searches, prompt.ids, params, search)
            requests.append(
                build(
                    info,
                    request_id=request_id if len(prompts) == 1 else f"{request_id}-{i}",
                    eos_token_ids=service.tokenizer.eos_token_ids,
                    priority=priority,
                    arrival=arrival,
                    param=prompt.param,
                    tokenizer=service.tokenizer,
                    cache_salt=prompt.cache_salt,
                    images=prompt.images,
                    embeds=prompt.embeds,
                    parts=service.parts,
                )
            )
        _check_prompt_logprobs([request for group in requests for request in group])
        for request in itertools.chain.from_iterable(requests):
            request.tenant, request.timeout = caller.tenant, caller.timeout
            request.session, request.background = caller.session, caller.background
        if (params.best_of or 0) > params.n:
            request_logprobs(itertools.chain.from_iterable(requests))
        if service.request_log is not None:
            ids = [prompt.ids for prompt in prompts]
            service.request_log.received(request_id, ids, params, caller.tenant)
        generation = cls(service, prompts, requests, params, search, caller, plan)
        generation.headers |= plan.headers
        repairs = sorted({name for prompt in prompts for name in prompt.repairs})
        if repairs:
            generation.headers[REPAIRED] = ",".join(repairs)
        for choice in generation.choices:
            choice.page_size = info.page_size if info.prefix_caching else 0
        return generation

    def run(self, at_once: int | None = None) -> Deltas:
        """Returns the choice stream: deltas of all choices as they come.

        Closing it aborts the engine requests that still run.

        Args:
            at_once: choices that run side by side, the first ones first, and of which all but the
                first one wait for a full queue; None: all, and none waits.
        """
        if self._searches:
            streams = [self._run_search(group) for group in self._by_prompt()]
        else:
            start: Callable[[Choice], Deltas] = self._run_choice
            if at_once is not None and len(self.choices) > 1:
                start = partial(self._run_in_turn, asyncio.Semaphore(at_once))
            streams = [start(choice) for choice in self.choices]
        return streams[0] if len(streams) == 1 else merged(streams)

    async def finish(self, deltas: Deltas) -> None:
        """Runs to the end; ``best_of`` then keeps the best choices of each prompt, best first."""
        async with aclosing(deltas):
            async for _ in deltas:
                pass
        if len(self.choices) > self._wanted * len(self.prompts):
            self.choices = [
                replace(group[best], index=i * self._wanted + place)
                for i, group in enumerate(self._by_prompt())
                for place, best in enumerate(
                    likeliest([choice.likelihood for choice in group], self._wanted)
                )
            ]

    async def render(self, reply: "Callable[[Generation], str]") -> str:
        """Returns the whole reply; a thread writes one with many log probabilities."""
        logprobs = sum(len(choice.logprobs) + len(choice.prompt.scores) for choice in self.choices)
        return await off_loop(logprobs * LOGPROB_CHARACTERS, partial(reply, self))

    def usage(self) -> Usage:
        """Counts the tokens so far: each prompt once, and all choices that run."""
        prompt = sum(len(prompt.ids) for prompt in self.prompts)
        completion = sum(len(choice.token_ids) for choice in self._candidates)
        firsts = [group[0] for group in self._by_prompt()]
        details = PromptTokensDetails(
            cached_tokens=sum(choice.cached_tokens for choice in firsts),
            created_cache_tokens=sum(choice.written_tokens for choice in firsts),
        )
        tells = self._replies.prompt_tokens_details
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=details if tells else None,
            completion_tokens_details=self._details(),
        )

    def metrics(self) -> RequestMetrics | None:
        """Returns the times of the request, if the server tells them and it has one choice."""
        choice = self.choices[0]
        return None if choice.times is None else choice.times.metrics(len(choice.token_ids))

    def _details(self) -> CompletionTokensDetails | None:
        if not self._candidates or not self._candidates[0].parsed.plan.reasons:
            return None
        thought = sum(choice.reasoning_tokens for choice in self._candidates)
        return CompletionTokensDetails(reasoning_tokens=thought)

    def _by_prompt(self) -> list[list[Choice]]:
        if not self.prompts:  # a silent recording has none
            return []
        every, count = self._candidates, len(self._candidates) // len(self.prompts)
        return [every[i : i + count] for i in range(0, len(every), count)]

    async def _run_choice(self, choice: Choice, waits: bool = False) -> Deltas:
        """The deltas of a choice; one that ``waits`` is run again if a full queue refuses it."""
        try:
            for delta in choice.earlier:  # the stream before has charged it
                yield choice, self._append(choice, delta, charged=True)
                if choice.output.finished:
                    return
            async with aclosing(self._client.stream(choice.request)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason == "error":
                        break
                    text = self._append(choice, delta)
                    if choice.output.finished:
                        choice.parsed.count(self._counts, choice.output.unparsed)
                        self._log_answer(choice)
                    yield choice, text
                    if choice.output.finished:
                        return
            raise RequestFailed("The engine failed on this request.")
        except RayfinError as error:
            choice.name_cause(error)
            if not (waits and isinstance(error, Overloaded)):
                self.refund()
            raise

    async def _run_in_turn(self, gate: asyncio.Semaphore, choice: Choice) -> Deltas:
        """A choice once the gate lets it in; what it waits counts for its timeout alone.

        A full queue refuses the first choice. The others wait for it: the queue may be shorter than
        they are many, and later on much has been done already.
        """
        came, request, waits = time.monotonic(), choice.request, choice is not self.choices[0]
        timeout, arrival = request.timeout, request.arrival
        async with gate:
            while True:
                waited = time.monotonic() - came
                request.arrival, request.underway = arrival + waited, waits and self._started
                left = math.inf if timeout is None else timeout - waited
                if timeout is not None:
                    request.timeout = max(left, LEAST_TIMEOUT)
                begun = False
                try:
                    async with aclosing(self._run_choice(choice, waits)) as deltas:
                        async for item in deltas:
                            begun = True
                            yield item
                    return
                except Overloaded:
                    if begun or not waits or left <= 0:
                        self.refund()
                        raise
                await asyncio.sleep(RETRY_AFTER_SECONDS)

    def _append(self, choice: Choice, delta: TokenDelta, *, charged: bool = False) -> TextDelta:
        text = choice.output.push(delta)
        choice.append(text)
        if choice.times is not None and delta.tokens:
            choice.times.observe(delta.queued, delta.first_token, time.monotonic())
        if delta.logprobs:
            choice.likelihood.add(delta, len(text.token_ids))
        choice.request.satisfied = choice.output.finished
        if not charged:
            self._spend(text)
        return text

    async def _run_search(self, choices: Sequence[Choice]) -> Deltas:
        """Runs the one engine request of a beam search; its last delta has all hypotheses."""
        try:
            async with aclosing(self._client.stream(choices[0].request)) as deltas:
                async for delta in deltas:
                    for choice, text in hypothesis_deltas(choices, delta):
                        self._spend(text)
                        yield choice, text
                    if delta.hypotheses:
                        for choice in choices:
                            self._log_answer(choice)
                        return
            raise RequestFailed("The engine failed on this request.")
        except RayfinError as error:
            choices[0].name_cause(error)
            self.refund()
            raise

    def _log_answer(self, choice: Choice) -> None:
        if self._log is not None:
            self._log.answered(
                choice.request.request_id,
                "".join(choice.text[1:]),  # the first one is the echo of the prompt
                choice.reasoning,
                [f"{call.name}({call.arguments})" for call in choice.calls],
                choice.token_ids,
                choice.finish_reason,
            )

    def _spend(self, delta: TextDelta) -> None:
        self._started = True
        if self._quotas is not None:
            self._quotas.spend(self._tenant, len(delta.token_ids))

    def refund(self) -> None:
        """Gives the prompts' tokens back to the quota if no engine took the request."""
        if not self._started and self._quotas is not None:
            self._quotas.spend(self._tenant, -sum(len(prompt.ids) for prompt in self.prompts))
            self._started = True  # of several choices the first failure counts


def _check_prompt_logprobs(requests: Sequence[EngineRequest]) -> None:
    """Rejects more log probabilities of prompts than an answer can hold."""
    count = sum(
        len(request.prompt) * (1 + (request.sampling.prompt_logprobs or 0))
        + sum(map(len, request.sampling.prompt_logprob_ids))
        for request in requests
        if request.sampling.prompt_logprobs is not None
    )
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"An answer has at most {MAX_PROMPT_LOGPROBS} log probabilities of its prompts, and "
            f"this one would have {count}.",
            "prompt_logprobs",
        )


async def off_loop(characters: int, work: Callable[[], T]) -> T:
    """Returns the result of ``work``; a thread does it if the text is long.

    Others run before that of a text of medium length: a request may have hundreds.
    """
    if characters >= LONG_TEXT:
        return await asyncio.to_thread(work)
    if characters >= SHORT_TEXT:
        await asyncio.sleep(0)
    return work()


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields items of all streams as they come. The first failure ends and closes all."""
    queue: asyncio.Queue[tuple[T | None, Exception | None]] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        failure: Exception | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait((item, None))
        except Exception as error:
            failure = error
        queue.put_nowait((None, failure))

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        running = len(tasks)
        while running:
            item, failure = await queue.get()
            if failure is not None:
                raise failure
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        await cancelled(*tasks)
