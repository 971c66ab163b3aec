"""The report of a search for the fastest settings: the result, what each setting contributes, and what was not kept."""

import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gpubench import units
from gpubench.gain import Gain
from gpubench.memory.batch_sizes import Trade, weigh
from gpubench.registry import kind_of
from gpubench.report import bar_charts, memory_figures, patches, phrases
from gpubench.report.document import (
    EVERYWHERE,
    UNASKED,
    Block,
    Cell,
    Command,
    Document,
    Facts,
    Figure,
    Folded,
    Medium,
    Paragraph,
    Style,
    table,
)
from gpubench.report.page import render
from gpubench.runs import directory
from gpubench.runs.catalogue import is_searching
from gpubench.tuning.conclusion import Conclusion, Contribution, Dropped, Interaction
from gpubench.tuning.progress import gain, memory, said
from gpubench.tuning.result import Tuning, named
from gpubench.tuning.search import FEWEST_RUNS

BEST = "best.yaml"
CHANGES = {
    "same": "nothing that is computed",
    "rounding": "the last digits",
    "type": "the precision",
    "batch": "the batch",
}
"""What a setting changes about the numbers, in words."""
REASONS = {
    "slower": "slower",
    "tie": "tie",
    "no gain": "no gain beyond the noise",
    "does not run": "does not run",
    "rejected": "rejected",
    "memory": "needs too much memory",
}
MORE = 3
"""The factor by which a limit is raised that has proved too small."""
FRESH = ", and the gain is that of fresh runs made after the choice"
NOT_REACHED = "the search ended before it was run"
SHOWN = 6
"""The settings that are not kept and that a terminal shows without -v."""
ALIKE = 0.02
"""Peaks of memory that differ by less than this share are not worth a picture."""
BUSY = 0.10
"""The machine counts as too busy to tell if equal runs have at least this standard deviation."""


def write(folder: Path, tuning: Tuning, best: str | None) -> None:
    """Writes report.html and, if there are settings to keep, best.yaml, the complete settings `best`."""
    directory.write_document(folder / directory.REPORT, render(document(folder, tuning)))
    if best:
        directory.write_document(folder / BEST, best)
    else:
        (folder / BEST).unlink(missing_ok=True)  # more runs may have disproved what was proved before --resume


def to_json(folder: Path, tuning: Tuning) -> str:
    """Returns `to_document` as --json prints it."""
    return directory.to_json(to_document(folder, tuning))


def to_document(folder: Path, tuning: Tuning) -> dict[str, Any]:
    """Returns tune.json with what is tuned, and the paths of the page and of the best settings."""
    found: dict[str, Any] = msgspec.to_builtins(tuning)
    paths = {"path": str(folder), "report": str(folder / directory.REPORT), "subject": subject(tuning)}
    return paths | ({"best": str(folder / BEST)} if tuning.keep else {}) | found


def document(folder: Path, tuning: Tuning) -> Document:
    if tuning.status == "running" and not is_searching(str(folder)):
        tuning = msgspec.structs.replace(tuning, status="interrupted")
    blocks: list[Block] = []
    found = tuning.conclusion
    if found:
        blocks += [*_certainty(tuning, found), *_next_steps(folder, tuning)]
        blocks += [*_gains(tuning, found), *_contributions(tuning, found), *_left_out(tuning, found)]
    else:
        blocks += _next_steps(folder, tuning)
    blocks += _untried(tuning)
    if found:
        blocks += _tradeoff(tuning, found)
    blocks.append(Command("page", str(folder / directory.REPORT), on=Medium.TERMINAL))
    blocks.append(Facts(_facts(folder, tuning)))
    return Document(
        headline(tuning),
        blocks,
        title=f"Tuning {subject(tuning)}",
        context="gpubench tune",
        path=str(folder),
        links=[("All runs", "../index.html")],
    )


def subject(tuning: Tuning) -> str:
    """Returns what is tuned, as its settings say, which are also what a resumed search runs."""
    return kind_of(tuning.command).describe(tuning.settings, tuning.workload, ranks=tuning.world_size)


def headline(tuning: Tuning) -> str:
    """Returns the answer in one sentence."""
    found = tuning.conclusion
    if found and tuning.keep and found.gain:
        sure, unsure = _by_proof(tuning, found)
        kept = f"{units.counted(len(unsure), 'setting')} together" if unsure and not sure else said(sure or tuning.keep)
        return f"{subject(tuning)}: {gain(found.gain)} as fast with {kept}"
    return f"{subject(tuning)}: {_unproved(tuning, found)}"


