"""Judges whether both sides did the same work, reached the same losses, and told the time by the same clock.

All comparisons use it: what is found is the `Sameness` of a `Comparison`, and its refusals leave no verdict on time.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from gpubench import units
from gpubench.compare import losses, watched
from gpubench.compare.comparability import lengths, same_step, samples_per_step
from gpubench.compare.evidence import PHASE, RUNS_READ, RunEvidence, Side
from gpubench.compare.losses import Claim, Margin
from gpubench.compare.result import ClockFound, Comparability, LossFound, Refusal, Sameness, WorkCount, WorkFound
from gpubench.compare.work import CountedWork, counts, in_words, skips, undrawn, work_of
from gpubench.runs import clocks
from gpubench.runs.clocks import ClockRates
from gpubench.settings.keys import CACHED, COMMAND
from gpubench.settings.roles import ROLES

STRATEGY = "distributed.strategy"
"""The setting by which ranks share the parameters."""
LESS_WORK = "does less work: "
"""How the reason of a refusal begins whose side does less work."""
OTHER_STEPS = LossFound(
    name="loss",
    outcome="unknown",
    reason="a step has other samples, so that the losses of the steps cannot be compared; a number that the program "
    "prints can, by --watch",
)
KEPT_BATCHES = LossFound(
    name="loss",
    outcome="unknown",
    reason=f"with {CACHED} the first batches are given again and again, so that the losses mean nothing",
)


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
    scaled = any(one.kind == "scale" for one in comparable.differences) and not same_step(baseline, candidate)
    ours, theirs = ([work_of(run) for run in side] for side in sides)
    layouts = [(side.runs[0].ranks, side.runs[0].settings.get(STRATEGY)) for side in (baseline, candidate)]
    tokens = lengths(baseline, candidate)
    counted = counts(ours, theirs, scaled=scaled, resharded=layouts[0] != layouts[1], tokens=tokens)
    workload = [one.key for one in comparable.differences if one.kind == "workload"]
    kept = any(one.key == CACHED for one in comparable.differences)
    if kept:
        counted = [one for one in counted if one.kind != "contents"]
        judged = [KEPT_BATCHES]
    else:
        judged = [] if workload else [OTHER_STEPS if scaled else _loss(sides[0], sides[1], claim, margin)]
        judged += _watched(sides[0], sides[1], margin)
    skipped = skips(ours, theirs)
    rates = [[one for run in side for one in run.summary.clock_rates] for side in sides]
    refusals = list(_wrong_clocks(rates))
    if not any(key in ROLES for key in workload):  # otherwise other work was asked for
        refusals += [*_less_work(counted, skipped), *_harmed(judged)]
    return Sameness(
        work=_found(counted, scaled=scaled) if not skipped else "less",
        counts=counted,
        losses=judged,
        clock=_clock([found for found, side in zip(rates, sides, strict=True) if side[0].settings.get(COMMAND)]),
        remarks=[
            *_unasked(baseline, candidate, comparable),
            *_remarks(baseline, candidate, counted),
            *_undrawn((baseline, ours), (candidate, theirs)),
        ],
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


def _less_work(counted: Sequence[WorkCount], skipped: str) -> Iterator[Refusal]:
    """Yields that the candidate does less work, with all that it does less of."""
    less = [*([skipped] if skipped else []), *(in_words(one) for one in counted if one.less)]
    if less:
        yield Refusal("work", "candidate", f"{LESS_WORK}{'; '.join(less)}")


def _clock(programs: Sequence[Sequence[ClockRates | None]]) -> ClockFound | None:
    """Returns what the rates of the sides tell that are programs."""
    differ = [clocks.differ(found) for found in programs]
    if not differ:
        return None
    return "different" if any(differ) else "unknown" if None in differ else "same"


def _wrong_clocks(rates: Sequence[Sequence[ClockRates | None]]) -> Iterator[Refusal]:
    """Yields the sides whose clock is not the host's, with what shows it."""
    names: Sequence[Literal["baseline", "candidate"]] = ("baseline", "candidate")
    for name, found in zip(names, rates, strict=True):
        if wrong := clocks.contradiction(found):
            yield Refusal("clock", name, f"has a clock of its own: {wrong}")


