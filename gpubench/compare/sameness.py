"""Judges whether both sides did the same work, reached the same losses, and told the time by the same clock.

All comparisons use it: what is found is the `Sameness` of a `Comparison`, and its refusals leave no verdict on time.
"""

from collections.abc import Iterator, Sequence

from gpubench.compare import losses
from gpubench.compare.comparability import declarations
from gpubench.compare.evidence import RUNS_READ, RunEvidence, Side
from gpubench.compare.losses import Claim, Margin
from gpubench.compare.result import Comparability, LossFound, Refusal, Sameness, WorkCount, WorkFound
from gpubench.compare.work import counts, in_words, skips, work_of

OTHER_WORK = "does less work: "
"""How the reason of a refusal begins whose side does less work."""
HARMED = "harms the loss: "
"""How the reason of a refusal begins whose side has another loss."""


def judge(
    baseline: Side,
    candidate: Side,
    comparable: Comparability,
    *,
    claim: Claim = "type",
    margin: Margin = losses.DEFAULT,
) -> Sameness:
    """Returns what is found about both sides. Of a group, the first few runs are read.

    `claim` is what the change between the sides says about the computed numbers: by default that they may be of another
    type, as the numbers of edited code may be. `margin` is the largest change of the loss that does not matter.
    """
    sides = [side.runs[:RUNS_READ] for side in (baseline, candidate)]
    if any(run.record is None or not run.kind.steps or run.untimed for side in sides for run in side):
        return Sameness()
    scaled = any(one.kind == "scale" for one in comparable.differences)
    ours, theirs = ([work_of(run) for run in side] for side in sides)
    counted = counts(ours, theirs, scaled=scaled)
    workload = [one.key for one in comparable.differences if one.kind == "workload"]
    other_loss = bool(workload)
    judged = [] if other_loss else [_loss(sides[0], sides[1], claim, margin)]
    skipped = skips(ours, theirs)
    said = [f"{OTHER_WORK}{skipped}"] if skipped else []
    refusals = [*(Refusal("work", "candidate", one) for one in said), *_less_work(counted), *_harmed(judged)]
    if any(key in declarations() for key in workload):  # other work was asked for, and the verdicts are withheld
        refusals = []
    return Sameness(
        work=_found(counted, scaled=scaled) if not skipped else "less",
        counts=counted,
        losses=judged,
        refusals=refusals,
    )


def _found(counted: Sequence[WorkCount], *, scaled: bool) -> WorkFound:
    if any(one.less for one in counted):
        return "less"
    if any(one.more for one in counted):
        return "more"
    if not any(one.kind != "samples" for one in counted):
        return "unknown"
    return "scaled" if scaled else "same"


def _less_work(counted: Sequence[WorkCount]) -> Iterator[Refusal]:
    """Yields the side that does less work, the candidate first, with all that it does less of."""
    if less := [one for one in counted if one.less]:
        yield Refusal("work", "candidate", f"{OTHER_WORK}{'; '.join(in_words(one) for one in less)}")
    if more := [one for one in counted if one.more]:
        said = "; ".join(in_words(one, of_baseline=True) for one in more)
        yield Refusal("work", "baseline", f"{OTHER_WORK}{said}")


def _loss(baseline: Sequence[RunEvidence], candidate: Sequence[RunEvidence], claim: Claim, margin: Margin) -> LossFound:
    ours, theirs = ([curve for run in side for curve in losses.curves_of(run)] for side in (baseline, candidate))
    first = baseline[0]
    precision = first.settings.get("precision") or ("fp32" if first.workload.get("device") == "cpu" else None)
    found = losses.judge(ours, theirs, claim, precision=precision and str(precision), margin=margin)
    return LossFound(
        name="loss",
        outcome=found.outcome,
        reason=found.reason,
        change=found.change,
        interval=found.interval,
        margin=found.margin,
    )


def _harmed(judged: Sequence[LossFound]) -> Iterator[Refusal]:
    for one in judged:
        if one.outcome == "harmed":
            yield Refusal("loss", "candidate", f"{HARMED}{one.reason}")
