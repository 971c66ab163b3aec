"""One self-contained page: a comparison, or a run beside the one before it. Opens offline; nothing in it is loaded."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from gpubench import units
from gpubench.comparison.causes import diagnosis
from gpubench.comparison.evidence import RunEvidence, Side
from gpubench.comparison.result import Causes, Comparison, Comparisons, Verdict
from gpubench.comparison.verdicts import leading
from gpubench.metrics import DEFINITIONS, Metric
from gpubench.report import (
    causing,
    comparing_memory_page,
    figures,
    footprint_page,
    hardware,
    lanes,
    phrases,
    pipeline_page,
    profile_page,
    profile_phrases,
    recorded,
    rows,
    trying_page,
    wording,
)
from gpubench.report.ceilings import ceilings
from gpubench.report.figures import Figure
from gpubench.report.templating import environment

LEADING = {"throughput": "", "step_time": " a step", "makespan": " in all"}  # figures, and what each is of
PHASES = [name.removeprefix("phase_") for name in DEFINITIONS if name.startswith("phase_")]


def compare_page(comparisons: Comparisons, sides: Sequence[Side]) -> str:
    """The page of one `gpubench compare`. sides: the baseline, then each comparison's candidate."""
    baseline, candidates = sides[0], sides[1:]
    sections = [
        _section(number, comparison, baseline, candidate)
        for number, (comparison, candidate) in enumerate(zip(comparisons.comparisons, candidates, strict=True), 1)
    ]
    return environment().get_template("compare.html").render(
        found=comparisons, sections=sections, several=len(sections) > 1, baseline=baseline.label
    )  # fmt: skip


def run_page(run: RunEvidence, previous: Comparison | None, previous_run: RunEvidence | None) -> str:
    """report.html of a run directory. `previous` compares the previous run of the experiment with this one."""
    side = figures.recording(Side(run.label, (run,)))
    distribution = figures.distribution([side])
    return environment().get_template("run.html").render(
        run=run,
        previous=previous,
        previous_link=f"../{quote(previous_run.path.name)}/report.html" if previous_run else None,
        previous_label=previous_run.label if previous_run else None,
        learned=wording.sentence(previous, "the previous run", "this run") if previous else None,
        lead=_lead(previous) if previous else None,
        figures_in_short=_in_short(run),
        metrics=[metric for metric in run.metrics.values() if _is_news(metric)],
        definitions=DEFINITIONS,
        ceilings=ceilings(run),
        steps=figures.steps([side]),
        phases=_phases(run),
        distribution=distribution,
        pipeline=pipeline_page.section(run.pipeline, run) if run.pipeline else None,
        profile=_profile(run),
        footprint=_footprint(run),
        batch_sizes=trying_page.batch_sizes(run.batch_sizes) if run.batch_sizes else None,
        trades=trying_page.trades(run.trades) if run.trades else None,
        leads=run.record is not None and run.record.command == "profile",
        telemetry=hardware.whole_run(run, recorded.GPU) or hardware.whole_run(run, recorded.CPU),
        peaks=hardware.peaks([side], [_estimates([run])]),
        memory=hardware.whole_run(run, [recorded.GPU_MEMORY]) or hardware.whole_run(run, [recorded.CPU_MEMORY]),
        settings=_by_head(run.settings),
        environment=_by_head(run.environment | {f"workload.{key}": value for key, value in run.workload.items()}),
    )  # fmt: skip


def _section(number: int, comparison: Comparison, baseline: Side, candidate: Side) -> dict[str, Any]:
    sides = [figures.recording(side) for side in (baseline, candidate)]
    phases = [verdict for verdict in comparison.verdicts if verdict.metric.startswith("phase_")]
    main = [verdict for verdict in comparison.verdicts if verdict not in phases] or phases
    waterfall = comparison.explanation.waterfall
    ratio_plot = rows.ratios(main)
    return {
        "anchor": f"candidate-{number}",
        "comparison": comparison,
        "headline": wording.sentence(comparison, "A", "B"),
        "lead": _lead(comparison),
        "verdicts": main,
        "phases": phases if main is not phases else [],
        "ratios": Figure("Ratio of each metric, B against A", ratio_plot) if ratio_plot else None,
        "waterfall": Figure(f"Where the change of a {waterfall.per}'s time comes from", rows.waterfall(waterfall))
        if waterfall
        else None,
        "causes": _causes(comparison.causes, (baseline, candidate)) if comparison.causes else None,
        "filled": comparing_memory_page.section(comparison.memory) if comparison.memory else None,
        "timed": not (baseline.runs[0].untimed and candidate.runs[0].untimed),
        "steps": figures.steps(sides),
        "distribution": figures.distribution(sides),
        "telemetry": hardware.telemetry(sides),
        "peaks": hardware.peaks(sides, [_estimates(side.runs) for side in (baseline, candidate)]),
        "memory": hardware.memory(sides),
        "methods": list(dict.fromkeys(verdict.method for verdict in comparison.verdicts if verdict.interval)),
        "versions": [_versions(side) for side in (baseline, candidate)],
    }


