"""``rayfin collect-env``: what it says, and that secrets are not in it."""

import json

import pytest
import torch

from rayfin.deployments.cli.main import main
from rayfin.deployments.telemetry.environment import variables


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYFIN_API_KEY", "canary")
    monkeypatch.setenv("HF_TOKEN", "canary")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    for line in ("System:", "  OS: ", "CPU:", "  instructions: ", "Memory:", "GPU:"):
        assert line in text, line
    assert "  RAYFIN_API_KEY: (set)" in text and "canary" not in text
    assert main(["collect-env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["Python"]["torch"] == torch.__version__.partition("+")[0] or "+" in torch.__version__
    )
    assert found["Memory"]["total"].endswith(" GiB")


def test_variables_of_others_are_left_out() -> None:
    given = {"HOME": "/x", "HF_HOME": "/y", "VLLM_API_KEY": "k", "RAY_ADDRESS": "a:1"}
    assert variables(given) == {"HF_HOME": "/y", "RAY_ADDRESS": "a:1", "VLLM_API_KEY": "(set)"}
    url = {"HF_ENDPOINT": "https://me:pw@hub/x"}
    assert variables(url) == {"HF_ENDPOINT": "https://(set)@hub/x"}
