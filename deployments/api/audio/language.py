"""The language of a recording, which a Whisper model finds in its first clip."""

from dataclasses import dataclass, replace

from rayfin.actors.errors import RequestFailed
from rayfin.actors.media.processed import ProcessedMedia
from rayfin.actors.sampling_params import SamplingParams
from rayfin.deployments.api.audio.prompts import FILE
from rayfin.deployments.generation.choice import Prompt
from rayfin.deployments.generation.generation import LEAST_TIMEOUT, Generation
from rayfin.deployments.generation.service import OpenAIService
from rayfin.deployments.http.caller import Caller
from rayfin.deployments.media.reader import MediaReader

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


@dataclass(frozen=True, slots=True)
class LanguageFinder:
    """Asks the engines for the language of a clip, in the name of a client's request."""

    service: OpenAIService
    media: MediaReader
    caller: Caller
    request_id: str
    cache_salt: str | None = None

    async def find(self, clip: ProcessedMedia) -> str:
        """The code of the language; cancelling it aborts the request.

        The request for the transcript finds the clip's pages, so a quota counts them there alone.

        Raises:
            RayfinError: the request cannot run, or has failed.
        """
        speech, service = self.media.speech, self.service
        assert speech is not None
        ids, images = self.media.place(speech.detect(), [clip], FILE)
        generation = await Generation.prepare(
            service,
            [Prompt(ids, FILE, cache_salt=self.cache_salt, images=images)],
            ONE_TOKEN,
            request_id=f"{self.request_id}-language",
            priority=0,
            caller=self.caller,
        )
        await generation.finish(generation.run())
        if service.quotas is not None:
            service.quotas.spend(self.caller.tenant, -generation.usage().total_tokens)
        for token in generation.choices[0].token_ids:
            language = speech.language(token)
            if language is not None:
                return language
        raise RequestFailed("The model named no language.")


def rest_of(caller: Caller, spent: float) -> Caller:
    """The caller with what is left of its timeout after ``spent`` seconds."""
    if caller.timeout is None:
        return caller
    return replace(caller, timeout=max(caller.timeout - spent, LEAST_TIMEOUT))
