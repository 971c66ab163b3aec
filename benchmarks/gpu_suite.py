"""Everything that needs a GPU, in groups that fit a short loan of one: `python benchmarks/gpu_suite.py`.

Runs named jobs through the real command line, sized by the memory of the GPU that is here, and sums them up in one
table. A call stops within its budget of under 8 minutes; the same call again goes on where that one stopped, and
`--group` chooses. Groups come in the order of their worth and none needs another. The output folder is written as the
jobs finish, so that a suite that is stopped keeps what it has:

    summary.md      the table over all groups
    summary.json    the same as data, with the device and the commands
    JOB/log.txt     the end of what the job printed
    JOB/RUN_ID/     each of its runs: run.json, config.yaml, environment.json, summary.json, noise.json, findings.json
                    and, where that is small, steps.jsonl

The group first-gpu says in eight minutes whether gpubench is right on a GPU, and is run only if it is named: each of
its jobs holds what gpubench reports to what programs measure of themselves; see `first_gpu.py`. A job that fails or is
stopped is a verdict, and so is one that this machine cannot do. summary.json can be sent: it names no user and no path.
With --reference, nor do the files of the jobs.

The jobs called planted-* have a fault that `gpubench profile --verify` must find: where it does not, the job has
failed. So has one whose profile does not hold together; see `profiled.py`. Those called memory-* hold a prediction of
memory to what is measured, and fail where it misses a bar; see `memory_check.py`. Those called compare-* judge runs of
the jobs before them.

`--dry-run` prints the groups with their estimated minutes and runs nothing. `--rehearse` runs the same jobs with tiny
models on the CPU, to show that the suite itself works.
"""

import argparse
import math
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import bars
from gpu_jobs import groups
from gpu_jobs.card import ASSUMED, GIB, Card
from gpu_jobs.job import COMPILED, VERIFY, Group, Job
from gpu_results import ROOT, Result, attempt, publish
from gpu_summary import DOCUMENT, Suite, recall, write
from gpu_tables import summary
from records import Machine
from tables import table

REFERENCES = ROOT / "benchmarks" / "reference"
REHEARSAL_FACTOR = 0.5  # a rehearsed job should take half of the real one's time
REHEARSAL_PATIENCE = 10.0  # and, as others may use the CPU, is not stopped soon
BUDGET = 460.0  # seconds; with the patience for a job that is stopped, under 8 minutes
SETTLED = {"completed", "failed"}  # jobs that are not run again unless asked to
INTERRUPTED = 130


