"""The report of a comparison: verdicts, what explains them, memory, causes and the gate; and of `compare --null`."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gpubench import units
from gpubench.compare.causes import diagnosis
from gpubench.compare.evidence import RunEvidence, Side
from gpubench.compare.result import (
    Bottleneck,
    Causes,
    Comparison,
    Comparisons,
    Difference,
    GateResult,
    Memory,
    MemoryPeak,
    Outcome,
    PhaseMemory,
    Sameness,
    SideSummary,
    SizeChange,
    Verdict,
    Waterfall,
)
from gpubench.compare.verdicts import leading
from gpubench.compare.work import figure
from gpubench.memory.allocation_log import PLACES
from gpubench.memory.footprint import Amounts
from gpubench.report import bar_charts, findings, phrases, profile, run_figures, timelines
from gpubench.report.document import (
    TEXT,
    UNASKED,
    Block,
    Cell,
    Chip,
    Document,
    Figure,
    Figures,
    Folded,
    Heading,
    Medium,
    NestedDocument,
    Paragraph,
    Sided,
    Sides,
    Style,
    Table,
    table,
)
from gpubench.report.findings import NOTHING
from gpubench.report.memory_figures import STAGES, added, category, hue, ordered, share, stack
from gpubench.report.phrases import headline
from gpubench.text import words

FOLDED = 0.001  # of the baseline's peak: smaller changes share one row
NAMED = 4  # categories in a sentence
WORTH_TELLING = 0.05  # of the sum of all absolute changes: a category with less explains nothing


def sentence(memory: Memory) -> str:
    """Returns the change of the peak and its parts, as "peak 3.1 GiB lower (-42 %): activations -3.3 GiB"."""
    before, change = memory.baseline.level.total, memory.change
    said = f"peak {units.size(abs(change))} {'lower' if change < 0 else 'higher'} ({_of(change, before)})"
    if not change:
        said = f"the same peak of {units.size(before)}"
    parts = _parts(memory.categories)
    return f"{said}{_elsewhere(memory)}{': ' if parts else ''}{parts}"


def peaks(memory: Memory) -> list[str]:
    return [f"memory of the {name}: {peak(side)}" for name, side in _sides(memory)]


def _sides(memory: Memory) -> list[tuple[str, MemoryPeak]]:
    return [("baseline", memory.baseline), ("candidate", memory.candidate)]


def peak(side: MemoryPeak) -> str:
    """Returns one side's peak, as "peak 529 MiB in the first backward pass (run 1; measured on cpu)"."""
    place = PLACES[side.phase].format("first " if side.stage == "first" else "")
    return f"peak {units.size(side.level.total)} {place} ({side.run}; {_source(side)})".replace("  ", " ")


def tables(memory: Memory) -> list[Table]:
    """Returns the tables of changes, largest change first; tables without rows are left out."""
    return [one for one in (categories(memory), phases(memory)) if one]


def categories(memory: Memory) -> Table:
    """Returns the change of each category at the peak; the rows add up to the last row, the whole peak."""
    whole = memory.baseline.level.total
    shown = [one for one in memory.categories if not _is_folded(one.change, whole)]
    folded = [one for one in memory.categories if _is_folded(one.change, whole)]
    rows = [_sizes(category(one.category), one, whole) for one in shown]
    if folded and rows:
        before, after = sum(one.baseline for one in folded), sum(one.candidate for one in folded)
        rows.append(_sizes("the rest", SizeChange("", before, after, after - before), whole))
    if rows:
        all_of_it = SizeChange("", whole, memory.candidate.level.total, memory.change)
        rows.append(_sizes("all of it", all_of_it, whole))
    return table("What holds the peak, before and after", rows, ("kind",))


def phases(memory: Memory) -> Table:
    """Returns the change of each phase's own peak; the rows do not add up."""
    whole = memory.baseline.level.total
    shown = [one for one in memory.phases if not _is_folded(one.change, whole)]
    others = len(memory.phases) - len(shown)
    rest = f"{units.counted(others, 'other')}, changed by less than {units.percent(FOLDED)} of the peak each"
    title = "Peak of each phase, before and after"
    return table(title, list(map(_phase, shown)), ("phase", "mostly"), rest=rest if others else "")


