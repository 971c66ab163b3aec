"""How a decision is shown, alone, in a ledger and in the listing of runs."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from decisions_made import KEPT, decided
from recorded_runs import write_run

from gpubench.compare.decision import Decision, Needed
from gpubench.compare.ledger import JudgedEdit, line_of
from gpubench.report import decision as report
from gpubench.report.listing import verdict
from gpubench.report.markdown import render
from gpubench.report.terminal import Terminal
from gpubench.runs import directory
from gpubench.runs.catalogue import catalogue

OPEN = decided("undecided", rounds=8, needed=Needed(20, 240.0), ending="budget", reasons=["the budget sufficed for 8"])


def shown(decision: Decision) -> str:
    return Terminal(quiet=True, verbosity=0).render(report.document(decision))


@pytest.mark.parametrize(
    ("decision", "says"),
    [
        (KEPT, "next: commit the edit"),
        (decided("discard"), "next: undo the edit"),
        (decided("refused", reasons=["does less work"]), "gpubench compare results/program/a results/program/b -v"),
        (decided("refused", rounds=0, reasons=["fails"]), "the run of the edited version: results/program/b"),
        (decided("refused", rounds=0, reasons=["fails"]), "no whole round of a repeat of each version"),
        (OPEN, "gpubench judge --resume results/program/b"),
        (OPEN, "about 20 rounds would tell, if the gain is as large as measured, 4 min more"),
        (
            decided("undecided", rounds=30, needed=Needed(90, 900.0)),
            "would tell, if the gain is as large as measured, and a judgement makes at most 30: quiet",
        ),
    ],
)
def test_the_answer_comes_first_and_what_to_do_next_last(decision: Decision, says: str) -> None:
    text = " ".join(shown(decision).split())
    assert text.startswith(decision.answer)
    assert says in text


def test_a_judgement_that_has_made_all_rounds_does_not_offer_to_go_on() -> None:
    assert "--resume" not in shown(decided("undecided", rounds=30))


def test_a_judgement_that_needs_more_rounds_than_it_may_make_does_not_offer_to_go_on() -> None:
    assert "--resume" not in shown(decided("undecided", rounds=8, needed=Needed(90, 900.0)))


def test_each_further_reason_and_warning_is_shown() -> None:
    text = shown(decided("refused", reasons=["one", "two"], warnings=["busy"]))
    assert "also: two" in text
    assert "warning: busy" in text


def edit(base: str, gain: float, decision: str = "keep") -> JudgedEdit:
    changes = {"base": base, "gain": gain, "interval": (gain / 1.01, gain * 1.01), "decision": decision}
    return msgspec.structs.replace(line_of(KEPT), **changes)


def test_a_ledger_has_no_gain_of_an_edit_that_was_refused() -> None:
    text = render(report.of_ledger(Path("edits.jsonl"), [edit("a" * 40, 1.1), edit("b" * 40, 1.7, "refused")]))
    assert "1 of 2 judged edits kept: the gain in throughput since aaaaaaaaa is 1.10 x" in text
    assert "1.7" not in text


def test_a_ledger_begins_with_what_the_kept_edits_gain_together() -> None:
    text = render(report.of_ledger(Path("edits.jsonl"), [edit("a" * 40, 1.1), edit("b" * 40, 1.2)]))
    assert "2 of 2 judged edits kept: the product of 2 gains in throughput since aaaaaaaaa is 1.32 x" in text
    assert "gpubench judge --base aaaaaaaaa --ledger edits.jsonl -- python train.py" in text


def test_a_product_that_the_whole_does_not_reach_is_called_too_large() -> None:
    edits = [edit("a" * 40, 1.1), edit("b" * 40, 1.2), edit("a" * 40, 1.25)]
    text = render(report.of_ledger(Path("edits.jsonl"), edits))
    assert "measured against the first base it is 1.25 x" in text
    assert "the product is too large" in text
    assert "--base" not in text


def test_an_empty_ledger_says_so() -> None:
    assert "no edit was judged" in render(report.of_ledger(Path("edits.jsonl"), []))


def test_runs_are_listed_with_the_decision_on_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "results", steps=14)
    report.write(KEPT, run)
    (entry,) = catalogue(tmp_path / "results")
    assert entry.compared is not None
    assert (entry.compared.by, entry.compared.labels) == ("judge", ("HEAD", "working tree"))
    assert verdict(entry.compared) == "keep, 1.10 x [1.09, 1.11]"
    (run / directory.DECISION).write_text("{}")
    (entry,) = catalogue(tmp_path / "results")
    assert entry.compared is None


def test_decisions_and_a_ledger_are_the_golden_ones(golden: Callable[[str, str], None]) -> None:
    terminal = Terminal(quiet=True, verbosity=1)
    edits = [edit("a" * 40, 1.1), edit("b" * 40, 0.98, "discard"), edit("b" * 40, 1.2), edit("a" * 40, 1.25)]
    refused = decided("refused", reasons=["does less work: 16 samples given to the model instead of 64", "it is slow"])
    documents = [*map(report.document, (KEPT, OPEN, refused)), report.of_ledger(Path("edits.jsonl"), edits)]
    golden("judged.txt", "\n".join(map(terminal.render, documents)))
