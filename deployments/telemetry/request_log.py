"""Lines of the log for each request that generates, and for its answers.

They are written with ``--enable-log-requests`` and ``--enable-log-outputs``.
"""

import logging
from collections.abc import Callable, Sequence

from rayfin.actors.sampling_params import SamplingParams

logger = logging.getLogger("rayfin.requests")


class RequestLog:
    """Logs the settings of requests, and at level debug their prompts.

    Args:
        longest: characters and ids of a prompt or an answer in the log; None logs all.
        decode: token ids to text.
        outputs: whether answers are logged.
    """

    def __init__(
        self,
        longest: int | None,
        decode: Callable[[list[int], bool], str],
        *,
        outputs: bool = False,
    ) -> None:
        self._longest = longest
        self._decode = decode
        self._outputs = outputs

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

    def answered(
        self,
        request_id: str,
        text: str,
        reasoning: str,
        calls: Sequence[str],
        ids: Sequence[int],
        reason: str | None,
    ) -> None:
        """Logs a whole answer, one choice of a request, if answers are logged.

        Args:
            text: its content, without reasoning and calls where the answer is parsed.
            calls: each as ``name(arguments)``.
            ids: its tokens.
            reason: its finish reason.
        """
        if not self._outputs:
            return
        parts = {"reasoning": reasoning, "tool_calls": ", ".join(calls), "output": text}
        shown = [
            f"{name}: {part[: self._longest]!r}"
            for name, part in parts.items()
            if part or name == "output"
        ]
        logger.info(
            "Answered request %s: %s, finish_reason: %s", request_id, ", ".join(shown), reason
        )
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "Answer %s details: output_token_ids: %s", request_id, list(ids)[: self._longest]
            )