def _phase(one: PhaseMemory) -> dict[str, str]:
    largest = next((part for part in one.categories if part.change), None)
    return {
        "phase": f"{STAGES[one.stage]}, {words(one.phase)}",
        "change": added(one.change),
        "before": "" if one.baseline is None else units.size(one.baseline),
        "after": "" if one.candidate is None else units.size(one.candidate),
        "of before": _of(one.change, one.baseline or 0),
        "mostly": _part(largest) if largest else "",
    }


def _sizes(name: str, one: SizeChange, whole: int) -> dict[str, str]:
    return {
        "kind": name,
        "change": added(one.change),
        "before": units.size(one.baseline),
        "after": units.size(one.candidate),
        "of the peak": _of(one.change, whole),
    }


def _parts(changes: Sequence[SizeChange]) -> str:
    moved = sum(abs(one.change) for one in changes)
    told = [one for one in changes[:NAMED] if one.change and abs(one.change) >= WORTH_TELLING * moved]
    return ", ".join(map(_part, told))


def _part(one: SizeChange) -> str:
    return f"{category(one.category)} {added(one.change)}"


def _elsewhere(memory: Memory) -> str:
    """Returns a clause that names both phases if the peak moved to another one; else ""."""
    before, after = (PLACES[side.phase].format("") for side in (memory.baseline, memory.candidate))
    return f", {after} and no longer {before}" if before and after and before != after else ""


def _source(side: MemoryPeak) -> str:
    preposition = "for" if side.source == "predicted" else "on"
    device = f" {preposition} {side.device}" if side.device else ""
    return f"{side.source}{device}{f', rank {side.rank}' if side.rank else ''}"


def _is_folded(change: int, whole: int) -> bool:
    return not change or abs(change) < FOLDED * whole


def _of(change: int, whole: int) -> str:
    """Returns the change as a signed share of the whole; "" if the whole is 0."""
    return f"{'-' if change < 0 else '+'}{share(abs(change), whole)}" if whole else ""


CAVEAT = "times of a profile are those of a step of the profiled repeat: they show proportions, not speed"


def bottlenecks(causes: Causes) -> list[str]:
    sides = (("baseline", causes.baseline), ("candidate", causes.candidate))
    return [f"profile of the {name}: {bottleneck(found)}" for name, found in sides]


def bottleneck(found: Bottleneck | None) -> str:
    """Returns a profile's headline and origin, as "GPU idle 43.5 % (run 1; 6 steps)"."""
    if found is None:
        return "not recorded"
    return f"{found.headline.rstrip('.')} ({found.run}; {_recorded(found)})"


def work_done(causes: Causes) -> Table | None:
    """Returns the work that changed most; None if the two profiles cannot be compared."""
    return profile.work_changes(causes.of, causes.work, causes.others) if causes.of and causes.work else None


def notes(causes: Causes) -> list[str]:
    """Returns caveats about the figures, and reasons for missing ones."""
    found = [] if causes.findings else [NOTHING]
    found.append(CAVEAT)
    if causes.obstacle:
        found.append(f"kernels and operators are not compared: {causes.obstacle}")
    return found


def _recorded(found: Bottleneck) -> str:
    steps = units.counted(found.steps, "step") if found.steps else "no steps marked"
    if found.overhead is None or found.overhead <= 0:
        return steps
    return f"{steps}, {units.times(found.overhead)} as long as without the profiler"


