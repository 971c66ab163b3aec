"""Inputs that are valid: real runs of the smallest models, made once, and files made on the spot."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

SUPPORT = Path(__file__).parents[2] / "tests" / "support"
sys.path.append(str(SUPPORT))  # the makers of traces, snapshots and runs are there

import footprints_made  # noqa: E402
import profiles_made  # noqa: E402
from decisions_made import KEPT  # noqa: E402
from recorded_runs import write_memory_run, write_run  # noqa: E402
from snapshots_made import FORWARD, STEP, alloc, block, flat, free, segment, snapshot, write  # noqa: E402
from traces_made import call, launched, slice_, step, work  # noqa: E402
from traces_made import write as write_trace  # noqa: E402
from tunings_made import TUNED  # noqa: E402

from gpubench.compare import ledger  # noqa: E402
from gpubench.runs.directory import DECISION, FINDINGS, PROFILE, write_document  # noqa: E402
from gpubench.tuning.result import save  # noqa: E402

SMALL = ("--model", "small_model:build", "--performance.cpu_threads=1", "--logging.graph=false", "--device", "cpu")
STEPS = ("--steps", "16", "--training.warmup_steps=4", "--repeats", "2")
SHAPES: dict[str, Any] = {"Input Dims": [[2, 3], [3, 4]], "Sequence number": 7}
REAL = (
    ("train-bench", *SMALL, *STEPS),
    ("train-bench", *SMALL, *STEPS, "--training.optimizer", "sgd"),
    ("profile", *SMALL, "--repeats", "1", "--steps", "16", "--profiling.profile_memory=true"),
    ("memory", *SMALL),
    ("pipe-infer", "--unet", "dummy", "--step-ms", "1", "--steps", "4", "--samples", "3", "--repeats", "1"),
)


@dataclass
class Seeds:
    """Paths of what is to be mutated; the originals are never written to."""

    configs: list[Path] = field(default_factory=list)
    runs: list[Path] = field(default_factory=list)
    pipelines: list[Path] = field(default_factory=list)
    """Those of `runs` that `--resume` takes."""
    logs: list[Path] = field(default_factory=list)
    traces: list[Path] = field(default_factory=list)
    snapshots: list[Path] = field(default_factory=list)
    ledgers: list[Path] = field(default_factory=list)
    shown: list[Path] = field(default_factory=list)
    """The directories of searches and of runs with documents of all kinds."""


def make(folder: Path, *, real: bool) -> Seeds:
    """Everything under `folder`. Without `real` no command is run, and the directories are of runs that never ran."""
    runs = _real_runs(folder / "real") if real else [write_run(folder / "made", ranks=2, steps=16) for _ in range(2)]
    documented = _documented(folder / "documented")
    presets = sorted(Path(str(files("gpubench.configs"))).glob("*.yaml"))
    made = folder / "files"
    made.mkdir(parents=True, exist_ok=True)
    return Seeds(
        configs=[*presets, *(run / "config.yaml" for run in runs)],
        runs=[*runs, *documented],
        pipelines=[run for run in runs if (run / "samples.jsonl").exists()],
        logs=_logs(made),
        traces=[*_traces(made), *(path for run in runs for path in sorted(run.glob("profiler_traces/*.json.gz")))],
        ledgers=[_ledger(made / "edits.jsonl")],
        shown=[*_searches(folder / "searches"), *documented],
        snapshots=[write(made / f"snapshot{protocol}.pickle", _recording(), protocol) for protocol in (2, 4)],
    )


def _real_runs(results: Path) -> list[Path]:
    if not results.exists():
        aside = results.with_name("unfinished")
        shutil.rmtree(aside, ignore_errors=True)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")])}
        for command in REAL:
            print(f"running gpubench {' '.join(command)}", file=sys.stderr)
            argv = [sys.executable, "-m", "gpubench", *command, "--results", str(aside), "--quiet"]
            subprocess.run(argv, check=True, env=environment, stdout=subprocess.DEVNULL)
        aside.rename(results)
    return sorted(path.parent for path in results.glob("*/*/run.json"))


def _logs(folder: Path) -> list[Path]:
    times = [10.0 + (7 * number % 5) / 10 for number in range(40)]
    rows = ["step,step_ms,note", *(f'{number},{time},"a, b"' for number, time in enumerate(times))]
    tabs = ["step\tstep_ms", *(f"{number}\t{time}" for number, time in enumerate(times))]
    lines = [json.dumps({"step": number, "step_ms": time}) for number, time in enumerate(times)]
    return [
        _text(folder / "log.csv", rows),
        _text(folder / "log.tsv", tabs),
        _text(folder / "log.jsonl", lines),
    ]


def _ledger(path: Path) -> Path:
    path.unlink(missing_ok=True)
    for number in range(4):
        edit = msgspec.structs.replace(ledger.line_of(KEPT), started=str(number), base=f"{number % 3}" * 40)
        ledger.add(path, edit)
    return path


def _searches(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, TUNED)
    return [folder]


def _documented(results: Path) -> list[Path]:
    """A run of each kind that has documents beside its steps."""
    shutil.rmtree(results, ignore_errors=True)
    memory = write_memory_run(results, footprints_made.predicted())
    write_document(memory / FINDINGS, footprints_made.findings())
    judged, profiled = write_run(results, ranks=2, steps=16), write_run(results, steps=16)
    write_document(judged / DECISION, KEPT)
    write_document(profiled / PROFILE, profiles_made.profile(2))
    write_document(profiled / FINDINGS, profiles_made.findings())
    return [memory, judged, profiled]


def _text(path: Path, lines: Sequence[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def _traces(folder: Path) -> list[Path]:
    """Two steps on a GPU with all kinds of events, as text and compressed."""
    events = []
    for number in range(2):
        at = number * 100
        events += [
            step(number + 1, at, at + 100),
            slice_("aten::mm", at + 1, at + 9, **SHAPES),
            slice_("train.py(12): forward", at + 0.5, at + 20, cat="python_function"),
            slice_("nn.Module: Linear_0", at + 0.6, at + 19, cat="python_function"),
            *launched("gemm", at + 2, at + 4, at + 12.5, number * 10 + 1),
            call("cudaMemcpyAsync", at + 20, at + 22, number * 10 + 2),
            work("Memcpy HtoD (Pageable -> Device)", at + 21, at + 25, number * 10 + 2, cat="gpu_memcpy", bytes=4096),
            call("cudaStreamSynchronize", at + 30, at + 44),
            _memory(at + 3, 512, 512),
            _memory(at + 60, -512, 0),
        ]
    about = {
        "deviceProperties": [{"name": "A GPU", "computeMajor": 9, "numSms": 132, "totalGlobalMem": 80 << 30}],
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 1},
    }
    return [
        write_trace(folder / "trace.json", events, **about),
        write_trace(folder / "trace.json.gz", events, **about),
    ]


def _memory(at: float, size: int, total: int) -> dict[str, object]:
    args = {
        "Bytes": size, "Addr": 4096, "Device Type": 1, "Device Id": 0, "Total Allocated": total,
        "Total Reserved": 2**21,
    }  # fmt: skip
    return {
        "ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at, "pid": 1, "tid": 1, "s": "t", "args": args,
    }  # fmt: skip


def _recording() -> dict[str, object]:
    events = []
    for number in range(2):
        events += flat(alloc(0, 1000, FORWARD), alloc(512, 100, FORWARD), free(512, 100, FORWARD), alloc(1024, 900))
        events += flat(free(0, 1000), *([alloc(2048, 800, STEP)] if not number else []), free(1024, 900, STEP))
    return snapshot(events, [segment(2048, 2**21, block(1024, 800))])
