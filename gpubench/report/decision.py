"""The report of a judgement: the answer, how sure it is, and what to do next; and the report of a ledger."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpubench import units
from gpubench.compare.decision import Decision, Version
from gpubench.compare.ledger import JudgedEdit, Together, together
from gpubench.compare.result import to_json
from gpubench.compare.sequential import FEWEST, MOST
from gpubench.report.document import UNASKED, Block, Cell, Command, Document, Medium, Paragraph, Style, table
from gpubench.runs import directory

STYLES: dict[str, Style] = {"keep": "better", "discard": "worse", "undecided": "inconclusive", "refused": "rejected"}
SHOWN = 9
"""The digits of a commit that are shown."""


def write(decision: Decision, path: Path) -> None:
    """Writes decision.json into the run directory of the edited version."""
    directory.write_document(path / directory.DECISION, to_json(decision))


def document(decision: Decision) -> Document:
    """Returns the report of a judgement."""
    blocks: list[Block] = [Paragraph(_certainty(decision), "quiet")]
    if decision.loss_reason and decision.decision in ("keep", "discard"):
        blocks.append(Paragraph(f"loss {decision.loss}: {decision.loss_reason}", "quiet"))
    blocks += [Paragraph(reason, label="also: ") for reason in decision.reasons[1:]]
    blocks += [Paragraph(line, "warning", label="warning: ") for line in decision.warnings]
    blocks += _next(decision)
    blocks.append(Paragraph([f"{name}: {value}" for name, value in _facts(decision)], "quiet", on=UNASKED))
    return Document(decision.answer, blocks, title="Judgement", context="gpubench judge", path=decision.runs[-1][1])


def _certainty(decision: Decision) -> str:
    """Returns what the answer rests on."""
    made = units.counted(decision.rounds, "round") if decision.rounds else "no whole round"
    parts = [f"{made} of a repeat of each version, in {units.seconds(decision.seconds)}"]
    if decision.interval:
        parts.append("intervals are 95 %, and hold at every look")
    if decision.spread is not None:
        parts.append(f"rounds differ by {units.percent(decision.spread)} (standard deviation)")
    return "; ".join(parts)


def _next(decision: Decision) -> Iterator[Block]:
    """Yields what to do now."""
    base, edited = (shlex.quote(path) for path in decision.runs[-1])
    if decision.decision == "keep" and decision.edited.edit:
        yield Paragraph("commit the edit: the next one is then judged against it", label="next: ")
    elif decision.decision == "keep":
        yield Paragraph("the next edit is judged against this version, by --base if it is not HEAD", label="next: ")
    elif decision.decision == "discard":
        yield Paragraph("undo the edit; git stash keeps a copy of it", label="next: ")
    elif decision.decision == "refused" and decision.rounds:
        yield Command("what both versions did", f"gpubench compare {base} {edited} -v")
    elif decision.decision == "refused":
        yield Paragraph(decision.runs[-1][1], label="the run of the edited version: ")
    else:
        yield from _more(decision, edited)


def _more(decision: Decision, edited: str) -> Iterator[Block]:
    """Yields what it would take to decide."""
    needed = decision.needed
    if needed:
        least = max(needed.rounds, decision.rounds + 1)
        text = f"about {units.counted(least, 'round')} would tell, if the gain is as large as measured"
        if decision.rounds < FEWEST:
            text = f"at least {units.counted(least, 'round')} are needed"
        if least > MOST:
            text += f", and a judgement makes at most {MOST}: quiet the machine, or make each repeat longer by --steps"
        elif needed.seconds:
            text += f", {units.about(needed.seconds)} more"
        yield Paragraph(text, label="next: ")
    if 0 < decision.rounds < MOST and not (needed and needed.rounds > MOST):
        yield Command("to go on", f"gpubench judge --resume {edited}")


def _facts(decision: Decision) -> Iterator[tuple[str, str]]:
    yield "base", _version(decision.base)
    yield "edited version", _version(decision.edited)
    if decision.baseline is not None and decision.candidate is not None:
        values = [units.quantity(value, decision.unit) for value in (decision.baseline, decision.candidate)]
        yield units.words(decision.metric), " -> ".join(values)
    yield "margin", units.percent(decision.margin)
    yield "run directories", ", ".join(path for pair in decision.runs for path in pair)


def _version(version: Version) -> str:
    commit = (version.commit or "")[:SHOWN]
    changes = ", with changes" if version.edit else ""
    return " ".join(
        filter(None, [version.ref or "working tree", f"({commit}{changes})" if commit else "", version.command])
    )


def of_ledger(path: Path, edits: Sequence[JudgedEdit]) -> Document:
    """Returns the report of a ledger."""
    total = together(edits)
    blocks: list[Block] = []
    if total and total.whole:
        blocks.append(Paragraph(_whole(total), label="as a whole: "))
    rows = [_row(number, edit) for number, edit in enumerate(edits, 1)]
    blocks.append(table("Judged edits", rows, ("base", "decision", "edit", "why"), sentences=("why",)))
    if total and len(total.edits) > 1 and not total.whole and total.edits[0].base:
        first = total.edits[0]
        again = (
            f"gpubench judge --base {(first.base or '')[:SHOWN]} --ledger {shlex.quote(str(path))} -- {first.program}"
        )
        blocks.append(Command("to measure them as a whole", again, on=Medium.TERMINAL | Medium.MARKDOWN))
    return Document(_headline(edits, total), blocks, title="Ledger", context="gpubench judge", path=str(path))


def _headline(edits: Sequence[JudgedEdit], total: Together | None) -> str:
    if not edits:
        return "no edit was judged"
    kept = sum(edit.decision == "keep" for edit in edits)
    counts = f"{kept} of {units.counted(len(edits), 'judged edit')} kept"
    if total is None:
        return counts
    since = f" since {(total.edits[0].base or '')[:SHOWN]}" if total.edits[0].base else ""
    number = len(total.edits)
    gain = "the gain" if number == 1 else f"the product of {units.counted(number, 'gain')}"
    return f"{counts}: {gain} in {units.words(total.edits[0].metric)}{since} is {_factor(total.gain, total.interval)}"


def _whole(total: Together) -> str:
    """Returns what the judgement of all edits at once says, beside the product of their gains."""
    edit = total.whole
    assert edit is not None
    assert edit.gain is not None
    measured = f"measured against the first base it is {_factor(edit.gain, edit.interval)}"
    if edit.interval and edit.interval[1] < total.gain:
        return f"{measured}: the product is too large, as gains that were kept because they were large tend to be"
    return measured


def _factor(gain: float, interval: tuple[float, float] | None) -> str:
    ratio, ends = units.factors(gain, interval or ())
    return f"{ratio} x" + (f" [{', '.join(ends)}]" if ends else "")


def _row(number: int, edit: JudgedEdit) -> dict[str, str | Cell]:
    code = f"{(edit.commit or '')[:SHOWN]}{f'+{edit.edit[:SHOWN]}' if edit.edit else ''}"
    return {
        "": str(number),
        "base": (edit.base or "")[:SHOWN],
        "edit": code,
        "decision": Cell(edit.decision, style=STYLES[edit.decision]),
        # Less work has no gain.
        "gain": _factor(edit.gain, edit.interval) if edit.gain and edit.decision != "refused" else "",
        "rounds": str(edit.rounds),
        "why": "; ".join(edit.reasons),
    }
