"""Self-contained HTML pages of a comparison and of a run compared with the previous one, which load nothing."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from gpubench import units
from gpubench.compare.evidence import RunEvidence, Side
from gpubench.compare.explanation import diagnosis
from gpubench.compare.result import Causes, Comparison, Comparisons, Verdict
from gpubench.compare.verdicts import leading
from gpubench.metrics import DEFINITIONS, Metric
from gpubench.report import (
    comparing_memory_page,
    figures,
    finding_phrases,
    fixes_page,
    footprint_page,
    gantt,
    lanes,
    phrases,
    profile_page,
    rows,
    wording,
)
from gpubench.report.comparison import bottleneck, finding_changes, notes, work_done
from gpubench.report.figures import Figure
from gpubench.report.phrases import baselines, evaluations, handover, handover_parts, verification
from gpubench.report.sheets import Sheet, sheet
from gpubench.report.templating import environment
from gpubench.runs.stages import PARTS, Pipeline, Stage


def ceilings(run: RunEvidence) -> list[str]:
    """Return the sentences about FLOPs and peaks."""
    said = []
    if (flops := run.flops) and flops.model_flops_per_sample:
        said.append(f"{units.count(flops.model_flops_per_sample, 'FLOP')} a sample, counted by {flops.method}")
    if peak := run.peak:
        said.append(
            f"{units.count(peak.flops_per_s, 'FLOP/s')} in {peak.dtype} published for {peak.device}: {peak.source}"
        )
    if (measured := run.measured_peak) and measured.flops_per_s:
        rate = units.count(measured.flops_per_s, "FLOP/s")
        said.append(
            f"{rate} in {measured.dtype} measured with a product of two {measured.size} x {measured.size} matrices"
        )
    return said


def section(pipeline: Pipeline, run: RunEvidence) -> dict[str, Any]:
    """Return the variables of templates/pipeline.html."""
    first = min((span.repeat for span in run.spans), default=0)
    found = gantt.bars(span for span in run.spans if span.repeat == first)
    chart = gantt.chart(found, len(pipeline.stages))
    sizes = handover_parts(pipeline.handover) if pipeline.handover else {}
    bars = rows.bars("size of a hand-over", "B", [(name, size, "fill solid a") for name, size in sizes.items()])
    note = "Boxes: at work on the sample of that number. Lines: waiting for it. Blank: idle."
    if len(found) > gantt.MOST_BARS:
        note += f" Only the first {gantt.MOST_BARS:,} of {len(found):,} are drawn."
    return {
        "pipeline": pipeline,
        "chart": Figure(f"What each rank did in repeat {first}", chart, note) if chart else None,
        "shares": gantt.shares(pipeline.stages),
        "legend": [(lanes.hue(part), wording.name(part)) for part in PARTS],
        "ranks": _ranks(pipeline.stages),
        "baselines": baselines(run.metrics, len(pipeline.stages)),
        "handover": handover(pipeline),
        "sizes": Figure("Size of a hand-over", bars) if bars else None,
        "verification": verification(pipeline.verification, pipeline.threads),
    }


def _ranks(stages: Sequence[Stage]) -> Sheet:
    return sheet(
        "",
        [
            {
                "rank": str(stage.rank),
                "evaluations": evaluations(stage),
                **{
                    wording.name(part): units.seconds(getattr(stage.times, part)) if stage.times else ""
                    for part in PARTS
                },
                "evaluation time": "" if stage.evaluation_time is None else units.seconds(stage.evaluation_time),
                "sent, received in all": f"{stage.sent}, {stage.received}",
                "peak memory": "" if stage.peak_memory is None else units.size(stage.peak_memory),
            }
            for stage in stages
        ],
    )


LEADING = {"throughput": "", "step_time": " a step", "makespan": " in all"}  # metric and what it refers to
PHASES = [name.removeprefix("phase_") for name in DEFINITIONS if name.startswith("phase_")]


def compare_page(comparisons: Comparisons, sides: Sequence[Side]) -> str:
    """Return the page of one `gpubench compare`. `sides` are the baseline and then each comparison's candidate."""
    baseline, candidates = sides[0], sides[1:]
    sections = [
        _section(number, comparison, baseline, candidate)
        for number, (comparison, candidate) in enumerate(zip(comparisons.comparisons, candidates, strict=True), 1)
    ]
    return environment().get_template("compare.html").render(
        found=comparisons, sections=sections, several=len(sections) > 1, baseline=baseline.label
    )  # fmt: skip


