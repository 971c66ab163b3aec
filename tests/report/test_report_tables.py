"""The tables of a profile in the order and of the length that the user asks for: --sort and --rows."""

import re
from collections.abc import Callable
from pathlib import Path

import profiles_made as made
import pytest
from cli import complaint
from running import Finished
from traces_made import launched, step, write

from gpubench.errors import UsageError
from gpubench.report.document import EVERYWHERE
from gpubench.report.profile_tables import LISTINGS, PLAIN, Arrangement, arrangement, tables
from gpubench.trace.profile import RankProfile

CommandLine = Callable[..., Finished]
RANKS = {"device": made.device_rank(), "host": made.host_rank()}
EVERY = [
    (kind, listing.name, column)
    for kind, rank in RANKS.items()
    for listing in LISTINGS.values()
    if listing.items(rank, False)
    for column in listing.order(rank)
]


@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS)
def test_columns_are_called_in_the_options_as_they_are_printed(rank: RankProfile) -> None:
    printed = {(name, column) for name, one in tables(rank).items() for column in one.columns}
    assert printed
    for name, column in printed:
        assert arrangement([f"{name}={column}"], [], unfolded=False).columns == {name: column}
        assert arrangement([f"{name.upper()[:4]}={column.upper()}"], [], unfolded=False).columns == {name: column}


@pytest.mark.parametrize(("kind", "name", "column"), EVERY)
def test_every_table_can_be_ordered_by_each_of_its_columns(kind: str, name: str, column: str) -> None:
    rank, listing = RANKS[kind], LISTINGS[name]
    found = tables(rank, Arrangement(columns={name: column}, rows={name: None}))[name]
    items = listing.items(rank, False)
    assert len(found.rows) == len(items), "no row is lost"
    values = [listing.columns[column].value(rank, item) for item in listing.sorted_by(rank, items, column)]
    known = [value for value in values if value not in (None, "")]
    assert values[: len(known)] == known, "what is not known comes last"
    assert known == sorted(known, reverse=not any(isinstance(value, str) for value in known))
    assert (found.title, found.on, found.kept) == (f"{name}, by {column}", EVERYWHERE, (column,))
    others = {title: one for title, one in tables(rank).items() if title != name}
    arranged = tables(rank, Arrangement(columns={name: column}))
    assert {title: arranged[title] for title in others} == others, "the others stay as they are"


@pytest.mark.parametrize("most", [1, 2, 10**6, None])
def test_a_table_has_the_rows_that_are_asked_for_and_counts_the_others(most: int | None) -> None:
    for name, one in tables(RANKS["device"], Arrangement(rows=dict.fromkeys(LISTINGS, most))).items():
        items = LISTINGS[name].items(RANKS["device"], False)
        assert len(one.rows) == min(len(items), most or len(items))
        left = len(items) - len(one.rows)
        assert one.rest.startswith(f"{left} other") if left else not one.rest


def test_an_option_without_a_table_is_for_every_table_that_has_the_column() -> None:
    found = arrangement(["calls", "copies=size"], ["30", "kernels=all"], unfolded=True)
    assert {name for name, column in found.columns.items() if column == "calls"} == {
        "Modules", "Operators", "Kernels", "Waits of the CPU for the device", "Reads of values on the CPU",
        "Collectives",
    }  # fmt: skip
    assert found.columns["Copies"] == "size"
    assert found.rows == dict.fromkeys(LISTINGS, 30) | {"Kernels": None}
    assert found.unfolded
    assert arrangement([], [], unfolded=False) == PLAIN


@pytest.mark.parametrize(
    ("sort", "rows", "message", "hint"),
    [
        ("kernels=cals", "", "--sort kernels=cals: Kernels has no column 'cals'", "did you mean 'calls'? columns are"),
        ("cals", "", "--sort cals: no table has a column 'cals'", "did you mean 'calls'?"),
        ("kernels=own time", "", "Kernels has no column 'own time'", "columns are kernel, time, share, calls"),
        ("kernel=", "", "Kernels has no column ''", "columns are kernel, time"),
        ("kernles=time", "", "--sort kernles: there is no such table", "did you mean 'Kernels'? tables are Phases"),
        (
            "co=time",
            "",
            "--sort co: several tables begin so",
            "Copies, Waits of the CPU for the device, Reads of values on the CPU, ",
        ),
        ("=time", "", "there is no such table", "tables are Phases, Modules"),
        ("", "kernels=x", "--rows kernels=x: 'x' is not a number of rows", "for example 30, all or kernels=30"),
        ("", "0", "'0' is not a number of rows", "for example"),
        ("", "-3", "'-3' is not a number of rows", "for example"),
        ("", "rows=3", "--rows rows: there is no such table", "tables are"),
    ],
)
def test_a_wrong_name_is_answered_with_the_right_ones(sort: str, rows: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refusal:
        arrangement([sort] if sort else [], [rows] if rows else [], unfolded=False)
    assert message in refusal.value.message
    assert hint in (refusal.value.hint or "")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Fourteen kernels; the later, the shorter and the more often launched."""
    events, number = [step(1, 0, 3000)], 0
    for kernel in range(14):
        for _ in range(kernel + 1):
            number += 1
            at = 25 * number
            events += launched(f"k{kernel:02}", at, at + 4, at + 18 - kernel, number)
    return str(write(tmp_path / "mine.json", events))


def kernels(done: Finished) -> list[str]:
    assert not done.code, done.stderr
    return re.findall(r"^k\d\d", done.stdout, re.MULTILINE)


def test_a_table_is_shown_as_it_was_asked_for_on_the_screen_and_on_the_page(
    command_line: CommandLine, trace: str
) -> None:
    assert not kernels(command_line("profile", "--trace", trace)), "nothing is asked for"
    arranged = ("--sort", "kernels=calls", "--rows", "kernels=12", "--html", "page.html")
    names = [f"k{number:02}" for number in range(13, 1, -1)]
    shown = command_line("profile", "--trace", trace, *arranged)
    assert kernels(shown) == names
    assert "Kernels, by calls" in shown.stdout
    assert "2 others" in shown.stdout
    page = Path("page.html").read_text()
    assert "Kernels, by calls" in page
    table = page[page.index("Kernels, by calls") :]
    assert sorted(names, key=table.index) == names
    plain, again = (command_line("profile", "--trace", trace, "--json", *more) for more in ((), arranged))
    assert plain.stdout == again.stdout


def test_an_order_that_could_not_be_seen_is_refused(command_line: CommandLine, trace: str) -> None:
    both = ("profile", "--trace", trace, "--against", trace, "--rows", "3")
    assert "--html" in complaint(command_line(*both))[1]
    assert not command_line(*both, "--html", "page.html").code
    assert "no column" in complaint(command_line("profile", "--sort", "kernels=cals", "--", "python", "x.py"))[0]


def test_the_profile_of_a_run_is_shown_again_in_another_order(command_line: CommandLine, finished_run: Path) -> None:
    said = complaint(command_line("runs", "show", str(finished_run), "--rows", "3"))
    assert said[0] == f"--sort and --rows arrange the tables of a profile, and {finished_run} has none"
