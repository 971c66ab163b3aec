"""Everything that needs a GPU, in one command: `python benchmarks/gpu_suite.py`.

Runs a list of named jobs through the real command line, sized for one GPU with about 140 GB of memory (NVIDIA H200),
and sums them up in one table. Every job has its time, and the suite has a budget: what no longer fits is listed as
skipped. The output folder is written as the jobs finish, so that a suite that is stopped keeps what it has:

    summary.md      the table
    summary.json    the same as data, with the commands
    JOB/log.txt     the end of what the job printed
    JOB/RUN_ID/     each of its runs: run.json, config.yaml, environment.json, summary.json, noise.json, findings.json

The jobs called planted-* have a fault that `gpubench profile --verify` must find: where it does not, the job has
failed. So has one whose profile does not hold together; see `profiled.py`. Those called memory-* hold a prediction of
memory to what is measured, and fail where it misses a bar; see `memory_check.py`.

`--dry-run` runs the same jobs with tiny models on the CPU, to show that the suite itself works.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import memory_check
import msgspec
import profiled

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("run.json", "config.yaml", "environment.json", "summary.json", "noise.json", "findings.json")
LOG_CHARACTERS = 20_000
LAST_LINES = 30  # of a job without runs, shown below the table
PATIENCE = 15.0  # seconds in which an interrupted job may close its run directory
DRY_FACTOR = 0.5  # a dry job may take half of the real one's time
RUNS = "RUNS"  # in a job's arguments: the folder for its run directories


@dataclass(frozen=True)
class Reference:
    """A figure that somebody else published for the same work."""

    throughput: float
    """Samples per second."""
    source: str


@dataclass(frozen=True)
class Job:
    """One command of the suite."""

    name: str
    arguments: tuple[str, ...]
    """Of the Python interpreter; `RUNS` stands for the folder to write run directories in."""
    shows: str
    seconds: float
    """How long it should take on an H200; it is stopped after twice as long."""
    dry: tuple[str, ...] = ()
    """What is appended in a dry run; later options win."""
    reference: Reference | None = None
    finds: tuple[str, ...] = ()
    """What its diagnosis must name, by the ids of findings."""


def cli(command: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", "gpubench", command, "--quiet", "--results", RUNS, *arguments)


SHORT = ("--repeats", "2", "--training.warmup_steps=5", "--training.seconds=8", "--logging.graph=false")
DRY = (
    "--device=cpu",
    "--repeats=1",
    "--training.warmup_steps=2",
    "--training.seconds=0.2",
    "--measurement.measure_peak=false",
    "--performance.cpu_threads=1",
    "--batch-size=4",
)
DRY_RESNET = (*DRY, "--model=resnet-tiny", "--performance.compile=false")
DRY_GPT2 = (*DRY, "--model=gpt2-tiny", "--data.sequence_length=32")
DRY_BERT = (*DRY, "--model=bert-tiny", "--data.sequence_length=32")

RESNET = cli("train-bench", *SHORT, "--model", "resnet50", "--precision", "amp", "--batch-size", "2560")
LAMBDA = Reference(
    3091.0, "median of the per-step rates in Lambda's public ResNet-50 AMP log of one NVIDIA H200, batch 2560"
)

PIPE = ("--repeats=1", "--steps=20", "--samples=4", "--verify", "--pipeline.deadline=120")
DRY_PIPE = (
    "--device=cpu",
    "--unet=tiny",
    "--precision=fp32",
    "--steps=4",
    "--samples=2",
    "--performance.cpu_threads=1",
)


def pipelines() -> Iterator[Job]:
    """Random weights at full size; two ranks share the GPU, so that they show what is right and not what is fast."""
    for unet, seconds in (("sd15", 60.0), ("sdxl", 120.0)):
        for precision in ("fp16", "bf16"):
            for ranks in (1, 2):
                yield Job(
                    f"pipe-{unet}-{precision}-{ranks}",
                    cli("pipe-infer", *PIPE, f"--unet={unet}", f"--precision={precision}", f"--world-size={ranks}"),
                    f"{unet} UNet, {precision}, 20 steps over {ranks} rank{'s' * (ranks > 1)} on one GPU, bit by bit",
                    ranks * seconds,
                    DRY_PIPE,
                )


GPU_TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
PROFILE_TESTS = "tests/test_gpu_profile.py"

PROFILE = ("--repeats=1", "--training.warmup_steps=10", "--training.seconds=3", "--logging.graph=false")
NO_SHAPES = "--profiling.record_shapes=false"  # and so no finding on memory, whose fix would compile for a minute
BF16 = "--precision=bf16"


def planted() -> Iterator[Job]:
    """Each with a fault that is worth more than noise on an H200, and sized so that others do not hide it."""

    def job(name: str, shows: str, finds: tuple[str, ...], seconds: float, dry: tuple[str, ...], *options: str) -> Job:
        return Job(f"planted-{name}", cli("profile", "--verify", *PROFILE, *options), shows, seconds, dry, finds=finds)

    slow = ("--model=resnet50", BF16, "--batch-size=128", "--data=synthetic-host", "--data.workers=0")
    yield job(
        *("loader", "batches made by the training process, in pageable memory", ("too-few-workers", "pinning"), 130.0),
        (*DRY_RESNET, "--data.samples=400"),
        *(*slow, "--data.pin_memory=false", NO_SHAPES),
    )
    resnet18 = ("--model=resnet18", BF16, NO_SHAPES)
    yield job(
        *("synchronisation", "the loss read after every step", ("synchronisation",), 60.0, DRY_RESNET),
        *(*resnet18, "--batch-size=64", "--training.read_loss=true", "--profiling.modules=false"),
    )
    yield job(
        *("optimizer", "an optimizer that loops over parameters", ("unfused-optimizer",), 60.0, DRY_RESNET),
        *(*resnet18, "--batch-size=192", "--training.optimizer_impl=loop"),
    )
    yield job(
        *("nchw", "bf16 convolutions in NCHW", ("nchw-convolutions",), 70.0, DRY_RESNET),
        *("--model=resnet50", BF16, "--batch-size=128", "--performance.channels_last=false", NO_SHAPES),
    )
    yield job(
        *("fp32-resnet50", "convolutions in full fp32", ("fp32-products",), 70.0, DRY_RESNET),
        *("--model=resnet50", "--precision=fp32", "--batch-size=128", NO_SHAPES),
    )
    yield job(
        *("fp32-gpt2", "matrix products in full fp32", ("fp32-products",), 70.0, DRY_GPT2),
        *("--model=gpt2", "--precision=fp32", "--batch-size=8", NO_SHAPES),
    )
    yield job(
        *("launches", "a batch too small for its launches", ("launch-bound",), 130.0, DRY_BERT),
        *("--model=bert-base", BF16, "--batch-size=1", NO_SHAPES),
    )


def profiles() -> Iterator[Job]:
    """Programs as they are: does their profile sum, what does it cost, how large is it?"""
    yield Job("profile-tests", (*GPU_TESTS, PROFILE_TESTS), "the tests of profiles that need a GPU", 170.0)
    for model, batch_size, dry in (
        ("resnet50", 256, DRY_RESNET),
        ("gpt2", 32, DRY_GPT2),
        ("bert-base", 128, DRY_BERT),
        ("sd15-unet", 8, (*DRY, "--model=sd15-unet-tiny")),
    ):
        yield Job(
            f"profile-{model}",
            cli("profile", *PROFILE, f"--model={model}", BF16, f"--batch-size={batch_size}"),
            f"{model}, bf16, eager: where a step goes",
            40.0,
            dry,
        )
    recorded = ("--profiling.enabled=true", "--profiling.all_ranks=true", "--baseline=off")
    yield Job(
        "profile-pipe",
        cli("pipe-infer", "--repeats=1", "--steps=20", "--samples=4", "--unet=sd15", "--world-size=2", *recorded),
        "sd15 UNet, 20 steps over 2 ranks on one GPU: where an evaluation goes",
        60.0,
        (*DRY_PIPE, "--steps=12"),
    )


MEMORY_TESTS = "tests/test_gpu_memory.py"
MEMORY_DRY = ("--device=cpu", "--performance.cpu_threads=1", "--batch-size=4")
MEMORY_CASES: tuple[tuple[str, tuple[str, ...], tuple[tuple[str, str, bool], ...]], ...] = (
    (
        "resnet50",
        (*MEMORY_DRY, "--model=resnet-tiny", "--data.image_size=32"),
        (("fp32", "sgd", False), ("bf16", "adamw", False), ("bf16", "sgd", True)),
    ),
    (
        "gpt2",
        (*MEMORY_DRY, "--model=gpt2-tiny", "--data.sequence_length=32"),
        (("fp32", "sgd", False), ("bf16", "adamw", False), ("fp32", "adamw", True)),
    ),
    (
        "bert-large",
        (*MEMORY_DRY, "--model=bert-tiny", "--data.sequence_length=32"),
        (("bf16", "adamw", False), ("fp32", "adamw", True), ("bf16", "sgd", True)),
    ),
    (
        "sd15-unet",
        (*MEMORY_DRY, "--model=sd15-unet-tiny", "--data.image_size=64"),
        (("fp32", "sgd", False), ("bf16", "adamw", False), ("bf16", "sgd", True)),
    ),
)
"""By preset: how it runs dry, and (precision, optimizer, checkpointing). Of all eight cases, the four in which any two
levels of different factors meet, less one."""
READ_BACK = "memory-gpt2-bf16-adamw"


def memories() -> Iterator[Job]:
    """Three steps each, at the preset's own batch; the prediction runs beside the measurement."""
    yield Job("memory-tests", (*GPU_TESTS, MEMORY_TESTS), "the tests of memory that need a GPU", 150.0)
    for preset, dry, cases in MEMORY_CASES:
        for precision, optimizer, checkpointing in cases:
            name = f"memory-{preset}-{precision}-{optimizer}{'-checkpointing' * checkpointing}"
            options = (
                *("benchmarks/memory_check.py", "--results", RUNS, f"--config={preset}", f"--precision={precision}"),
                *(f"--training.optimizer={optimizer}", "--logging.graph=false"),
                *("--model.activation_checkpointing=true",) * checkpointing,
                *("--read-back",) * (name == READ_BACK),
            )
            shows = f"{preset}, {precision}, {optimizer}{', checkpointing' * checkpointing}: predicted and measured"
            yield Job(name, options, shows, 40.0, dry)


