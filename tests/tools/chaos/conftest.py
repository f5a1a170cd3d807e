"""Makes the parts of the chaos runs importable: they import each other by their bare names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[3] / "tools" / "chaos"))
