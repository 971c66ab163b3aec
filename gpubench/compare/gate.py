"""The gate: tests whether a metric got worse by more than a tolerated limit.

Every condition is tested for every metric that it names and for every candidate. "regressed" means that the worsening
is larger than the limit, and "passed" that it is smaller. Both are one-sided tests of Student's t on the logarithm of
the ratio at 2.5 %, so that a single condition agrees with the 95 % interval. With several conditions, Holm's correction
applies to the p-values of each claim over the whole gate: the probability that a gate regresses without cause, or that
any "passed" is wrong, stays below 2.5 %. If neither claim holds, the result is inconclusive.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType

from gpubench.compare.comparability import PER_DEVICE
from gpubench.compare.intervals import SIGNIFICANT, Ratio, holm, two_sided
from gpubench.compare.result import GateResult, Verdict
from gpubench.compare.verdicts import Judged
from gpubench.errors import UsageError, alike, did_you_mean, one_of
from gpubench.metrics import DEFINITIONS, LATENCIES
from gpubench.runs.stats import least_values

METRICS_SHOWN_BY = "gpubench runs --json shows the metrics of every run"
EXAMPLE = 'such as --fail-on "step_time>2%"'

_PERCENT = re.compile(r"([0-9]+(?:\.[0-9]+)?) *%|0")
_ALMOST = re.compile(r"([A-Za-z]\w*)(?:[ <>=]+([0-9]+(?:\.[0-9]+)?) *%?)?")
_CONDITION = re.compile(r"([^<>=]+)>([^<>=]+)")


@dataclass(frozen=True)
class Condition:
    text: str
    """The condition as the user wrote it."""
    metric: str
    """A metric's name, or a pattern with * ? and []."""
    limit: float
    """The tolerated worsening, as a fraction."""

    def names(self, metric: str) -> bool:
        """Tells whether the condition names the metric. A figure per device also matches its undivided name."""
        names = (metric, metric.removesuffix(PER_DEVICE))
        return self.metric in names or any(fnmatchcase(name, self.metric) for name in names)


@dataclass(frozen=True)
class _Trial:
    """One condition for one metric of one candidate, before the correction over the gate."""

    condition: Condition
    candidate: str
    verdict: Verdict
    limit: float
    worsening: float | None
    beyond: float | None
    """The p-value of "the worsening is larger than the limit"; None if it is unknown."""
    within: float | None
    """The p-value of "the worsening is smaller than the limit"; None if it is unknown."""


def percent(text: str) -> float | None:
    """Returns "0.5%", "0.5 %" or a plain 0 as a fraction; None for any other text, such as a number without %."""
    found = _PERCENT.fullmatch(text.strip())
    return float(found[1] or 0) / 100 if found else None


def parse_condition(text: str) -> Condition:
    """Parses "METRIC>X%". Raises UsageError for any other text."""
    parts = _CONDITION.fullmatch(text)
    if parts is None or not (metric := parts[1].strip()):
        raise UsageError(f"--fail-on {text!r} is not METRIC>X%", _condition_like(text))
    limit = percent(parts[2])
    if limit is None:
        raise UsageError(f"--fail-on {text!r}: {parts[2].strip()!r} is not a percentage", _condition_like(text))
    return Condition(text, metric, limit)


def refuse_undefined(condition: Condition) -> None:
    """Raises UsageError for a condition that no measurement can decide, so that it is refused before one begins.

    A name that begins with "phase_" may be that of a program's own phase.
    """
    if condition.metric.startswith("phase_"):
        return
    named = {name: one.better for name, one in DEFINITIONS.items() if condition.names(name)}
    if not named:
        near = did_you_mean(condition.metric.replace(" ", "_"), DEFINITIONS, most=3, cutoff=0.5)
        raise UsageError(f"--fail-on {condition.text!r} names no metric", near or EXAMPLE)
    directed = {name: better for name, better in named.items() if better}
    if not directed:
        raise _undirected(condition, next(iter(named)))
    if condition.limit >= 1 and set(directed.values()) == {"higher"}:
        raise _impossible(condition, next(iter(directed)))


def _undirected(condition: Condition, metric: str) -> UsageError:
    return UsageError(
        f"--fail-on {condition.text!r}: neither more nor less of {metric} is worse",
        f"name a metric with a better and a worse, {EXAMPLE}",
    )


def _impossible(condition: Condition, metric: str) -> UsageError:
    return UsageError(f"--fail-on {condition.text!r} can never fail: {metric} loses 100 % at most", EXAMPLE)


def _condition_like(text: str) -> str:
    """Returns a hint with the condition that a text may have been meant as."""
    found = _ALMOST.fullmatch(text.strip())
    if found is None:
        return EXAMPLE
    own = found[1] in DEFINITIONS or found[1].startswith("phase_")
    near = [found[1]] if own else alike(found[1], DEFINITIONS, cutoff=0.75)
    return f'did you mean --fail-on "{near[0]}>{found[2] or 2}%"?' if near else EXAMPLE


class Withheld(UsageError):
    """A condition names a metric whose verdict is withheld, so that it tests nothing."""


