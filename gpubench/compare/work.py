"""Compares the work that both sides have counted, so that one that does less of it is not called faster."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Literal

import numpy as np

from gpubench import units
from gpubench.compare.evidence import RunEvidence
from gpubench.compare.result import WorkCount
from gpubench.events import WorkCounted

Per = Literal["step", "whole"]
"""What a count is of: a step, whose samples may differ between the sides, or the whole of a run."""

OF_PARAMETERS = ("parameters", "updated", "changed")
"""The kinds of work that a rank does for its share of the parameters."""
SURE = 4.0
"""The standard errors by which counts of random sizes have to differ."""
OF_TOKENS = "elements reach the model for each of its tokens"
"""What is compared where sequences have another length by intention."""
HARDLY_ANY = 0.95
"""The share of the batches from which on those that are not drawn are nearly all.

Fewer of them are no less work: larger batches have the same samples, which are counted.
"""


@dataclass(frozen=True)
class Kind:
    """A kind of work, of which a candidate must not do less than the baseline."""

    noun: str
    """What there is fewer of, as in "4 times fewer samples reach the model"."""
    per: Per = "whole"
    alike: float = 1e-3
    """The share by which two counts of the same work may differ."""
    is_share: bool = False
    """Whether the count is a share of what was looked at."""


KINDS: Mapping[str, Kind] = {
    "samples": Kind("samples are in a step", "step"),
    "forwarded": Kind("samples reach the model", "step", 0.1),
    "elements": Kind("elements reach the model for each of its samples", alike=0.02),
    "contents": Kind("batches have a content of their own", alike=0.25, is_share=True),
    "batches": Kind("batches are drawn from DataLoaders in a step", alike=HARDLY_ANY),
    "reached": Kind("forward passes are followed by a backward pass through them", alike=0.25, is_share=True),
    "used": Kind("backward passes have gradients that an update uses", alike=0.1, is_share=True),
    "passes": Kind("backward passes are in a step", "step"),
    "parameters": Kind("parameters are in the model"),
    "updated": Kind("elements of parameters get a gradient"),
    "changed": Kind("parameters change in an update that has their gradient", alike=0.1, is_share=True),
    "flops": Kind("FLOPs are needed for a sample"),
}
"""The kinds of work by their names, the plainest ones first.

