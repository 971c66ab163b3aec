"""Compares the work that runs counted, so that a run that does less is not called faster."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from gpubench import units
from gpubench.compare.evidence import RunEvidence


@dataclass(frozen=True, kw_only=True)
class CountedWork:
    """What the steps of a run have done, counted where it is done and not taken from settings."""

    samples: float | None = None
    """The samples of one step of all ranks, as a mean over the steps after the warm-up; None if they are unknown."""
    skipped: int = 0
    """The updates that the gradient scaler has skipped after the warm-up."""
    updated: int | None = None
    """The elements of the parameters that one step updates, at least; None if they were not counted."""
    passes: float | None = None
    """The backward passes of one step, as a mean over all steps; None if they were not counted."""
    forwarded: float | None = None
    """The samples that the model is given in one step on a rank, as a mean over all steps; None if not counted."""
    flops: float | None = None
    """The model FLOPs of one sample; None if they were not counted."""


def work_of(run: RunEvidence) -> CountedWork:
    """Returns the work of a run, of the repeat that did least for each kind of work."""
    samples, passes, forwarded = [], [], []
    skipped = 0
    for window, counted in zip_longest(run.windows, run.summary.work):
        steps = run.steps.of_repeat(window.repeat)
        steady = run.steps.steady(window)
        samples.append(sum(float(rows.samples.mean()) for rows in steady.values()))
        skipped += sum(int(np.count_nonzero(rows.skipped)) for rows in steady.values())
        if counted and steps:
            passes.append(counted.backward_passes / max(map(len, steps.values())))
            forwarded.append(counted.forwarded / max(map(len, steps.values())))
    flops = run.metrics.get("model_flops_per_sample")
    return CountedWork(
        samples=min(samples, default=0.0) or None,
        skipped=skipped,
        updated=min((one.updated_least for one in run.summary.work if one), default=None),
        passes=min(passes, default=None),
        forwarded=min(forwarded, default=0.0) or None,
        flops=flops.estimate if flops else None,
    )


COUNTED_ALIKE = 1e-3
"""The share by which two counts of the same work may differ, such as those of FLOPs that fusion leaves out."""
FORWARDED_ALIKE = 0.1
"""The same for the samples that the model is given, which are counted from the call on in which it is recognised."""
LESS = {
    "samples": "samples in a step",
    "updated": "elements of parameters updated in a step",
    "passes": "backward passes in a step",
    "forwarded": "samples given to the model in a step",
    "flops": "FLOPs for a sample",
}
"""The counts that must not be smaller, in words."""


def less_work(baseline: Sequence[CountedWork], candidate: CountedWork) -> str:
    """Returns which work the candidate does less of than the baseline's runs, with figures; "" if there is none.

    What is unknown on a side is not compared. Where equal runs differ, as with random lengths, the candidate must do
    less than the least of them by as much as they differ.
    """
    skipped = max((work.skipped for work in baseline), default=candidate.skipped)
    if candidate.skipped > skipped:
        return f"{units.counted(candidate.skipped, 'update')} skipped by the gradient scaler instead of {skipped}"
    for name, unit in LESS.items():
        before = [count for work in baseline if (count := getattr(work, name)) is not None]
        after = getattr(candidate, name)
        alike = FORWARDED_ALIKE if name == "forwarded" else COUNTED_ALIKE
        if before and after is not None and after < (2 * min(before) - max(before)) * (1 - alike):
            return f"{units.count(after)} {unit} instead of {units.count(min(before))}"
    return ""
