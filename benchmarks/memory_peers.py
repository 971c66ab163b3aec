"""What will it take? gpubench's prediction of a training step's memory beside what other estimators say.

    .venv/bin/python benchmarks/memory_peers.py [--rounds 2] [--only gpt2] [--peers all]

The models of the presets at their own batch, in fp32 and by autocast in bf16, with AdamW, for an H200. Each answer
comes from a fresh process, in rounds there and back, start-up included: the least wall clock and processor time of the
rounds, and the most memory of all its processes together. `counts` is what an estimator says that its figure is:
all that the device must have (total), or what tensors ask for. No GPU is needed: where a measured reference is
committed under benchmarks/reference/h200, it stands in a row of its own, and each figure has its ratio.

Then predictions for a CPU, where the truth is at hand: see `peers/memory_on_cpu.py`. Bar: GPT-2 124M predicted in 8 s
and 800 MB; the exit code is 1 if it is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import msgspec
import psutil
from memory_check import Check
from memory_subject import PARTS, Subject
from overhead import CONSTRAINTS, print_table, reason

from gpubench.configuration import load
from gpubench.hardware import find_by_key
from gpubench.memory.footprint import Amounts, Footprints
from gpubench.memory_defaults import complete_memory
from gpubench.runs import MEMORY
from gpubench.settings import MemorySettings

HERE = Path(__file__).resolve().parent
REFERENCE = HERE / "reference" / "h200" / "summary.json"
DEVICE = "h200"
MODELS = ("gpt2", "bert-large", "resnet50", "sd15-unet")
PRECISIONS = ("fp32", "bf16")
BARRED = "gpt2"
SECONDS, MEGABYTES = 8.0, 800.0
GIB, MB = 2**30, 1e6
GLANCE = 0.05  # seconds between two looks at a process's memory
ON_CPU = (
    {"model.name": "gpt2-tiny"},
    {"model.name": "resnet18"},
    {"model.name": "bert-base", "training.batch_size": "8"},
    {"model.name": "bert-base", "training.batch_size": "8", "precision": "bf16"},
)


@dataclass(frozen=True)
class Answer:
    peak: int
    """Bytes; so are the parts."""
    parts: Mapping[str, int | None]
    seconds: float = 0.0
    processor: float = 0.0
    """Seconds, of all processes."""
    megabytes: float = 0.0


@dataclass
class Estimator:
    name: str
    script: str | None
    counts: str
    requirements: tuple[str, ...] = ()
    """What pip installs beside this environment, without what they need in turn: that is here."""
    folder: Path | None = None
    trouble: str | None = None
    answers: dict[Subject, list[Answer]] = field(default_factory=dict)

    def install(self, environments: Path) -> None:
        if not self.requirements:
            return
        self.folder = environments / "-".join(("memory", *self.requirements))
        if self.folder.is_dir():
            return
        print(f"installing {', '.join(self.requirements)} in {self.folder}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--constraint={CONSTRAINTS}"]
        try:
            subprocess.run(
                [*command, f"--target={self.folder}", *self.requirements], capture_output=True, text=True, check=True
            )
        except (subprocess.SubprocessError, OSError) as error:
            self.trouble = f"does not install: {reason(error)}"

    def ask(self, subject: Subject) -> None:
        """Once more, in a fresh process. Raises subprocess.CalledProcessError or ValueError if there is no answer."""
        with tempfile.TemporaryDirectory(prefix="gpubench-memory-") as folder:
            command = predicting(subject, folder) if self.script is None else asking(self.script, subject)
            said, answer = observe(command, self.environment())
            if self.script is None:
                (path,) = Path(folder).glob(f"*/*/{MEMORY}")
                (found,) = msgspec.json.decode(path.read_bytes(), type=Footprints).ranks
                peak, parts = found.peak.level.total, parts_of(found.peak.amounts)
            else:
                parts = json.loads(said.splitlines()[-1])
                peak = parts.pop("peak")
        made = Answer(peak, parts, answer.seconds, answer.processor, answer.megabytes)
        self.answers.setdefault(subject, []).append(made)

    def environment(self) -> dict[str, str]:
        """One thread, no network, no GPU, and nothing that configures gpubench."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("GPUBENCH_")}
        path = os.pathsep.join(str(one) for one in (HERE.parent, HERE, self.folder) if one)
        quiet = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        return clean | quiet | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

    def row(self, subject: Subject, measured: Answer | None) -> list[str]:
        answers = self.answers.get(subject)
        if not answers:
            return [*cells_of(subject), self.name, *[""] * (len(HEAD) - 4), self.trouble or "no answer"]
        (first, *_), seconds = answers, min(one.seconds for one in answers)
        return [
            *cells_of(subject),
            self.name,
            *sizes(first),
            f"{first.peak / measured.peak:.3f}" if measured else "",
            f"{seconds:.1f} s",
            f"{min(one.processor for one in answers):.1f} s",
            f"{max(one.megabytes for one in answers):,.0f} MB",
            self.counts,
        ]


