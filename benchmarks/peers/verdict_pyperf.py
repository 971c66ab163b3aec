"""pyperf's verdicts: `pyperf compare_to` on two suites, a benchmark for each pair and a run for each process."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pyperf  # type: ignore[import-not-found]


def dump(sides: list[list[list[float]]], path: Path) -> None:
    """sides: for each pair its processes' step times, in seconds."""
    benchmarks = []
    for number, processes in enumerate(sides):
        known = {"name": f"pair-{number}"}
        runs = [pyperf.Run(steps, metadata=known, collect_metadata=False) for steps in processes]
        benchmarks.append(pyperf.Benchmark(runs))
    pyperf.BenchmarkSuite(benchmarks).dump(str(path))


pairs = json.loads(Path(sys.argv[1]).read_text())
with tempfile.TemporaryDirectory() as folder:
    files = [Path(folder) / "before.json", Path(folder) / "after.json"]
    for side, file in enumerate(files):
        dump([pair[side] for pair in pairs], file)
    command = [sys.executable, "-m", "pyperf", "compare_to", *map(str, files)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
verdicts = dict(re.findall(r"^(pair-\d+): .*x (slower|faster)", said, re.MULTILINE))
print(json.dumps([verdicts.get(f"pair-{number}", "same") for number in range(len(pairs))]))
