"""Spreads test files over the workers of pytest-xdist, which a machine for GPU tests may lack."""

from xdist.scheduler import LoadScopeScheduling

from run_order import RAY


class FileScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives whole files to workers in the order of collection.

    All files of tests/e2e are one piece of work: two clusters of Ray at once starve each other.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return RAY if file.startswith(RAY) else file
