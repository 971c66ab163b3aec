"""The runs of a results folder over time: which belong together, where their level changed, and what changed there."""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
from msgspec import Struct

from gpubench import units
from gpubench.compare import changepoints, comparability, gate, power, sameness
from gpubench.compare.changepoints import FEWEST, ChangePoint, Floats
from gpubench.compare.evidence import Side, open_run
from gpubench.compare.gate import Condition
from gpubench.compare.intervals import CONFIDENCE, SIGNIFICANT, holm, two_sided
from gpubench.compare.result import Difference, GateResult, Sameness
from gpubench.compare.verdicts import DEFAULT_MARGIN
from gpubench.distributions import student_t_quantile
from gpubench.errors import GpubenchError, UsageError, one_of
from gpubench.metrics import DEFINITIONS, LEADERS, Better
from gpubench.registry import kind_of
from gpubench.runs import directory
from gpubench.runs.directory import COMPLETED
from gpubench.runs.entries import Entry
from gpubench.runs.references import RESULTS
from gpubench.settings.keys import MACHINE, VARIABLES, assignment, is_empty
from gpubench.settings.roles import ROLES

LARGEST_LOGARITHM = 700.0
NORMAL = 1.96  # half the width of a 95 % interval, in standard deviations
VISIBLE, OF_FEW = 4.0, 20.0
"""VISIBLE + OF_FEW / n times the noise that n runs show is the change that is found in nine of ten series once FEWEST
more runs were made. docs/decisions.md has the simulations."""
WANDERING = 0.4
"""The level counts as wandering if runs correlate with the ones before by more than this."""
UNSTEADY = 2.5
"""The factor on the change that is found in a series whose level wanders."""
LONG = 10
"""The least number of runs whose correlation is estimated."""
NAMED = 3  # settings that tell series of one workload apart
OF_CODE = ("git.commit", "git.subject", "git.dirty", "git.branch", "packages.gpubench")
VERSIONS = ("packages.", "cuda", "driver", "python", "cudnn", "nccl")
"""The beginnings of the facts of versions, which are named before other facts of the environment."""


class SeriesPoint(Struct, frozen=True):
    """A run of a series."""

    run_id: str
    path: str
    name: str | None
    started: str
    commit: str | None
    dirty: bool | None
    estimate: float
    interval: tuple[float, float] | None


class LevelChange(Struct, frozen=True):
    """A change of the level between two runs that follow each other."""

    index: int
    """The place of the first run after the change."""
    before: str
    """The id of the last run before the change; `after` is that of the first one after it."""
    after: str
    started: str
    """When the first run after the change was started."""
    earliest: int
    """The change lies, with 95 %, before one of the runs from `earliest` to `latest`."""
    latest: int
    ratio: float
    """The level after the change over that before it."""
    interval: tuple[float, float]
    """The 95 % interval of the ratio."""
    probability: float
    """Of a change beyond the margin that is not one of the machine, an outlier, or noise."""
    outcome: Literal["better", "worse", "other"]
    cause: Literal["code", "machine"]
    """"machine" if the reference workload changed with it."""
    differences: list[Difference]
    """What changed between the runs around the interval of the place, the code and the settings first."""
    command: str
    """The command that compares both sides."""
    sameness: Sameness | None = None
    """What was found about the work, the losses and the clocks of these runs; None if one of them cannot be read.

    Where they did not do the same work, the change is neither better nor worse.
    """


class Series(Struct, frozen=True):
    """The runs of one workload in order of time."""

    workload: str
    metric: str
    unit: str
    better: Better | None
    points: list[SeriesPoint]
    changes: list[LevelChange]
    noise: float | None
    """The standard deviation between runs of one level, as a fraction; None for too few runs."""
    visible: float | None
    """The change that would be found in nine of ten such series once three runs were made after it, as a fraction.

    None for too few runs, or above 100 %.
    """
    correlation: float | None
    """The correlation of a run with the one before, around the levels between changes; None for fewer than ten runs."""
    wanders: bool
    """Whether that correlation is so large that only changes much larger than the noise are told from it."""
    varied: list[str]
    """What tells this series from another one of its workload, as "precision=bf16" or "node3"."""