SIGNS: dict[Outcome, str] = {
    "faster": "▲",
    "slower": "▼",
    "more": "↑",
    "less": "↓",
    "equivalent": "=",
    "inconclusive": "?",
    "withheld": "\u2013",
    "rejected": "✕",
}
STYLES: dict[Outcome, Style] = {
    "faster": "better",
    "slower": "worse",
    "equivalent": "equivalent",
    "inconclusive": "inconclusive",
    "withheld": "withheld",
    "rejected": "rejected",
}
GATES: dict[str, Style] = {
    "refused": "rejected",
    "regressed": "worse",
    "passed": "better",
    "inconclusive": "inconclusive",
}
VERSIONS = {"gpubench": "packages.gpubench", "torch": "torch.version", "driver": "driver.version", "on": "host.name"}
VERDICTS = 3  # verdicts that a terminal shows without -v, besides established ones
LEAST_MOVE = 0.02  # of a step: a terminal without -v leaves out smaller changes of a phase
ESTABLISHED = ("faster", "slower", "more", "less")
WARNINGS = 2  # warnings that a terminal shows without -v
PATHS = 3  # paths of a side that a page names


def document(comparisons: Comparisons, sides: Sequence[Side] = (), *, everything: bool = False) -> Document:
    """Returns the report of `gpubench compare`.

    `sides` are the baseline and then each comparison's candidate; a page needs them for its figures. `everything` lists
    verdicts without news too, for a user who asked for them by name.
    """
    found = comparisons.comparisons
    left_out = [phrases.omission(line) for line in comparisons.left_out]
    single = len(found) == 1
    blocks: list[Block] = [] if single else [_overview(found), Paragraph(left_out, "warning")]
    if comparisons.gate:
        blocks += [Heading("Gate"), _gate_table(comparisons.gate, Medium.PAGE)]
    for number, comparison in enumerate(found, 1):
        pair = (sides[0], sides[number]) if sides else ()
        section = _section(comparison, comparisons, pair, everything, 0 if single else number)
        if single:
            section = replace(section, blocks=[*section.blocks, Paragraph(left_out, "warning")])
        blocks.append(section)
    if comparisons.gate:
        blocks += [Paragraph(f"{one.outcome}: {phrases.gate(one)}", on=Medium.TERMINAL) for one in comparisons.gate]
        blocks.append(_gate_table(comparisons.gate, Medium.MARKDOWN))
    baseline = found[0].baseline.label if found else ""
    return Document(
        f"{len(found)} candidates against {baseline}" if len(found) > 1 else "",
        blocks,
        title=f"{', '.join(one.candidate.label for one in found)} against {baseline}",
        context="gpubench compare",
        names=[side.label for one in found for side in (one.baseline, one.candidate)],
        chips=[one for one in [_lead_chip(found[0])] if one] if len(found) == 1 else [],
        footer=_footer(comparisons, sides),
    )


def _overview(found: Sequence[Comparison]) -> Table:
    """Returns one row for each of several candidates, with the verdict on its main metric."""
    rows: list[dict[str, str | Cell]] = []
    for one in found:
        lead = leading(one.verdicts)
        row: dict[str, str | Cell] = {"candidate": one.candidate.label}
        if lead:
            made = chip(lead)
            row["metric"] = words(lead.metric)
            row["baseline"], row["measured"] = phrases.values(lead)
            row["change"] = Cell(phrases.change(lead), brief=phrases.change(lead, interval=False))
            row["verdict"] = Cell(made.word, style=made.style, sign=made.sign, chip=True)
        rows.append(row)
    return table("", rows, ("metric", "verdict"), expendable=("baseline", "measured", "metric"), kept=("verdict",))


