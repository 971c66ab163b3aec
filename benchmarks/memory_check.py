"""Does a memory prediction match the measurement? Measures a training step on the GPU, and predicts it without the GPU.

    .venv/bin/python benchmarks/memory_check.py --config=gpt2 --precision=bf16 [--device-model h200] [--read-back]

Options that this script does not know are passed to two runs of `gpubench memory` in parallel: the measurement needs
the GPU, the prediction one core. Bars: 2 % for the memory allocated at the peak, 5 % for the largest reserved memory.
The exit code is 1 if the categories of a phase do not sum to its total, or if the two runs have different settings. The
memory outside the allocator is an assumption of the prediction, which is shown with the measured figure and has no bar.
`--read-back` also reads the allocator's own snapshot of the measured run, which should show the same peak. On a CPU a
prediction for a GPU cannot be checked, so figures are shown without verdicts. Both run directories and
`memory_check.json` are kept in `--results`.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bars
import msgspec
import yaml
from processes import reason

from gpubench.devices import visible_gpus
from gpubench.hardware import find_accelerator
from gpubench.memory.footprint import Footprint, Footprints
from gpubench.runs.directory import CONFIG, MEMORY, TRACES
from gpubench.settings.keys import flatten

ALLOCATED, RESERVED = 0.02, 0.05
READ_BACK = 0.02
"""The bar for a snapshot, as a fraction of the measured peak. Its blocks are computed from requested sizes."""
DOCUMENT = "memory_check.json"
MEASURED, PREDICTED = "measured", "predicted"  # experiments
ASSUMED = "h200"
GIB = 2**30
SETTINGS = {
    "model": "model.name",
    "batch_size": "training.batch_size",
    "precision": "precision",
    "optimizer": "training.optimizer",
    "checkpointing": "model.activation_checkpointing",
}


class Figures(msgspec.Struct, frozen=True):
    """The sizes in one footprint, in bytes."""

    phase: str
    """The phase of the peak, such as "steady backward"."""
    allocated: int
    """The memory allocated at the peak."""
    reserved: int | None
    """The largest reserved memory; None on a CPU."""
    other: int
    """The memory outside the allocator: context and libraries."""
    amounts: dict[str, int]
    """The memory at the peak by category."""

    @classmethod
    def of(cls, found: Footprint) -> "Figures":
        levels = [found.peak.level, *(phase.level for phase in found.phases)]
        reserved = [level.reserved for level in levels if level.reserved is not None]
        reserved += found.timeline.reserved or []
        return cls(
            f"{found.peak.stage} {found.peak.phase}",
            found.peak.level.allocated,
            max(reserved, default=None),
            found.peak.amounts.get("other", 0),
            found.peak.amounts,
        )


class Check(msgspec.Struct, frozen=True):
    """The contents of memory_check.json."""

    settings: dict[str, Any]
    """The settings of both runs, by the names in SETTINGS."""
    device: str | None
    measured: Figures
    predicted: Figures
    snapshot: int | None
    """The bytes allocated at the peak according to the allocator's own snapshot; None if it was not read."""
    broken: list[str]
    """Descriptions of the conditions that are violated."""

    @property
    def judged(self) -> bool:
        return self.measured.reserved is not None


@dataclass(frozen=True)
class Followed:
    """One of the two runs, on one rank."""

    settings: dict[str, Any]
    """The settings of the run, by the names in SETTINGS."""
    found: Footprint

    @classmethod
    def read(cls, path: Path) -> "Followed":
        """Read the run from its directory."""
        given = flatten(yaml.safe_load((path / CONFIG).read_text()))
        (found,) = msgspec.json.decode((path / MEMORY).read_bytes(), type=Footprints).ranks
        return cls({name: given[key] for name, key in SETTINGS.items()}, found)


def check(measured: Followed, predicted: Followed, snapshot: int | None = None) -> Check:
    real, foretold = measured.found, predicted.found
    made = Check(measured.settings, real.device, Figures.of(real), Figures.of(foretold), snapshot, [])
    broken = [*_unlike(measured, predicted), *_unsummed(real), *_unsummed(foretold), *_missed(made)]
    return msgspec.structs.replace(made, broken=broken)


def _unlike(measured: Followed, predicted: Followed) -> Iterator[str]:
    for name, value in measured.settings.items():
        if value != predicted.settings[name]:
            yield f"{name}: measured with {value}, predicted with {predicted.settings[name]}"


def _unsummed(found: Footprint) -> Iterator[str]:
    for one in found.phases:
        if sum(one.peak.values()) != one.level.total or min(one.peak.values(), default=0) < 0:
            yield f"{found.source}: the categories of {one.stage} {one.phase} do not sum to its total"


