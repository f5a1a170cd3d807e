"""What an ingress asks an engine beside the first transcript of a recording."""

import asyncio
import math
import time
from contextlib import aclosing
from dataclasses import replace

from rayfin.actors.errors import Overloaded, RequestFailed
from rayfin.actors.media.part import Alignment
from rayfin.actors.media.processed import ProcessedMedia
from rayfin.actors.messages import StopRules
from rayfin.actors.sampling_params import BeamSearchParams, SamplingParams
from rayfin.actors.timing import RETRY_AFTER_SECONDS
from rayfin.deployments.api.audio.prompts import FILE
from rayfin.deployments.generation.choice import Choice, Prompt
from rayfin.deployments.generation.generation import LEAST_TIMEOUT, Generation
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.media.reader import MediaReader

SECONDS_PER_TIME = 0.02  # of a state of the encoder
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, logprobs_mode="raw_logprobs")


class Asker:
    """Asks the engines about clips of one recording, in the name of a client's request.

    The timeout of that counts for all together, from the first one on. A quota counts transcripts
    alone: the other requests find the clip's pages.

    Args:
        request_id: others are made of it.
    """

    def __init__(
        self,
        service: OpenAIService,
        media: MediaReader,
        caller: Caller,
        request_id: str,
        cache_salt: str | None,
    ) -> None:
        self._service, self._quotas = replace(service, quotas=None), service.quotas
        self._media, self._caller, self._request_id = media, caller, request_id
        self._cache_salt = cache_salt
        self._begun: float | None = None
        self._count = 0

    def caller(self) -> Caller:
        """Returns the client, with what is left of its timeout."""
        now = time.monotonic()
        self._begun = now if self._begun is None else self._begun
        if self._caller.timeout is None:
            return self._caller
        left = self._caller.timeout - (now - self._begun)
        return replace(self._caller, timeout=max(left, LEAST_TIMEOUT))

    async def transcript(
        self,
        ids: list[int],
        clip: ProcessedMedia,
        params: SamplingParams,
        search: BeamSearchParams | None = None,
    ) -> Choice:
        """What a model writes behind ``ids``; it waits for a full queue as long as it may."""
        while True:
            try:
                choice = await self._ask(ids, clip, params, search, underway=True)
                break
            except Overloaded:
                if self.caller().timeout == LEAST_TIMEOUT:
                    raise
                await asyncio.sleep(RETRY_AFTER_SECONDS)
        if self._quotas is not None:
            new = len(choice.prompt.ids) - choice.cached_tokens
            self._quotas.spend(self._caller.tenant, new + len(choice.token_ids))
        return choice

    async def language(self, clip: ProcessedMedia) -> str:
        """Returns the code of the language of a clip; cancelling it aborts the request.

        Raises:
            RayfinError: the request cannot run, or has failed.
        """
        speech = self._media.speech
        assert speech is not None
        if self._quotas is not None:
            self._quotas.admit(self._caller.tenant, 0)
        for token in (await self._ask(speech.detect(), clip, ONE_TOKEN)).token_ids:
            language = speech.language(token)
            if language is not None:
                return language
        raise RequestFailed("The model named no language.")

    async def no_speech(self, ids: list[int], clip: ProcessedMedia) -> float:
        """Returns the probability that there is no speech in a clip.

        Args:
            ids: that ask for its transcript.
        """
        speech = self._media.speech
        assert speech is not None
        params = replace(ONE_TOKEN, logprobs=0, allowed_token_ids=[speech.tokens.no_speech])
        start = ids[: ids.index(speech.tokens.start) + 1]
        (entry,) = (await self._ask(start, clip, params)).logprobs
        return math.exp(entry.logprob)

    async def times(
        self, ids: list[int], count: int, clip: ProcessedMedia, seconds: float
    ) -> list[float]:
        """When each of the last ``count`` tokens of ``ids`` begins, and when the last one ends.

        Args:
            ids: that ask for a transcript without times, then the transcript.
            seconds: of sound in the clip.
        """
        generation = await self._prepared(ids, clip, ONE_TOKEN)
        request = generation.choices[0].request
        states = max(1, round(seconds / SECONDS_PER_TIME))
        request.use(Alignment(len(request.prompt) - count - 1, states))
        request.stopping = StopRules(max_tokens=0)
        async with aclosing(self._service.client.stream(request)) as deltas:
            async for delta in deltas:
                if delta.vector is not None:
                    times: list[float] = delta.vector.tolist()
                    return times
        raise RequestFailed("The engine failed on this request.")

    async def _ask(
        self,
        ids: list[int],
        clip: ProcessedMedia,
        params: SamplingParams,
        search: BeamSearchParams | None = None,
        *,
        underway: bool = False,
    ) -> Choice:
        generation = await self._prepared(ids, clip, params, search)
        for choice in generation.choices:
            choice.request.underway = underway
        await generation.finish(generation.run())
        return generation.choices[0]

    async def _prepared(
        self,
        ids: list[int],
        clip: ProcessedMedia,
        params: SamplingParams,
        search: BeamSearchParams | None = None,
    ) -> Generation:
        placed, images = self._media.place(ids, [clip], FILE)
        self._count += 1
        return await Generation.prepare(
            self._service,
            [Prompt(placed, FILE, cache_salt=self._cache_salt, images=images)],
            params,
            request_id=f"{self._request_id}-{self._count}",
            priority=0,
            caller=self.caller(),
            search=search,
        )