def run_page(run: RunEvidence, previous: Comparison | None, previous_run: RunEvidence | None) -> str:
    """Return a run's report.html. `previous` compares the experiment's previous run with this one."""
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
        pipeline=section(run.pipeline, run) if run.pipeline else None,
        profile=_profile(run),
        footprint=_footprint(run),
        batch_sizes=fixes_page.batch_sizes(run.batch_sizes) if run.batch_sizes else None,
        trades=fixes_page.trades(run.trades) if run.trades else None,
        leads=run.record is not None and run.record.command == "profile",
        telemetry=figures.whole_run(run, figures.GPU) or figures.whole_run(run, figures.CPU),
        peaks=figures.peaks([side], [_estimates([run])]),
        memory=figures.whole_run(run, [figures.GPU_MEMORY]) or figures.whole_run(run, [figures.CPU_MEMORY]),
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
        "telemetry": figures.telemetry(sides),
        "peaks": figures.peaks(sides, [_estimates(side.runs) for side in (baseline, candidate)]),
        "memory": figures.memory(sides),
        "methods": list(dict.fromkeys(verdict.method for verdict in comparison.verdicts if verdict.interval)),
        "versions": [_versions(side) for side in (baseline, candidate)],
    }


def _causes(causes: Causes, sides: Sequence[Side]) -> dict[str, Any]:
    """Return both profiles' results and each side's findings as cards."""
    found = [diagnosis(side) for side in sides]
    return {
        "bottlenecks": [wording.opening(bottleneck(one)) for one in (causes.baseline, causes.candidate)],
        "finding_changes": [(outcome, wording.typeset(about)) for outcome, about in finding_changes(causes)],
        "work": work_done(causes),
        "notes": [wording.opening(note) for note in notes(causes)],
        "cards": [(letter, profile_page.cards(one.findings)) for letter, one in zip("AB", found, strict=True) if one],
    }


def _lead(comparison: Comparison) -> Verdict | None:
    return leading(comparison.verdicts)


def _estimates(runs: Sequence[RunEvidence]) -> dict[str, float]:
    """Return the mean over the runs of each metric that all of them have."""
    return {
        name: sum(run.metrics[name].estimate for run in runs) / len(runs)
        for name in runs[0].metrics
        if all(name in run.metrics for run in runs)
    }


def _is_news(metric: Metric) -> bool:
    return not metric.name.startswith("phase_") and phrases.WITHOUT_NEWS.get(metric.name) != metric.estimate


def _in_short(run: RunEvidence) -> str:
    """Return the run's leading figures in a line."""
    known = [run.metrics[name] for name in LEADING if name in run.metrics] or list(run.metrics.values())[:1]
    noisy = any(metric.too_noisy for metric in known)
    said = []
    for metric in known:
        low, high = metric.interval if noisy and metric.interval else (metric.estimate, metric.estimate)
        said.append(units.span(low, high, metric.unit) + LEADING.get(metric.name, ""))
    return wording.typeset(", ".join([*said, *[phrases.TOO_NOISY] * noisy, units.counted(run.repeats, "repeat")]))


def _phases(run: RunEvidence) -> dict[str, Any] | None:
    """Return a step's stacked bar and its parts as (name, class, time, share)."""
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
    unit = finding_phrases.unit_of(run.record.command, run.settings)
    return profile_page.section(run.profile, run.findings, unit=unit, own=True)


def _footprint(run: RunEvidence) -> dict[str, Any] | None:
    """Return the footprint of the rank with the largest peak."""
    if run.footprints is None or not run.footprints.ranks:
        return None
    fullest = max(run.footprints.ranks, key=lambda found: found.most)
    return footprint_page.section(fullest, run.findings)


def _by_head(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return settings grouped by the part before the first dot; those without a dot come first, without heading."""
    groups: dict[str, dict[str, Any]] = {"": {}}
    for key, value in values.items():
        head, dot, rest = key.partition(".")
        groups.setdefault(head if dot else "", {})[rest if dot else key] = value
    return {head: entries for head, entries in groups.items() if entries}


def _versions(side: Side) -> list[tuple[str, Any]]:
    """Return the environment that this side's first run recorded."""
    environment = side.runs[0].environment
    known = {"gpubench": "packages.gpubench", "torch": "torch.version", "driver": "driver.version", "on": "host.name"}
    return [(word, environment[key]) for word, key in known.items() if environment.get(key)]