def _by_proof(tuning: Tuning, found: Conclusion) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the kept settings whose own part of the gain is established, and the changes of each other one."""
    sure: dict[str, Any] = {}
    unsure = []
    for one in found.contributions:
        changes = tuning.of_level(one.factor, one.level)
        if one in found.established:
            sure |= changes
        else:
            unsure.append(changes)
    return sure, unsure


def _unproved(tuning: Tuning, found: Conclusion | None) -> str:
    """Returns why no settings are proved to be faster."""
    made = units.counted(tuning.runs, "run")
    limited = tuning.budget or tuning.most_runs
    tried = any(any(run.combination) for block in tuning.blocks for run in block.runs)
    if not tuning.treatments:
        return "there is no setting to try"
    if tuning.status == "running":
        return f"the search is running, with {made} so far"
    if tuning.status == "interrupted":
        return f"nothing is proved yet, after {made}" if tried else "interrupted before a setting was tried"
    if found is None or not tried:
        return f"no setting was tried{f', because {_too_little(tuning)}' if limited else ''}"
    before = tuning.peak((0,) * len(tuning.treatments))
    if tuning.most_peak and before and before > tuning.most_peak and not any(found.best):
        limit = units.size(tuning.most_peak)
        return f"nothing that was tried fits into {limit}; as it is, it takes {units.size(before)}"
    if limited and found.gain is None and any(found.best):
        return "no settings are proved to be faster, because the limit left no runs to confirm them"
    if _is_busy(found):
        return "no settings are proved to be faster, because equal runs differ too much to tell"
    if found.gain and any(found.best):
        return f"no settings are proved to be faster; the best ones gave {gain(found.gain)}"
    return "no settings are proved to be faster"


def _too_little(tuning: Tuning) -> str:
    """Returns why the limit left no run of a setting."""
    if tuning.budget is None:
        return f"a limit of {units.counted(tuning.most_runs or 0, 'run')} is too little"
    look = f"the first look took {units.about(tuning.look_seconds)}, " if tuning.look_seconds else ""
    needed = f"and {FEWEST_RUNS} runs can prove one setting"
    return (
        f"{units.about(tuning.budget)} are too little: {look}a run takes {units.about(tuning.seconds_a_run)}, {needed}"
    )


def _is_busy(found: Conclusion) -> bool:
    """Tells whether equal runs differ so much that small gains cannot be seen."""
    return found.noise is not None and found.noise.sigma > BUSY


def _certainty(tuning: Tuning, found: Conclusion) -> Iterator[Block]:
    if found.noise:
        spread = units.percent(found.noise.sigma)
        made = units.counted(tuning.runs, "run")
        on = f" on {tuning.device}" if tuning.device else ""
        look = f" after a first look of {units.seconds(tuning.look_seconds)}" if tuning.look_seconds else ""
        took = units.seconds(tuning.seconds - tuning.look_seconds)
        yield Paragraph(
            f"{made} in {took}{on}{look}; equal runs differ by {spread} (standard deviation); "
            f"intervals are 95 %{FRESH if found.gain else ''}",
            "quiet",
        )
    if _is_busy(found):
        advice = "for a narrower result," if tuning.keep else "for a result,"
        yield Paragraph(f"this machine is busy: {advice} search again while nothing else runs on it", "warning")
    if (ready := tuning.ready_data) and ready.ratio > 1:
        yield Paragraph(f"{ready.found}: no settings of the data alone gain more")
    if tuning.keep and (unsure := _by_proof(tuning, found)[1]):
        names = units.listed(map(said, unsure))
        yield Paragraph(f"also kept, because the gain was proved with them, but not proved by themselves: {names}")
    judged = tuning.losses.get(named(found.best))
    if judged and any(found.best):
        tone: Any = "plain" if judged.outcome == "unharmed" else "warning"
        yield Paragraph(f"loss {judged.outcome}: {judged.reason}", tone)


def _contributions(tuning: Tuning, found: Conclusion) -> Iterator[Block]:
    """Yields what each setting of the best combination contributes, in the order of the ladder, and pairs of them."""
    title = "What each setting contributes" if tuning.keep else "The most promising settings, which are not proved"
    order = [rung.factor for rung in found.ladder]
    kept = sorted(found.contributions, key=lambda one: order.index(one.factor) if one.factor in order else len(order))
    rows = [_contribution(tuning, found, one) for one in kept if tuning.has_run(one.factor, one.level)]
    shown = UNASKED if _is_busy(found) and not tuning.keep else EVERYWHERE  # such gains tell little
    yield table(title, rows, words=("setting", "changes", "loss"), expendable=("changes", "memory"), on=shown)
    pairs: list[dict[str, str | Cell]] = [
        {"settings": " and ".join(_pair(tuning, pair)), "beyond their own gains": _cell(pair.effect)}
        for pair in found.pairs
    ]
    yield table("Settings that depend on each other", pairs, words=("settings",))


def _pair(tuning: Tuning, pair: Interaction) -> list[str]:
    return [said(tuning.of_level(*one)) for one in zip(pair.factors, pair.levels, strict=True)]


def _contribution(tuning: Tuning, found: Conclusion, one: Contribution) -> dict[str, str | Cell]:
    treatment = next(each for each in tuning.treatments if each.name == one.factor)
    judged = tuning.losses.get(named(tuning.alone(one.factor, one.level)))
    rung = next((rung for rung in found.ladder if rung.factor == one.factor), None)
    return {
        "setting": said(tuning.of_level(one.factor, one.level)),
        "step by step": gain(rung.gain).partition(" [")[0] if rung else "",
        "with the others": _cell(one.with_others, ", tie" if one.tie else ""),
        "alone": _cell(one.alone),
        "memory": memory(tuning, one.factor, one.level),
        "changes": CHANGES[treatment.numbers],
        "loss": judged.outcome if judged else "",
    }


def _cell(estimate: Gain | None, remark: str = "") -> Cell:
    if estimate is None:
        return Cell("")
    style: Style = "better" if estimate.low > 1 else "worse" if estimate.high < 1 else "inconclusive"
    return Cell(gain(estimate) + remark, style=style)


def _left_out(tuning: Tuning, found: Conclusion) -> Iterator[Block]:
    known = [one for one in found.dropped if tuning.has_run(one.factor, one.level)]
    rows = [_dropped(tuning, found, one) for one in known]
    unclear = _is_busy(found) and not tuning.keep
    first = [row for row, one in zip(rows, known, strict=True) if not unclear or one.reason not in ("no gain", "tie")]
    title = "Tried and not kept"
    yield table(
        title,
        first[:SHOWN],
        words=("setting", "why"),
        sentences=("why",),
        expendable=("memory",),
        on=Medium.BRIEF,
        rest=_rest(len(rows) - len(first[:SHOWN])),
    )
    yield table(title, rows, words=("setting", "why"), sentences=("why",), on=UNASKED)


def _rest(left: int) -> str:
    return f"{left} more with -v" if left else ""


def _dropped(tuning: Tuning, found: Conclusion, one: Dropped) -> dict[str, str | Cell]:
    why = REASONS[one.reason]
    kept = next((each.level for each in found.contributions if each.factor == one.factor), None)
    if tuning.keep and kept and one.reason in ("no gain", "tie"):
        why = f"{'tie, ' * (one.reason == 'tie')}{said(tuning.of_level(one.factor, kept))} is kept"
    return {
        "setting": said(tuning.of_level(one.factor, one.level)),
        "gain": _cell(one.gain),
        "memory": memory(tuning, one.factor, one.level),
        "why": f"{why}: {one.detail}" if one.detail and one.detail != why else why,
    }


def _untried(tuning: Tuning) -> Iterator[Block]:
    by_reason: dict[str, list[str]] = {}
    for one in tuning.untried:
        by_reason.setdefault(one.reason, []).append(one.name)
    for treatment in tuning.treatments if tuning.conclusion else ():
        for level, changes in enumerate(treatment.levels, 1):
            if not tuning.has_run(treatment.name, level):
                by_reason.setdefault(NOT_REACHED, []).append(said(changes))
    lines = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    shown = UNASKED if tuning.treatments else EVERYWHERE
    if lines:
        yield Folded("What was not tried", [Paragraph(lines, "quiet", "not tried: ", listed=True, on=shown)], on=shown)


def _short(changes: Mapping[str, Any]) -> str:
    """Returns changes without their sections, as "workers=4", because the names in a drawing have little space."""
    return said({key.rpartition(".")[2]: value for key, value in changes.items()})


def _gains(tuning: Tuning, found: Conclusion) -> Iterator[Block]:
    """Yields the picture of the gain, with that of each setting."""
    steps = [
        (_short(tuning.of_level(rung.factor, rung.level)), rung.gain)
        for rung in found.ladder
        if tuning.has_run(rung.factor, rung.level)
    ]
    if drawing := bar_charts.gains("gain step by step", steps):
        note = "Each setting is added to those above it. Whiskers: 95 % intervals."
        note += " The last row is from fresh runs alone." if found.gain else ""
        yield Figure("From the baseline to the result", drawing, note, shape="rows")
    pairs = [one for one in found.interactions if all(map(tuning.has_run, one.factors, one.levels))]
    factors = list(dict.fromkeys(name for pair in pairs for name in pair.factors))
    levels = {name: level for pair in pairs for name, level in zip(pair.factors, pair.levels, strict=True)}
    effects = {
        (factors.index(pair.factors[0]), factors.index(pair.factors[1])): pair.effect
        for pair in pairs
        if not pair.effect.too_wide
    }
    names = [said(tuning.of_level(name, levels[name])) for name in factors]
    if drawing := bar_charts.pairs("interaction of each pair of settings", names, effects):
        numbered = ", ".join(f"{number} {name}" for number, name in enumerate(names, 1))
        note = (
            "The gain of both, in % beyond the product of their own gains. Bold: the 95 % interval excludes 0. "
            f"Settings: {numbered}."
        )
        yield Figure("Which settings depend on each other", drawing, note)


def _tradeoff(tuning: Tuning, found: Conclusion) -> Iterator[Block]:
    """Yields every combination that was tried, with its throughput and its memory, if any was."""
    if not found.tried:
        return
    trades = []
    for tried in found.tried:
        spread = found.noise.sigma / math.sqrt(tried.runs) if found.noise else 0.0
        rate = math.exp(tried.rate) if tried.rate is not None else None
        interval = (rate * math.exp(-2 * spread), rate * math.exp(2 * spread)) if rate and spread else None
        peak = round(tried.peak) if tried.peak else None
        trades.append(Trade(tuning.changes(tried.combination), peak, rate, interval, reason=tried.rejected or None))
    weighed = weigh(trades)
    peaks = [trade.peak for trade in trades if trade.peak]
    if peaks and max(peaks) > (1 + ALIKE) * min(peaks):
        yield from memory_figures.trades(weighed)
    rows = [
        {
            "run": str(number),
            "settings": said(trade.fix) or "as they are",
            "peak": units.size(trade.peak) if trade.peak else "",
            "throughput": units.rate(trade.throughput, "samples/s") if trade.throughput else "does not run",
        }
        for number, trade in enumerate(weighed.trades, 1)
    ]
    shown = table("", rows, words=("settings",), on=Medium.PAGE)
    yield Folded("Every combination that was tried", [shown], on=Medium.PAGE)


def _next_steps(folder: Path, tuning: Tuning) -> Iterator[Block]:
    if tuning.keep:
        yield Command("to run it", f"gpubench train-bench --config {shlex.quote(str(folder / BEST))}", "strong")
        codes = [
            code
            for one in (tuning.conclusion.contributions if tuning.conclusion else ())
            if (code := tuning.codes.get(f"{one.factor} {one.level}"))
        ]
        for code in codes:
            yield Command("in code", code)
        yield from patches.blocks(folder, tuning.patch)
    again = f"gpubench tune --resume {shlex.quote(str(folder))}"
    if tuning.status == "interrupted":
        yield Command("to go on", again, "strong")
    elif tuning.treatments and not tuning.keep and tuning.status == "completed":
        if tuning.budget:
            seconds = max(MORE * tuning.budget, 2 * FEWEST_RUNS * tuning.seconds_a_run)
            yield Command("with more time", f"{again} --budget {math.ceil(seconds / 60)}m")
        elif tuning.most_runs:
            yield Command("with more runs", f"{again} --runs {MORE * tuning.most_runs}")


def _facts(folder: Path, tuning: Tuning) -> dict[str, dict[str, str]]:
    found = {
        "started": phrases.moment(tuning.started),
        "took": units.seconds(tuning.seconds),
        "first look": units.seconds(tuning.look_seconds) if tuning.look_seconds else "",
        "runs": str(tuning.runs),
        "memory limit": units.size(tuning.most_peak) if tuning.most_peak else "none",
        "limit of runs": str(tuning.most_runs or "none"),
        "time limit": units.seconds(tuning.budget) if tuning.budget else "none",
        "profile": str(folder / tuning.look) if tuning.look else "",
    }
    stages: dict[str, str] = {block.stage: block.why for block in tuning.blocks}
    return {"The search": found, "Stages": stages}
