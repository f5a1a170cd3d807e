"""What would fit where memory is short: settings with numbers, for an error."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A request that does not fit into the pages."""

    wanted: int  # tokens
    page_size: int  # tokens
    page_bytes: int
    available: int  # bytes for pages
    setting: str | None  # kv_cache_memory or num_pages; None: memory was measured
    smaller_pages: tuple[tuple[str, int], ...] = ()  # kv_cache_dtype and bytes of a page
    int4_saves: int = 0  # bytes of weights

    def what_fits(self) -> str:
        """Settings with the longest request that each one alone makes room for."""
        return "; ".join([*self._settings(), self._more_memory()])

    def _settings(self) -> Iterator[str]:
        if longest := self._longest(self.available, self.page_bytes):
            yield f"max_model_len {longest}"
        for dtype, size in self.smaller_pages:
            if longest := self._longest(self.available, size):
                yield f"kv_cache_dtype {dtype!r} for {self._tokens(longest)}"
        if self.int4_saves and self.setting is None:
            if longest := self._longest(self.available + self.int4_saves, self.page_bytes):
                saved = f"{self.int4_saves:,} bytes less"
                yield f"quantization 'int4' ({saved}) for {self._tokens(longest)}"

    def _more_memory(self) -> str:
        pages = -(-self.wanted // self.page_size)
        needed = pages * self.page_bytes
        if self.setting is not None:
            return f"{self.setting} {needed if self.setting == 'kv_cache_memory' else pages}"
        return f"memory_utilization for {needed - self.available:,} bytes more"

    def _longest(self, available: int, page_bytes: int) -> int:
        return max(available // page_bytes, 0) * self.page_size if page_bytes else 0

    def _tokens(self, longest: int) -> str:
        return "all of it" if longest >= self.wanted else f"{longest} tokens"
