"""Write a comparison as Markdown, CSV or JSON."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gpubench import text as plain
from gpubench.compare.result import Causes, Comparison, Comparisons, Memory, Verdict, Waterfall
from gpubench.compare.verdicts import leading
from gpubench.report import phrases
from gpubench.report.comparison import bottlenecks, finding_changes, notes, peaks, sentence, tables, work_done
from gpubench.report.phrases import headline
from gpubench.runs import directory

PARTS = {  # columns of the fields of Verdict that are pairs
    "interval": ("low", "high"),
    "units": ("baseline", "candidate"),
    "effective_n": ("baseline", "candidate"),
}

_SPECIAL = re.compile(r"([\\`*\[\]|~#$])|(?<![^\W_])(_)|(_)(?![^\W_])")  # an underscore inside a word needs no escape


def to_json(document: msgspec.Struct) -> str:
    """Return the document as JSON; a NaN or infinity, which JSON does not have, becomes a string."""
    return directory.to_json(_finite(msgspec.to_builtins(document, str_keys=True)))


def to_csv(comparisons: Comparisons) -> str:
    """Return one row per metric and candidate; an apostrophe precedes text that a spreadsheet would evaluate."""
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
    """Return GitHub-flavoured Markdown for a pull request or a job summary."""
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
    """Return a Markdown table between two blank lines; this function escapes the cells."""
    lines = [f"| {' | '.join(map(escape, row))} |" for row in (head, *rows)]
    return ["", lines[0], "|" + "---|" * len(head), *lines[1:], ""]


def escape(text: str) -> str:
    """Return text that Markdown renders literally in a cell, a list or a heading."""
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
    lines = [f"- {escape(line)}" for line in (sentence(memory), *peaks(memory))]
    for one in tables(memory):
        lines += table(one.columns, one.rows)
        lines += [f"and {escape(one.rest)}", ""] if one.rest else []
    return lines


def _causes(causes: Causes) -> list[str]:
    lines = [f"- {escape(line)}" for line in bottlenecks(causes)]
    lines += [f"- {outcome}: {escape(about)}" for outcome, about in finding_changes(causes)]
    if work := work_done(causes):
        lines += table(work.columns, work.rows)
        lines += [f"and {escape(work.rest)}", ""] if work.rest else []
    return lines + [f"- {escape(note)}" for note in notes(causes)]


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
