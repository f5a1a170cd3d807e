"""What the tests of programs of npm share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agent_programs import NpmUnreachable, installed


@pytest.fixture(scope="session")
def install(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs a package, and returns the folder of its programs; skips where npm cannot."""

    def install(package: str) -> Path:
        try:
            return installed(tmp_path_factory.mktemp("npm"), package)
        except NpmUnreachable as reason:
            pytest.skip(str(reason))

    return install
