"""What is reported of the batch sizes and the trades that were tried: its tables and plots, alone and of a run."""

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import footprints_made as made
import msgspec
import pytest
from footprints_made import MIB
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_runs import write_memory_run
from reports import HOSTILE, everywhere, find, harmless, only, paragraphs, rows, text, titles
from test_page import run_of
from test_plots import parsed, texts

from gpubench.compare.evidence import RunEvidence, open_run
from gpubench.errors import RunDirectoryError
from gpubench.kinds.memory.batch_sizes_report import batch_sizes, batch_sizes_sentence
from gpubench.kinds.memory.trades_report import trades
from gpubench.memory.batch_sizes import BatchSizes, Confirmed, LinearFit, PeakPoint, Speed, Trade, Trades, weigh
from gpubench.report import after_run, page
from gpubench.report import memory_figures as figures
from gpubench.report import run as report
from gpubench.report.charts import HEAD, Scale
from gpubench.report.document import Block, Document, Figure, Table
from gpubench.report.memory_figures import PLOT_HEIGHT, scatter
from gpubench.runs.directory import BATCH_SIZES, ENVIRONMENT, MEMORY, REPORT, SCHEMA_VERSION, SUMMARY, TRADES, RunWriter

REPLACE = msgspec.structs.replace
LINE = LinearFit(MIB, MIB, 0.0)


def looked(**changes: Any) -> BatchSizes:
    """One MiB, and one more for each sample: 9 fit into 10 MiB."""
    found = BatchSizes(
        capacity=20 * MIB,
        spare=0.5,
        limit=10 * MIB,
        points=[PeakPoint(size, (size + 1) * MIB) for size in (1, 2, 4, 9, 10, 400)],
        line=LINE,
        largest=9,
        confirmed=[Confirmed(9, 10 * MIB)],
        speeds=[Speed(9, 900.0), Speed(4, 1000.0), Speed(2, 500.0)],
    )
    return REPLACE(found, **changes)


def tried() -> Trades:
    """The first and the last are efficient, the one between takes more memory and is slower than the first."""
    return weigh(
        [
            Trade({}, 30 * MIB, 100.0),
            Trade({"model.activation_checkpointing": True}, 10 * MIB, 50.0),
            Trade({"training.batch_size": 4}, 20 * MIB, 40.0),
            Trade({"model.name": "large"}, None, None, reason="out of memory in backward"),
        ]
    )


def reported(sizes: BatchSizes, weighed: Trades) -> Document:
    """As a run that tried both reports them."""
    return Document(batch_sizes_sentence(sizes), [*batch_sizes(sizes, headed=True), *trades(weighed)])


def plots(blocks: list[Block]) -> list[Figure]:
    return only(blocks, Figure)


def drawn(found: BatchSizes, number: int = 0) -> ElementTree.Element:
    return parsed(plots(batch_sizes(found))[number].drawing)


def places(root: ElementTree.Element, tag: str = "circle") -> list[tuple[float, float]]:
    """Percent from the left and pixels from the top of dots, or of symbols."""
    if tag == "circle":
        return [(percent(one.get("cx")), float(one.get("cy") or 0)) for one in root.iter("circle")]
    found = (one for one in root.iter("svg") if one.get("class") == "symbol")
    return [(percent(one.get("x")), float(one.get("y") or 0)) for one in found]


def percent(text: str | None) -> float:
    return float((text or "").removesuffix("%"))


def near(found: list[tuple[float, float]]) -> Any:
    return [pytest.approx(one, abs=0.02) for one in found]


def test_the_report_of_what_was_tried_is_the_golden_one(golden: Callable[[str, str], None]) -> None:
    golden("memory-tried.txt", everywhere(reported(looked(), tried())))


def test_a_peak_stands_above_its_batch_as_high_as_it_is() -> None:
    x, y = Scale(0, 1.06 * 10, 0, 100), Scale(0, 1.08 * 11 * MIB, PLOT_HEIGHT, 0)
    root = drawn(looked())
    assert places(root) == near([(x(size), HEAD + y((size + 1) * MIB)) for size in (1, 2, 4, 9, 10)])
    assert places(root, "symbol") == near([(x(9), HEAD + y(10 * MIB))])
    (limit,) = [line for line in root.iter("line") if line.get("class") == "median error"]
    assert float(limit.get("y1") or 0) == pytest.approx(HEAD + y(10 * MIB), abs=0.01)
    assert "limit 10 MiB" in texts(root)


