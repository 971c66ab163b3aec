"""Run directories as the real writer makes them, of runs that never ran."""

import itertools
import json
from pathlib import Path
from typing import Any

import msgspec

from gpubench.compare.evidence import Side, open_run
from gpubench.events import Step
from gpubench.memory.footprint import Footprint, Footprints, peaks
from gpubench.metrics import DEFINITIONS, Metric
from gpubench.runs.directory import (
    COMPLETED,
    ENVIRONMENT,
    MEMORY,
    RUNNING,
    SCHEMA_VERSION,
    STEPS,
    SUMMARY,
    TELEMETRY,
    RunWriter,
)
from gpubench.runs.steps import Repeat
from gpubench.runs.summary import summarise
from gpubench.telemetry import CpuSample, TelemetrySample

CONFIG = "experiment: made\nseed: 0\ntraining:\n  batch_size: 8\n  steps: 30 # default\n"
FASTER = 0.999  # of rank 1 beside rank 0
WARMUP = 10
MEMORY_SETTINGS: dict[str, Any] = {
    "model": {"name": "gpt2"}, "precision": "bf16", "device": "cuda", "training": {"batch_size": 16},
    "memory": {"predict": True, "device_model": "h200"},
}  # fmt: skip


def side(*paths: Path) -> Side:
    """Of a comparison."""
    return Side(paths[0].name, tuple(map(open_run, paths)))


def step(number: int, repeat: int = 0, rank: int = 0, **changes: Any) -> Step:
    """About 10 ms, with an uneven share for the forward pass."""
    total = (0.010 + 0.0001 * ((number * 7 + repeat * 3) % 5)) * FASTER**rank
    step = Step(
        repeat=repeat,
        rank=rank,
        epoch=0,
        step=number,
        time=1e9 + 100 * repeat + number * 0.0104,
        total=total,
        phases={"forward": total * 0.4, "backward": total * 0.5, "other": total * 0.1},
        host=total,
        samples=8,
        loss=2 / (1 + number),
    )
    return msgspec.structs.replace(step, **changes)


def write_run(
    results: Path,
    experiment: str = "made",
    *,
    repeats: int = 2,
    ranks: int = 1,
    steps: int = 30,
    status: str = COMPLETED,
    pace: float = 1.0,
    **changes: Any,
) -> Path:
    """A run directory with `steps` steps in each repeat, the first WARMUP of which are warm-up.

    The steps take `pace` times as long as usual, and have `changes`.
    """
    writer = RunWriter(results, experiment, CONFIG, command="train-bench", argv=[], world_size=ranks, git=None)
    writer.replace(ENVIRONMENT, {"host": {"name": "here"}, "gpus": [], "torch": {"version": "2.13.0"}})
    measured = [Repeat(number, WARMUP) for number in range(repeats)]
    for repeat, number, rank in itertools.product(measured, range(steps), range(ranks)):
        made = step(number, repeat.number, rank, **changes)
        phases = {name: pace * seconds for name, seconds in made.phases.items()}
        made = msgspec.structs.replace(made, total=pace * made.total, phases=phases)
        repeat.steps[rank].append(made)
        writer.append(STEPS, made)
    for second in range(3):
        writer.append(TELEMETRY, TelemetrySample(time=1e9 + second, cost=1e-4, cpu=CpuSample(load=0.5)))
    summary = summarise(measured, None, "fp32")
    writer.replace(SUMMARY, {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(summary)})
    writer.update(repeats=repeats)
    ended_well = status in (COMPLETED, RUNNING)
    writer.finish(status, None if ended_well else {"kind": "OutOfMemory", "message": "not enough memory", "hint": None})
    return writer.path


def write_memory_run(
    results: Path, *ranks: Footprint, repeats: int = 1, reserved: list[float] | None = None, **changes: Any
) -> Path:
    """The directory of a run of `gpubench memory` that came to these footprints in every repeat."""
    config = json.dumps(MEMORY_SETTINGS | changes)
    writer = RunWriter(results, "memory", config, command="memory", argv=[], world_size=len(ranks), git=None)
    writer.replace(ENVIRONMENT, {"host": {"name": "here"}, "gpus": []})
    writer.replace(MEMORY, Footprints(list(ranks)))
    values = {name: [value] * repeats for name, value in peaks(ranks).items()}
    if reserved:
        values["peak_memory_reserved"] = reserved
    metrics = [memory_metric(*one) for one in values.items()]
    summary = {"schema_version": SCHEMA_VERSION, "metrics": metrics, "steady": []}
    nothing = dict.fromkeys(("flops", "peak", "measured_peak", "pipeline"))
    writer.replace(SUMMARY, summary | nothing | {"ranks": [], "throttled": {}, "warnings": []})
    writer.update(repeats=repeats)
    writer.finish("completed")
    return writer.path


def memory_metric(name: str, values: list[float]) -> Metric:
    known = DEFINITIONS[name]
    return Metric(name, known.unit, known.better, max(values), None, len(values), None, values, None)


def edit(path: Path, **changes: Any) -> None:
    """Changes fields of a JSON document."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