def _section(
    comparison: Comparison, whole: Comparisons, sides: Sequence[Side], everything: bool, number: int
) -> NestedDocument:
    answer, reasons = headline(comparison), comparison.comparability.reasons
    blocks: list[Block] = [
        Sides(_sided("baseline", comparison.baseline), _sided("candidate", comparison.candidate)),
        Heading("Can these be compared?"),
        Paragraph(_comparable(comparison), on=Medium.PAGE),
        Paragraph([one for one in reasons if answer != f"withheld: {one}"], listed=True, on=Medium.BRIEF),
        Paragraph(reasons, listed=True, on=UNASKED),
        *differences(comparison.comparability.differences),
        *_sameness(comparison.sameness),
        Heading("Verdicts"),
        *_verdicts(comparison, everything, drawn=bool(sides)),
        Paragraph(phrases.left_out_as_warmup(whole.warmup), "quiet"),
        *_memory(comparison.memory, drawn=bool(sides)),
        *_explanation(comparison, sides),
        *(_causes(comparison.causes, sides) if comparison.causes else []),
    ]
    if comparison.warnings:
        blocks += [Heading("Warnings"), Paragraph(comparison.warnings, "warning", "warning: ", on=UNASKED)]
        first = comparison.warnings if len(comparison.warnings) <= WARNINGS + 1 else comparison.warnings[:WARNINGS]
        rest = len(comparison.warnings) - len(first)
        blocks.append(Paragraph(first, "warning", "warning: ", on=Medium.BRIEF))
        blocks.append(Paragraph(f"{rest} more warnings with -v" if rest else "", "quiet", on=Medium.BRIEF))
    if sides:
        blocks += _recordings(sides)
        blocks += _method(comparison, whole, timed=_timed(sides))
    name = comparison.candidate.label if number else ""
    return NestedDocument(answer, blocks, name, f"candidate-{number}", _lead_chip(comparison))


def renamed(comparison: Comparison, baseline: str, candidate: str) -> Comparison:
    return msgspec.structs.replace(
        comparison,
        baseline=msgspec.structs.replace(comparison.baseline, label=baseline),
        candidate=msgspec.structs.replace(comparison.candidate, label=candidate),
    )


def _sided(role: Any, side: SideSummary) -> Sided:
    label, paths = side.label, side.paths
    facts = [units.counted(side.runs, "run"), units.counted(side.repeats, "repeat")]
    if side.started:
        facts.append(phrases.moment(side.started))
    lines = [line for line in (side.headline, "; ".join(facts)) if line]
    return Sided(role, label, paths[0] if len(paths) == 1 and paths[0] != label else "", lines)


def _comparable(comparison: Comparison) -> str:
    comparability = comparison.comparability
    if not comparability.comparable:
        if comparability.forced:
            return "no: the work differs; verdicts were given because --force was set"
        return "no: the verdicts are withheld"
    return "yes, with these reservations:" if comparability.reasons else "yes: the workload is the same"


def differences(found: Sequence[Difference], before: str = "baseline", after: str = "candidate") -> list[Block]:
    """Returns the settings, facts and commits that differ, those that prevent a comparison first."""
    if not found:
        return [Paragraph("no setting, fact of the environment or commit differs", "missing", on=Medium.PAGE)]
    listed, rest = phrases.listed(found)
    rows = [
        {
            "differs": Cell(one.key, code=True),
            before: Cell(phrases.cell(one.baseline)),
            after: Cell(phrases.cell(one.candidate)),
        }
        for one in listed
    ]
    columns = frozenset({"differs", before, after})
    return [
        table("", rows, columns, complete=True),
        Paragraph(rest, "quiet"),
        Paragraph(phrases.consequences(found), "quiet", on=UNASKED),
    ]


CLOCKS = {
    "same": "the clocks of both sides agree with the host's",
    "different": "the clock of a side contradicts the host's",
    "unknown": "whether the clocks of both sides agree with the host's is not known: the repeats were too short "
    "for that, or the machine too busy",
}


def _sameness(found: Sameness) -> Iterator[Block]:
    """Yields what was found about the work, the losses and the clocks of both sides, if anything was."""
    if not (found.counts or found.losses):
        return
    yield Heading("Did both sides do the same work?")
    rows = [
        {
            "counted": f"how many {one.unit}",
            "baseline": figure(one, one.baseline),
            "candidate": figure(one, one.candidate),
            "which is": "less work" if one.less else "more work" if one.more else "the same",
        }
        for one in found.counts
    ]
    yield table("", rows, ("counted", "which is"), on=Medium.PAGE | Medium.DETAILS)
    lines = [f"{words(one.name)}: {one.outcome}, {one.reason}" for one in found.losses]
    if found.counts:
        if found.clock:
            lines.append(CLOCKS[found.clock])
    else:
        lines.insert(0, "the work was not counted on both sides")
    yield Paragraph(lines, "quiet", listed=True, on=Medium.PAGE | Medium.DETAILS)