def test_the_line_runs_through_the_predictions_from_what_no_sample_adds() -> None:
    root = drawn(looked())
    (path,) = [one for one in root.iter("path") if one.get("class") == "line a"]
    points = [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path.get("d") or "")]
    x, y = Scale(0, 10.6, 0, 100), Scale(0, 1.08 * 11 * MIB, PLOT_HEIGHT, 0)
    assert points[0] == pytest.approx((0, y(MIB)), abs=0.1)
    assert points[-1] == pytest.approx((x(10.6), y(11.6 * MIB)), abs=0.1)


def test_a_line_that_begins_below_nothing_is_drawn_from_nothing_on() -> None:
    root = drawn(looked(line=LinearFit(-2.0 * MIB, MIB, 0.5)))
    (path,) = [one for one in root.iter("path") if one.get("class") == "line a"]
    x, y = re.findall(r"M([\d.]+),([\d.]+)", path.get("d") or "")[0]
    assert float(x) == pytest.approx(100 * 2 / 10.6, abs=0.5)
    assert float(y) == pytest.approx(PLOT_HEIGHT, abs=2)


def test_what_is_far_beyond_the_limit_is_told_and_not_drawn() -> None:
    assert plots(batch_sizes(looked()))[0].note.endswith("not drawn: 400.")
    assert "400" in [row["batch"] for row in rows(find(batch_sizes(looked()), Table, "batch"))]


def test_a_batch_that_failed_when_it_was_run_is_told_beneath() -> None:
    found = looked(confirmed=[Confirmed(9, None, "out of memory"), Confirmed(4, 5 * MIB)], largest=4)
    assert plots(batch_sizes(found))[0].note.endswith("Failed when run: 9.")
    assert len(places(drawn(found), "symbol")) == 1


def test_where_not_even_one_sample_fits_its_peak_is_drawn_above_the_limit() -> None:
    found = looked(
        points=[PeakPoint(1, 100 * MIB)], line=LinearFit(0, 100 * MIB, 0), largest=None, confirmed=[], speeds=[]
    )
    root = drawn(found)
    assert places(root) == near([(100 / 1.06, HEAD + PLOT_HEIGHT - PLOT_HEIGHT / 1.08)])
    assert "limit 10 MiB" in texts(root)
    assert paragraphs(batch_sizes(found), "strong")[0].startswith("not even a batch of 1 fits into 10 MiB")


@pytest.mark.parametrize(("limit", "is_drawn"), [(16.4, True), (17, False)])
def test_a_limit_is_drawn_only_where_it_is_near(limit: float, is_drawn: bool) -> None:
    found = looked(limit=int(limit * MIB), points=looked().points[:5])
    assert any(said.startswith("limit") for said in texts(drawn(found))) == is_drawn


def test_throughput_is_drawn_over_the_same_batches_and_the_fastest_is_named() -> None:
    root = drawn(looked(), 1)
    x, y = Scale(0, 10.6, 0, 100), Scale(0, 1180, PLOT_HEIGHT, 0)
    expected = [(x(size), HEAD + y(rate)) for size, rate in ((2, 500), (4, 1000), (9, 900))]
    assert places(root, "symbol") == near(expected)
    assert "fastest: 4" in texts(root)


def test_batches_have_whole_numbers_on_their_axis() -> None:
    for most in (1, 2, 3, 4, 5, 7, 1 << 20):
        found = looked(points=[PeakPoint(most, MIB)], confirmed=[], speeds=[], largest=most)
        labels = [one.text or "" for one in drawn(found).iter("text") if one.get("class") == "tick middle"]
        assert len(labels) > 1
        assert all(label.replace(",", "").isdigit() for label in labels)


def test_nothing_timed_leaves_one_plot() -> None:
    assert len(plots(batch_sizes(looked(speeds=[])))) == 1


