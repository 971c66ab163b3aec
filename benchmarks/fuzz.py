"""Does any damaged file or option make gpubench crash, hang or do something forbidden?

    .venv/bin/python benchmarks/fuzz.py [--seconds 300] [--seed 0] [--only configs,dotkeys,options,runs,csv,...]
    .venv/bin/python benchmarks/fuzz.py --quick              # three cases of each, and simulated runs

Valid inputs (real runs of small models, presets, logs, traces, snapshots) are damaged at random and given to the real
command line, each in a forked process, for a fixed time. A case passes if it ends by itself with a documented exit
code, with one `error:` line if it refuses and none otherwise, without a traceback, within 1 GiB of memory, without
control characters in its output or live markup in a page, and with no file changed but the requested page. Every other
case is a finding: its input is kept in `--findings`, with the command and its output. The same seed and `--inputs`
give the same cases. The exit code is 3 if there are findings.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

for name, value in {"NO_COLOR": "1", "COLUMNS": "120", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}.items():
    os.environ[name] = value  # before numpy is loaded, because forking a process with threads is unsafe

import bars  # noqa: E402
from fuzzing import seeds  # noqa: E402
from fuzzing.targets import TARGETS  # noqa: E402
from fuzzing.trial import Ended, call, complaint, tree  # noqa: E402
from tables import table  # noqa: E402

QUICK = 3


@dataclass(frozen=True)
class Tried:
    target: str
    number: int
    """The seed, which determines the case."""
    arguments: Sequence[str]
    about: str
    """How the input was damaged."""
    ended: Ended
    complaint: str | None

    @property
    def outcome(self) -> str:
        return "findings" if self.complaint else ("refused" if self.ended.code in (1, 2) else "accepted")


def attempt(target: str, number: int, seed: int, whole: seeds.Seeds, folder: Path) -> Tried:
    """Run one case in a new `folder`."""
    random = Random(f"{seed} {target} {number}")
    inputs, here, home, out = (folder / name for name in ("in", "here", "home", "out"))
    for one in (inputs, here, home, out):
        one.mkdir(parents=True)
    case = TARGETS[target](whole, inputs, random)
    page = out / "page.html"
    arguments = [str(page) if argument == "{page}" else argument for argument in case.arguments]
    os.environ.update(HOME=str(home), TMPDIR=str(home))
    before = [tree(one) for one in (inputs, here, home)]
    ended = call(arguments, here, out)
    wrong = complaint(ended, case.kind, [page])
    if wrong is None and "--null" not in arguments and [tree(one) for one in (inputs, here, home)] != before:
        wrong = "something was changed that should not be"
    return Tried(target, number, arguments, case.about, ended, wrong)


def attempts(
    targets: Sequence[str], seed: int, whole: seeds.Seeds, work: Path, findings: Path | None
) -> Iterator[Tried]:
    """Yield cases of each target in turn, endlessly; the folders of findings are kept."""
    for number in itertools.count():
        for target in targets:
            folder = work / "case"
            tried = attempt(target, number, seed, whole, folder)
            if tried.complaint and findings:
                _keep(tried, folder, findings / f"{target}-{number}")
            _remove(folder)
            yield tried


def preload() -> None:
    """Load what a case would load, without what fixes configuration or starts a thread."""
    import gpubench.commands
    import gpubench.compare.compare
    import gpubench.diagnosis.rules
    import gpubench.kinds.memory.footprint_report
    import gpubench.kinds.memory.predicted_device
    import gpubench.kinds.pipeline.defaults
    import gpubench.kinds.pipeline.resuming
    import gpubench.memory.snapshot
    import gpubench.report.comparison
    import gpubench.report.markdown
    import gpubench.report.page
    import gpubench.report.profile
    import gpubench.report.run
    import gpubench.report.terminal
    import gpubench.settings.defaults  # noqa: F401


def _keep(tried: Tried, folder: Path, kept: Path) -> None:
    """Keep the input, without the holes of a file larger than memory, and the output."""
    kept.mkdir(parents=True, exist_ok=True)
    for path in (folder / "in").rglob("*"):
        if path.is_symlink() or path.is_file():
            path.chmod(0o600, follow_symlinks=False) if not path.is_symlink() else None
    shutil.copytree(folder / "in", kept / "in", symlinks=True, ignore=_enormous, dirs_exist_ok=True)
    said = [f"gpubench {' '.join(map(repr, tried.arguments))}", tried.about, str(tried.complaint)]
    said += [f"exit code {tried.ended.code}", tried.ended.stderr[-20_000:], tried.ended.stdout[-2000:]]
    (kept / "finding.txt").write_text("\n\n".join(said), errors="backslashreplace")


def _enormous(folder: str, names: list[str]) -> list[str]:
    paths = [Path(folder, name) for name in names]
    return [path.name for path in paths if path.is_fifo() or (path.is_file() and path.stat().st_size > 2**26)]


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(TARGETS))
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="made where there are some")
    parser.add_argument("--quick", action="store_true", help="three cases of each target, with simulated runs")
    parser.add_argument("--inputs", type=Path, help="where the real runs are kept from one time to the next")
    options = parser.parse_args()
    if unknown := set(options.only) - set(TARGETS):
        parser.error(f"no target {sorted(unknown)[0]!r}: there are {', '.join(TARGETS)}")
    preload()
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="gpubench-fuzz-") as work:
        whole = seeds.make((options.inputs or Path(work, "inputs")).resolve(), real=not options.quick)
        most = QUICK * len(options.only) if options.quick else None
        until = time.monotonic() + options.seconds
        found = attempts(options.only, options.seed, whole, Path(work), options.findings.resolve())
        for tried in itertools.islice(found, most):
            counts[tried.target, tried.outcome] += 1
            if tried.complaint:
                print(f"{tried.target}-{tried.number}: {tried.about}: {tried.complaint}", file=sys.stderr)
            if not options.quick and time.monotonic() > until:
                break
    sys.exit(conclude(options.only, counts))


def conclude(targets: Sequence[str], counts: Counter[tuple[str, str]]) -> int:
    """Print how often each outcome occurred, and return the exit code."""
    columns = ("refused", "accepted", "findings")
    rows = [(target, [counts[target, outcome] for outcome in columns]) for target in targets]
    rows.append(("all", [sum(column) for column in zip(*(found for _, found in rows), strict=True)]))
    print(table([["target", "cases", *columns], *([name, *map(str, (sum(found), *found))] for name, found in rows)]))
    cases = counts.total()
    passed = cases - sum(counts[target, "findings"] for target in targets)
    return bars.conclude([bars.every("damaged inputs that were read or refused as they should be", passed, cases)])


if __name__ == "__main__":
    main()