def _verdicts(comparison: Comparison, everything: bool, *, drawn: bool) -> Iterator[Block]:
    shown = phrases.shown(comparison.verdicts, everything)
    if not shown:
        yield Paragraph("the sides have no metric in common", "missing", on=Medium.PAGE)
        return
    drawing = bar_charts.ratios(shown) if drawn and len(shown) > 1 else None
    if drawing:
        note = (
            "Shaded: the margin within which a change does not matter. ◆ established, ■ equivalent, ○ inconclusive, "
            "✕ rejected. An arrow: the interval continues beyond the axis."
        )
        yield Figure("Ratio of each metric, B against A", drawing, note, "rows")
    first = _first_verdicts(shown, everything)
    rest = units.counted(len(shown) - len(first), "more metric") + " with -v" if len(first) < len(shown) else ""
    yield replace(_verdict_table(first), rest=rest, on=Medium.BRIEF)
    yield replace(_verdict_table(shown), on=UNASKED)
    said = comparison.comparability.reasons
    noted = [one for one in shown if one.verdict != "withheld" or one.reason not in said]
    yield Paragraph(phrases.reasons([one for one in noted if one in first]), "quiet", on=Medium.BRIEF)
    yield Paragraph(phrases.notes(noted), "quiet", on=UNASKED)
    if lead := leading(shown):
        yield Paragraph(phrases.method(lead), "quiet", on=Medium.DETAILS | Medium.MARKDOWN)
    of_phases = [one for one in comparison.verdicts if one not in shown and one.metric.startswith("phase_")]
    if of_phases:
        each = [_verdict_table(of_phases)]
        yield Folded("The same for each phase of a step", each, on=Medium.PAGE | Medium.DETAILS)


def _first_verdicts(verdicts: Sequence[Verdict], everything: bool) -> list[Verdict]:
    """Returns the verdicts that a terminal shows without -v: the first ones, and all others that are established."""
    first = list(verdicts) if everything else list(verdicts[:VERDICTS])
    return first + [one for one in verdicts[len(first) :] if one.verdict in ESTABLISHED]


def _verdict_table(verdicts: Sequence[Verdict]) -> Table:
    cells = []
    for one in verdicts:
        baseline, candidate = phrases.values(one)
        change = Cell(phrases.change(one), brief=phrases.change(one, interval=False))
        made = chip(one)
        row: dict[str, str | Cell] = {"metric": words(one.metric), "baseline": baseline, "candidate": candidate}
        row |= {"change": change, "verdict": Cell(made.word, style=made.style, sign=made.sign, chip=True)}
        cells.append(row)
    expendable = ("candidate", "baseline", "change")
    return table("", cells, ("verdict",), expendable=expendable)


def chip(verdict: Verdict) -> Chip:
    """Returns the verdict in a word; "more" of a metric that should be low is as bad as "slower"."""
    style = STYLES.get(verdict.verdict, "established")
    if verdict.verdict in ("more", "less") and verdict.better:
        style = "better" if (verdict.verdict == "more") == (verdict.better == "higher") else "worse"
    return Chip(verdict.verdict, style, SIGNS[verdict.verdict])


def _lead_chip(comparison: Comparison) -> Chip | None:
    lead = leading(comparison.verdicts)
    return chip(lead) if lead else None


def _explanation(comparison: Comparison, sides: Sequence[Side]) -> Iterator[Block]:
    explanation = comparison.explanation
    if not sides or _timed(sides):
        yield Heading("What explains it")
    if explanation.waterfall:
        yield from _waterfall(explanation.waterfall, known=_is_established(comparison))
        if sides:
            title = f"Where the change of a {explanation.waterfall.per}'s time comes from"
            note = "Filled: takes longer. Hollow: takes less time. Whiskers are 95 % intervals of the change."
            yield Figure(title, bar_charts.waterfall(explanation.waterfall), note, "rows")
    elif sides and _timed(sides):
        yield Paragraph("phases of a step are not recorded on both sides", "missing", on=Medium.PAGE)
    yield Paragraph(explanation.notes, listed=True)
    cells = [
        {
            "rank": str(one.rank),
            "baseline busy, a step": units.seconds(one.baseline),
            "candidate busy, a step": units.seconds(one.candidate),
            "change": units.signed_seconds(one.change),
        }
        for one in explanation.ranks
    ]
    yield table("", cells, on=Medium.PAGE | Medium.DETAILS)