@pytest.mark.parametrize(
    ("confirmed", "said"),
    [
        ([], "not even a batch of 1 fits into {room}: it takes 2 MiB, by prediction"),
        (
            [Confirmed(9, None, "out of memory in backward"), Confirmed(1, 11 * MIB, "more than the margin leaves")],
            "not even a batch of 1 fits into {room}: it was run and took 11 MiB",
        ),
        (
            [Confirmed(9, 12 * MIB), Confirmed(1, None, "out of memory in\x1b backward")],
            "not even a batch of 1 fits into {room}: it was run and failed: out of memory in\x1b backward",
        ),
        (
            [Confirmed(9, 12 * MIB), Confirmed(4, 11 * MIB)],
            "no batch that was run fits into {room}: the smallest, 4, took 11 MiB",
        ),
    ],
    ids=["none run", "too large", "failed", "broken off"],
)
def test_that_no_batch_fits_rests_on_the_smallest_that_was_run(confirmed: list[Confirmed], said: str) -> None:
    told = batch_sizes_sentence(looked(largest=None, confirmed=confirmed, speeds=[]))
    assert told == said.format(room="10 MiB (20 MiB less 50.0 %)")


def test_nothing_looked_at_is_said() -> None:
    found = looked(points=[], line=LinearFit(0, 0, 0), largest=None, confirmed=[], speeds=[])
    assert plots(batch_sizes(found)) == []
    assert paragraphs(batch_sizes(found), "missing") == ["no batch size was tried"]


def test_a_run_stands_right_of_those_that_take_less_and_above_the_slower() -> None:
    root = parsed(scatter(tried()))
    x, y = Scale(10 - 2.8, 30 + 2.8, 0, 100), Scale(40 - 8.4, 100 + 8.4, PLOT_HEIGHT, 0)
    assert places(root, "symbol") == near([(x(10), HEAD + y(50)), (x(30), HEAD + y(100))])
    assert places(root) == near([(x(20), HEAD + y(40))])


def test_every_mark_has_the_number_of_its_row_and_the_efficient_ones_in_bold() -> None:
    root = parsed(scatter(tried()))
    said = {one.text: one.get("class") for one in root.iter("text") if "tick" not in (one.get("class") or "")}
    assert said["1"] == "label after"
    assert said["2"] == "before"
    assert said["3 as it was"] == "label before"
    firsts = [row["option"] for row in rows(find(trades(tried()), Table, "option"))]
    assert [first.split()[0] for first in firsts] == ["1.", "2.", "3.", "4."]
    assert firsts[2] == "3. as it was"


def test_labels_of_marks_that_lie_together_do_not_lie_on_each_other() -> None:
    alike = [Trade({"training.batch_size": size}, 10 * MIB + size, 50.0 + 1e-3 * size) for size in range(5)]
    root = parsed(scatter(weigh([*alike, Trade({}, 30 * MIB, 100.0)])))
    heights = sorted(float(one.get("y") or 0) for one in root.iter("text") if one.get("class", "").endswith("after"))
    assert len(heights) == 5
    assert all(b - a >= figures.APART - 0.02 for a, b in pairwise(heights))


def test_an_interval_is_a_whisker_and_cut_off_where_it_would_press_the_plot_flat() -> None:
    weighed = Trades([Trade({}, 10 * MIB, 100.0, (90.0, 110.0)), Trade({"a": 1}, 20 * MIB, 90.0, (-900.0, 1e6))])
    root = parsed(scatter(weighed))
    y = Scale(60 - 0.14 * 90, 150 + 0.14 * 90, PLOT_HEIGHT, 0)
    ends = [
        (float(one.get("y1") or 0), float(one.get("y2") or 0))
        for one in root.iter("line")
        if one.get("class") == "error"
    ]
    assert ends == near([(HEAD + y(90), HEAD + y(110)), (HEAD + y(60), HEAD + y(150))])
    assert "Whiskers: 95 % intervals." in plots(trades(weighed))[0].note