JOBS = (
    Job(
        "resnet50-nchw",
        (*RESNET, "--performance.channels_last=false", "--measurement.measure_peak=true"),
        "the published configuration: AMP, NCHW, eager, batch 2560",
        75,
        DRY_RESNET,
        LAMBDA,
    ),
    Job(
        "resnet50-channels-last",
        (*RESNET, "--performance.channels_last=true"),
        "the same in NHWC: what the memory format gives",
        60,
        (*DRY_RESNET, "--performance.channels_last=true"),
        LAMBDA,
    ),
    Job(
        "gpu-tests",
        (*GPU_TESTS, "tests", f"--ignore={PROFILE_TESTS}", f"--ignore={MEMORY_TESTS}"),
        "the tests that need a GPU",
        90,
    ),
    Job(
        "gpt2-compile",
        cli(
            "train-bench",
            *SHORT,
            "--model=gpt2",
            "--precision=bf16",
            "--data.sequence_length=1024",
            "--batch-size=32",
            "--performance.compile=true",
            "--measurement.measure_peak=true",
        ),
        "GPT-2 124M, bf16, compiled, 1024 tokens: MFU of a transformer, against both peaks",
        85,
        DRY_GPT2,
    ),
    Job(
        "bert-large",
        cli("train-bench", *SHORT, "--model=bert-large", "--precision=bf16", "--batch-size=256"),
        "BERT-large, bf16, eager, 128 tokens",
        50,
        DRY_BERT,
    ),
    Job(
        "overhead",
        ("benchmarks/overhead.py", "--device", "cuda", "--quick", "--peers", "none"),
        "what measuring costs, against the bare loop",
        50,
        ("--device=cpu", "--model=resnet-tiny", "--image-size=32", "--batch-size=4"),
    ),
    Job(
        "equal-runs",
        (
            *("benchmarks/compare_equal.py", "--runs", "4", "--repeats", "3", "--"),
            *("--model=gpt2", "--precision=bf16", "--batch-size=16", "--steps=60", "--logging.graph=false"),
        ),
        "runs that are all alike against each other: how often they are called different here",
        150,
        ("--device=cpu", "--model=gpt2-tiny", "--performance.cpu_threads=1", "--steps=10", "--training.warmup_steps=2"),
    ),
    Job(
        "resnet50-compile",
        (*RESNET, "--performance.channels_last=true", "--performance.compile=true"),
        "NHWC and compiled: what torch.compile gives on top",
        80,
        (*DRY_RESNET, "--performance.channels_last=true"),
        LAMBDA,
    ),
    *pipelines(),
    *planted(),
    *profiles(),
    *memories(),
)
BUDGET = 460.0  # seconds; with the patience for a job that is stopped, under 8 minutes


