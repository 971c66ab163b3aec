"""Run every benchmark that this machine can, one after the other: `python benchmarks/suite.py`.

Each benchmark of listing.py runs in a process of its own. Its output and verdicts are kept in benchmarks/measured/, and
docs/benchmarks.md is written again after each benchmark, so that an interrupted suite keeps its results; `--only NAME`
refreshes one section. A benchmark that fails or runs out of time is reported, and the others continue. A missed bar is
a result: the exit code is 1 only if a benchmark did not complete.
"""

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import bars
import msgspec
from bars import STOPPED
from listing import BENCHMARKS, GPU, Benchmark
from page import page, references
from processes import last_words, reason, run_for, without_settings
from records import PYTHON, ROOT, Machine, Record, keep, recall
from tables import table

from gpubench import units
from gpubench.devices import visible_gpus

LIMIT = 1800.0  # far above the time of most benchmarks, because peers may have to be installed first
LONGER = 3.0  # the factor of a busy machine on the time in the listing, for benchmarks that take long
MEASURED = ROOT / "benchmarks" / "measured"
REFERENCES = ROOT / "benchmarks" / "reference"
PAGE = ROOT / "docs" / "benchmarks.md"
PRINTED = 20_000  # characters kept, the last ones
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, benchmarks: Sequence[Benchmark] = BENCHMARKS) -> int:
    options = parse(arguments, benchmarks)
    if options.list:
        print(listed(benchmarks))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no benchmark outlives the suite
    try:
        return run_all(options, benchmarks)
    except KeyboardInterrupt:
        print("interrupted; the results so far are kept", file=sys.stderr)
        return INTERRUPTED
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 1


def run_all(options: argparse.Namespace, benchmarks: Sequence[Benchmark]) -> int:
    machine, every = Machine.here(), True
    has = {GPU: bool(visible_gpus())}
    for benchmark in benchmarks:
        if options.only and benchmark.name not in options.only:
            continue
        if benchmark.needs and not has[benchmark.needs]:
            say(f"{benchmark.name}: skipped, because it needs {benchmark.needs}")
            continue
        say(f"{benchmark.name}: {benchmark.question} About {benchmark.minutes:g} min")
        limit = options.limit if options.limit is not None else max(LIMIT, LONGER * 60 * benchmark.minutes)
        record = attempt(benchmark, machine, limit)
        say(f"  {record.verdict} in {units.seconds(record.seconds)} {record.trouble if not record.ran else ''}")
        keep(record, options.measured)
        write(benchmarks, options.measured, options.page)
        every &= record.ran
    write(benchmarks, options.measured, options.page)
    say(f"wrote {options.page}")
    return 0 if every else 1


def attempt(benchmark: Benchmark, machine: Machine, limit: float) -> Record:
    """Run a benchmark for at most `limit` seconds."""
    with tempfile.TemporaryDirectory(prefix="gpubench-suite-") as folder:
        judged = Path(folder) / "bars.json"
        environment = without_settings(**{bars.VARIABLE: str(judged), "PYTHONUNBUFFERED": "1"})
        began = time.monotonic()
        ended = run_for([sys.executable, *benchmark.command], limit, ROOT, environment)
        seconds = time.monotonic() - began
        found = msgspec.json.decode(judged.read_bytes(), type=list[bars.Bar]) if judged.is_file() else []
    finished = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    command = [PYTHON, *benchmark.command]
    made = Record(benchmark.name, command, machine, finished, seconds, ended.code, found, ended.printed[-PRINTED:], "")
    if made.verdict == STOPPED:
        return msgspec.structs.replace(made, trouble=f"stopped after {limit:g} s")
    return made if made.ran else msgspec.structs.replace(made, trouble=last_words(ended.errors or ended.printed))


def write(benchmarks: Sequence[Benchmark], measured: Path, path: Path) -> None:
    """Write the page of all records, atomically."""
    records = {one.name: record for one in benchmarks if (record := recall(measured, one.name))}
    aside = path.with_name(f".{path.name}")
    aside.write_text("\n".join(page(benchmarks, records, references(REFERENCES))) + "\n", encoding="utf-8")
    aside.replace(path)


def listed(benchmarks: Sequence[Benchmark]) -> str:
    rows = [
        (one.name, f"{one.minutes:g} min", one.needs or "", " ".join((PYTHON, *one.command)), one.bar)
        for one in benchmarks
    ]
    return table([("benchmark", "about", "needs", "command", "bar"), *rows])


def say(line: str) -> None:
    print(line.rstrip(), file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None, benchmarks: Sequence[Benchmark]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run all benchmarks that this machine can, and write their page.")
    names = [one.name for one in benchmarks]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="may be repeated; see --list")
    parser.add_argument("--list", action="store_true", help="list the benchmarks with their times, and run nothing")
    limit = f"for each benchmark; default: {LIMIT:.0f}, or {LONGER:g} times its minutes in --list if that is longer"
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=limit)
    parser.add_argument("--measured", type=Path, default=MEASURED, metavar="DIR", help="folder for results")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="the page; default: docs/benchmarks.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