def _missed(found: Check) -> Iterator[str]:
    for name, off, bar in _off(found):
        if abs(off) > bar:
            yield f"{name}: {100 * off:+.1f} % from the measurement, bar {100 * bar:.0f} %"


def judge(found: Check) -> Iterator[bars.Bar]:
    for name, off, bar in _off(found):
        yield bars.at_most(f"{name}, deviation from the measurement", abs(off), bar, "{:.1%}")


def _off(found: Check) -> Iterator[tuple[str, float, float]]:
    """Yield (what, deviation, largest allowed deviation), as fractions of the measured figure."""
    if not found.judged:
        return
    for name, got, wanted, bar in (
        ("allocated", found.predicted.allocated, found.measured.allocated, ALLOCATED),
        ("reserved", found.predicted.reserved, found.measured.reserved, RESERVED),
        ("read back", found.snapshot, found.measured.allocated, READ_BACK),
    ):
        if got is not None and wanted:
            yield name, got / wanted - 1, bar


HEAD = (
    *("memory", "allocated", "measured", "ratio", "reserved", "measured", "ratio", "other", "measured"),
    *("read back", "peak in", "bars"),
)


def row(name: str, found: Check) -> list[str]:
    """Return one row of a table below HEAD; each pair is predicted, then measured, in GiB."""
    measured, predicted = found.measured, found.predicted
    verdict = "; ".join(found.broken) or (bars.MET if found.judged else "not judged on a CPU")
    phases = dict.fromkeys((predicted.phase, measured.phase))
    return [
        name,
        *_pair(predicted.allocated, measured.allocated),
        *_pair(predicted.reserved, measured.reserved),
        *_pair(predicted.other, measured.other)[:2],
        _gib(found.snapshot),
        " / ".join(phases),
        verdict,
    ]


def _pair(predicted: int | None, measured: int | None) -> list[str]:
    ratio = f"{predicted / measured:.4f}" if predicted and measured else ""
    return [_gib(predicted), _gib(measured), ratio]


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.3f}"


def command(experiment: str, results: Path, *options: str) -> list[str]:
    own = ("--quiet", f"--results={results}", f"--experiment={experiment}")
    return [sys.executable, "-m", "gpubench", "memory", *options, *own]


def run(options: argparse.Namespace, passed: Sequence[str]) -> Check:
    """Make both runs and compare them. Raises subprocess.CalledProcessError if a run fails."""
    device = [f"--device={options.device}"] if options.device else []
    target = ("--predict", *_target(options.device_model))
    with subprocess.Popen(
        command(PREDICTED, options.results, *passed, *target), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as foretelling:
        try:
            _said(command(MEASURED, options.results, *passed, *device))
        finally:
            said, _ = foretelling.communicate()
    if foretelling.returncode:
        raise subprocess.CalledProcessError(foretelling.returncode, foretelling.args, said.decode())
    measured, predicted = (max(options.results.glob(f"{name}/*/")) for name in (MEASURED, PREDICTED))
    kept = sorted((measured / TRACES).glob("*.snapshot.pickle")) if options.read_back else []
    peaks = [_read_back(path) for path in kept]
    return check(Followed.read(measured), Followed.read(predicted), max(peaks, default=None))


def _target(model: str | None) -> tuple[str, ...]:
    """Return the options for the predicted GPU: `model`, else the local GPU, else an H200."""
    here = next(iter(visible_gpus()), None)
    if model or here is None or not here.memory_bytes:
        return (f"--device-model={model or ASSUMED}",)
    listed = find_accelerator(here.name, here.memory_bytes)
    known = (f"--device-model={listed.key}",) if listed else ()
    return (*known, f"--device-memory={here.memory_bytes}")


def _said(command: Sequence[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


def _read_back(path: Path) -> int:
    """Return the bytes allocated at the peak according to the allocator's own snapshot."""
    asked = [sys.executable, "-m", "gpubench", "memory", "--json", f"--snapshot={path}"]
    document = json.loads(subprocess.run(asked, stdout=subprocess.PIPE, check=True).stdout)
    return msgspec.convert(document["memory"], Footprints).ranks[0].peak.level.allocated


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=Path("results") / "memory-check")
    parser.add_argument("--device-model", help="to predict for; default: the GPU that is here")
    parser.add_argument("--device", help="to measure on; default: what gpubench chooses")
    parser.add_argument("--read-back", action="store_true", help="read the snapshot of the measured run as well")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options, passed = parse(arguments)
    try:
        found = run(options, passed)
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(map(str, error.cmd[2:]))}: {reason(error)}")
        return 1
    (options.results / DOCUMENT).write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    for name, cell in zip(HEAD[1:], row("", found)[1:], strict=True):
        print(f"{name:<10} {cell}")
    missed = bars.conclude([*judge(found)])
    return missed or (1 if found.broken else 0)


if __name__ == "__main__":
    sys.exit(main())
