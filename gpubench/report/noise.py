"""The report of `compare --null`: how much a workload varies on this machine, and which changes can be found."""

from collections.abc import Sequence

from gpubench import units
from gpubench.compare import power
from gpubench.compare.result import Noise, NullMetric
from gpubench.metrics import LEADERS
from gpubench.report.document import Document, Paragraph, table
from gpubench.report.phrases import left_out_as_warmup
from gpubench.text import words

CHANGES = (0.01, 0.02, 0.05)  # changes for which the needed repeats are given
MOST_PRACTICAL = 100  # runs or repeats a side; nobody makes more
RESOLVABLE = (
    "resolvable: the change that new measurements find with 80 % probability, and in brackets its 95 % range, "
    "because the spread is an estimate"
)


def document(found: Noise) -> Document:
    """Returns the report of `compare --null`: how much this workload varies, and which changes are resolvable."""
    if not found.metrics:
        return Document(_headline(found), [])
    cells = [
        {
            "metric": words(one.metric),
            "spread": units.percent(one.spread),
            "within": "-" if one.within is None else units.percent(one.within),
            "noise floor": "-" if one.noise_floor is None else units.percent(one.noise_floor),
            "resolvable": _resolvable(one) or "-",
        }
        for one in found.metrics
    ]
    shown = table("", cells, ("metric",), expendable=("within", "noise floor", "spread"))
    leading = _leading_metric(found.metrics)
    first = [_measured(found, leading), *_budget(leading, found.margin)] if leading else []
    blocks = [Paragraph(first), shown, Paragraph([_caption(found), left_out_as_warmup(found.warmup)], "quiet")]
    return Document(_headline(found), blocks, context="gpubench compare --null")


def _headline(noise: Noise) -> str:
    leading = _leading_metric(noise.metrics)
    if leading is None:
        return "no noise known: no metric was measured often enough"
    name, enough = words(leading.metric), f"{units.counted(leading.per_side, leading.level)} a side"
    if leading.resolvable is None:
        return f"on this machine, expect to see no change of {name} by less than a factor of two with {enough}"
    return f"on this machine, expect to see changes of {name} above {units.percent(leading.resolvable)} with {enough}"


def _measured(noise: Noise, leading: NullMetric) -> str:
    """Returns what the noise was learned from, and how large it is."""
    runs = units.counted(len(noise.runs), "run")
    whose = runs if leading.level == "run" else f"{units.counted(leading.units, 'repeat')} of {runs}"
    spread = f"{units.percent(leading.spread)} (standard deviation)"
    return f"{whose} without a change differ in {words(leading.metric)} by {spread}"


def _resolvable(one: NullMetric) -> str | None:
    """Returns the resolvable change with its range, as "2 % [1.2, 4.5]"; None if it is unknown."""
    if one.resolvable is None:
        return None
    text = units.percent(one.resolvable)
    if one.resolvable_range is None:
        return text
    low, high = (units.percent(end).removesuffix(" %") for end in one.resolvable_range)
    return f"{text} [{low}, {high}]"


def _caption(noise: Noise) -> str:
    leading = _leading_metric(noise.metrics)
    unit = leading.level if leading else "repeat"
    said = [
        f"spread: standard deviation between {unit}s",
        f"within: standard error of one {unit} by its steps",
        f"noise floor: the difference between two equal {unit}s that 95 % of them stay below",
    ]
    return "; ".join([*said, RESOLVABLE])


def _budget(leading: NullMetric, margin: float) -> list[str]:
    """Returns how many runs or repeats a side find small changes of the leading metric; [] if none is within reach."""
    prices = [(change, _price(leading, change, margin)) for change in CHANGES if change > margin]
    found = [f"{units.percent(change)} takes {price}" for change, price in prices if price]
    return [f"to find a change of {units.listed(found)}"] if found else []


def _price(metric: NullMetric, change: float, margin: float) -> str:
    """Returns the runs or repeats that a change needs, with their range, as "7 repeats a side [3, 20]".

    Returns "" where they are more than anybody makes.
    """
    known = metric.spread, metric.units - 1, margin
    needed, (low, high) = power.repeats_for(change, *known), power.repeats_range(change, *known)
    if needed is None or low is None or needed > MOST_PRACTICAL:
        return ""
    most = high if high and high <= MOST_PRACTICAL else f"over {MOST_PRACTICAL}"
    return f"{units.counted(needed, metric.level)} a side [{low}, {most}]"


def _leading_metric(metrics: Sequence[NullMetric]) -> NullMetric | None:
    return next((one for name in LEADERS for one in metrics if one.metric == name), next(iter(metrics), None))
