"""What ``serve`` says: the welcome, and the reason out of Serve's report."""

import pytest

from rayfin.actors.config import EngineArgs
from rayfin.actors.errors import EngineUnavailable, InvalidConfig
from rayfin.deployments.serve.model_args import ModelArgs
from rayfin.deployments.serve.server_args import ServerArgs
from rayfin.deployments.serve.serving import _reason, _welcome

REPORT = """Deploying application rayfin failed: Failed to update the deployments ['engine'].
The deployment failed to start 2 times in a row. Error:
  File "replica.py", line 1928, in initialize
RuntimeError: Traceback (most recent call last):
  File "supervisor.py", line 62, in start
    raise error.cause from None
rayfin.actors.errors.{kind}: a request of 100 tokens needs 7 pages: lower max_model_len
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("InvalidConfig", InvalidConfig),
        ("UnsupportedModel", InvalidConfig),
        ("EngineUnavailable", EngineUnavailable),
    ],
)
def test_reason_is_rayfins_own_error(kind: str, expected: type[Exception]) -> None:
    reason = _reason(REPORT.format(kind=kind))
    assert type(reason) is expected
    assert str(reason) == "a request of 100 tokens needs 7 pages: lower max_model_len"


def test_other_failures_are_told_by_their_last_line() -> None:
    reason = _reason("Traceback:\n  File x\nOSError: no space left\n\n")
    assert type(reason) is EngineUnavailable
    assert str(reason) == "the deployment failed: OSError: no space left"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1"])
def test_welcome_shows_an_address_that_can_be_opened(host: str) -> None:
    text = _welcome([ModelArgs(ServerArgs(served_model_name="tiny"), EngineArgs())], host, 8123)
    assert "Rayfin serves tiny at http://127.0.0.1:8123/v1" in text
    assert "Authorization" not in text


def test_welcome_keeps_the_key_to_itself() -> None:
    text = _welcome([ModelArgs(ServerArgs(api_key="secret"), EngineArgs())], "127.0.0.1", 1)
    assert "secret" not in text and '"Authorization: Bearer $KEY"' in text
