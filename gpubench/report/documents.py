"""A comparison for other programs and other pages: Markdown, CSV and JSON."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpubench import runs
from gpubench.comparison.result import Causes, Comparison, Comparisons, Memory, Verdict, Waterfall
from gpubench.comparison.verdicts import leading
from gpubench.report import causing, comparing_memory, phrases, plain
from gpubench.report.headline import headline

PARTS = {  # of Verdict's pairs, by column
    "interval": ("low", "high"),
    "units": ("baseline", "candidate"),
    "effective_n": ("baseline", "candidate"),
}

_SPECIAL = re.compile(r"([\\`*\[\]|~#$])|(?<![^\W_])(_)|(_)(?![^\W_])")  # an underscore inside a word is none


def to_json(document: msgspec.Struct) -> str:
    """Every number and reason. JSON knows no NaN: where a recorded setting holds one, it becomes a word."""
    return runs.to_json(_finite(msgspec.to_builtins(document, str_keys=True)))


def to_csv(comparisons: Comparisons) -> str:
    """A row for each metric of each candidate. Text that a spreadsheet would run has an apostrophe in front."""
    text = io.StringIO()
    columns = ["baseline_label", "candidate_label"]
    for name in Verdict.__struct_fields__:
        columns += [f"{name}_{part}" for part in PARTS.get(name, ())] or [name]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for comparison in comparisons.comparisons:
        labels = [plain.cell(side.label) for side in (comparison.baseline, comparison.candidate)]
        writer.writerows([*labels, *_fields(verdict)] for verdict in comparison.verdicts)
    return text.getvalue()


def to_markdown(comparisons: Comparisons, *, everything: bool = False) -> str:
    """For a pull request or a job summary, in GitHub's dialect."""
    lines = [f"- {escape(phrases.omission(line))}" for line in comparisons.left_out]
    for comparison in comparisons.comparisons:
        lines += _comparison(comparison, everything)
    if comparisons.gate:
        rows = [
            [result.outcome, result.condition, result.candidate, phrases.worsening(result), _p_value(result.p_value)]
            for result in comparisons.gate
        ]
        lines += table(["gate", "condition", "candidate", "measured and limit", "adjusted p"], rows)
    return "\n".join(lines).strip("\n") + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """With a blank line on each side; cells are escaped here."""
    lines = [f"| {' | '.join(map(escape, row))} |" for row in (head, *rows)]
    return ["", lines[0], "|" + "---|" * len(head), *lines[1:], ""]


def escape(text: str) -> str:
    """Text that shows as itself in a cell, a list or a heading, whatever Markdown or HTML it holds."""
    safe = plain.clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", safe)


def _comparison(comparison: Comparison, everything: bool) -> list[str]:
    lines = ["", f"### {escape(headline(comparison))}", ""]
    lines += [f"- baseline {escape(phrases.side(comparison.baseline))}"]
    lines += [f"- candidate {escape(phrases.side(comparison.candidate))}"]
    lines += [f"- {escape(reason)}" for reason in comparison.comparability.reasons]
    listed, rest = phrases.listed(comparison.comparability.differences)
    if listed:
        rows = [[one.key, phrases.cell(one.baseline), phrases.cell(one.candidate)] for one in listed]
        lines += table(["differs", "baseline", "candidate"], rows)
        lines += [escape(rest)] * bool(rest)
        lines += [f"- {escape(line)}" for line in phrases.consequences(comparison.comparability.differences)]
    lines += _verdicts(phrases.shown(comparison.verdicts, everything))
    if waterfall := comparison.explanation.waterfall:
        lines += _waterfall(waterfall)
    lines += [f"- {escape(note)}" for note in comparison.explanation.notes]
    if comparison.memory:
        lines += _memory(comparison.memory)
    if comparison.causes:
        lines += _causes(comparison.causes)
    lines += [f"- warning: {escape(warning)}" for warning in comparison.warnings]
    return lines


def _verdicts(verdicts: Sequence[Verdict]) -> list[str]:
    if not verdicts:
        return []
    rows = [[plain.words(one.metric), *phrases.values(one), phrases.change(one), one.verdict] for one in verdicts]
    lines = table(["metric", "baseline", "candidate", "change", "verdict"], rows)
    lines += [f"- {escape(note)}" for note in phrases.notes(verdicts)]
    lead = leading(verdicts)
    return [*lines, f"- {escape(phrases.method(lead))}"] if lead else lines


def _waterfall(waterfall: Waterfall) -> list[str]:
    rows = [[move.phase, move.change, move.share, move.interval] for move in phrases.moves(waterfall)]
    total = phrases.total(waterfall)
    rows.append([f"{total.phase} {phrases.span(waterfall)}", total.change, total.share, total.interval])
    return table(["phase", "change", "of the whole", "95 % interval"], rows)


def _memory(memory: Memory) -> list[str]:
    lines = [f"- {escape(line)}" for line in (comparing_memory.sentence(memory), *comparing_memory.peaks(memory))]
    for one in comparing_memory.tables(memory):
        lines += table(one.columns, one.rows)
        lines += [f"and {escape(one.rest)}", ""] if one.rest else []
    return lines


def _causes(causes: Causes) -> list[str]:
    lines = [f"- {escape(line)}" for line in causing.bottlenecks(causes)]
    lines += [f"- {fate}: {escape(about)}" for fate, about in causing.fates(causes)]
    if work := causing.work(causes):
        lines += table(work.columns, work.rows)
        lines += [f"and {escape(work.rest)}", ""] if work.rest else []
    return lines + [f"- {escape(note)}" for note in causing.notes(causes)]


def _p_value(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _fields(verdict: Verdict) -> list[Any]:
    cells: list[Any] = []
    for name in Verdict.__struct_fields__:
        value = getattr(verdict, name)
        cells += list(value or [None] * len(PARTS[name])) if name in PARTS else [value]
    return [plain.cell(cell) if isinstance(cell, str) else cell for cell in cells]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