def _causes(causes: Causes, sides: Sequence[Side]) -> dict[str, Any]:
    """What both profiles came to, and each side's findings as cards."""
    found = [diagnosis(side) for side in sides]
    return {
        "bottlenecks": [wording.opening(causing.bottleneck(one)) for one in (causes.baseline, causes.candidate)],
        "fates": [(fate, wording.typeset(about)) for fate, about in causing.fates(causes)],
        "work": causing.work(causes),
        "notes": [wording.opening(note) for note in causing.notes(causes)],
        "cards": [(letter, profile_page.cards(one.findings)) for letter, one in zip("AB", found, strict=True) if one],
    }


def _lead(comparison: Comparison) -> Verdict | None:
    return leading(comparison.verdicts)


def _estimates(runs: Sequence[RunEvidence]) -> dict[str, float]:
    """Mean over the runs of each metric that all of them have."""
    return {
        name: sum(run.metrics[name].estimate for run in runs) / len(runs)
        for name in runs[0].metrics
        if all(name in run.metrics for run in runs)
    }


def _is_news(metric: Metric) -> bool:
    return not metric.name.startswith("phase_") and phrases.WITHOUT_NEWS.get(metric.name) != metric.estimate


def _in_short(run: RunEvidence) -> str:
    """The run's leading figures in a line."""
    known = [run.metrics[name] for name in LEADING if name in run.metrics] or list(run.metrics.values())[:1]
    noisy = any(metric.too_noisy for metric in known)
    said = []
    for metric in known:
        low, high = metric.interval if noisy and metric.interval else (metric.estimate, metric.estimate)
        said.append(units.span(low, high, metric.unit) + LEADING.get(metric.name, ""))
    return wording.typeset(", ".join([*said, *[phrases.TOO_NOISY] * noisy, units.counted(run.repeats, "repeat")]))


def _phases(run: RunEvidence) -> dict[str, Any] | None:
    """The stacked bar of a step, and its parts: (name, class, time, share)."""
    found = {
        metric.name.removeprefix("phase_"): max(0.0, metric.estimate)
        for metric in run.metrics.values()
        if metric.name.startswith("phase_")
    }
    ordered = sorted(found, key=lambda name: PHASES.index(name) if name in PHASES else len(PHASES))
    styles = {name: lanes.hue(name) for name in ordered}
    drawing = rows.stack("phases of a step", [(wording.name(name), found[name], styles[name]) for name in ordered])
    if drawing is None:
        return None
    whole = sum(found.values())
    parts = [
        (
            wording.name(name),
            styles[name],
            wording.typeset(units.seconds(found[name])),
            wording.typeset(units.percent(found[name] / whole)),
        )
        for name in ordered
    ]
    return {"drawing": drawing, "parts": parts}


def _profile(run: RunEvidence) -> dict[str, Any] | None:
    if not (run.record and run.profile and run.findings):
        return None
    unit = profile_phrases.unit_of(run.record.command, run.settings)
    return profile_page.section(run.profile, run.findings, unit=unit, own=True)


def _footprint(run: RunEvidence) -> dict[str, Any] | None:
    """Of the fullest rank."""
    if run.footprints is None or not run.footprints.ranks:
        return None
    fullest = max(run.footprints.ranks, key=lambda found: found.most)
    return footprint_page.section(fullest, run.findings)


def _by_head(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Dot-keys grouped by what stands before the first dot; those without a dot come first, under no heading."""
    groups: dict[str, dict[str, Any]] = {"": {}}
    for key, value in values.items():
        head, dot, rest = key.partition(".")
        groups.setdefault(head if dot else "", {})[rest if dot else key] = value
    return {head: entries for head, entries in groups.items() if entries}


def _versions(side: Side) -> list[tuple[str, Any]]:
    """What measured this side, as its first run recorded it."""
    environment = side.runs[0].environment
    known = {"gpubench": "packages.gpubench", "torch": "torch.version", "driver": "driver.version", "on": "host.name"}
    return [(word, environment[key]) for word, key in known.items() if environment.get(key)]
