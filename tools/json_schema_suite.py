"""Measures `make_grammar` against JSON-Schema-Test-Suite, which is no part of the repository.

    pip download --no-deps --no-binary jsonschema jsonschema==4.26.0 && tar xf jsonschema-*.tar.gz
    python tools/json_schema_suite.py jsonschema-4.26.0/json/tests/draft2020-12

The exit status is 1 if an instance is accepted that is not valid, or if more are refused or too
strict than `MOST`, which may only fall.

    right      accepted and valid, or rejected and not valid
    refused    the schema is answered with 400
    strict     rejected, and valid
    wrong      accepted, and not valid; or the schema is said to have no valid instance, and has one
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]

from byte_matcher import accepts, compile_error  # noqa: E402
from rayfin.actors.errors import InvalidRequest  # noqa: E402
from rayfin.actors.structured_outputs import StructuredOutputs  # noqa: E402
from rayfin.deployments.guidance.grammar import make_grammar  # noqa: E402

MOST = {"draft2020-12": {"refused": 514, "strict": 26}}  # of 1257 instances of jsonschema 4.26.0
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
}


def verdicts(schema: Any, tests: list[dict[str, Any]]) -> list[str]:
    """Returns a word for each test."""
    try:
        grammar = make_grammar(StructuredOutputs(json=schema)).text
    except InvalidRequest as e:
        if e.code == "unsatisfiable_schema":
            return ["wrong" if test["valid"] else "right" for test in tests]
        return ["refused"] * len(tests)
    if compile_error(grammar):
        return ["refused"] * len(tests)
    words = []
    for test in tests:
        accepted = accepts(grammar, json.dumps(test["data"], ensure_ascii=False), {})
        right = accepted is test["valid"]
        words.append("right" if right else "wrong" if accepted else "strict")
    return words


def main(folders: list[str]) -> int:
    total: Counter[str] = Counter()
    worse = False
    for folder in map(Path, folders):
        counts: Counter[str] = Counter()
        for file in sorted(folder.glob("*.json")):
            for group in json.loads(file.read_text()):
                schema = group["schema"]
                if isinstance(schema, dict) and folder.name in DRAFTS:
                    schema = {"$schema": DRAFTS[folder.name], **schema}
                words = verdicts(schema, group["tests"])
                counts.update(words)
                for test, word in zip(group["tests"], words, strict=True):
                    if word == "wrong":
                        print(f"{file}: {group['description']}: {test['description']}")
        total += counts
        for word, most in MOST.get(folder.name, {}).items():
            if counts[word] > most:
                worse = True
                print(f"{folder.name}: {counts[word]} instances are {word}, {most} were")
        print(f"{folder.name}: {counts.total()} instances, {dict(counts)}")
    return 1 if worse or total["wrong"] or not total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
