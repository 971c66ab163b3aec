"""How much a workload's figures vary on a machine where nothing was changed, and what can be told from that."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gpubench import inference, runs
from gpubench.comparison.evidence import RunEvidence, Side
from gpubench.comparison.result import Noise, NullMetric
from gpubench.comparison.sampling import RATES, WELL_KNOWN, sample_of
from gpubench.inference import Error, Sample, Steps
from gpubench.metrics import Metric
from gpubench.runs import NOISE

SPLITS = 200
MACHINE = ("host.name", "cpu.model", "gpus")


def learn(side: Side, metrics: Sequence[Metric], margin: float, source: str) -> Noise:
    """The noise of the runs of one side, which all did the same."""
    found = [_learn(side, metric, margin) for metric in metrics]
    first = side.runs[0]
    return Noise(
        schema_version=runs.SCHEMA_VERSION,
        source="null" if source == "null" else "repeats",
        workload=first.workload,
        machine=machine(first),
        runs=[run.label for run in side.runs],
        margin=margin,
        confidence=inference.CONFIDENCE,
        metrics=[one for one in found if one],
    )


def machine(run: RunEvidence) -> dict[str, Any]:
    """What the noise of a figure hangs on beside its workload."""
    return {key: value for key, value in run.environment.items() if key in MACHINE}


def recall(run: RunEvidence) -> Noise | None:
    """What is on record in the run's directory; None if nothing is, or it does not read, or is of another version."""
    try:
        noise = msgspec.json.decode((run.path / NOISE).read_bytes(), type=Noise)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    return noise if noise.schema_version <= runs.SCHEMA_VERSION else None


def on_record(baseline: Side, candidate: Side) -> list[NullMetric]:
    """The recorded noise that holds for both sides: learned with one of their runs, on the machine of both."""
    machines = [machine(side.runs[0]) for side in (baseline, candidate)]
    found = [recall(run) for run in (baseline.runs[0], candidate.runs[0]) if run.record]
    fitting = [noise for noise in found if noise and noise.machine == machines[0] == machines[1]]
    widest = sorted(fitting, key=lambda noise: len(noise.runs), reverse=True)
    return [entry for noise in widest for entry in noise.metrics]


def write(noise: Noise, path: Path) -> None:
    """Puts the noise on record in a run directory. Raises OSError."""
    runs.write_document(path / NOISE, noise)


def _learn(side: Side, metric: Metric, margin: float) -> NullMetric | None:
    sample = _every_unit(side, metric.name)
    if sample is None or sample.n < 2 or sample.mean <= 0:
        return None
    unit_spread = inference.spread(sample)
    assert unit_spread is not None
    per_side = sample.n // 2 if sample.n >= 4 else 1
    halves = list(_splits(sample, per_side)) if per_side > 1 else []
    singles = list(_splits(sample, 1)) if sample.steps else []
    edges = _edges(sample, halves)
    single_edges = _edges(sample, singles)
    band = math.log1p(margin)
    error = Error(unit_spread * math.sqrt(2 / max(2, per_side)), 2 * max(2, per_side) - 2)
    return NullMetric(
        metric=metric.name,
        unit=metric.unit,
        units=sample.n,
        spread=unit_spread,
        within=_within(sample),
        noise_floor=inference.noise_floor(unit_spread, sample.n - 1, 1, 1),
        per_side=max(2, per_side),
        splits=len(halves),
        false_verdicts=_false_verdicts(edges, band),
        resolvable=_found_with_power(edges, band) if halves else inference.resolvable(error, margin),
        single_splits=len(singles),
        single_false_verdicts=_false_verdicts(single_edges, band),
    )


def _every_unit(side: Side, metric: str) -> Sample | None:
    """Runs, if there are enough of them to be split; else the repeats of all runs, as if of one."""
    if len(side.runs) >= 4 or len(side.runs) == 1:
        return sample_of(side, metric)
    samples = [sample_of(Side(run.label, (run,)), metric) for run in side.runs]
    known = [sample for sample in samples if sample]
    if len(known) < len(samples):
        return None
    steps: list[Sequence[Steps]] = [unit for sample in known for unit in sample.steps or ()]
    units = np.concatenate([sample.units for sample in known])
    return Sample(units, steps if len(steps) == len(units) else None, inverse=metric in RATES)


def _splits(sample: Sample, per_side: int) -> Iterator[tuple[Sample, Sample]]:
    """Random pairs of disjoint halves; every split once where there are no more than SPLITS of them."""
    rng = np.random.default_rng(inference.SEED)
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for _ in range(SPLITS):
        order = rng.permutation(sample.n)
        first, second = sorted((tuple(sorted(order[:per_side])), tuple(sorted(order[per_side : 2 * per_side]))))
        if (first, second) not in seen:
            seen.add((first, second))
            yield _part(sample, first), _part(sample, second)


def _part(sample: Sample, indices: Sequence[int]) -> Sample:
    steps = [sample.steps[index] for index in indices] if sample.steps and len(indices) < WELL_KNOWN else None
    return Sample(sample.units[list(indices)], steps, sample.inverse)


def _edges(sample: Sample, splits: Sequence[tuple[Sample, Sample]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Logarithms of both ends of each split's interval, (splits, 2)."""
    found = [inference.ratio(*split) for split in splits]
    return np.log([ratio.interval for ratio in found if ratio]).reshape(-1, 2)


def _false_verdicts(edges: np.ndarray[Any, np.dtype[np.float64]], band: float) -> float | None:
    return float(np.mean((edges[:, 0] > band) | (edges[:, 1] < -band))) if len(edges) else None


def _found_with_power(edges: np.ndarray[Any, np.dtype[np.float64]], band: float) -> float:
    """The change, up or down, that would have moved POWER of the intervals wholly out of the band."""
    needed = np.concatenate([band - edges[:, 0], band + edges[:, 1]])
    return float(np.expm1(np.quantile(needed, inference.POWER)))


def _within(sample: Sample) -> float | None:
    """Standard error that the steps leave in a repeat, root mean square over the repeats."""
    errors = [repeat.error for unit in sample.steps or () for repeat in unit]
    known = [error.size for error in errors if error]
    return float(np.sqrt(np.mean(np.square(known)))) if known and len(known) == len(errors) else None