@dataclass(frozen=True)
class Result:
    """How a job ended."""

    name: str
    shows: str
    command: list[str]
    status: str
    """completed, failed, stopped (out of time) or skipped."""
    note: str
    seconds: float = 0.0
    runs: list[dict[str, Any]] = field(default_factory=list)
    """One entry per run directory: its path in the output folder, status, metrics and warnings."""
    printed: str = ""
    """The end of what it printed, where that is all it leaves."""
    reference: Reference | None = None
    memory: memory_check.Check | None = None
    """What a job leaves that holds a prediction of memory to a measurement."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
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
    print(table(results))
    return 0 if all(result.status in {"completed", "skipped"} for result in results) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run everything that needs a GPU, and sum it up in one table.")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "gpu-suite", metavar="DIR")
    parser.add_argument(
        "--only", action="append", type=beginning, metavar="JOB", help="jobs whose names begin so; may be repeated"
    )
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="SECONDS", help="default: %(default).0f")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
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
    return replace(job, arguments=(*arguments, *job.dry), seconds=DRY_FACTOR * job.seconds, reference=None, finds=())


def attempt(job: Job, output: Path, remaining: float) -> Result:
    """Runs `job` if the budget of `remaining` seconds allows, and keeps what it leaves behind in `output`."""
    command = [sys.executable, *job.arguments]
    made = Result(job.name, job.shows, ["python", *job.arguments], "skipped", "", reference=job.reference)
    script = job.arguments[0]
    if not script.startswith("-") and not (ROOT / script).is_file():
        return replace(made, note=f"{script} is not there")
    if remaining < job.seconds:
        return replace(
            made, note=f"needs about {job.seconds:.0f} s, and {max(remaining, 0):.0f} s of the budget are left"
        )
    kept = output / job.name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="gpu-suite-") as scratch:
        began = time.monotonic()
        status, printed = run([scratch if part == RUNS else part for part in command], min(2 * job.seconds, remaining))
        took = time.monotonic() - began
        paths = [path.parent for path in sorted(Path(scratch).glob("*/*/run.json"))]
        # What became of each fix stands in the findings of the run that it was tried for.
        runs = [keep(path, kept) for path in paths if not path.parent.name.endswith("-verify")]
        memory = checked(Path(scratch))
    (kept / "log.txt").write_text(printed[-LOG_CHARACTERS:])
    note = "" if runs and status == "completed" else last_words(printed)
    if status == "completed" and (wrong := list(unlike(job, runs))):
        status, note = "failed", "; ".join(wrong)
    rest = "" if runs else "\n".join(printed.splitlines()[-LAST_LINES:])
    return replace(made, status=status, note=note, seconds=took, runs=runs, printed=rest, memory=memory)


def checked(scratch: Path) -> memory_check.Check | None:
    path = scratch / memory_check.DOCUMENT
    return msgspec.json.decode(path.read_bytes(), type=memory_check.Check) if path.is_file() else None


def unlike(job: Job, runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the job should have shown and did not."""
    for done in runs:
        found = done["profiled"]
        if found is not None:
            yield from found.broken
            named = {finding.partition(" ")[0].rstrip(":") for finding in found.findings}
            yield from (f"{name} was not found" for name in job.finds if name not in named)