def test_trades_that_failed_are_in_the_table_alone() -> None:
    assert plots(trades(tried()))[0].note.endswith("Not drawn: 1 run that failed or was not timed.")
    assert len(find(trades(tried()), Table, "option").rows) == 4
    followed_only = Trades([Trade({}, MIB, None), Trade({"a": 1}, None, None, reason="no")])
    assert plots(trades(followed_only)) == []
    assert [row.get("kind") for row in rows(find(trades(followed_only), Table, "option"))] == [None, "no"]
    assert paragraphs(trades(Trades([])), "missing") == ["no settings were run"]


def test_a_single_trade_has_its_plot() -> None:
    ((left, top),) = places(parsed(scatter(weigh([Trade({}, MIB, 10.0)]))), "symbol")
    assert (left, top) == pytest.approx((50, HEAD + PLOT_HEIGHT / 2), abs=0.01)


def test_hostile_settings_are_shown_and_not_obeyed() -> None:
    bold = f"{HOSTILE}\x1b[2J\n"
    weighed = weigh([Trade({bold: HOSTILE}, MIB, 1.0), Trade({"model.name": "<script>"}, None, None, reason=bold)])
    harmless(reported(looked(confirmed=[Confirmed(9, 10 * MIB, bold)]), weighed), at_least=1)


@settings(deadline=None)  # the first page compiles its template
@given(
    st.lists(st.tuples(st.integers(1, 2**20), st.integers(0, 2**50)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 2**20), st.none() | st.integers(0, 2**50)), max_size=4),
    st.lists(st.tuples(st.integers(1, 2**20), st.floats(0, 1e12)), max_size=4),
    st.integers(0, 2**50),
    st.tuples(st.floats(-(2**60), 2**60), st.floats(-(2**60), 2**60)),
)
def test_any_search_is_drawn_within_reason(
    points: list[tuple[int, int]],
    confirmed: list[tuple[int, int | None]],
    speeds: list[tuple[int, float]],
    limit: int,
    line: tuple[float, float],
) -> None:
    found = BatchSizes(
        capacity=limit, spare=0.0, limit=limit, points=[PeakPoint(*one) for one in points], line=LinearFit(*line, 0.1),
        largest=None, confirmed=[Confirmed(*one) for one in confirmed], speeds=[Speed(*one) for one in speeds],
    )  # fmt: skip
    for figure in plots(batch_sizes(found)):
        parsed(figure.drawing)
    page.render(Document("", batch_sizes(found)))


@settings(deadline=None)  # the first page compiles its template
@given(
    st.lists(st.tuples(st.none() | st.integers(0, 2**50), st.none() | st.floats(0, 1e12), st.booleans()), max_size=8)
)
def test_any_trades_are_drawn_within_reason(found: list[tuple[int | None, float | None, bool]]) -> None:
    weighed = Trades([Trade({"a": 1}, peak, speed, None, efficient) for peak, speed, efficient in found])
    drawing = scatter(weighed)
    assert (drawing is None) == all(peak is None or speed is None for peak, speed, _ in found)
    if drawing is not None:
        parsed(drawing)
    page.render(Document("", trades(weighed)))


def searched(results: Path, found: Any) -> Path:
    """The directory of a run that looked for batch sizes and followed nothing."""
    writer = RunWriter(results, "memory", "{}", command="memory", argv=[], world_size=1, git=None)
    writer.replace(ENVIRONMENT, {"host": {"name": "here"}, "gpus": []})
    writer.replace(BATCH_SIZES, found)
    nothing = dict.fromkeys(("flops", "peak", "measured_peak", "pipeline"))
    empty: dict[str, Any] = {"metrics": [], "steady": [], "ranks": [], "throttled": {}, "warnings": []}
    writer.replace(SUMMARY, {"schema_version": SCHEMA_VERSION} | empty | nothing)
    writer.finish("completed")
    return writer.path


def test_a_run_that_only_looked_for_batch_sizes_has_its_page(tmp_path: Path) -> None:
    write_memory_run(tmp_path, made.predicted())
    path = searched(tmp_path, looked())
    after_run.write_up(path)
    assert (path / REPORT).is_file()
    found = report.page(open_run(path, measured=False))
    assert found.headline == batch_sizes_sentence(looked())
    assert find(found, Table, "batch")
    assert "nothing was measured" in paragraphs(found, "missing")
    assert f"{MEMORY} is missing" not in text(found)