def _is_established(comparison: Comparison) -> bool:
    lead = leading(comparison.verdicts)
    return lead is not None and lead.verdict in ESTABLISHED


def _waterfall(found: Waterfall, *, known: bool) -> Iterator[Table]:
    """Yields the change of each phase; a terminal without -v shows the large parts of a change that is known."""
    total = phrases.total(found)
    title = f"{total.phase}: {phrases.span(found)}"
    phases = list(zip(phrases.moves(found), found.phases, strict=True))
    large = [one for one in phases if abs(one[1].change) >= LEAST_MOVE * found.baseline]
    smaller = units.counted(len(phases) - len(large), "smaller change") + " with -v" if len(large) < len(phases) else ""
    brief = [(large, smaller, Medium.BRIEF)] if known else []
    for shown, rest, on in [*brief, (phases, "", TEXT & ~Medium.BRIEF)]:
        cells = [
            {"phase": one.phase, "change": one.change, "of the whole": one.share, "95 % interval": one.interval}
            for one in [*(move for move, _ in shown), total]
        ]
        yield table(
            title,
            cells,
            ("phase", "95 % interval"),
            expendable=("95 % interval",),
            sizes=[phase.change for _, phase in shown] if len(shown) > 1 else (),
            rest=rest,
            on=on,
        )


def _memory(memory: Memory | None, *, drawn: bool) -> Iterator[Block]:
    if memory is None:
        return
    yield Heading("What fills the memory")
    yield Paragraph(sentence(memory), "strong", on=Medium.PAGE)
    yield Paragraph(sentence(memory), on=TEXT)
    yield Paragraph(peaks(memory), "quiet")
    drawing = _peak_bars(memory) if drawn else None
    if drawing:
        anywhere: Amounts = {one.category: max(one.baseline, one.candidate) for one in memory.categories}
        legend = [(hue(name), category(name)) for name, _ in ordered(anywhere)]
        yield Figure("The peak of both", drawing, shape="lanes", legends=[("held", legend)])
    yield from tables(memory)


def _peak_bars(memory: Memory) -> Any:
    """Returns bars of the peaks of A and B; None if neither holds anything."""
    held: list[Amounts] = [
        {one.category: one.baseline for one in memory.categories},
        {one.category: one.candidate for one in memory.categories},
    ]
    totals = [side.level.total for _, side in _sides(memory)]
    stacks = [
        stack(f"{name} {units.size(total)}", amounts)
        for name, total, amounts in zip(run_figures.NAMES, totals, held, strict=True)
    ]
    return timelines.stacked(
        "peak of both sides by category", "; ".join(one.name for one in stacks), stacks, "B", "held"
    )


def _causes(causes: Causes, sides: Sequence[Side]) -> Iterator[Block]:
    yield Heading("What the profiles show")
    yield Paragraph(bottlenecks(causes))
    yield from profile.finding_changes(causes.findings, alike=not causes.obstacle)
    if work := work_done(causes):
        yield work
    yield Paragraph(notes(causes), "quiet")
    for side, role in zip(sides, ("baseline", "candidate"), strict=False):
        if found := diagnosis(side):
            cards = findings.blocks(found.findings, "step")
            yield Folded(f"Findings of the {role}, with their evidence and fixes", cards, on=Medium.PAGE)


def _timed(sides: Sequence[Side]) -> bool:
    return not all(side.runs[0].untimed for side in sides)