def judge(
    conditions: Sequence[Condition],
    candidates: Sequence[tuple[str, Sequence[Judged]]],
    refused: Mapping[str, str] = MappingProxyType({}),
) -> list[GateResult]:
    """Returns the result of every condition for every candidate, in this order.

    `candidates` has the label and the judged metrics of each, and `refused` by label why one did not do the work of the
    baseline: it fails every condition. Raises UsageError if a condition names no metric, none that can get
    worse, or one whose verdict is withheld: a gate that tests nothing must not pass. A candidate with a rejected
    verdict does not pass either.
    """
    trials = [
        _try(condition, candidate, one)
        for condition in conditions
        for candidate, judged in candidates
        for one in _named(condition, candidate, judged)
    ]
    if conditions and not trials:
        raise UsageError(f"--fail-on {conditions[0].text!r}: there is no candidate to judge", "give a candidate too")
    beyond, within = _corrected([trial.beyond for trial in trials]), _corrected([trial.within for trial in trials])
    rejected = {
        name: f"rejected, {one.verdict.reason}"
        for name, judged in candidates
        for one in judged
        if one.verdict.verdict == "rejected"
    }
    return [
        _result(trial, above, below, rejected.get(trial.candidate), refused.get(trial.candidate))
        for trial, above, below in zip(trials, beyond, within, strict=True)
    ]


def _corrected(p_values: Sequence[float | None]) -> list[float | None]:
    """Applies Holm's correction to the known p-values."""
    known = iter(holm([p for p in p_values if p is not None]))
    return [None if p is None else next(known) for p in p_values]


def _named(condition: Condition, candidate: str, judged: Sequence[Judged]) -> list[Judged]:
    """Returns the metrics that the condition names, at least one.

    A pattern skips metrics without a better direction.
    """
    named = [one for one in judged if condition.names(one.verdict.metric)]
    if not named:
        metrics = [one.verdict.metric for one in judged]
        said = f"--fail-on {condition.text!r}"
        raise absent(said, condition.metric, f"that was compared for {candidate}", metrics)
    directed = [one for one in named if one.verdict.better]
    if not directed:
        raise _undirected(condition, named[0].verdict.metric)
    for one in directed:
        _refuse_the_untestable(condition, candidate, one.verdict)
    return directed


def _refuse_the_untestable(condition: Condition, candidate: str, verdict: Verdict) -> None:
    if verdict.verdict == "withheld":
        reason = f": {verdict.reason}" if verdict.reason else ""
        raise Withheld(
            f"--fail-on {condition.text!r}: the verdict on {verdict.metric} of {candidate} is withheld{reason}",
            "compare runs of the same workload",
        )
    if verdict.better == "higher" and condition.limit >= 1:
        raise _impossible(condition, verdict.metric)
    if verdict.baseline == 0 != verdict.candidate:
        raise UsageError(
            f"--fail-on {condition.text!r}: {verdict.metric} is 0 in the baseline, and no percentage of 0 is a limit",
            f"{candidate} has {verdict.candidate:g}",
        )


def absent(said: str, wanted: str, which: str, names: Sequence[str]) -> UsageError:
    """Returns the error for a metric that is not among `names`; `which` says of which metrics these are the names.

    A name that is none is told from that of a metric that these runs do not have.
    """
    near = one_of(wanted, names, METRICS_SHOWN_BY, cutoff=0.5)
    if wanted not in DEFINITIONS:
        return UsageError(f"{said} names no metric {which}", near)
    if share := LATENCIES.get(wanted):
        least = f"{least_values(share)} steps or more in each repeat"
        near = f"{wanted} is measured with --inference, and needs {least}: --steps {least_values(share)}"
    return UsageError(f"{said}: {wanted} is a metric, but none {which}", near)


def _try(condition: Condition, candidate: str, judged: Judged) -> _Trial:
    verdict = judged.verdict
    floor = verdict.limit if verdict.limit > verdict.margin else 0.0
    limit = max(condition.limit, floor)
    worsening, beyond, within = _test(verdict, judged.ratio, limit)
    # If the noise floor is above the limit, the condition can fail but cannot pass.
    return _Trial(condition, candidate, verdict, limit, worsening, beyond, within if limit == condition.limit else None)


def _test(verdict: Verdict, ratio: Ratio | None, limit: float) -> tuple[float | None, float | None, float | None]:
    """Returns the worsening, and the p-values of "larger than the limit" and "smaller than the limit".

    The worsening is None if it is too noisy to say anything.
    """
    if verdict.ratio is None and ratio is None:  # 0 on both sides, in every repeat
        return 0.0, 1.0, 0.0
    sign = 1 if verdict.better == "lower" else -1
    worsening = None if verdict.ratio is None else sign * (verdict.ratio - 1)
    if ratio is None:
        return worsening, None, None
    if ratio.error.size == 0 and not ratio.bias and worsening is not None:
        return (worsening, 0.0, 1.0) if worsening > limit else (worsening, 1.0, 0.0)
    edge = math.log1p(sign * limit) if sign * limit > -1 else -math.inf
    above, below = ratio.above(edge), ratio.below(edge)
    return (worsening, above, below) if sign > 0 else (worsening, below, above)


def _result(
    trial: _Trial, beyond: float | None, within: float | None, rejected: str | None, refused: str | None
) -> GateResult:
    told = trial.limit > trial.condition.limit or trial.verdict.too_noisy
    reason = refused or rejected or (trial.verdict.reason if told else None)
    regressed = beyond is not None and beyond < SIGNIFICANT
    passed = within is not None and within < SIGNIFICANT and not rejected
    return GateResult(
        condition=trial.condition.text,
        metric=trial.verdict.metric,
        candidate=trial.candidate,
        limit=trial.limit,
        worsening=trial.worsening,
        interval=_worsening_interval(trial.verdict),
        p_value=two_sided(within if passed else beyond),
        outcome="refused" if refused else "regressed" if regressed else "passed" if passed else "inconclusive",
        reason=None if (regressed or passed) and not refused else reason,
    )


def _worsening_interval(verdict: Verdict) -> tuple[float, float] | None:
    if verdict.interval is None:
        return None
    low, high = verdict.interval
    return (low - 1, high - 1) if verdict.better == "lower" else (1 - high, 1 - low)
