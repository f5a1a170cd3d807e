"""The one error of the cache: a broken invariant, never a user's mistake."""


class CacheError(AssertionError):
    """A page is freed twice, lost, or held by two tables that may not share it."""