def test_such_a_run_is_nothing_to_compare_with(tmp_path: Path) -> None:
    path = searched(tmp_path, looked())
    with pytest.raises(RunDirectoryError, match="has no metrics, because nothing was measured"):
        open_run(path)
    later = write_memory_run(tmp_path, made.predicted())
    after_run.write_up(later)
    assert "no earlier run of this work" in (later / REPORT).read_text(encoding="utf-8")


def test_the_page_of_a_run_shows_what_was_tried(tmp_path: Path) -> None:
    path = write_memory_run(tmp_path, made.predicted())
    (path / BATCH_SIZES).write_bytes(msgspec.json.encode(looked()))
    (path / TRADES).write_bytes(msgspec.json.encode(tried()))
    found = report.page(open_run(path))
    order = ["Batch sizes", "What fills the memory", "Over the history", "Memory against speed", "Metrics"]
    assert [title for title in titles(found) if title in order] == order


def test_a_run_that_tried_nothing_has_neither_section(tmp_path: Path) -> None:
    run = open_run(write_memory_run(tmp_path, made.predicted()))
    assert (run.batch_sizes, run.trades, run.problems) == (None, None, [])
    assert {"Memory against speed", "Batch sizes"}.isdisjoint(titles(report.page(run)))
    assert "Batch sizes" not in titles(report.page(run_of()))


def evidence(path: Path, name: str, content: bytes) -> RunEvidence:
    (path / name).write_bytes(content)
    return open_run(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"limit": -1}, "is damaged: it has an impossible number of bytes"),
        ({"points": [{"batch_size": 1, "total": 2**63 + 1}]}, "is damaged: it has an impossible number of bytes"),
        ({"points": [{"batch_size": 0, "total": 1}]}, "is damaged: it has an impossible batch size"),
        ({"confirmed": [{"batch_size": 2**40, "total": 1}]}, "is damaged: it has an impossible batch size"),
        ({"speeds": [{"batch_size": 1, "throughput": 1e300}]}, "is damaged: it has an impossible throughput"),
        (
            {"line": {"constant": 1e300, "per_sample": 0, "error": 0}},
            "is damaged: its line has an impossible number of bytes",
        ),
        ({"points": []}, "is damaged: it has a largest batch, but no batch was tried"),
        ({"points": None}, "cannot be read: "),
    ],
)
def test_batch_sizes_that_cannot_be_are_a_problem(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = write_memory_run(tmp_path, made.predicted())
    run = evidence(path, BATCH_SIZES, json.dumps(msgspec.to_builtins(looked()) | changes).encode())
    assert run.batch_sizes is None
    assert [problem.startswith(f"{path / BATCH_SIZES} {said}") for problem in run.problems] == [True]
    assert any(said.split(":")[0] in line for line in paragraphs(report.page(run), "warning"))


@pytest.mark.parametrize(
    ("trade", "said"),
    [
        ({"peak": -1, "throughput": 1}, "is damaged: it has an impossible number of bytes"),
        ({"peak": 1, "throughput": -1}, "is damaged: it has an impossible throughput"),
        ({"peak": 1, "throughput": 1, "interval": [0, 1e300]}, "is damaged: it has an impossible throughput"),
        ({"peak": 1}, "cannot be read: Object missing required field `throughput`"),
    ],
)
def test_trades_that_cannot_be_are_a_problem(tmp_path: Path, trade: dict[str, Any], said: str) -> None:
    path = write_memory_run(tmp_path, made.predicted())
    run = evidence(path, TRADES, json.dumps({"trades": [{"fix": {}} | trade]}).encode())
    assert run.trades is None
    assert [problem.startswith(f"{path / TRADES} {said}") for problem in run.problems] == [True]


@pytest.mark.parametrize("name", [BATCH_SIZES, TRADES])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"trades": 1, "points": 1}'])
def test_damage_never_costs_the_page(tmp_path: Path, name: str, content: bytes) -> None:
    path = write_memory_run(tmp_path, made.predicted())
    run = evidence(path, name, content)
    assert any(f"{path / name} cannot be read" in line for line in paragraphs(report.page(run), "warning"))
