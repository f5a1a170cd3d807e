"""The GPU's tests and benchmarks on a machine that has torch and transformers, and no server."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ABSENT = ("ray", "openai", "uvicorn", "fastapi", "starlette", "kubernetes", "peft")
FOLDERS = (
    "tests/kernels/triton",
    "tests/actors/runner/gpu",
    "tests/actors/runner/test_on_gpu.py",
    "tests/actors/runner/test_page_moves.py",
)


def run(code: str) -> str:
    """What Python prints of code, without the packages of a server."""
    block = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); sys.path += ['benchmarks']"
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins want a server's
    done = subprocess.run(
        [sys.executable, "-c", f"{block}\n{code}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_the_tests_of_the_page_are_collected() -> None:
    """docs/benchmarks/gpu.md names these folders."""
    pytest.importorskip("triton")
    page = (ROOT / "docs/benchmarks/gpu.md").read_text()
    assert all(folder in page for folder in FOLDERS)
    arguments = ["--all", "--collect-only", "-q", "-p", "no:cacheprovider", *FOLDERS]
    printed = run(f"import pytest; sys.exit(pytest.main({arguments!r}))")
    assert "test_overlap.py" in printed and "test_attention.py" in printed


def test_the_benchmark_is_imported_and_an_engine_runs() -> None:
    code = "import gpu; assert set(gpu.CALLS) >= {1, 2, 3, 4}; from rayfin import LLM"
    prompt = "LLM('demo').generate('Hello', use_tqdm=False)[0]"
    assert run(f"{code}; print(len({prompt}.outputs[0].token_ids))").strip() not in ("", "0")
