"""The error of the cache. It means a broken invariant, never a mistake of the user."""


class CacheError(AssertionError):
    """A page is freed twice, lost, or held by two tables that may not share it."""
