"""pytest-benchmark's verdicts: whether --benchmark-compare-fail with the given limit, such as median:5%, would fail."""

import json
import sys
from pathlib import Path
from typing import Any

from pytest_benchmark.stats import Stats  # type: ignore[import-not-found]
from pytest_benchmark.utils import parse_compare_fail  # type: ignore[import-not-found]

pairs = json.loads(Path(sys.argv[1]).read_text())
check = parse_compare_fail(sys.argv[2])


def stats(processes: list[list[float]]) -> dict[str, Any]:
    taken = Stats()
    for steps in processes:
        for step in steps:
            taken.update(step)
    return {check.field: getattr(taken, check.field)}


print(json.dumps(["slower" if check.fails(stats(after), stats(before)) else "same" for before, after in pairs]))