HEAD = (
    *("model", "precision", "estimator", "peak, GiB", *PARTS, "of measured"),
    *("wall", "processor", "memory", "counts"),
)


def estimators() -> list[Estimator]:
    return [
        Estimator("gpubench", None, "total"),
        Estimator("MemTracker", "memory_memtracker.py", "what tensors ask for, on a CPU"),
        Estimator("accelerate", "memory_accelerate.py", "training using Adam", ("accelerate==1.15.0",)),
        Estimator("vram-check", "memory_vram_check.py", "total", ("vram-check==0.1.1",)),
        Estimator("torch-kitsune", "memory_kitsune.py", "total", ("torch-kitsune==0.7.0",)),
        Estimator("torch-preflight", "memory_preflight.py", "total", ("torch-preflight==0.5.0", "libcst")),
    ]


def predicting(subject: Subject, results: str) -> list[str]:
    options = (f"--config={subject.model}", f"--precision={subject.precision}", "--training.optimizer=adamw")
    target = ("--predict", f"--device-model={subject.device_model}", f"--results={results}", "--quiet")
    return [sys.executable, "-m", "gpubench", "memory", *options, *target]


def asking(script: str, argument: object) -> list[str]:
    return [sys.executable, str(HERE / "peers" / script), str(argument)]


def observe(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, Answer]:
    """What it printed last, and what it took. Raises subprocess.CalledProcessError if it fails."""
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        began, most = time.perf_counter(), 0
        process = subprocess.Popen(command, stdout=printed, stderr=errors, env=environment)
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
        while not ended:
            most = max(most, resident(process.pid))
            time.sleep(GLANCE)
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        said = [(file.seek(0), file.read().decode(errors="replace"))[1] for file in (printed, errors)]
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), *said)
    megabytes = max(most, used.ru_maxrss * 1024) / MB
    return said[0].strip(), Answer(0, {}, seconds, used.ru_utime + used.ru_stime, megabytes)


def resident(process: int) -> int:
    """Bytes of a process and all that it started, together."""
    total = 0
    try:
        root = psutil.Process(process)
        for one in (root, *root.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.Error:  # one of them has just ended
        pass
    return total


def parts_of(amounts: Amounts) -> dict[str, int | None]:
    named = {
        "parameters": amounts.get("parameters", 0),
        "gradients": amounts.get("gradients", 0),
        "optimizer": amounts.get("optimizer_state", 0),
        "activations": amounts.get("activations", 0),
    }
    return {**named, "rest": sum(amounts.values()) - sum(named.values())}


def subjects(models: Sequence[str]) -> Iterator[Subject]:
    """Sizes as gpubench completes the presets."""
    capacity = find_by_key(DEVICE).memory_bytes
    for model, precision in product(models, PRECISIONS):
        given = {"precision": precision, "memory.predict": "true", "memory.device_model": DEVICE}
        settings, _ = complete_memory(load(MemorySettings, model, given).settings)
        assert settings.training.batch_size
        sizes = (settings.training.batch_size, settings.data.image_size, settings.data.sequence_length)
        yield Subject(model, precision, *sizes, DEVICE, capacity)


def references() -> dict[tuple[str, str, int], Answer]:
    """What the GPU suite measured with AdamW, as it keeps it, by model, precision and batch size."""
    if not REFERENCE.is_file():
        return {}
    jobs = json.loads(REFERENCE.read_text())["jobs"]
    checks = [msgspec.convert(job["memory"], Check) for job in jobs if job.get("memory")]
    return {
        (one.settings["model"], one.settings["precision"], one.settings["batch_size"]): Answer(
            sum(one.measured.amounts.values()), parts_of(one.measured.amounts)
        )
        for one in checks
        if one.settings["optimizer"] == "adamw" and not one.settings["checkpointing"]
    }


def cells_of(subject: Subject) -> list[str]:
    return [f"{subject.model}, batch {subject.batch_size}", subject.precision]


def sizes(answer: Answer) -> list[str]:
    found = (answer.peak, *(answer.parts.get(part) for part in PARTS))
    return ["" if size is None else f"{size / GIB:.2f}" for size in found]


def rows(subject: Subject, entered: Sequence[Estimator], measured: Answer | None) -> Iterator[list[str]]:
    if measured:
        yield [*cells_of(subject), "measured on an H200", *sizes(measured), "1", "", "", "", "total"]
    yield from (estimator.row(subject, measured) for estimator in entered)


def ask(entered: Sequence[Estimator], asked: Sequence[Subject], rounds: int) -> None:
    """Every estimator once a round, there and back. A peer that fails is out for that subject."""
    for subject, number in product(asked, range(rounds)):
        for estimator in entered if number % 2 == 0 else reversed(entered):
            if estimator.trouble:
                continue
            print(f"{subject.model} {subject.precision}, round {number + 1}: {estimator.name}", file=sys.stderr)
            try:
                estimator.ask(subject)
            except (subprocess.SubprocessError, ValueError) as error:
                if estimator.script is None:
                    raise
                print(f"  {reason(error)}", file=sys.stderr)


def on_cpu() -> Iterator[list[str]]:
    """Predicted for a CPU, against the same run on it."""
    environment = estimators()[0].environment()
    for settings in ON_CPU:
        print(f"on the CPU: {settings}", file=sys.stderr)
        said, _ = observe(asking("memory_on_cpu.py", json.dumps(settings)), environment)
        found = json.loads(said.splitlines()[-1])
        predicted, tracked, counted = (found[name] for name in ("predicted", "tracked", "counted"))
        yield [
            ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in settings.items()),
            *(f"{size / 2**20:,.2f}" for size in (predicted, tracked, counted)),
            f"{predicted / tracked:.4f}",
            f"{predicted / counted:.4f}",
        ]


