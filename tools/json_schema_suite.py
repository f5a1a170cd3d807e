"""Measures `make_grammar` against JSON-Schema-Test-Suite, which is no part of the repository.

    pip download --no-deps --no-binary jsonschema jsonschema==4.26.0 && tar xf jsonschema-*.tar.gz
    python tools/json_schema_suite.py jsonschema-4.26.0/json/tests/draft2020-12
    python tools/json_schema_suite.py --drawn 4000

`--drawn` counts schemas as people send them (tests/support/drawn_schemas.py), whose instances
jsonschema judges; some more are drawn under the masks. The exit status is 1 if an instance is
accepted that is not valid, or if more are refused or too strict than `MOST`, which may only fall.

    right      accepted and valid, or rejected and not valid
    refused    the schema is answered with 400
    strict     rejected, and valid
    wrong      accepted, and not valid; or the schema is said to have no valid instance, and has one
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "support")]

from jsonschema import FormatChecker, validators  # noqa: E402

from byte_matcher import accepted, compile_error, has_repeated_key, walk  # noqa: E402
from drawn_schemas import drawn  # noqa: E402
from rayfin.actors.errors import InvalidRequest  # noqa: E402
from rayfin.actors.structured_outputs import StructuredOutputs  # noqa: E402
from rayfin.deployments.guidance.grammar import make_grammar  # noqa: E402

WALKED = 4  # of so many drawn schemas an answer is drawn for one
MOST_DRAWN = {"refused": 0.12, "strict": 0.002}  # of all instances, from 400 schemas on
MOST = {"draft2020-12": {"refused": 521, "strict": 26}}  # of 1257 instances of jsonschema 4.26.0
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
}


def verdicts(schema: Any, tests: list[dict[str, Any]], walks: Sequence[int] = ()) -> list[str]:
    """Returns a word for each test, and for each answer that is drawn under the masks.

    Args:
        walks: seeds of these answers.
    """
    try:
        grammar = make_grammar(StructuredOutputs(json=schema)).text
    except InvalidRequest as e:
        if e.code == "unsatisfiable_schema":
            return ["wrong" if test["valid"] else "right" for test in tests]
        return ["refused"] * len(tests)
    if compile_error(grammar):
        return ["refused"] * len(tests)
    words = []
    texts = [json.dumps(test["data"], ensure_ascii=False) for test in tests]
    for test, taken in zip(tests, accepted(grammar, texts), strict=True):
        words.append("right" if taken is test["valid"] else "wrong" if taken else "strict")
    for seed in walks:
        answer = walk(grammar, seed)
        if answer is not None and not has_repeated_key(answer):
            words.append("right" if is_valid(schema, json.loads(answer)) else "wrong")
    return words


def is_valid(schema: Any, value: Any) -> bool:
    """Whether jsonschema takes a value, with the formats that Rayfin holds."""
    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    return bool(kind(schema, format_checker=CHECKER).is_valid(value))


CHECKER = FormatChecker()
URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]*")


@CHECKER.checks("date-time", raises=ValueError)
def is_date_time(value: object) -> bool:
    """Of RFC 3339; a leap second is taken for the one before it."""
    if not isinstance(value, str):
        return True
    moment = datetime.fromisoformat(value.upper().replace(":60", ":59"))
    return "T" in value.upper() and moment.tzinfo is not None


@CHECKER.checks("uri")
def is_uri(value: object) -> bool:
    """A scheme, and characters that a URI may have."""
    return not isinstance(value, str) or URI.fullmatch(value) is not None


def count_drawn(count: int) -> Counter[str]:
    """Counts the words of schemas that are drawn from the seeds below ``count``."""
    counts: Counter[str] = Counter()
    for seed in range(count):
        case = drawn(seed)
        tests = [{"data": value, "valid": is_valid(case.schema, value)} for value in case.values]
        words = verdicts(case.schema, tests, [seed] if seed % WALKED == 0 else ())
        counts.update(words)
        if "wrong" in words:
            print(f"seed {seed}: {words}: {json.dumps(case.schema)}")
    return counts


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="of the suite, one for each draft")
    parser.add_argument("--drawn", type=int, default=0, help="schemas as people send them")
    chosen = parser.parse_args(arguments)
    total: Counter[str] = Counter()
    worse = False
    if chosen.drawn:
        total = count_drawn(chosen.drawn)
        for word, share in MOST_DRAWN.items():
            if total[word] > share * total.total():
                worse = True
                print(f"drawn: {total[word]} instances are {word}, over {share:.2%}")
        print(f"drawn: {total.total()} instances, {dict(total)}")
    for folder in chosen.folders:
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
        for word, limit in MOST.get(folder.name, {}).items():
            if counts[word] > limit:
                worse = True
                print(f"{folder.name}: {counts[word]} instances are {word}, {limit} were")
        print(f"{folder.name}: {counts.total()} instances, {dict(counts)}")
    return 1 if worse or total["wrong"] or not total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
