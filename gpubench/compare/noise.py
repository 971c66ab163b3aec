"""Measures how much a workload's figures vary on a machine without changes, and which differences are detectable."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gpubench.compare import intervals, power
from gpubench.compare.comparability import PASSING_OF_GPU
from gpubench.compare.evidence import RunEvidence, Side, steps_left_out
from gpubench.compare.intervals import MetricSample, Steps
from gpubench.compare.result import Noise, NullMetric
from gpubench.compare.verdicts import rounding, sample_of
from gpubench.errors import RunDirectoryError
from gpubench.metrics import Metric
from gpubench.runs import directory
from gpubench.runs.directory import NOISE

SPLIT = 4  # smallest number of runs that show how runs vary: two on each side, each side with a spread
MACHINE = ("host.name", "cpu.model", "gpus")


def learn(side: Side, metrics: Sequence[Metric], margin: float) -> Noise:
    """Returns the noise of one side's runs, which must all have the same configuration."""
    found = [_learn(side, metric, margin) for metric in metrics]
    first = side.runs[0]
    return Noise(
        schema_version=directory.SCHEMA_VERSION,
        workload=first.workload,
        machine=machine(first),
        runs=[run.label for run in side.runs],
        margin=margin,
        confidence=intervals.CONFIDENCE,
        metrics=[one for one in found if one],
        warmup=steps_left_out([side]),
    )


def machine(run: RunEvidence) -> dict[str, Any]:
    """Returns the facts of the machine on which noise depends, without momentary readings."""
    return _lasting(run.environment)


def recall(run: RunEvidence) -> Noise | None:
    """Returns the noise recorded in the run's directory; None if it is missing, unreadable or of another version."""
    try:
        noise = run.files.required(NOISE, Noise) if run.files else None
    except RunDirectoryError:
        return None
    return noise if noise and noise.schema_version <= directory.SCHEMA_VERSION else None


def on_record(baseline: Side, candidate: Side) -> list[NullMetric]:
    """Returns the recorded noise that applies to both sides, that of the most runs first.

    It must be recorded for a run of one side, on the machine of both.
    """
    machines = [machine(side.runs[0]) for side in (baseline, candidate)]
    found = [recall(run) for side in (baseline, candidate) for run in side.runs[:1] if run.record]
    fitting = [noise for noise in found if noise and _lasting(noise.machine) == machines[0] == machines[1]]
    ranked = sorted(fitting, key=lambda noise: len(noise.runs), reverse=True)
    return [entry for noise in ranked for entry in noise.metrics]


def write(noise: Noise, path: Path) -> None:
    """Writes the noise to a run directory. Raises OSError."""
    directory.write_document(path / NOISE, noise)


def _lasting(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts of the machine without momentary readings, such as a GPU's clock in older records."""
    facts = {key: value for key, value in environment.items() if key in MACHINE}
    if isinstance(listed := facts.get("gpus"), list):
        facts["gpus"] = [
            {name: fact for name, fact in gpu.items() if name not in PASSING_OF_GPU}
            for gpu in listed
            if isinstance(gpu, dict)
        ]
    return facts


def _learn(side: Side, metric: Metric, margin: float) -> NullMetric | None:
    between_runs = len(side.runs) >= SPLIT or all(run.repeats == 1 for run in side.runs)
    sample = sample_of(side, metric.name) if between_runs else _all_repeats(side, metric.name)
    unit_spread = intervals.spread(sample) if sample else None
    if sample is None or unit_spread is None:
        return None
    unit_spread = math.hypot(unit_spread, rounding(side, metric.name) / math.sqrt(3))  # see `Ratio.rounded`
    per_side = max(2, sample.n // 2)
    change, (low, high) = power.resolvable_by(unit_spread, sample.n - 1, per_side, margin) or (None, (0.0, 0.0))
    return NullMetric(
        metric=metric.name,
        unit=metric.unit,
        level="run" if between_runs else "repeat",
        units=sample.n,
        spread=unit_spread,
        within=_within(sample),
        noise_floor=power.telling(intervals.noise_floor(unit_spread, sample.n - 1, 1, 1)),
        per_side=per_side,
        resolvable=change,
        resolvable_range=None if change is None else (low, high),
    )


def _all_repeats(side: Side, metric: str) -> MetricSample | None:
    """Returns the repeats of all runs as one sample; None if a run lacks the metric."""
    found = [sample_of(Side(run.label, (run,)), metric) for run in side.runs]
    samples = [sample for sample in found if sample]
    if len(samples) < len(found):
        return None
    steps: list[Sequence[Steps]] = [unit for sample in samples for unit in sample.steps or ()]
    units = np.concatenate([sample.units for sample in samples])
    return MetricSample(units, steps if len(steps) == len(units) else None)


def _within(sample: MetricSample) -> float | None:
    """Returns the standard error of a repeat's mean from its steps, as the root mean square over the repeats."""
    errors = [repeat.error for unit in sample.steps or () for repeat in unit]
    known = [error.size for error in errors if error]
    return float(np.sqrt(np.mean(np.square(known)))) if known and len(known) == len(errors) else None
