"""Ray Serve is spared pandas, and nothing else is."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
import rayfin.actors.processes.spared_imports
import ray.serve

assert "pandas" not in sys.modules
import pandas

assert pandas.DataFrame({"a": [1]}).a.sum() == 1
"""

OTHERS = """
import sys, types
import rayfin.actors.processes.spared_imports

name = "ray.serve._private.utils"
sys.modules[name] = types.ModuleType(name)
inside = {"__name__": name}
try:
    exec("import pandas", inside)
except ModuleNotFoundError:
    assert "pandas" not in sys.modules
else:
    raise AssertionError("Serve has imported pandas")
exec(sys.argv[1], inside)
assert "pandas" in sys.modules
"""


@pytest.mark.parametrize(
    "code",
    [
        "exec('import pandas', {'__name__': 'another.module'})",
        "exec('def call():\\n import pandas'); call()",
        "import threading, importlib as i\n"
        "thread = threading.Thread(target=i.import_module, args=['pandas'])\n"
        "thread.start(); thread.join()",
    ],
    ids=["module", "function", "thread"],
)
def test_others_import_pandas_while_serve_imports(code: str) -> None:
    """Whatever state Serve's module is in: its names are private to it."""
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", OTHERS, code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_serve_does_without_pandas_and_others_do_not() -> None:
    pytest.importorskip("pandas")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
