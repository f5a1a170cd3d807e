"""Two nodes of Ray: a bucket that both read, and stages that lie where a configuration says."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rayfin import LLM, SamplingParams
from rayfin.deployments.serve.preflight import DEMO_FOLDER
from two_nodes import LABEL, LENGTH, PROMPT

pytest.importorskip("pyarrow", reason="an extra")
SUPPORT = Path(__file__).parents[1] / "support"


def test_two_nodes_read_buckets_once_and_engines_lie_where_they_should(
    drive: Callable[..., Any], port: int, settings: dict[str, Any], tmp_path: Path, solo: LLM
) -> None:
    kwargs = {name: value for name, value in settings.items() if name != "model"}
    path = os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    program = str(SUPPORT / "two_nodes.py")
    driver = drive(program, str(tmp_path), str(port), json.dumps(kwargs), PYTHONPATH=path)
    assert driver.wait() == 0, driver.story()
    seen = json.loads(driver.output.splitlines()[-1])

    buckets = seen["buckets"]
    assert buckets["right"] == [True] * 6 and buckets["left"] == []
    sizes = {f"demo/{file.name}": file.stat().st_size for file in DEMO_FOLDER.iterdir()}
    assert buckets["once"] == buckets["again"] == sizes

    model = seen["model"]
    # Nodes have one core each: what watches the engine has its hundredth of these.
    assert model["bundles"] == [{"CPU": 0.99, LABEL: 0.001}] * 2
    assert (model["nodes"], model["strategy"]) == ([0, 1], "STRICT_SPREAD")
    params = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
    (output,) = solo.generate(PROMPT, params, use_tqdm=False)
    assert model["tokens"] == output.outputs[0].token_ids
