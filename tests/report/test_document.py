"""What the renderers promise of every report: that all is shown where it should be, fits, and obeys nobody."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import needs_browser, wide_tables
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup
from reports import HOSTILE, Page, everywhere, harmless, on_terminal
from rich.cells import cell_len
from rich.console import Console
from test_report_footprint import REPORTS as FOOTPRINTS
from test_report_profile import REPORTS as PROFILES
from test_report_trying import looked, reported, tried

from gpubench.report import document as blocks
from gpubench.report import markdown, page, terminal
from gpubench.report.document import (
    EVERYWHERE,
    Block,
    Cell,
    Document,
    Medium,
    Paragraph,
    Part,
    StackedBar,
    Table,
    table,
)

REPORTS = {**FOOTPRINTS, **PROFILES, "memory-tried": reported(looked(), tried())}


def every_kind(text: str) -> Iterator[Block]:
    """A block of every kind; the text stands wherever a block can have one."""
    figure = blocks.Figure(
        text,
        Markup("<svg><title>{}</title></svg>").format(text),
        text,
        legends=[(text, [("hue-other", text)])],
    )
    part = Part(text, "other", 0.5, text, text)
    side = blocks.Sided("baseline", text, text, [text])
    finding = blocks.FindingBlock(
        text, "high", [text], [blocks.Line(text, text), blocks.Line("set", text, code=True)], text
    )
    yield blocks.Heading(text, anchor="here", link=text, target="#here")
    yield Paragraph([text, text], "warning", "note: ")
    yield blocks.Command(text, text, after=text)
    yield Table(
        text, ("of", "what"), [(Cell(text, note=text), Cell(text, chip=True)), (Cell("1"), Cell(text, code=True))],
        frozenset({"what"}), rest=text, note=text, bars=[1.0, 0.5],
    )  # fmt: skip
    yield blocks.Breakdown(text, text, text, [part])
    yield figure
    yield blocks.Figures([figure])
    yield blocks.StackedBars("phase", [StackedBar(text, text, {"peak": text}, [part])])
    yield blocks.FindingList([finding], "nothing")
    yield blocks.Sides(side, side)
    yield blocks.Facts({text: {text: text}})
    yield blocks.Folded(text, [Paragraph(text)])
    yield blocks.NestedDocument(text, [Paragraph(text)], text, "there")


KINDS = {type(block).__name__: block for block in every_kind("a text")}


def whole(*found: Block) -> Document:
    return Document("", found)


def shown(found: Document) -> dict[Medium, str]:
    return {
        Medium.TERMINAL: on_terminal(found),
        Medium.MARKDOWN: markdown.render(found),
        Medium.PAGE: Page(page.render(found)).words,
    }


def test_there_is_an_example_of_every_kind_of_block() -> None:
    assert {type(block) for block in every_kind("")} == set(Block.__subclasses__())


@pytest.mark.parametrize("kind", KINDS)
def test_every_medium_that_a_block_names_shows_it_and_no_other_does(kind: str) -> None:
    block = KINDS[kind]
    assert block.on
    for medium, text in shown(whole(block)).items():
        assert ("a text" in text.lower()) == bool(medium & block.on), medium


def test_details_are_shown_with_v_alone_and_lines_of_a_medium_only_there() -> None:
    detail = whole(Paragraph("a detail", on=Medium.DETAILS | Medium.MARKDOWN))
    assert "a detail" not in on_terminal(detail)
    assert "a detail" in on_terminal(detail, details=True)
    assert "a detail" in markdown.render(detail)
    assert "a detail" not in page.render(detail)


@pytest.mark.parametrize("name", ["Paragraph", "Table", "Breakdown", "Stacks", "Findings"])
def test_a_block_without_content_leaves_no_trace(name: str) -> None:
    empty: dict[str, Block] = {
        "Paragraph": Paragraph(["", ""], "warning", "note: "),
        "Table": table("a title", []),
        "Breakdown": blocks.Breakdown("a title", "of", "size", []),
        "Stacks": blocks.StackedBars("a title", []),
        "Findings": blocks.FindingList([], "all is well"),
    }
    texts = shown(whole(empty[name])).values()
    assert not any("a title" in text or "note" in text for text in texts)
    assert name != "Findings" or all("ll is well" in text for text in texts), "that nothing was found is said"


def test_foreign_names_are_escaped_by_every_renderer() -> None:
    attack = f"{HOSTILE}[bold]\x1b[2J\nline[/bold]"
    found = Document(attack, list(every_kind(attack)), title=attack, context=attack, path=attack, about=attack,
                     chips=[blocks.Chip(attack, "worse", attack)], footer=[([attack], [attack])])  # fmt: skip
    harmless(found, at_least=12)
    assert "[bold]\\x1b[2J\\nline[/bold]" in on_terminal(found, 1000)
    assert b"\\ud800" in page.render(whole(Paragraph("\ud800"))).encode(), "half a character is no reason to fail"


@pytest.mark.parametrize(
    "text", ["a|b", "*a*", "_a_", "a`b`", "[a](b)", "# a", "~a~", "$a$", "a\\b", "a\nb", "<a>", "&lt;"]
)
def test_markdown_shows_its_own_signs_as_they_are(text: str) -> None:
    source = markdown.render(whole(Table("", ("of", "what"), [(Cell(text), Cell("1"))])))
    (line,) = [line for line in source.splitlines() if line.endswith("| 1 |")]
    assert re.sub(r"\\.", "", line).count("|") == 3
    assert not re.search(r"(?<!\\)[*`\[\]~#$<>]", line)


def test_markdown_has_no_heaps_of_empty_lines_and_ends_with_one_line_end() -> None:
    for found in REPORTS.values():
        source = markdown.render(found)
        assert "\n\n\n" not in source
        assert source == source.strip("\n") + "\n"


# Tables in a terminal

names = st.text("abc层", min_size=1, max_size=60)
figures = st.integers(0, 10**6).map(str)


def made(rows: list[tuple[str, ...]], words: set[str], **options: Any) -> Table:
    columns = tuple(f"c{number}" for number in range(len(rows[0])))
    return Table("", columns, [tuple(map(Cell, row)) for row in rows], frozenset(words), **options)


@settings(deadline=None)
@given(
    st.lists(st.tuples(names, figures, names, figures, figures, names, figures), min_size=1, max_size=4),
    st.integers(20, 200),
    st.sampled_from([(), ("c2",), ("c3", "c1")]),
    st.sampled_from([(), ("c5",)]),
    st.booleans(),
)
def test_a_table_fits_any_terminal_with_its_first_column_and_another_one(
    rows: list[tuple[str, ...]], width: int, expendable: tuple[str, ...], sentences: tuple[str, ...], barred: bool
) -> None:
    bars = [1 / (1 + place) for place in range(len(rows))] if barred else []
    found = made(rows, {"c2", "c5"}, expendable=expendable, sentences=sentences, bars=bars)
    head, *body = on_terminal(whole(found), width).splitlines()
    assert max(cell_len(line.rstrip()) for line in [head, *body]) <= width
    assert head.startswith("c0")
    assert len(head.split()) >= 2
    for name in head.split()[1:]:
        place = int(name[1:])
        if name not in found.words:
            assert all(any(row[place] in line.split() for line in body) for row in rows), "no figure is shortened"


def columns_at(found: Table, width: int) -> list[str]:
    return on_terminal(whole(found), width).splitlines()[0].split()


def test_expendable_columns_go_first_and_then_those_on_the_right() -> None:
    found = made([("a name", *["1234567890"] * 4)], set(), expendable=("c2", "c1"))
    seen = list(dict.fromkeys(tuple(columns_at(found, width)) for width in range(120, 20, -1)))
    assert seen == [
        ("c0", "c1", "c2", "c3", "c4"), ("c0", "c1", "c3", "c4"), ("c0", "c3", "c4"), ("c0", "c3"),
    ]  # fmt: skip


def test_a_column_is_briefer_before_it_goes_and_words_are_shortened_in_the_middle() -> None:
    name, rate = "the first of the names of " + "many " * 9 + "rows", Cell("1000000 samples/s", brief="1 M")
    row = (Cell(name), Cell("42"), rate)
    lines = [on_terminal(whole(Table("", ("name", "count", "rate"), [row])), width) for width in (90, 45, 34)]
    assert ["1000000" in line for line in lines] == [True, False, False]
    assert ["1 M" in line for line in lines] == [False, True, False]
    assert re.search(r"the first.*….*rows     42   1 M", lines[1])


def test_a_sentence_is_wrapped_and_not_shortened() -> None:
    said = "a correction has a reason that is longer than a line of a narrow terminal can be"
    text = on_terminal(whole(made([("dropout", "1", said)], {"c2"}, sentences=("c2",))), 50)
    assert "…" not in text
    assert " ".join(text.split()).endswith("narrow terminal can be")


def test_numbers_are_aligned_on_the_right_also_where_they_name_rows() -> None:
    text = on_terminal(whole(made([("8", "9"), ("16", "100")], set())))
    assert [line.rstrip() for line in text.splitlines()[1:]] == [" 8    9", "16  100"]
    words = on_terminal(whole(made([("rank 8", "9"), ("rank 16", "100")], set())))
    assert [line.rstrip() for line in words.splitlines()[1:]] == ["rank 8     9", "rank 16  100"]


def test_bars_stand_beside_names_where_there_is_room_and_signed_ones_lead_from_an_axis() -> None:
    found = made([("a", "1"), ("b", "2")], set(), bars=[0.5, 1.0])
    wide = on_terminal(whole(found), 80)
    assert [line.count("█") for line in wide.splitlines()[1:]] == [6, 12]
    assert "█" not in on_terminal(whole(found), 79)
    signed = on_terminal(whole(made([("a", "1"), ("b", "2")], set(), bars=[-1.0, 0.5])), 60).splitlines()
    assert "less · more" in signed[0]
    assert [line.split()[1] for line in signed[1:]] == ["█" * 12 + "│", "│" + "█" * 6]


# Stacked bars, sentences and commands in a terminal


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(1, 3))
def test_a_stacked_bar_is_as_long_as_its_share_of_the_whole(sizes: list[float], over: float) -> None:
    most = max(sum(sizes) * over, 1e-9)
    parts = [Part(str(place), "other", size / most, "", "", "PGOATFCI"[place]) for place, size in enumerate(sizes)]
    text = on_terminal(whole(blocks.StackedBars("phase", [StackedBar("x", "stage", {"peak": "1 B"}, parts)])))
    bar = text.splitlines()[-1].split()[-1]
    assert len(bar) == terminal.STACK
    assert abs(len(bar.rstrip("░")) - sum(sizes) / most * terminal.STACK) <= 0.5
    assert "░" not in bar.rstrip("░")


def test_a_block_of_a_bar_hides_its_letter_in_its_own_colour_and_without_colours_is_the_letter() -> None:
    stacks = whole(
        blocks.StackedBars("phase", [StackedBar("x", "stage", {"peak": "1 B"}, [Part("p", "o", 1.0, "", "", "P")])])
    )
    assert "\x1b[34;44mPPPP" in on_terminal(stacks, colour=True)
    assert "  PPPP" in on_terminal(stacks)
    assert "PP" not in on_terminal(stacks, 16), "figures alone, where bars have no room"
    assert "1 B" in on_terminal(stacks, 16)


@pytest.mark.parametrize("width", [40, 60, 80, 200])
@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_wider_than_the_terminal_but_what_is_to_be_copied_out_of_it(name: str, width: int) -> None:
    copied = tuple(f"{label}: " for label in ("keep", "kept", "open", "together"))
    lines = [line.rstrip() for line in on_terminal(REPORTS[name], width).splitlines() if not line.startswith(copied)]
    assert max(map(cell_len, lines)) <= width


def test_sentences_are_wrapped_on_a_terminal_and_whole_in_a_file_and_commands_are_always_whole() -> None:
    sentence, command = "a few words " * 20, " ".join(["--a.setting=value"] * 10)
    found = whole(Paragraph(sentence), blocks.Command("keep", command))
    file = io.StringIO()
    terminal.show(found, Console(file=file, width=60))
    assert len(file.getvalue().splitlines()) == 2
    lines = on_terminal(found, 60).splitlines()
    assert len(lines) == 4 + 1
    assert lines[-1] == f"keep: {command}"


def test_a_warning_is_coloured_and_an_explanation_is_dim() -> None:
    tones = [on_terminal(whole(Paragraph("said", tone)), colour=True) for tone in ("quiet", "strong", "warning")]
    assert [text.split("m")[0] for text in tones] == ["\x1b[2", "\x1b[1", "\x1b[33"]


# Pages


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_is_whole_in_itself_and_says_so_to_the_browser(name: str) -> None:
    source = page.render(REPORTS[name])
    found = Page(source)
    assert source.startswith('<!doctype html>\n<html lang="en">')
    assert ("http-equiv", "Content-Security-Policy") in found.attributes
    assert "default-src 'none'" in source
    assert ("name", "viewport") in found.attributes
    links = {
        value for key, value in found.attributes if key in ("href", "src") and not value.startswith(("#", "data:,"))
    }
    assert links <= {"https://ui.perfetto.dev"}
    assert not re.search(r"url\(|@import|\bnan\b|inf%", source)
    assert found.tags.count("h1") == 1
    assert all(f'id="{value[1:]}"' in source for key, value in found.attributes if key == "href" and value[:1] == "#")


def test_minus_signs_of_numbers_are_typeset_and_those_of_code_are_not() -> None:
    finding = blocks.FindingBlock(
        "t", "low", [], [blocks.Line("set", "-4", code=True), blocks.Line("measured", "-5 %", figures=True)], ""
    )
    command = blocks.Command("keep", "--a=-2", after=" at -3 %")
    cells = Table("", ("of", "what"), [(Cell("x"), Cell("-6")), (Cell("y"), Cell("-7", code=True))])
    source = page.render(whole(Paragraph("changed by -1 %"), command, blocks.FindingList([finding], ""), cells))
    assert {number for number in "1234567" if f"\u2212{number}" in source} == set("1356")
    assert '<code class="copied">--a=-2</code>' in source
    assert "5\u00a0%" in source, "a number stays beside its unit"


def test_sentences_begin_with_a_capital_and_end_with_a_full_stop_and_names_stay_as_they_are() -> None:
    assert page.sentence("it took 3 s") == "It took 3\u00a0s."
    assert page.sentence("it is said.") == "It is said."
    assert page.sentence("why?") == "Why?"
    assert page.sentence("x.pt.trace.json: 6 steps") == "x.pt.trace.json: 6 steps."
    assert page.sentence("gpubench/a.py has it").startswith("gpubench/")
    assert page.sentence("single: other processes kept it busy", ["single"]).startswith("single: ")
    assert page.sentence("singles are many", ["single"]).startswith("Singles")
    assert page.heading("sd, fp32, 20 steps of PNDMScheduler") == "sd, fp32, 20 steps of PNDMScheduler"
    assert page.sentence("sd, PNDMScheduler") == "sd, PNDMScheduler."
    assert page.heading("env A=1 python train.py") == "env A=1 python train.py"
    assert page.sentence("steady, then slow") == "Steady, then slow."


def test_a_table_of_a_page_can_be_read_on_a_phone_and_by_a_screen_reader() -> None:
    found = Page(page.render(whole(made([("a", "1", "words"), ("2", "3", "more")], {"c2"}))))
    roles = {value for key, value in found.attributes if key == "role"}
    assert {"table", "rowgroup", "row", "columnheader", "rowheader", "cell"} <= roles
    named = [value for key, value in found.attributes if key == "data-name"]
    assert named == ["c1", "c2", "c0", "c1", "c2"], "a row that is named by a number also names its first cell"


def test_a_long_name_is_shortened_and_whole_on_hover_and_may_go_on_in_another_line() -> None:
    name, kernel = "transformer.h.0.mlp.c_fc.weight", "k" * 300
    source = page.render(whole(made([(kernel, name)], {"c1"})))
    assert f'title="{kernel}"' in source
    assert f">{'k' * 48}…" in source
    assert f'title="{name}"' in source
    assert ">transformer.<wbr>h.<wbr>0.<wbr>mlp.<wbr>c_<wbr>fc.<wbr>weight</td>" in source
    assert name in Page(source).words


@needs_browser
def test_no_table_of_a_page_has_to_be_scrolled_on_a_small_screen(tmp_path: Path) -> None:
    assert wide_tables(page.render(REPORTS["footprint-predicted"]), tmp_path, 1000) == 0


def test_a_golden_file_holds_every_medium() -> None:
    assert everywhere(whole(Paragraph("said", on=EVERYWHERE))).lower().count("said") == 4


def test_a_table_that_must_be_complete_keeps_all_columns_on_a_narrow_terminal() -> None:
    names = ("distributed.sync_gradients", "every micro-batch", "the last micro-batch")
    lines = on_terminal(whole(made([names], {"c1", "c2"}, complete=True)), 40).splitlines()
    assert lines[0].split() == ["c0", "c1", "c2"]
    assert max(map(cell_len, lines)) <= 40
    assert len(on_terminal(whole(made([names], {"c1", "c2"})), 40).splitlines()[0].split()) < 3


def test_details_replace_what_is_shown_in_brief() -> None:
    found = whole(
        Paragraph("brief", on=Medium.BRIEF), Paragraph("details", on=Medium.DETAILS), Paragraph("a", on=Medium.TERMINAL)
    )
    assert on_terminal(found) == "brief\na\n"
    assert on_terminal(found, details=True) == "details\na\n"


def test_a_terminal_shows_no_heap_of_empty_lines_and_no_space_at_the_end_of_a_line() -> None:
    for found in REPORTS.values():
        text = on_terminal(found, 60, details=True)
        assert "\n\n\n" not in text
        assert not re.search(r" \n", text)
        assert text == text.strip("\n") + "\n"


def test_a_page_has_the_label_of_each_line_but_that_of_a_warning() -> None:
    assert Page(page.render(whole(Paragraph("commit it", label="next: ")))).words.count("Next: commit it.") == 1
    several = Page(page.render(whole(Paragraph(["commit it", "go on"], label="next: ")))).words
    assert "Next: commit it." in several
    assert "Next: go on." in several
    assert "arning:" not in Page(page.render(whole(Paragraph("it is noisy", "warning", label="warning: ")))).words