class Histories(Struct, frozen=True):
    """The complete result of `gpubench history`: the series with the newest run first."""

    schema_version: int
    confidence: float
    margin: float
    series: list[Series]
    gate: list[GateResult]


@dataclass
class _Workload:
    """Runs that did the same work on the same device, in order of time."""

    facts: dict[str, Any]
    runs: list[Entry] = field(default_factory=list)


def histories(
    entries: Sequence[Entry],
    metric: str | None = None,
    *,
    margin: float = DEFAULT_MARGIN,
    conditions: Sequence[Condition] = (),
) -> Histories:
    """Returns the history of a metric, by default of the main metric of each workload.

    Raises UsageError if no run has the metric, or if a condition names no metric that can get worse.
    """
    measured = [entry for entry in entries if entry.measured and entry.record.status == COMPLETED]
    known = list(dict.fromkeys(name for entry in measured for name in entry.metrics))
    if metric is not None and metric not in (known or DEFINITIONS):
        main = (
            [*(name for name in LEADERS if name in known), *known]
            if known
            else ["throughput", "step_time", *DEFINITIONS]
        )
        raise UsageError(f"no run has a metric {metric!r}", one_of(metric, dict.fromkeys(main), gate.METRICS_SHOWN_BY))
    groups = [group for workload in _workloads(_in_order(measured)) for group in _chains(workload)]
    found = [one for group in groups if (one := _series(group, metric or _main(group.runs), margin))]
    return Histories(
        schema_version=directory.SCHEMA_VERSION,
        confidence=CONFIDENCE,
        margin=margin,
        series=sorted(found, key=lambda one: one.points[-1].started, reverse=True),
        gate=_gate(conditions, groups, known, margin),
    )


def workload_of(entry: Entry) -> str:
    """Returns the workload of a run in one line."""
    settings, ranks = entry.settings, entry.record.world_size
    if not settings:
        return f"{entry.record.command} of {entry.model}"
    known = {"model": entry.model, "device": settings.get("device")}
    return kind_of(entry.record.command).describe(settings, known, ranks=ranks)


@dataclass
class _SeriesRuns:
    """The runs of a series."""

    runs: list[Entry]
    varied: list[str]
    """The settings, and the machine, in which its newest run differs from that of another series of the workload."""


def _in_order(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda one: (one.record.started, one.run_id))


def _chains(workload: _Workload) -> list[_SeriesRuns]:
    """Returns the runs that are one series each, in order of time.

    All runs of a series were asked for in the same way: with the same settings, commit and environment variables. What
    the program decides itself, as by its code, and the machine may change within a series, but only for good: runs of
    several variants that take turns are several series, because the difference between them would hide a change of all.
    If the code is the same, another value comes from elsewhere, and begins another series.
    """
    asked: list[tuple[dict[str, Any], list[Entry]]] = []
    for entry in workload.runs:
        own = _asked(entry)
        runs = next((runs for known, runs in asked if all(known.get(key, own[key]) == own[key] for key in own)), None)
        if runs is None:
            asked.append((own, runs := []))
        runs.append(entry)
    of_asked = _varied([own for own, _ in asked])
    found = []
    for own, runs in asked:
        chains = _continued(runs)
        decided = [_decided(chain[-1]) for chain in chains]
        of_decided = _varied(decided)
        for chain, known in zip(chains, decided, strict=True):
            told = [(key, own.get(key)) for key in of_asked] + [(key, known.get(key)) for key in of_decided]
            words = [assignment(key, value) for key, value in told if not is_empty(value)]
            found.append(_SeriesRuns(chain, words[:NAMED]))
    return found