CPU_HEAD = ("on the CPU", "predicted, MiB", "tracked", "the allocator's count", "of tracked", "of the count")


def judge(ours: Estimator) -> list[str]:
    """PASS or FAIL for each precision of the model that has a bar."""
    verdicts = []
    for subject, answers in ours.answers.items():
        if subject.model != BARRED:
            continue
        seconds, megabytes = min(one.seconds for one in answers), max(one.megabytes for one in answers)
        verdicts.append("PASS" if seconds <= SECONDS and megabytes <= MEGABYTES else "FAIL")
        print(
            f"{verdicts[-1]}  {subject.model} {subject.precision}: {seconds:.1f} s, {megabytes:.0f} MB; "
            f"bar {SECONDS:g} s, {MEGABYTES:g} MB"
        )
    return verdicts


def parse() -> argparse.Namespace:
    known = [one.name for one in estimators() if one.requirements]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="fresh processes of each estimator and model")
    parser.add_argument("--only", action="append", choices=MODELS, help="models; may be repeated")
    parser.add_argument("--peers", default="all", help=f"none, all, or some of {','.join(known)}")
    parser.add_argument("--environments", type=Path, default=Path.home() / ".cache" / "gpubench-benchmarks")
    options = parser.parse_args()
    options.peers = {"none": [], "all": known}.get(options.peers, options.peers.split(","))
    if unknown := set(options.peers) - set(known):
        parser.error(f"--peers: {', '.join(sorted(unknown))} is none of {', '.join(known)}")
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


def main() -> int:
    options = parse()
    entered = [one for one in estimators() if not one.requirements or one.name in options.peers]
    for estimator in entered:
        estimator.install(options.environments.expanduser().resolve())
    asked, measured = list(subjects(options.only or MODELS)), references()
    try:
        ask(entered, asked, options.rounds)
        truths = list(on_cpu())
    except subprocess.SubprocessError as error:
        print(f"error: {reason(error)}", file=sys.stderr)
        return 1
    known = f"measured references from {REFERENCE}" if measured else "nothing here was measured on a GPU"
    print(f"AdamW, one process, for an H200; GiB; best of {options.rounds} rounds; {known}\n")
    keys = [(one.model, one.precision, one.batch_size) for one in asked]
    print_table(
        [HEAD, *(row for one, key in zip(asked, keys, strict=True) for row in rows(one, entered, measured.get(key)))]
    )
    print("\nThree steps on the CPU, one thread\n")
    print_table([CPU_HEAD, *truths])
    print()
    return 1 if "FAIL" in judge(entered[0]) else 0


if __name__ == "__main__":
    sys.exit(main())
