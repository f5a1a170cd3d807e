"""Token quotas per tenant, as token buckets."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from rayfin.actors.errors import RateLimited

MINUTE = 60.0
NAMES = ("limit", "remaining", "reset")


@dataclass(slots=True)
class _Bucket:
    tokens: float  # below 0 if admitted requests used more than there was
    seen: float  # time of ``tokens``, seconds


class TokenQuotas:
    """Tokens of prompts and outputs, of each tenant.

    A request is admitted if its tenant has a token left. Its prompt is charged at once, its output
    as it comes, and both may overdraw: no length has to be guessed, and the long-run rate still
    holds. A full bucket holds a minute's tokens.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = per_minute
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}  # tenants are the operator's: few

    def admit(self, tenant: str, tokens: int) -> dict[str, str]:
        """Charges a prompt's tokens; returns OpenAI's rate limit headers.

        Raises:
            RateLimited: no token is left.
        """
        bucket = self._bucket(tenant)
        if bucket.tokens < 1:
            seconds = (1 - bucket.tokens) / self._limit * MINUTE
            raise RateLimited(
                f"Rate limit reached: {self._limit:g} tokens a minute. "
                f"Please try again in {_written(seconds)}.",
                retry_after=math.ceil(seconds),
                headers=self._headers(bucket),
            )
        bucket.tokens -= tokens
        return self._headers(bucket)

    def spend(self, tenant: str, tokens: int) -> None:
        """Charges tokens; a negative number refunds them."""
        self._bucket(tenant).tokens -= tokens

    def _bucket(self, tenant: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.setdefault(tenant, _Bucket(self._limit, now))
        grown = bucket.tokens + (now - bucket.seen) * self._limit / MINUTE
        bucket.tokens, bucket.seen = min(self._limit, grown), now
        return bucket

    def _headers(self, bucket: _Bucket) -> dict[str, str]:
        reset = (self._limit - bucket.tokens) / self._limit * MINUTE
        values = (f"{self._limit:.0f}", str(max(0, int(bucket.tokens))), _written(reset))
        return {
            f"x-ratelimit-{name}-tokens": value for name, value in zip(NAMES, values, strict=True)
        }


def _written(seconds: float) -> str:
    """Formats a time as OpenAI does: 1m30s, 0.25s."""
    minutes, rest = divmod(max(0.0, seconds), MINUTE)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:.3g}s"
