"""A line of the log for each request that generates (``--enable-log-requests``)."""

import logging
from collections.abc import Callable, Sequence

from rayfin.actors.sampling_params import SamplingParams

logger = logging.getLogger("rayfin.requests")


class RequestLog:
    """Logs the settings of requests, and at level debug their prompts.

    Args:
        longest: characters and ids of a prompt in the log; None logs all.
        decode: token ids to text.
    """

    def __init__(self, longest: int | None, decode: Callable[[list[int], bool], str]) -> None:
        self._longest = longest
        self._decode = decode

    def received(
        self, request_id: str, prompts: Sequence[list[int]], params: SamplingParams, tenant: str
    ) -> None:
        """Logs a request that is about to run."""
        count = sum(map(len, prompts))
        logger.info(
            "Received request %s: tenant: %s, prompt tokens: %d, params: %s",
            *(request_id, tenant, count, params),
        )
        if logger.isEnabledFor(logging.DEBUG):
            for ids in prompts:
                text = self._decode(list(ids), False)
                shown, head = list(ids)[: self._longest], text[: self._longest]
                logger.debug(
                    "Request %s details: prompt: %r, prompt_token_ids: %s", request_id, head, shown
                )
