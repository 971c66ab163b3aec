import io
import logging

import pytest
from rich.console import Console

from gpubench.logs import CHOICES, MODIFIABLE
from gpubench.report.document import Command, Document, FindingBlock, FindingList, Line
from gpubench.report.terminal import Terminal, show
from gpubench.text import bar

SENTENCE = "the step waits for batches, and the loader takes most of the time outside of PyTorch"


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=30, force_terminal=terminal, color_system=None)


def said(found: Console) -> list[str]:
    return found.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_a_sentence_is_broken_between_words_on_a_terminal() -> None:
    terminal = console(terminal=True)
    show(Document(SENTENCE, []), terminal)
    lines = said(terminal)
    assert len(lines) == 3
    assert " ".join(line.strip() for line in lines) == SENTENCE


def test_a_sentence_in_a_file_is_one_line() -> None:
    file = console(terminal=False)
    show(Document(SENTENCE, []), file)
    assert said(file) == [SENTENCE]


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_to_be_copied_is_never_broken_and_brackets_are_no_markup(terminal: bool) -> None:
    path = "results/[bold]trial[/bold]/20261121-105421-739-4586"
    copied = console(terminal)
    show(Document("", [Command("completed", path)]), copied)
    assert said(copied) == [f"completed: {path}"]


def test_a_bar_is_as_long_as_asked_for_whatever_its_share() -> None:
    assert [bar(share, "forward", 8).plain for share in (0.0, 0.25, 1.0)] == ["░" * 8, "██" + "░" * 6, "█" * 8]
    assert bar(0.5, "forward").spans[0].style == "green"
    assert bar(0.5, "of a later version").spans[0].style == "white"


def test_choices_are_named_once_and_without_the_name_of_a_level(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(quiet=False, verbosity=0)
    with terminal.errors_only():
        for _ in range(3):
            logging.getLogger(CHOICES).log(MODIFIABLE, "device=cpu")
        logging.getLogger("gpubench").warning("hidden")
    logging.getLogger("gpubench").log(MODIFIABLE, "trying")
    logging.getLogger("gpubench").warning("shown")
    assert capsys.readouterr().err == "device=cpu\ntrying\nwarning: shown\n"


def test_findings_are_brief_without_details() -> None:
    lines = [Line("cause", "long", brief=False), Line("set", "--a=1")]
    found = Document(
        "", [FindingList([FindingBlock(f"problem {n}", "low", ["first", "second"], lines, "") for n in range(5)], "")]
    )
    brief, full = console(terminal=False), console(terminal=False)
    show(found, brief)
    show(found, full, details=True)
    text, all_of_it = brief.file.getvalue(), full.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("--a=1") == text.count("first") == 3
    assert "second" not in text
    assert "long" not in text
    assert all_of_it.count("long") == all_of_it.count("second") == 5