def _recordings(sides: Sequence[Side]) -> Iterator[Block]:
    """Returns the figures of steps, hardware and memory, or says what was not recorded."""
    drawn = [run_figures.recording(side) for side in sides]
    if _timed(sides):
        yield Heading("Steps")
        yield from run_figures.or_missing([run_figures.steps(drawn)], "steps are not recorded")
        yield from run_figures.or_missing([run_figures.distribution(drawn)], "")
        yield Heading("Hardware over time")
        telemetry = run_figures.telemetry(drawn)
        yield Figures(telemetry) if telemetry else Paragraph("telemetry is not recorded", "missing", on=Medium.PAGE)
    yield Heading("Memory")
    known = [run_figures.peaks(drawn, [_estimates(side.runs) for side in sides]), run_figures.memory(drawn)]
    yield from run_figures.or_missing(known, "memory is not recorded")


def _method(comparison: Comparison, whole: Comparisons, *, timed: bool) -> Iterator[Block]:
    yield Heading("How the verdicts were made")
    level, margin = units.digits(whole.confidence * 100), units.percent(whole.margin)
    lines = [
        "a change is reported only where it is established to lie beyond the margin, and equivalence only where the "
        f"change is established to lie within it, each at {level} % for all metrics together; the intervals are those "
        f"of each metric alone; the margin is {margin}"
    ]
    if not timed:
        lines.append(
            "peaks of memory are counted, not timed: where the counts of a side agree, their ratio itself is compared "
            "with the margin"
        )
    lines += dict.fromkeys(one.method for one in comparison.verdicts if one.interval)
    yield Paragraph(lines, on=Medium.PAGE)
    if not comparison.verdicts:
        return
    cells = [
        {
            "metric": words(one.metric),
            "rests on": _rests_on(one),
            "independent steps": ", ".join(units.digits(n) for n in one.effective_n if n is not None),
            "margin": units.percent(one.margin),
            "noise floor": "not known" if one.noise_floor is None else units.difference(one.noise_floor),
            "resolvable": "not known" if one.resolvable is None else units.difference(one.resolvable),
        }
        for one in comparison.verdicts
    ]
    note = (
        "noise floor: the difference that noise alone can make between such sides; resolvable: the smallest "
        "change that as many new repeats find with 80 % power"
    )
    yield Folded("What each verdict rests on", [table("", cells, ("rests on",), note=note)], on=Medium.PAGE)


def _rests_on(verdict: Verdict) -> str:
    """Returns what the interval is made of: "3 and 3 repeats, in pairs"."""
    if verdict.level is None:
        return "one figure a side"
    ours, theirs = verdict.units
    return f"{ours:,} and {theirs:,} {verdict.level}s{', in pairs' if verdict.paired else ''}"


def _estimates(runs: Sequence[RunEvidence]) -> dict[str, float]:
    """Returns the mean over the runs of each metric that all of them have."""
    return {
        name: sum(run.metrics[name].estimate for run in runs) / len(runs)
        for name in runs[0].metrics
        if all(name in run.metrics for run in runs)
    }


def _gate_table(gate: Sequence[GateResult], on: Medium) -> Table:
    cells: list[dict[str, str | Cell]] = [
        {
            "gate": Cell(one.outcome, style=GATES[one.outcome], chip=True),
            "condition": Cell(one.condition, code=True),
            "candidate": one.candidate,
            "measured and limit": phrases.worsening(one),
            "adjusted p": "-" if one.p_value is None else f"{one.p_value:.2g}",
        }
        for one in gate
    ]
    decides = f"an adjusted p {phrases.DECIDES}" if any(one.p_value is not None for one in gate) else ""
    return table("", cells, ("condition", "candidate", "measured and limit"), note=decides, on=on)


def _footer(comparisons: Comparisons, sides: Sequence[Side]) -> list[tuple[list[str], list[str]]]:
    """Returns the paths and versions of the baseline and of each candidate."""
    found = comparisons.comparisons
    summaries = [*(one.baseline for one in found[:1]), *(one.candidate for one in found)]
    lines = []
    for summary, side in zip(summaries, sides, strict=False):
        more = len(summary.paths) - PATHS
        environment = side.runs[0].environment
        facts = [f"{word} {phrases.cell(environment[key])}" for word, key in VERSIONS.items() if environment.get(key)]
        lines.append((summary.paths[:PATHS], [f"{more} more paths"] * (more > 0) + facts))
    return lines