def run(command: Sequence[str], limit: float) -> tuple[str, str]:
    """(status, everything printed). A job out of time is interrupted as by Ctrl-C, then killed with its family."""
    child = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = child.communicate(timeout=limit)
        return "completed" if child.returncode == 0 else "failed", printed
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
        try:
            printed, _ = child.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            printed, _ = child.communicate()
        return "stopped", f"{printed}\nstopped after {limit:.0f} s\n"
    finally:
        if child.poll() is None:  # the suite itself was interrupted
            os.killpg(child.pid, signal.SIGKILL)


def keep(path: Path, kept: Path) -> dict[str, Any]:
    """Copies the small files of the run directory `path`, and returns what the table needs of it."""
    copy = kept / path.name
    copy.mkdir()
    for name in KEPT:
        if (path / name).is_file():
            shutil.copyfile(path / name, copy / name)
    record = json.loads((path / "run.json").read_text())
    summary = json.loads((path / "summary.json").read_text()) if (path / "summary.json").is_file() else {}
    return {
        "path": str(copy.relative_to(kept.parent)),
        "status": record["status"],
        "metrics": {metric["name"]: metric for metric in summary.get("metrics", [])},
        "warnings": summary.get("warnings", []),
        "profiled": profiled.examine(path),
    }


def last_words(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1][:160]