def _remarks(baseline: Side, candidate: Side, counted: Sequence[WorkCount]) -> Iterator[str]:
    """Yields what differs and leaves a verdict."""
    if more := [one for one in counted if one.more]:
        said = "; ".join(in_words(one, of_baseline=True) for one in more)
        yield f"{baseline.label} {LESS_WORK}{said}"
    for side, other in ((baseline, candidate), (candidate, baseline)):
        share = _evaluation(side)
        if share and _evaluation(other) == 0:
            without = f"{other.label} does not evaluate"
            yield f"{without}, and {side.label} does for {units.percent(share)} of the time of its steps"

    lengths = [_steps(side) for side in (baseline, candidate)]
    asked = [side.runs[0].settings.get("training.steps") for side in (baseline, candidate)]
    if asked[0] == asked[1] is not None and None not in lengths and lengths[0] != lengths[1]:
        names = [side.label for side in (baseline, candidate)]
        ours, theirs = (units.counted(length or 0, "step") for length in lengths)
        yield f"a repeat of {names[0]} has {ours}, and one of {names[1]} has {theirs}"


def _undrawn(*sides: tuple[Side, Sequence[CountedWork]]) -> Iterator[str]:
    """Yields that a side makes its batches itself, which may be legitimate: the data may be in the memory of a GPU."""
    for (side, ours), (other, theirs) in (sides, sides[::-1]):
        if drawn := undrawn(ours, theirs):
            yield (
                f"{other.label} draws no batches from a DataLoader, and {side.label} draws {units.digits(drawn)} for "
                "each step: whether both read the same data is not known"
            )


def _unasked(baseline: Side, candidate: Side, comparable: Comparability) -> Iterator[str]:
    """Yields that a step has other samples although neither a setting nor an argument asks for that.

    Smaller batches that the code makes cannot be told from batches of which it leaves out a part.
    """
    before, after = (samples_per_step(side) for side in (baseline, candidate))
    commands = {side.runs[0].settings.get(COMMAND) for side in (baseline, candidate)}
    asked = len(commands) > 1 or any(
        one.kind in ("scale", "workload") and one.key in ROLES for one in comparable.differences
    )
    if None not in (before, after) and before != after and not asked:
        yield (
            f"a step of {candidate.label} has {units.counted(after or 0, 'sample')} instead of {before}, and no "
            "setting or argument asks for that: its code makes other batches, or leaves out a part of each"
        )


def _steps(side: Side) -> int | None:
    """Returns the steps of the shortest repeat, the warm-up included; None if there is none."""
    return min((window.first + window.steps for run in side.runs[:RUNS_READ] for window in run.windows), default=None)


def _evaluation(side: Side) -> float | None:
    """Returns the share of evaluation in the time of the steps; None if the phases are unknown."""
    metrics = side.runs[0].metrics
    if "step_time" not in metrics or not any(name.startswith(PHASE) for name in metrics):
        return None
    found = metrics.get(f"{PHASE}evaluation")
    return found.estimate / metrics["step_time"].estimate if found else 0.0


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


def _watched(baseline: Sequence[RunEvidence], candidate: Sequence[RunEvidence], margin: Margin) -> Iterator[LossFound]:
    """Yields the judgement of each number that is watched in the output of both sides."""
    names = {name for run in candidate for name in run.summary.watched}
    for name in dict.fromkeys(name for run in baseline for name in run.summary.watched):
        if name in names:
            ours, theirs = (
                [values for run in side for values in run.summary.watched.get(name, [])]
                for side in (baseline, candidate)
            )
            yield watched.judge(name, ours, theirs, margin)


def _harmed(judged: Sequence[LossFound]) -> Iterator[Refusal]:
    for one in judged:
        if one.outcome == "harmed":
            what = "the loss" if one.name == "loss" else one.name
            yield Refusal("loss", "candidate", f"harms {what}: {one.reason}")
