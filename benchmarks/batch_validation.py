"""How long the validation of a batch takes, and how much memory.

python benchmarks/batch_validation.py [--lines 500000]
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

from rayfin.deployments.batches.validation import validate

URL = "/v1/completions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=500_000)
    lines = parser.parse_args().lines
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for number in range(lines):
                body = {"prompt": "a b"}
                line = {"custom_id": f"r{number}", "method": "POST", "url": URL, "body": body}
                file.write(json.dumps(line) + "\n")
        before, began = _kilobytes(), time.perf_counter()
        found = validate(path, URL, lambda name: True, lines)
        seconds = time.perf_counter() - began
        assert found == (lines, [])
        print(f"{lines} lines of {path.stat().st_size // lines} bytes: {seconds:.1f} s, ", end="")
        print(f"{(_kilobytes() - before) // 1024} MB more of memory")


def _kilobytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
