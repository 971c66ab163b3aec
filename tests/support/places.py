"""Where the files of this repository are."""

from pathlib import Path

SUPPORT = Path(__file__).parent
"""Also where the programs are that tests start, which find their imports there."""
TESTS = SUPPORT.parent
ROOT = TESTS.parent
BENCHMARKS = ROOT / "benchmarks"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
