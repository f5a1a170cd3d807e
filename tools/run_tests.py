"""Runs all tests in two processes: those that start Ray in one, all others in the other.

    python tools/run_tests.py [pytest's arguments]        # make test

One process would leave a core idle, and two clusters of Ray at once would starve each other. With a
path among the arguments it is one plain pytest.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5  # pytest's exit status where -k or -m picks nothing


def run_both(arguments: list[str]) -> int:
    """Both halves; the second one's output follows the first one's."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    with tempfile.TemporaryFile() as log:
        e2e = [*pytest, "tests/e2e", "-p", "no:cacheprovider"]
        with subprocess.Popen(e2e, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) as ray:
            try:
                others = subprocess.run([*pytest, "tests", "--ignore=tests/e2e"], cwd=ROOT)
            except KeyboardInterrupt:
                ray.wait()
                raise
        log.seek(0)
        print("\ntests/e2e:", flush=True)
        sys.stdout.buffer.write(log.read())
        sys.stdout.flush()
    codes = {others.returncode, ray.returncode}
    failures = codes - {0, NO_TESTS}
    return max(failures) if failures else min(codes)


def main() -> int:
    arguments = sys.argv[1:]
    if any((ROOT / argument.partition("::")[0]).exists() for argument in arguments):
        return subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=ROOT).returncode
    return run_both(arguments)


if __name__ == "__main__":
    sys.exit(main())
