"""How much memory does a training step take? gpubench's prediction compared with those of other estimators.

    .venv/bin/python benchmarks/memory_peers.py [--rounds 2] [--only gpt2] [--peers all]

The models are those of the presets with their default batch size, in fp32 and with autocast in bf16, trained with AdamW
on an H200. Each estimator runs in a fresh process, in rounds of alternating order. The table shows the smallest
wall-clock and processor time of the rounds, including start-up, and the largest memory of all processes together. The
column `counts` gives the meaning of the peak: all memory that the device must have (total), or only that of tensors. No
GPU is needed. If benchmarks/reference/h200 has a measurement, it is shown in a row with the ratio of each estimate.

Predictions for a CPU follow, which are also measured: see `peers/memory_on_cpu.py`. Bar: GPT-2 124M predicted in 8 s
and 800 MB.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import bars
import environments
import msgspec
from memory_check import Check
from memory_subject import PARTS, Subject
from processes import Spent, observe, reason, without_settings
from tables import table

from gpubench.hardware import find_by_key
from gpubench.kinds.memory.defaults import complete_memory
from gpubench.kinds.memory.settings import MemorySettings
from gpubench.memory.footprint import Amounts, Footprints
from gpubench.runs.directory import MEMORY
from gpubench.settings.loading import load

HERE = Path(__file__).resolve().parent
REFERENCE = HERE / "reference" / "h200" / "summary.json"
DEVICE = "h200"
MODELS = ("gpt2", "bert-large", "resnet50", "sd15-unet")
PRECISIONS = ("fp32", "bf16")
BARRED = "gpt2"
SECONDS, MEGABYTES = 8.0, 800.0
GIB, MIB = 2**30, 2**20
ON_CPU = (
    {"model.name": "gpt2-tiny"},
    {"model.name": "resnet18"},
    {"model.name": "bert-base", "precision": "fp32"},
    {"model.name": "bert-base", "precision": "bf16"},
)


@dataclass(frozen=True)
class Answer:
    """A prediction or measurement, in bytes."""

    peak: int
    parts: Mapping[str, int | None]


@dataclass
class Estimator:
    """A program that predicts the memory of a training step, and its answers."""

    name: str
    script: str | None
    counts: str
    requirements: tuple[str, ...] = ()
    """The packages that pip installs for it; their requirements are in this environment."""
    folder: Path | None = None
    trouble: str | None = None
    answers: dict[Subject, Answer] = field(default_factory=dict)
    spent: dict[Subject, list[Spent]] = field(default_factory=dict)

    def install(self, place: Path) -> None:
        if not self.requirements:
            return
        try:
            self.folder = environments.create_beside(self.requirements, place / f"memory-{self.name}")
        except (subprocess.SubprocessError, OSError) as error:
            self.trouble = f"does not install: {reason(error)}"

    def ask(self, subject: Subject) -> None:
        """Run the estimator in a fresh process. Raises CalledProcessError, ValueError or LookupError if it fails."""
        with tempfile.TemporaryDirectory(prefix="gpubench-memory-") as folder:
            command = predicting(subject, folder) if self.script is None else asking(self.script, subject)
            said, spent = observe(command, self.environment(), family=True)
            self.answers[subject] = predicted(Path(folder)) if self.script is None else answered(said)
        self.spent.setdefault(subject, []).append(spent)

    def environment(self) -> dict[str, str]:
        """Return the environment variables of an estimator: one thread, no network, no GPU, no gpubench settings."""
        quiet = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        return without_settings(HERE.parent, HERE, self.folder, **quiet)

    def row(self, subject: Subject, measured: Answer | None) -> list[str]:
        if subject not in self.answers:
            return [*cells_of(subject), self.name, *[""] * (len(HEAD) - 4), self.trouble or "no answer"]
        found, spent = self.answers[subject], self.spent[subject]
        return [
            *cells_of(subject),
            self.name,
            *sizes(found),
            f"{found.peak / measured.peak:.3f}" if measured else "",
            f"{min(one.seconds for one in spent):.1f} s",
            f"{min(one.processor for one in spent):.1f} s",
            f"{max(one.megabytes for one in spent):,.0f} MB",
            self.counts,
        ]


HEAD = (
    *("model", "precision", "estimator", "peak, GiB", *PARTS, "of measured"),
    *("wall", "processor", "memory", "counts"),
)


def estimators() -> list[Estimator]:
    return [
        Estimator("gpubench", None, "total"),
        Estimator("MemTracker", "memory_memtracker.py", "tensors on a CPU"),
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


def predicted(results: Path) -> Answer:
    """Return the prediction in a run directory of gpubench."""
    (path,) = results.glob(f"*/*/{MEMORY}")
    (found,) = msgspec.json.decode(path.read_bytes(), type=Footprints).ranks
    return Answer(found.peak.level.total, parts_of(found.peak.amounts))


def answered(said: str) -> Answer:
    """Return the answer in the last line of another estimator's output."""
    parts = json.loads(said.splitlines()[-1])
    return Answer(parts.pop("peak"), parts)


