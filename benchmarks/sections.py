"""Runs one of several measurements of a script: ``python benchmarks/SCRIPT.py SECTION ...``."""

import argparse
import sys
from collections.abc import Callable


def run(doc: str | None, *sections: Callable[[], int | None]) -> None:
    """Runs the section that the first argument names, with the arguments behind it."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = {section.__name__.replace("_", "-"): section for section in sections}
    parser.add_argument("section", choices=known, help="SECTION --help lists its options")
    name = parser.parse_args(sys.argv[1:2]).section
    sys.argv[:2] = [f"{sys.argv[0]} {name}"]
    sys.exit(known[name]())
