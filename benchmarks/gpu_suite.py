"""Everything that needs a GPU, in one command: `python benchmarks/gpu_suite.py`.

Runs a list of named jobs through the real command line, sized for one GPU with about 140 GB of memory (NVIDIA H200),
and sums them up in one table. Every job has its time, and the suite has a budget: what no longer fits is listed as
skipped. The output folder is written as the jobs finish, so that a suite that is stopped keeps what it has:

    summary.md      the table
    summary.json    the same as data, with the commands
    JOB/log.txt     the end of what the job printed
    JOB/RUN_ID/     each of its runs: run.json, config.yaml, environment.json, summary.json, noise.json, findings.json
                    and, where that is small, steps.jsonl

The jobs called planted-* have a fault that `gpubench profile --verify` must find: where it does not, the job has
failed. So has one whose profile does not hold together; see `profiled.py`. Those called memory-* hold a prediction of
memory to what is measured, and fail where it misses a bar; see `memory_check.py`. Those called compare-* judge runs of
the jobs before them.

`--dry-run` runs the same jobs with tiny models on the CPU, to show that the suite itself works.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
from gpu_jobs import JOBS
from gpu_jobs.job import Job
from gpu_results import ROOT, Result, attempt
from gpu_tables import summary
from tables import table

DRY_FACTOR = 0.5  # a dry job should take half of the real one's time
DRY_PATIENCE = 10.0  # and, as the CPU may be anybody's, is not stopped soon
BUDGET = 460.0  # seconds; with the patience for a job that is stopped, under 8 minutes


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print(table([("job", "about", "shows"), *((job.name, f"{job.seconds:.0f} s", job.shows) for job in JOBS)]))
        return 0
    jobs = [job for job in JOBS if not options.only or job.name.startswith(tuple(options.only))]
    if options.dry_run:
        jobs = [dried(job) for job in jobs]
    output: Path = options.output
    output.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + options.budget
    results: list[Result] = []
    for job in jobs:
        print(f"{job.name}: {job.shows}", file=sys.stderr, flush=True)
        results.append(attempt(job, output, ends - time.monotonic()))
        print(f"  {results[-1].status} in {results[-1].seconds:.0f} s {results[-1].note}", file=sys.stderr, flush=True)
        write(results, jobs[len(results) :], output)
    print(summary(results))
    return 0 if all(result.status in {"completed", "skipped"} for result in results) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU, and sum it up in one table.")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "gpu-suite", metavar="DIR")
    parser.add_argument(
        "--only", action="append", type=beginning, metavar="JOB", help="jobs whose names begin so; may be repeated"
    )
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="default: %(default).0f")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--list", action="store_true", help="the jobs, and run nothing")
    return parser.parse_args(arguments)


def beginning(name: str) -> str:
    if not any(job.name.startswith(name) for job in JOBS):
        raise argparse.ArgumentTypeError(
            f"no job begins with {name!r}; there are {', '.join(job.name for job in JOBS)}"
        )
    return name


def dried(job: Job) -> Job:
    """The same job in a size for a CPU. No published figure is comparable with that, and no fault is worth its fix."""
    arguments = tuple(part for part in job.arguments if part != "--verify" or not job.finds)
    given, seconds = (*arguments, *job.dry), DRY_FACTOR * job.seconds
    return replace(job, arguments=given, seconds=seconds, patience=DRY_PATIENCE, reference=None, finds=(), judged=False)


def write(results: Sequence[Result], waiting: Sequence[Job], output: Path) -> None:
    """summary.json and summary.md, with the jobs that have not had their turn, each replaced in one go."""
    jobs = [asdict(result) | {"memory": msgspec.to_builtins(result.memory)} for result in results]
    document = {"jobs": jobs, "waiting": [job.name for job in waiting]}
    text = f"# GPU suite\n\n{summary(results)}"
    text += "".join(f"\n## {result.name}\n\n```\n{result.printed}\n```\n" for result in results if result.printed)
    if waiting:
        text += f"\nNot run yet: {', '.join(job.name for job in waiting)}.\n"
    for name, content in (("summary.json", json.dumps(document, indent=2) + "\n"), ("summary.md", text)):
        aside = output / f".{name}"
        aside.write_text(content)
        aside.replace(output / name)


if __name__ == "__main__":
    sys.exit(main())
