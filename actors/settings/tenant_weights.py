"""The shares of tenants under the fair policy."""

import math

from rayfin.actors.errors import InvalidConfig


def parse_weights(text: str | None) -> dict[str, float]:
    """``tenant_weights`` as shares by tenant: 'gold=4,free=1' is {"gold": 4.0, "free": 1.0}.

    Raises:
        InvalidConfig: not pairs of a name and a number over 0, or a name twice.
    """
    weights: dict[str, float] = {}
    for part in text.split(",") if text else []:
        name, equals, value = (piece.strip() for piece in part.rpartition("="))
        try:
            weight = float(value)
        except ValueError:
            weight = math.nan
        if not equals or not name or not 0 < weight < math.inf:
            raise InvalidConfig(
                f"tenant_weights must be like 'gold=4,free=1' with numbers over 0, got {part!r}",
                "tenant_weights",
            )
        if name in weights:
            raise InvalidConfig(f"tenant_weights names {name!r} twice", "tenant_weights")
        weights[name] = weight
    return weights
