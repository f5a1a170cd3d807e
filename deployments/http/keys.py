"""API keys, stored as SHA-256 digests, and the tenant of each."""

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rayfin.actors.errors import InvalidConfig

KEY = re.compile(r"[!-+\--~]{1,4096}")  # printable ASCII without blanks and commas
TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
TENANT_DIGITS = 8  # of the digest, in a tenant's made-up name


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Digests of keys and their tenants. The keys themselves are not kept, nor sent to replicas."""

    tenants: tuple[tuple[bytes, str], ...]  # (digest, name); several keys may have one tenant

    @classmethod
    def load(
        cls, keys: Iterable[str] = (), file: str | None = None, param: str = "api_key"
    ) -> "ApiKeys | None":
        """The keys of a list, each entry one key or several with commas, and those of a file.

        A line of the file is ``key`` or ``name:key``; blank lines and lines that start with # do
        not count. The name is the key's tenant; without one it is made from the key's digest.

        Returns:
            None if no keys are configured; then the API needs no key.

        Raises:
            InvalidConfig: a source without a key, a malformed key or name, a key with two names.
        """
        named = [("", part.strip()) for entry in keys for part in entry.split(",")]
        if file is not None:
            named += _read(file)
            if not named:
                raise InvalidConfig(f"{file} holds no key", "api_key_file")
        if not named:
            return None
        tenants: dict[bytes, str] = {}
        for name, key in named:
            if not KEY.fullmatch(key):
                raise InvalidConfig(
                    f"{param} must be 1 to 4096 printable ASCII characters without blanks", param
                )
            digest = _digest(key.encode())
            name = name or f"key-{_digest(digest).hex()[:TENANT_DIGITS]}"
            if tenants.setdefault(digest, name) != name:
                raise InvalidConfig(f"one key belongs to {tenants[digest]} and {name}", "api_key")
        return cls(tuple(tenants.items()))

    @property
    def digests(self) -> frozenset[bytes]:
        return frozenset(digest for digest, _ in self.tenants)

    def tenant(self, authorization: str) -> str | None:
        """The tenant of the key in an Authorization header, or None for an unknown key.

        Takes constant time: it does not reveal how much of a key is right.
        """
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip().encode("latin-1", "replace"))
        tenant: str | None = None
        for digest, name in self.tenants:
            if hmac.compare_digest(given, digest):
                tenant = name
        return tenant if scheme.lower() == "bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(file: str) -> list[tuple[str, str]]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InvalidConfig(f"cannot read {file}: {reason}", "api_key_file") from None
    named = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, separator, key = line.partition(":")
        if not separator:
            name, key = "", line
        elif not TENANT.fullmatch(name.strip()):
            raise InvalidConfig(
                f"{file}:{number}: a name has 1 to 64 of A-Z a-z 0-9 . _ -", "api_key_file"
            )
        named.append((name.strip(), key.strip()))
    return named
