"""The report of `compare --null`: how much a workload varies on this machine, and which changes can be found."""

from collections.abc import Sequence

from gpubench import units
from gpubench.compare import power
from gpubench.compare.intervals import MOST_REPEATS
from gpubench.compare.result import Noise, NullMetric
from gpubench.metrics import LEADERS
from gpubench.report.document import Document, Paragraph, table
from gpubench.text import words

CHANGES = (0.005, 0.01, 0.02)  # changes for which the needed repeats are given
SINGLE = "one against one"
RESOLVABLE = (
    "resolvable: the change that new measurements find with 80 % probability, and in brackets its 95 % range, "
    "because the spread is an estimate"
)


def document(found: Noise) -> Document:
    """Returns the report of `compare --null`: how much this workload varies, and which changes are resolvable."""
    if not found.metrics:
        return Document(_headline(found), [])
    split, single = (any(getattr(one, name) for one in found.metrics) for name in ("splits", "single_splits"))
    cells = [
        {
            "metric": words(one.metric),
            "spread": units.percent(one.spread),
            "within": "-" if one.within is None else units.percent(one.within),
            "noise floor": units.difference(one.noise_floor),
            **({"false verdicts": _of_splits(one.false_verdicts, one.splits)} if split else {}),
            **({SINGLE: _of_splits(one.single_false_verdicts, one.single_splits)} if single else {}),
            "resolvable": _resolvable(one) or "-",
        }
        for one in found.metrics
    ]
    expendable = (SINGLE, "within", "false verdicts", "noise floor", "spread")
    lines = [_caption(found), *_budget(found)]
    shown = table("", cells, ("metric",), expendable=expendable)
    return Document(_headline(found), [shown, Paragraph(lines, "quiet")], context="gpubench compare --null")


def _headline(noise: Noise) -> str:
    leading = _leading_metric(noise.metrics)
    if leading is None:
        return "no noise known: no metric was measured often enough"
    runs = units.counted(len(noise.runs), "run")
    whose = runs if leading.level == "run" else f"{units.counted(leading.units, 'repeat')} of {runs}"
    sentence = f"{whose}: {words(leading.metric)} varies by"
    sentence += f" {units.percent(leading.spread)} where nothing was changed"
    resolvable = _resolvable(leading)
    if resolvable is None:
        return sentence
    enough = f"{units.counted(leading.per_side, leading.level)} a side"
    return f"{sentence}; {enough} resolve a change of {resolvable}"


def _resolvable(one: NullMetric) -> str | None:
    """Returns the resolvable change with its range, as "2 % [1.2, 4.5]"; None if it is unknown."""
    if one.resolvable is None:
        return None
    text = units.difference(one.resolvable)
    if one.resolvable_range is None:
        return text
    low, high = (units.difference(end).removesuffix(" %") for end in one.resolvable_range)
    return f"{text} [{low}, {high}]"


def _caption(noise: Noise) -> str:
    leading = _leading_metric(noise.metrics)
    unit = leading.level if leading else "repeat"
    said = [
        f"spread: standard deviation between {unit}s",
        f"within: standard error of one {unit} by its steps",
        f"noise floor: the difference between two equal {unit}s that 95 % of them stay below",
    ]
    if leading and leading.splits:
        said.append(
            f"false verdicts: random halves of equal {unit}s, {leading.per_side} against {leading.per_side}, that were "
            f"called different at a margin of {units.percent(noise.margin)}"
        )
    if leading and leading.single_splits:
        said.append(f"{SINGLE}: pairs of equal {unit}s that were called different by their steps alone")
    return "; ".join([*said, RESOLVABLE])


def _budget(noise: Noise) -> list[str]:
    """Returns how many runs or repeats a side are needed to resolve changes of the leading metric."""
    leading = _leading_metric(noise.metrics)
    if leading is None:
        return []
    prices = [f"{units.percent(change)}: {_price(leading, change, noise.margin)}" for change in CHANGES]
    return [f"to resolve a change of {words(leading.metric)} by {', '.join(prices)}"]


def _price(metric: NullMetric, change: float, margin: float) -> str:
    """Returns the runs or repeats that a change needs, with their range, as "7 repeats a side [3, 20]"."""
    if change <= margin:
        return "within the margin"
    known = metric.spread, metric.units - 1, margin
    low, high = power.repeats_range(change, *known)
    needed = power.repeats_for(change, *known)
    if low is None:
        return "out of reach"
    if needed is None:
        return f"{low} {metric.level}s a side or many more"
    return f"{units.counted(needed, metric.level)} a side [{low}, {high or f'over {MOST_REPEATS:,}'}]"


def _leading_metric(metrics: Sequence[NullMetric]) -> NullMetric | None:
    return next((one for name in LEADERS for one in metrics if one.metric == name), next(iter(metrics), None))


def _of_splits(share: float | None, splits: int) -> str:
    return "-" if share is None else f"{units.percent(share)} of {splits}"