def parts_of(amounts: Amounts) -> dict[str, int | None]:
    named = {
        "parameters": amounts.get("parameters", 0),
        "gradients": amounts.get("gradients", 0),
        "optimizer": amounts.get("optimizer_state", 0),
        "activations": amounts.get("activations", 0),
    }
    return {**named, "rest": sum(amounts.values()) - sum(named.values())}


def subjects(models: Sequence[str]) -> Iterator[Subject]:
    """Yield the models with the sizes that gpubench chooses for the presets."""
    capacity = find_by_key(DEVICE).memory_bytes
    for model, precision in product(models, PRECISIONS):
        given = {"precision": precision, "memory.predict": "true", "memory.device_model": DEVICE}
        settings, _ = complete_memory(load(MemorySettings, model, given).settings)
        assert settings.training.batch_size
        sizes = (settings.training.batch_size, settings.data.image_size, settings.data.sequence_length)
        yield Subject(model, precision, *sizes, DEVICE, capacity)


def references() -> dict[tuple[str, str, int], Answer]:
    """Return the measurements of the GPU suite with AdamW, by model, precision and batch size."""
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
    """Run every estimator once per round, forwards and backwards; a peer that fails is left out for that subject."""
    for subject, number in product(asked, range(rounds)):
        for estimator in entered if number % 2 == 0 else reversed(entered):
            if estimator.trouble:
                continue
            print(f"{subject.model} {subject.precision}, round {number + 1}: {estimator.name}", file=sys.stderr)
            try:
                estimator.ask(subject)
            except (subprocess.SubprocessError, ValueError, LookupError) as error:
                if estimator.script is None:
                    raise
                print(f"  {reason(error)}", file=sys.stderr)


def on_cpu() -> Iterator[list[str]]:
    """Compare predictions for a CPU with runs on it."""
    environment = estimators()[0].environment()
    for settings in ON_CPU:
        print(f"on the CPU: {settings}", file=sys.stderr)
        said, _ = observe(asking("memory_on_cpu.py", json.dumps(settings)), environment)
        found = json.loads(said.splitlines()[-1])
        predicted, tracked, counted = (found[name] for name in ("predicted", "tracked", "counted"))
        yield [
            ", ".join(settings.values()),
            *(f"{size / MIB:,.2f}" for size in (predicted, tracked, counted)),
            f"{predicted / tracked:.4f}",
            f"{predicted / counted:.4f}",
        ]


CPU_HEAD = ("on the CPU", "predicted, MiB", "tracked", "the allocator's count", "of tracked", "of the count")


def judge(ours: Estimator) -> Iterator[bars.Bar]:
    """Yield the bars for each precision of the model that has them."""
    for subject, spent in ours.spent.items():
        if subject.model == BARRED:
            name = f"{subject.model} {subject.precision}"
            yield bars.at_most(name, min(one.seconds for one in spent), SECONDS, "{:.1f} s")
            yield bars.at_most(f"{name}, memory", max(one.megabytes for one in spent), MEGABYTES, "{:.0f} MB")


def parse() -> argparse.Namespace:
    known = [one.name for one in estimators() if one.requirements]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="fresh processes of each estimator and model")
    parser.add_argument("--only", action="append", choices=MODELS, help="models; may be repeated")
    environments.add_options(parser, known, "all")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds: at least 1")
    return options


def main() -> int:
    options = parse()
    entered = [one for one in estimators() if not one.requirements or one.name in options.peers]
    for estimator in entered:
        estimator.install(options.environments)
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
    found = [row for one, key in zip(asked, keys, strict=True) for row in rows(one, entered, measured.get(key))]
    print(table([HEAD, *found]))
    print("\nThree steps on the CPU, one thread\n")
    print(table([CPU_HEAD, *truths]))
    installed = [environments.versions(one.folder, one.requirements) for one in entered if one.folder]
    print(f"\n{', '.join(installed)}")
    return bars.conclude([*judge(entered[0])])


if __name__ == "__main__":
    sys.exit(main())