def _varied(facts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the keys whose values differ."""
    keys = dict.fromkeys(key for each in facts for key in each)
    return [key for key in keys if len({str(each.get(key)) for each in facts}) > 1]


def _continued(runs: Sequence[Entry]) -> list[list[Entry]]:
    """Splits runs that were asked for in the same way by what was decided elsewhere, unless that changed for good."""
    variants: dict[str, list[Entry]] = {}
    for entry in runs:
        variants.setdefault(repr(sorted(_decided(entry).items(), key=str)), []).append(entry)
    chains: list[list[Entry]] = []
    for variant in variants.values():
        place = runs.index(variant[0])
        before = next((chain for chain in chains if place and chain[-1] is runs[place - 1]), None)
        if before and _may_continue(before[-1], variant[0]):
            before.extend(variant)
        else:
            chains.append(variant)
    return chains


def _may_continue(before: Entry, after: Entry) -> bool:
    """Tells whether the code, or another machine, can explain what differs between two runs."""
    ours, theirs = _decided(before), _decided(after)
    if all(ours.get(key) == theirs.get(key) for key in ours | theirs if key != MACHINE):
        return True
    code = [(entry.record.git or {}).get("commit") for entry in (before, after)]
    dirty = any((entry.record.git or {"dirty": True}).get("dirty") for entry in (before, after))
    return dirty or code[0] != code[1]


def _workloads(entries: Iterable[Entry]) -> list[_Workload]:
    """Groups runs by their work. A fact that a run lacks, as one of an older gpubench may, does not count."""
    found: list[_Workload] = []
    known: dict[str, _Workload] = {}
    for entry in entries:
        facts = _work(entry)
        text = repr(sorted(facts.items(), key=str))
        if text not in known:
            fitting = (one for one in found if all(one.facts.get(key, fact) == fact for key, fact in facts.items()))
            known[text] = next(fitting, None) or _Workload(facts)
            if known[text] not in found:
                found.append(known[text])
        known[text].runs.append(entry)
    return found


def _work(entry: Entry) -> dict[str, Any]:
    """Returns the facts in which runs of one workload agree."""
    facts = {
        key: value for key, value in entry.settings.items() if _role(key) in ("workload", "scale") and value is not None
    }
    facts |= {key: entry.settings[key] for key in ("program.command", "device") if key in entry.settings}
    kind = kind_of(entry.record.command)
    command = kind.work if kind.timed else kind.command
    return facts | {"command": command, "device name": entry.device, "ranks": entry.record.world_size}


def _asked(entry: Entry) -> dict[str, Any]:
    """Returns what the user asked of a run, besides its workload; None for what was left to gpubench or the program."""
    found = {key: None if key in entry.left_open else value for key, value in _treatments(entry).items()}
    known = entry.variables
    return found | ({} if known is None else {name: known.get(name) for name in VARIABLES})


def _decided(entry: Entry) -> dict[str, Any]:
    """Returns the name of the machine, and the settings that gpubench or the program decided."""
    found = {key: value for key, value in _treatments(entry).items() if key in entry.left_open}
    return found | ({MACHINE: entry.record.host} if entry.record.host else {})


def _treatments(entry: Entry) -> dict[str, Any]:
    return {key: value for key, value in entry.settings.items() if _role(key) == "treatment" and key != "seed"}


@cache
def _role(key: str) -> str:
    found = ROLES.get(key) or ROLES.get(key.rpartition(".")[0])
    return found.role if found else "uncompared"


def _main(entries: Sequence[Entry]) -> str:
    known = entries[-1].metrics
    return next((name for name in LEADERS if name in known), next(iter(known)))


def _series(chain: _SeriesRuns, metric: str, margin: float) -> Series | None:
    """Returns the history of one metric; None if no run has a positive value of it."""
    runs = [entry for entry in chain.runs if metric in entry.metrics and 0 < entry.metrics[metric].estimate < math.inf]
    if not runs:
        return None
    figure = runs[-1].metrics[metric]
    sign = -1.0 if figure.better == "higher" else 1.0
    values = sign * np.log([entry.metrics[metric].estimate for entry in runs])
    timed = figure.unit == "s" or figure.unit.endswith("/s")
    reference = _reference(runs) if timed else None
    days = [entry.record.started[:10] for entry in runs]
    found = changepoints.find(
        values, days=days, errors=_errors(runs, metric), reference=reference, margin=math.log1p(margin)
    )
    noise, correlation = _noise(values, found), _correlation(values, found)
    wanders = correlation is not None and correlation > WANDERING
    visible = (VISIBLE + OF_FEW / len(values)) * (UNSTEADY if wanders else 1.0)
    return Series(
        workload=workload_of(runs[-1]),
        metric=metric,
        unit=figure.unit,
        better=figure.better,
        points=[_point(entry, metric) for entry in runs],
        changes=[_change(one, runs, sign, figure.better) for one in found],
        noise=noise,
        visible=None if noise is None else power.telling(max(margin, math.expm1(_bounded(visible * noise)))),
        correlation=correlation,
        wanders=wanders,
        varied=chain.varied,
    )


def _point(entry: Entry, metric: str) -> SeriesPoint:
    figure, git = entry.metrics[metric], entry.record.git or {}
    interval = None if figure.low is None or figure.high is None else (figure.low, figure.high)
    return SeriesPoint(
        run_id=entry.run_id,
        path=entry.folder,
        name=entry.name,
        started=entry.record.started,
        commit=git.get("commit"),
        dirty=git.get("dirty"),
        estimate=figure.estimate,
        interval=interval,
    )


def _reference(runs: Sequence[Entry]) -> Floats | None:
    """Returns the logarithms of the times of the reference workload; None if a run lacks it."""
    rates = [entry.reference for entry in runs]
    known = [rate for rate in rates if rate]
    return -np.log(known) if len(known) == len(runs) else None


def _errors(runs: Sequence[Entry], metric: str) -> Floats:
    """Returns the standard errors of the logarithms, NaN where fewer than three repeats leave them unknown."""
    found = []
    for entry in runs:
        _, low, high, _, _ = entry.metrics[metric]
        repeats = entry.settings.get("measurement.repeats")
        if low and high and 0 < low < high and isinstance(repeats, int) and repeats > 2:
            found.append(math.log(high / low) / 2 / -student_t_quantile(repeats - 1, SIGNIFICANT))
        else:
            found.append(math.nan)
    return np.array(found)


def _noise(values: Floats, found: Sequence[ChangePoint]) -> float | None:
    """Returns the standard deviation between runs of one level, without outliers and slow drift."""
    if len(values) < 2 * FEWEST:
        return None
    parts = np.split(values, [one.index for one in found])
    steps = np.concatenate([np.diff(part) for part in parts])
    return float(1.4826 * np.median(np.abs(steps)) / math.sqrt(2)) if len(steps) else None


def _correlation(values: Floats, found: Sequence[ChangePoint]) -> float | None:
    """Returns the correlation of a run with the one before, around their level, with little weight for outliers."""
    if len(values) < LONG:
        return None
    parts = [part - np.median(part) for part in np.split(values, [one.index for one in found])]
    usual = 1.4826 * np.median(np.abs(np.concatenate(parts)))
    parts = [np.clip(part, -2 * usual, 2 * usual) for part in parts]
    squares = float(sum(part @ part for part in parts))
    return float(sum(part[1:] @ part[:-1] for part in parts)) / squares if squares else None


def _change(one: ChangePoint, runs: Sequence[Entry], sign: float, better: Better | None) -> LevelChange:
    before, after = runs[one.index - 1], runs[one.index]
    differences, same = _between(runs[one.first - 1], runs[one.last])
    undecidable = same.undecidable if same else None
    better = None if undecidable else better
    ends = [math.exp(_bounded(sign * (one.change + side * one.half_width))) for side in (-1, 1)]
    return LevelChange(
        index=one.index,
        before=before.run_id,
        after=after.run_id,
        started=after.record.started,
        earliest=one.first,
        latest=one.last,
        ratio=math.exp(_bounded(sign * one.change)),
        interval=(min(ends), max(ends)),
        probability=one.probability,
        outcome="other" if better is None else "worse" if one.change > 0 else "better",
        cause=one.cause,
        differences=differences,
        sameness=same,
        command=_command(before, after),
    )


def _bounded(logarithm: float) -> float:
    """Returns a logarithm whose ratio is a number, also where absurd figures are compared."""
    return min(max(logarithm, -LARGEST_LOGARITHM), LARGEST_LOGARITHM)


def _command(before: Entry, after: Entry) -> str:
    """Returns the command that compares two runs. Those of the usual folder are found by their ids."""
    if all(entry.path.parts[:-2] == (RESULTS,) for entry in (before, after)):
        return f"gpubench compare {before.run_id} {after.run_id}"
    return f"gpubench compare {shlex.quote(before.folder)} {shlex.quote(after.folder)}"


def _between(before: Entry, after: Entry) -> tuple[list[Difference], Sameness | None]:
    """Returns what differs between two runs, without how long they were measured, and whether they did the same work.

    The latter is None if one of them cannot be read now.
    """
    try:
        ours, theirs = (Side(entry.run_id, (open_run(entry.path),)) for entry in (before, after))
        comparable = comparability.judge(ours, theirs)
        same = sameness.judge(ours, theirs, comparable)
    except GpubenchError:
        return [], None
    found = [one for one in comparable.differences if one.kind != "protocol" and not one.follows]
    return sorted(found, key=_importance), same


def _importance(difference: Difference) -> tuple[int, str]:
    key = difference.key
    if key in OF_CODE:
        return OF_CODE.index(key) // 2 * 2, key
    if key in ROLES:
        return 1, key
    return (3 if key.startswith(VERSIONS) or key.startswith("host.") else 4), key


def _gate(
    conditions: Sequence[Condition], groups: Sequence[_SeriesRuns], known: Sequence[str], margin: float
) -> list[GateResult]:
    """Judges whether the level now is worse than any earlier one, apart from what the machine has changed.

    With several conditions or series, Holm's correction applies to both claims, as in `gpubench compare`.
    """
    trials = []
    for condition in conditions:
        named = [name for name in known if condition.names(name)]
        if not named:
            raise gate.absent(f"--fail-on {condition.text!r}", condition.metric, "of these runs", known)
        found = [one for group in groups for name in named if (one := _series(group, name, margin)) and one.better]
        if not found:
            raise UsageError(
                f"--fail-on {condition.text!r}: neither more nor less of {named[0]} is worse",
                f"name a metric with a better and a worse, {gate.EXAMPLE}",
            )
        trials += [(condition, one, *_worsening(one)) for one in found]
    beyond = holm([_above(worse - _log(condition, one), error) for condition, one, worse, error in trials])
    within = holm([_above(_log(condition, one) - worse, error) for condition, one, worse, error in trials])
    return [
        _judged(condition, one, worse, error, p_beyond, p_within)
        for (condition, one, worse, error), p_beyond, p_within in zip(trials, beyond, within, strict=True)
    ]


def _worsening(one: Series) -> tuple[float, float]:
    """Returns how much worse the level is now than the best earlier one, as a logarithm, with its standard error."""
    sign = -1.0 if one.better == "higher" else 1.0
    worst, worst_error, total, variance = 0.0, 0.0, 0.0, 0.0
    for change in reversed([change for change in one.changes if change.cause == "code"]):
        low, high = change.interval
        total += sign * math.log(change.ratio)
        variance += (math.log(high / low) / 2 / NORMAL) ** 2
        if total > worst:
            worst, worst_error = total, math.sqrt(variance)
    return worst, worst_error


def _log(condition: Condition, one: Series) -> float:
    """Returns the limit as a logarithm of a time: a rate that is 2 % lower is a time that is 2.04 % longer."""
    return -math.log1p(-min(condition.limit, 0.999)) if one.better == "higher" else math.log1p(condition.limit)


def _above(distance: float, error: float) -> float:
    """Returns the one-sided p-value of "above", which is certain if nothing changed and no error is known."""
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return math.erfc(distance / error / math.sqrt(2)) / 2


def _judged(
    condition: Condition, one: Series, worse: float, error: float, p_beyond: float, p_within: float
) -> GateResult:
    sign = -1.0 if one.better == "higher" else 1.0
    reason = None
    if one.noise is None:
        reason = f"{units.counted(len(one.points), 'run')}: a history needs {2 * FEWEST}"
    elif not worse and (one.visible is None or one.visible > condition.limit):
        seen = "no change is" if one.visible is None else f"only changes above {units.percent(one.visible)} are"
        reason = f"runs differ by {units.difference(one.noise)}: {seen} visible"
    regressed = p_beyond < SIGNIFICANT
    passed = p_within < SIGNIFICANT and reason is None
    ends = [abs(math.expm1(_bounded(sign * (worse + side * NORMAL * error)))) for side in (-1, 1)]
    return GateResult(
        condition=condition.text,
        metric=one.metric,
        candidate=one.workload,
        limit=condition.limit,
        worsening=None if reason and not worse else abs(math.expm1(_bounded(sign * worse))),
        interval=(min(ends), max(ends)) if error else None,
        p_value=two_sided(p_within if passed else p_beyond),
        outcome="regressed" if regressed else "passed" if passed else "inconclusive",
        reason=None if regressed or passed else reason,
    )