def write(results: Sequence[Result], waiting: Sequence[Job], output: Path) -> None:
    """summary.json and summary.md, with the jobs that have not had their turn, each replaced in one go."""
    jobs = [asdict(result) | {"memory": msgspec.to_builtins(result.memory)} for result in results]
    document = {"jobs": jobs, "waiting": [job.name for job in waiting]}
    text = f"# GPU suite\n\n{table(results)}"
    text += "".join(f"\n## {result.name}\n\n```\n{result.printed}\n```\n" for result in results if result.printed)
    if waiting:
        text += f"\nNot run yet: {', '.join(job.name for job in waiting)}.\n"
    for name, content in (("summary.json", json.dumps(document, indent=2) + "\n"), ("summary.md", text)):
        aside = output / f".{name}"
        aside.write_text(content)
        aside.replace(output / name)


HEAD = (
    *("job", "throughput", "step", "MFU", "of measured peak", "J/sample", "peak memory", "hand-over", "bit-identical"),
    *("reference", "ratio", "note"),
)


def table(results: Sequence[Result]) -> str:
    """Markdown, one row per run, or per job where there is none; then sources and warnings."""
    rows = [row for result in results for row in rows_of(result)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *rows)]
    lines += below(profiled.HEAD, profiled_rows(results))
    lines += below(memory_check.HEAD, [memory_check.row(one.name, one.memory) for one in results if one.memory])
    sources = {result.reference.source for result in results if result.reference}
    lines += ["", *(f"Reference: {source}." for source in sorted(sources))] if sources else []
    said = [f"- {result.name}: {warning}" for result in results for run in result.runs for warning in run["warnings"]]
    lines += ["", "Warnings:", "", *said] if said else []
    return "\n".join(lines) + "\n"


def profiled_rows(results: Sequence[Result]) -> list[list[str]]:
    return [profiled.row(result.name, run["profiled"]) for result in results for run in result.runs if run["profiled"]]


def below(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table, if there is anything in it."""
    if not rows:
        return []
    return ["", *("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))]


def rows_of(result: Result) -> Iterator[list[str]]:
    status = "" if result.status == "completed" else result.status
    note = ": ".join(part for part in (status, result.note) if part)
    for number, done in enumerate(result.runs or [{"metrics": {}}]):
        cells = Cells(done["metrics"])
        reference = result.reference
        throughput = cells.estimate("throughput")
        yield [
            result.name if number == 0 else f"{result.name} ({number + 1})",
            cells.throughput(),
            cells.show("step_time", 1e3, "{:.2f} ms") or cells.show("evaluation_time", 1e3, "{:.2f} ms"),
            cells.show("mfu", 100, "{:.1f} %"),
            cells.show("mfu_of_measured_peak", 100, "{:.1f} %"),
            cells.show("energy_per_sample", 1, "{:.4g}"),
            cells.show("peak_memory_allocated", 1 / 2**30, "{:.2f} GiB"),
            cells.show("handover_time", 1e6, "{:.0f} us") + cells.show("handover_bytes", 1, ", {:,.0f} B"),
            cells.show("verified_samples", 100, "{:.0f} %"),
            f"{reference.throughput:,.0f}" if reference else "",
            f"{throughput / reference.throughput:.3f}" if reference and throughput else "",
            note.replace("|", "/"),
        ]


@dataclass(frozen=True)
class Cells:
    """The metrics of one run as text; empty where a metric is absent."""

    metrics: dict[str, dict[str, Any]]

    def estimate(self, name: str) -> float | None:
        metric = self.metrics.get(name)
        return None if metric is None else float(metric["estimate"])

    def show(self, name: str, scale: float, form: str) -> str:
        value = self.estimate(name)
        return "" if value is None else form.format(value * scale)

    def throughput(self) -> str:
        metric = self.metrics.get("throughput")
        if metric is None:
            return ""
        text = f"{metric['estimate']:,.1f}"
        if interval := metric["interval"]:
            text += f" ± {(interval[1] - interval[0]) / 2:,.1f}"
        return f"{text} {metric['unit']}"


if __name__ == "__main__":
    sys.exit(main())