class Refused(Exception):
    """The suite cannot do what was requested; the arguments are message and hint."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.command = shlex.join(
        ["python", "benchmarks/gpu_suite.py", *(sys.argv[1:] if arguments is None else arguments)]
    )
    try:
        card = Card("a GPU", int(options.memory * GIB)) if options.memory else Card.here()
        if options.dry_run:
            print(planned(card or ASSUMED, options.group))
            return 0
        return run(options, card)
    except Refused as refused:
        print("error: {}\nhint: {}".format(*refused.args), file=sys.stderr)
        return 2


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [group.name for group in groups(ASSUMED)]
    parser = argparse.ArgumentParser(
        description="Run the benchmarks and checks that need a GPU, and print one table of results."
    )
    parser.add_argument(
        "--group",
        action="append",
        choices=names,
        help="run this group; may be repeated; default: all groups but first-gpu",
    )
    parser.add_argument(
        "--job", action="append", metavar="NAME", help="run jobs whose names begin with NAME; may be repeated"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="folder for results; default: results/gpu-suite/<GPU>"
    )
    parser.add_argument("--reference", action="store_true", help="write to benchmarks/reference/<GPU>")
    parser.add_argument(
        "--budget", type=float, default=BUDGET, metavar="SECONDS", help="time limit; default: %(default).0f"
    )
    parser.add_argument("--again", action="store_true", help="also run jobs that have already completed or failed")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--dry-run", action="store_true", help="print the groups and jobs with their times, and run nothing"
    )
    mode.add_argument("--rehearse", action="store_true", help="run tiny models on the CPU")
    parser.add_argument(
        "--memory", type=gibibytes, metavar="GIB", help="with --dry-run: show the sizes for a GPU with this memory"
    )
    options = parser.parse_args(arguments)
    if options.memory and not options.dry_run:
        parser.error("--memory needs --dry-run: a run uses the memory of the local GPU")
    if options.reference and options.output:
        parser.error("--reference and --output name two different folders: leave one out")
    every = [job.name for group in groups(ASSUMED) for job in group.jobs]
    for name in options.job or []:
        if not any(one.startswith(name) for one in every):
            parser.error(f"no job begins with {name!r}; there are {', '.join(every)}")
    return options


def gibibytes(text: str) -> float:
    found = float(text)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a size of memory")
    return found


def planned(card: Card, chosen: Sequence[str] | None) -> str:
    """Return a Markdown table of the groups and jobs, with the time that each should take."""
    selected = [group for group in groups(card) if not chosen or group.name in chosen]
    rows = [
        (
            group.name if number == 0 else "",
            f"{group.seconds / 60:.1f} min" if number == 0 else "",
            job.name,
            f"{job.seconds:.0f} s",
            job.shows if job.fits else f"skipped: not even one sample fits into {card.memory_bytes / GIB:.1f} GiB",
        )
        for group in selected
        for number, job in enumerate(group.jobs)
    ]
    total = sum(group.seconds for group in selected if chosen or not group.by_name) / 60
    sized = (
        f"Sized for {card}; times are those of an H100 or H200. {total:.1f} min in total, in calls of {BUDGET:.0f} s.\n"
    )
    return f"{sized}\n{table([('group', 'time', 'job', 'time', 'shows'), *rows])}"


def run(options: argparse.Namespace, card: Card | None) -> int:
    if card is None:
        if not options.rehearse:
            raise Refused(
                "no GPU is visible", "--rehearse runs tiny models on the CPU, --dry-run prints what would run"
            )
        card = ASSUMED
    output = place(options, card)
    output.mkdir(parents=True, exist_ok=True)
    suite = recall(output) or Suite.of(card, Machine.here(), rehearsed=options.rehearse)
    if (suite.name, suite.memory_bytes, suite.rehearsed) != (card.name, card.memory_bytes, options.rehearse):
        raise Refused(f"{output} holds results of {suite.title}", "choose another folder with --output")
    suite.called.append(options.command)
    every = [rehearsed(job) if options.rehearse else job for group in groups(card) for job in group.jobs]
    names = {job.name for job in chosen(options, groups(card))}
    ends = time.monotonic() + options.budget
    done: dict[str, Result] = {result.name: result for result in suite.jobs}
    for job in every:
        interrupted = False
        if job.name in names and (options.again or not settled(job, done.get(job.name))):
            say(f"{job.name}: {job.shows}; about {job.seconds:.0f} s")
            done[job.name] = found = attempt(job, output, ends - time.monotonic())
            if output.resolve().is_relative_to(REFERENCES):
                publish(output / job.name)
            say(f"  {found.status} in {found.seconds:.0f} s {found.note}")
            interrupted = found.status == bars.INTERRUPTED
        suite.jobs = [done[one.name] for one in every if one.name in done]
        suite.waiting = [one.name for one in every if one.name not in done]
        write(suite, output)
        if interrupted:
            break
    print(summary(suite.jobs, suite.title))
    say(f"kept in {output / DOCUMENT}, which names no user and no path")
    if interrupted:
        return INTERRUPTED
    return 0 if all(done[name].status in {"completed", "skipped"} for name in names) else 1


def place(options: argparse.Namespace, card: Card) -> Path:
    """The folder for results. Raises Refused where it is kept for measurements and there will be none."""
    slug = "rehearsal" if options.rehearse else card.slug
    output: Path = options.output or (REFERENCES if options.reference else ROOT / "results" / "gpu-suite") / slug
    if output.resolve().is_relative_to(REFERENCES) and (options.rehearse or card.simulated):
        what = "a rehearsal" if options.rehearse else card.name
        raise Refused(
            f"{what} measures nothing: {REFERENCES} is for real devices", "choose another folder with --output"
        )
    return output


def chosen(options: argparse.Namespace, available: Sequence[Group]) -> list[Job]:
    return [
        job
        for group in available
        for job in group.jobs
        if (group.name in options.group if options.group else bool(options.job) or not group.by_name)
        and (not options.job or job.name.startswith(tuple(options.job)))
    ]


def settled(job: Job, before: Result | None) -> bool:
    """Whether it has been run as it is now."""
    return before is not None and before.status in SETTLED and before.command == ["python", *job.arguments]


def rehearsed(job: Job) -> Job:
    """The same job in a size for a CPU. No published figure is comparable with that, and no fault is worth its fix."""
    left_out = {COMPILED} | ({VERIFY} if job.finds else set())
    arguments = tuple(part for part in job.arguments if part not in left_out)
    return replace(
        job,
        arguments=(*arguments, *job.rehearsed),
        seconds=REHEARSAL_FACTOR * job.seconds,
        patience=REHEARSAL_PATIENCE,
        reference=None,
        finds=(),
        judged=False,
    )


def say(line: str) -> None:
    print(line.rstrip(), file=sys.stderr, flush=True)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):  # so that no job outlives the suite; a shell's job ignores SIGINT
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