Two counts of FLOPs differ by those that fusion leaves out. Samples are counted from the forward pass on in which the
model is recognised. The shares are of a sample of the steps.
"""


@dataclass(frozen=True, kw_only=True)
class CountedWork:
    """What the steps of a run have done, counted where it is done and not taken from settings. None is unknown."""

    samples: float | None = None
    """The samples of one step of all ranks, as a mean over the steps after the warm-up."""
    skipped: int = 0
    """The updates that the gradient scaler has skipped after the warm-up."""
    updated: float | None = None
    """The elements of the parameters that have a gradient in one update, at least."""
    changed: float | None = None
    """The share of these parameters that an update has changed, in a sample of the updates on a CPU."""
    passes: float | None = None
    """The backward passes of one step, as a mean over all steps."""
    used: float | None = None
    """The share of the backward passes whose gradients were not cleared before an update."""
    reached: float | None = None
    """The share of the forward passes that a backward pass has gone through, in a sample of the steps."""
    forwarded: float | None = None
    """The samples that the model is given in one step of all ranks, as a mean over the steps."""
    elements: float | None = None
    """The elements that the model is given for each of these samples."""
    contents: float | None = None
    """The share of the batches whose content is not that of an earlier one, in a sample of the steps on a CPU."""
    batches: float | None = None
    """The batches that are drawn from DataLoaders for one step of all ranks, as a mean over the steps."""
    parameters: float | None = None
    """The parameters of the model of a program."""
    flops: float | None = None
    """The model FLOPs of one sample."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """The standard errors of counts that vary at random, by their names."""


def work_of(run: RunEvidence) -> CountedWork:
    """Returns the work of a run, of the repeat that did least for each kind of work."""
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    errors: dict[str, list[float]] = {"samples": [], "elements": []}
    skipped = 0
    for window, counted in zip_longest(run.windows, run.summary.work):
        steady = run.steps.steady(window)
        found["samples"].append(sum(float(rows.samples.mean()) for rows in steady.values()))
        of_ranks = (float(rows.samples.std()) / len(rows) ** 0.5 for rows in steady.values())
        errors["samples"].append(math.hypot(*of_ranks))
        skipped += sum(int(np.count_nonzero(rows.skipped)) for rows in steady.values())
        steps = max(map(len, run.steps.of_repeat(window.repeat).values()), default=0)
        if counted and steps:
            for name, value in _of_repeat(counted, steps, run.ranks).items():
                found[name].append(value)
            if counted.elements_spread is not None and counted.calls and counted.forwarded:
                errors["elements"].append(counted.elements_spread * counted.calls**0.5 / counted.forwarded)
    flops = run.metrics.get("model_flops_per_sample")
    is_program = "program.command" in run.settings
    parameters = run.workload.get("parameters") if is_program else None
    least = {name: min(values) for name, values in found.items() if values}
    return CountedWork(
        **(least | {"samples": least.get("samples") or None}),
        skipped=skipped,
        parameters=float(parameters) if parameters else None,
        flops=flops.estimate if flops else None,
        errors={name: max(each) for name, each in errors.items() if each},
    )


def _of_repeat(counted: WorkCounted, steps: int, ranks: int) -> dict[str, float]:
    """Returns the counts of a repeat by the names of KINDS, without those that are unknown."""
    found: dict[str, float] = {
        "updated": float(counted.updated_least),
        "passes": counted.backward_passes / steps,
    }
    if counted.calls is not None:  # so that none at all is known to be none
        # Those of all ranks: the forwarded samples are of one, and the steps in which they were counted of all.
        found["forwarded"] = counted.forwarded * ranks / max((counted.counted_steps or 0) / ranks, 1)
    elif counted.forwarded:
        found["forwarded"] = counted.forwarded * ranks / steps
    if counted.elements is not None and counted.forwarded:
        found["elements"] = counted.elements / (counted.forwarded * ranks)
    if counted.unused_passes is not None and counted.backward_passes:
        found["used"] = 1 - counted.unused_passes / counted.backward_passes
    if counted.batches is not None:
        found["batches"] = counted.batches / steps
    if counted.looked_at and counted.reached is not None:
        found["reached"] = counted.reached / counted.looked_at
    if counted.contents and counted.repeated_contents is not None:
        found["contents"] = 1 - counted.repeated_contents / counted.contents
    if counted.looked_at_parameters and counted.changed_parameters is not None:
        found["changed"] = counted.changed_parameters / counted.looked_at_parameters
    return found


def counts(
    baseline: Sequence[CountedWork],
    candidate: Sequence[CountedWork],
    *,
    scaled: bool = False,
    resharded: bool = False,
    tokens: tuple[float, float] | None = None,
) -> list[WorkCount]:
    """Returns what both sides have counted, each kind of it by the run that did least.

    `scaled` means that a step may have other samples, so that what is of a step is compared by its samples, and
    `resharded` that a rank may hold another share of the parameters, so that these are not compared. `tokens` are those
    of a sample on both sides if they may differ: elements are then compared by tokens, and FLOPs, of which a token of a
    shorter sequence needs fewer, are not. What is unknown on a side is not compared. Where the runs of a side differ,
    as with random lengths, the other one must do less than the least of them by as much as they differ.
    """
    found: list[WorkCount] = []
    seen = {name for name in KINDS if all(_known(side, name) for side in (baseline, candidate))}
    for name, kind in KINDS.items():
        if name not in seen or (name == "samples" and scaled) or (name in OF_PARAMETERS and resharded):
            continue
        if name == "passes" and (scaled or {"reached", "used"} <= seen):
            continue  # an accumulation in other parts has other passes, and does the same work if all are reached
        if name == "batches" and not any(one.kind == "contents" and (one.less or one.more) for one in found):
            continue  # a program may make its batches without a DataLoader; see `undrawn`
        if name == "flops" and tokens:
            continue
        by_sample = scaled and kind.per == "step" and "samples" in seen
        ours, theirs = (_known(side, name, by_sample=by_sample) for side in (baseline, candidate))
        by_token = tokens is not None and name == "elements"
        if tokens and by_token:
            ours, theirs = [value / tokens[0] for value in ours], [value / tokens[1] for value in theirs]
        error = SURE * math.hypot(*(_error(side, name, by_sample=by_sample) for side in (baseline, candidate)))
        found.append(
            WorkCount(
                kind=name,
                unit=OF_TOKENS if by_token else kind.noun + (", for each sample" if by_sample else ""),
                baseline=min(ours),
                candidate=min(theirs),
                less=_less(ours, theirs, kind.alike, error),
                more=_less(theirs, ours, kind.alike, error),
            )
        )
    return found


def _known(side: Sequence[CountedWork], name: str, *, by_sample: bool = False) -> list[float]:
    """Returns a count of each run of a side that has it, divided by the samples of a step on request."""
    values = [(getattr(work, name), (work.samples or 1.0) if by_sample else 1.0) for work in side]
    return [value / samples for value, samples in values if value is not None]


def _error(side: Sequence[CountedWork], name: str, *, by_sample: bool) -> float:
    """Returns the largest standard error of a count of a side, in its unit."""
    of = "samples" if name == "forwarded" else name  # the model is given what is in the step
    return max(work.errors.get(of, 0.0) / ((work.samples or 1.0) if by_sample else 1.0) for work in side)


def _less(before: Sequence[float], after: Sequence[float], alike: float, error: float) -> bool:
    """Returns whether the runs after a change count less than the ones before it, beyond what varies."""
    return min(after) < (2 * min(before) - max(before)) * (1 - alike) - error


def skips(baseline: Sequence[CountedWork], candidate: Sequence[CountedWork]) -> str:
    """Returns that the candidate's gradient scaler skips more updates than the baseline's; "" if it does not."""
    before = max((work.skipped for work in baseline), default=None)
    after = max((work.skipped for work in candidate), default=0)
    if before is None or after <= before:
        return ""
    return f"{units.counted(after, 'update')} skipped by the gradient scaler instead of {before}"


def undrawn(baseline: Sequence[CountedWork], candidate: Sequence[CountedWork]) -> float | None:
    """Returns the batches that a step of the baseline draws from DataLoaders if the candidate draws hardly any."""
    ours, theirs = (_known(side, "batches") for side in (baseline, candidate))
    return min(ours) if ours and theirs and _less(ours, theirs, HARDLY_ANY, 0.0) else None


def in_words(count: WorkCount, *, of_baseline: bool = False) -> str:
    """Returns a difference in work, as "64 times fewer samples reach the model (1 instead of 64)"."""
    before, after = (count.candidate, count.baseline) if of_baseline else (count.baseline, count.candidate)
    if not after:
        return f"no {count.unit}"
    ratio = before / after
    how = f"{units.digits(ratio)} times" if ratio >= 2 else units.percent(1 - after / before)
    ours, theirs = (figure(count, value) for value in (before, after))
    return f"{how} fewer {count.unit} ({theirs} instead of {ours})"


def figure(count: WorkCount, value: float) -> str:
    """Returns the count of a side, as "64" or "25.0 %"."""
    kind = KINDS.get(count.kind)
    return units.percent(value) if kind and kind.is_share else units.count(value)


def less_work(baseline: Sequence[CountedWork], candidate: CountedWork, *, scaled: bool = False) -> str:
    """Returns which work the candidate does less of than the baseline's runs, with figures; "" if there is none."""
    if skipped := skips(baseline, [candidate]):
        return skipped
    return next((in_words(one) for one in counts(baseline, [candidate], scaled=scaled) if one.less), "")
