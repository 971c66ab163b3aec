"""Scales and drawings: round ticks, nothing lost in a long series, nothing that is no number."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from gpubench.compare.result import PhaseChange, Verdict, Waterfall
from gpubench.report import bar_charts, charts
from gpubench.report.charts import (
    Curve,
    Measure,
    Plane,
    Scale,
    ShadedRange,
    bulk,
    histogram,
    measure,
    reduce,
    ticks,
    widen,
)
from gpubench.report.run_figures import DeviceReading

PLANE = Plane("step time", "a description", "s", "time", "s", spans=[ShadedRange(0, 2, "warm-up")])
HOSTILE = "<script>alert(1)</script>\"'&"


def verdict(
    ratio: float | None = 1.03, interval: tuple[float, float] | None = (1.02, 1.04), **changes: object
) -> Verdict:
    fields: dict[str, object] = {
        "metric": "step_time", "unit": "s", "better": "lower", "verdict": "slower", "baseline": 1.0,
        "candidate": 1.03, "ratio": ratio, "interval": interval, "margin": 0.005, "limit": 0.005, "method": "a method",
    }  # fmt: skip
    return Verdict(**(fields | changes))  # type: ignore[arg-type]


def parsed(drawing: Markup | None) -> ElementTree.Element:
    """The drawing as XML, every number in it checked to be one and to be within reason."""
    assert drawing is not None
    root = ElementTree.fromstring(drawing)
    for element in root.iter():
        for name in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height"):
            assert math.isfinite(float(element.get(name, "0").removesuffix("%")))
        for number in re.findall(r"[^MLZAHVh0-9 ,.\-]+|-?[\d.]+(?:e-?\d+)?", element.get("d", "")):
            assert abs(float(number)) < 1e5
        assert float(element.get("width", "0").removesuffix("%")) >= 0
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter("text")]


def test_ticks_are_round_and_have_no_more_decimals_than_they_need() -> None:
    assert [tick.label for tick in ticks(0.0993, 0.1061, 4, measure("s", 0.1061))] == ["100", "102", "104", "106"]
    assert [tick.label for tick in ticks(0.01472, 0.01491, 4, measure("s", 0.0149))] == [
        "14.75", "14.80", "14.85", "14.90",
    ]  # fmt: skip
    assert [tick.label for tick in ticks(-0.01, 0.01, 4, Measure(0.01, "%"))] == ["-1.0", "-0.5", "0.0", "0.5", "1.0"]


def test_bytes_have_ticks_that_are_round_in_binary_units() -> None:
    found = ticks(0, 33 * 2**30, 4, measure("B", 33 * 2**30))
    assert [tick.label for tick in found] == ["0", "10", "20", "30"]
    assert found[1].value == 10 * 2**30


@given(
    st.floats(-1e9, 1e9),
    st.floats(1e-6, 1e9),
    st.integers(1, 12),
    st.sampled_from(["s", "B", "fraction", "", "samples/s"]),
)
def test_ticks_of_any_range_lie_within_it_and_are_few(low: float, width: float, count: int, unit: str) -> None:
    low, high = widen(low, low + width)
    found = ticks(low, high, count, measure(unit, high))
    room = 1e-6 * max(abs(low), abs(high))
    assert len(found) <= 2 * count + 2
    assert all(low - room <= tick.value <= high + room for tick in found)


def test_a_range_of_nothing_still_gets_room() -> None:
    assert widen(0, 0) == (-1, 1)
    low, high = widen(5, 5)
    assert low < 5 < high


def test_a_scale_holds_values_on_the_page_but_lets_curves_leave_it() -> None:
    scale = Scale(10, 20, 0, 100)
    assert (scale(15), scale(0), scale(99)) == (50, 0, 100)
    assert scale.places(np.array([15.0, 25.0, 1e9])).tolist() == [50, 150, 150]


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_reducing_a_series_keeps_its_extremes_and_its_mean(n: int, columns: int, seed: int) -> None:
    y = np.random.default_rng(seed).standard_cauchy(n)
    envelope = reduce(np.arange(n, dtype=np.float64), y, columns)
    assert len(envelope.x) == len(envelope.low) == len(envelope.mean) == len(envelope.high) == min(n, columns)
    assert (envelope.low.min(), envelope.high.max()) == (y.min(), y.max())
    assert np.all((envelope.low <= envelope.mean + 1e-9) | (np.abs(envelope.mean) > 1e3))
    assert np.all(np.diff(envelope.x) > 0)


def test_a_single_outlier_among_a_million_steps_is_drawn() -> None:
    y = np.full(1_000_000, 0.1)
    y[700_123] = 0.9
    drawing = charts.over(PLANE, [Curve(np.arange(1e6), y, "a", "A")])
    assert drawing is not None
    assert len(drawing) < 60_000
    band = next(element for element in parsed(drawing).iter() if element.get("class") == "extremes a")
    heights = [float(point.split(",")[1]) for point in re.findall(r"[\d.]+,[\d.]+", band.get("d") or "")]
    assert min(heights) < 0.1 * PLANE.height < 0.9 * PLANE.height < max(heights)


def test_the_axis_of_the_bulk_is_not_stretched_by_a_few_outliers() -> None:
    values = np.concatenate([np.linspace(1, 2, 995), np.full(5, 100.0)])
    low, high = bulk([values])
    assert 0 < low < 1 < 2 < high < 3


def test_the_axis_of_the_bulk_does_not_reach_below_zero_where_no_value_does() -> None:
    assert bulk([np.array([1.0, 2.0, 9.0])])[0] == 0
    assert bulk([np.array([-1.0, 2.0, 9.0])])[0] < -1


def test_a_line_breaks_where_nothing_was_read() -> None:
    reading = DeviceReading("CPU", np.array([0.0, 0.2, 0.4, 9.0, 9.2]), np.arange(5.0))
    assert [list(piece.values) for piece in reading.pieces()] == [[0, 1, 2], [3, 4]]
    assert len(DeviceReading("CPU", np.array([1.0]), np.array([1.0])).pieces()) == 1


def test_the_axis_of_the_bulk_holds_a_short_series_beside_a_long_one() -> None:
    low, high = bulk([np.full(100_000, 1.0), np.full(10, 2.0)])
    assert low < 1 < 2 < high


def test_a_histogram_gives_shares_of_all_values() -> None:
    edges, (inside, outside) = histogram([np.full(100, 0.5), np.full(100, 9.0)], 0, 1)
    assert len(edges) == len(inside) + 1
    assert (inside.sum(), outside.sum()) == (1, 0)


@pytest.mark.parametrize("y", [[0.1], [0.0, 0.0], [1e-9, 2e-9, 3e-9], [1e9, 1e-9], [-1.0, 1.0]])
def test_curves_of_any_size_have_a_drawing(y: list[float]) -> None:
    root = parsed(charts.over(PLANE, [Curve(np.arange(len(y), dtype=float), np.array(y), "a", "A")]))
    assert root.findtext("title") == "step time"
    assert root.findtext("desc") == "a description"
    assert "time, s" in " ".join(texts(root))


def test_no_curves_are_no_drawing() -> None:
    assert charts.over(PLANE, []) is None
    assert charts.distributions(PLANE, [[], []], ["A", "B"], 0, 1) is None
    assert bar_charts.bars("memory", "B", []) is None
    assert bar_charts.bars("memory", "B", [("A", 0.0, "a")]) is None
    assert bar_charts.stack("phases", []) is None


def test_rows_whose_names_are_alike_once_shortened_are_numbered() -> None:
    long = [f"cutlass_gemm_{kind}_with_a_long_name_of_its_own" for kind in "ab"]
    items = [(name, 2.0, "a") for name in ("aten::mm", *long, "aten::relu", "aten::mm")]
    root = parsed(bar_charts.bars("operators", "s", items))
    names = [element.text or "" for element in root.iter("text") if element.get("class") == "row-name"]
    assert len(set(names)) == len(names) == len(items)
    assert [names[0], names[3], names[4]] == ["aten::mm #1", "aten::relu", "aten::mm #2"]
    assert max(map(len, names)) <= bar_charts.LONGEST


def test_labels_of_curves_that_end_together_do_not_overlap() -> None:
    x, y = np.arange(10.0), np.ones(10)
    root = parsed(charts.over(PLANE, [Curve(x, y, "a", "A"), Curve(x, y, "b", "B")]))
    first, second = (float(text.get("y") or 0) for text in root.iter("text") if "end" in (text.get("class") or ""))
    assert abs(first - second) >= 14


@pytest.mark.parametrize("sides", [[[[1.0]], []], [[], [[2.0, 2.0]]], [[[1.0, 2.0], [3.0]], [[1.5, 2.5]]]])
def test_distributions_show_a_median_for_each_side_and_a_dot_for_each_repeat(sides: list[list[list[float]]]) -> None:
    arrays = [[np.array(values) for values in side] for side in sides]
    root = parsed(charts.distributions(PLANE, arrays, ["A", "B"], 0, 4))
    assert sum("median" in text for text in texts(root)) == sum(bool(side) for side in sides)
    assert len(list(root.iter("circle"))) == sum(map(len, sides))


def test_the_kinds_of_verdicts_have_marks_of_different_shape() -> None:
    kinds = ("slower", "equivalent", "inconclusive", "rejected")
    root = parsed(bar_charts.ratios([verdict(verdict=kind) for kind in kinds]))
    shapes = [element.get("d") for element in root.iter("path") if (element.get("class") or "").startswith("mark")]
    assert len(set(shapes)) == len(kinds)


def test_a_withheld_ratio_is_not_drawn() -> None:
    root = parsed(bar_charts.ratios([verdict(), verdict(verdict="withheld", metric="mfu")]))
    assert "withheld" in texts(root)
    assert sum((element.get("class") or "").startswith("mark") for element in root.iter("path")) == 1
    assert bar_charts.ratios([verdict(verdict="withheld")]) is None
    assert bar_charts.ratios([]) is None


def test_an_interval_that_leaves_the_axis_ends_in_an_arrow() -> None:
    root = parsed(
        bar_charts.ratios([verdict(), verdict(metric="mfu", interval=(0.2, 30.0)), verdict(interval=(-0.5, 2.0))])
    )
    arrows = [element for element in root.iter("path") if (element.get("class") or "").startswith("arrow")]
    assert len(arrows) == 4


@pytest.mark.parametrize("ratio", [1e-9, 0.2, 0.999999, 1.0, 1.00001, 3.4, 1e12])
@pytest.mark.parametrize("interval", [None, (1.0, 1.0), (0.0, math.inf)])
def test_any_ratio_has_a_drawing(ratio: float, interval: tuple[float, float] | None) -> None:
    if interval == (0.0, math.inf):
        ends = (ratio / 1e6, ratio * 1e6)
        parsed(bar_charts.ratios([verdict(ratio, ends)]))
    else:
        parsed(bar_charts.ratios([verdict(ratio, interval)]))


def test_the_waterfall_leads_from_the_baseline_to_the_candidate() -> None:
    phases = [
        PhaseChange("forward", 0.04, 0.045, 0.005, (0.004, 0.006)),
        PhaseChange("backward", 0.06, 0.058, -0.002, None),
    ]
    root = parsed(bar_charts.waterfall(Waterfall("step", 0.1, 0.103, phases)))
    bars = {element.get("class"): element for element in root.iter("rect")}
    ends = {
        name: [float((bar.get(key) or "").removesuffix("%")) for key in ("x", "width")] for name, bar in bars.items()
    }
    assert ends["loss"][0] == pytest.approx(ends["fill solid a"][1], abs=0.02)
    assert ends["gain"][0] == pytest.approx(ends["fill solid b"][1], abs=0.02)
    assert sum(ends["gain"]) == pytest.approx(sum(ends["loss"]), abs=0.02)
    assert {"100 ms", "103 ms", "+5 ms", "backward"} <= {text.replace("\u00a0", " ") for text in texts(root)}


@pytest.mark.parametrize("change", [0.0, 1e-9, -0.099, 5.0])
def test_a_waterfall_of_any_size_has_a_drawing(change: float) -> None:
    phases = [PhaseChange("other", 0.1, 0.1 + change, change, (-1e3, 1e3))]
    parsed(bar_charts.waterfall(Waterfall("sample", 0.1, 0.1 + change, phases)))


def test_text_is_escaped_wherever_it_stands() -> None:
    curve = Curve(np.arange(3.0), np.ones(3), "a", HOSTILE)
    plane = Plane(HOSTILE, HOSTILE, "s", HOSTILE, HOSTILE, spans=[ShadedRange(0, 1, HOSTILE)])
    drawings = [
        charts.over(plane, [curve]),
        charts.distributions(plane, [[np.ones(3)]], [HOSTILE], 0, 2),
        charts.marks(plane, [("a", HOSTILE, np.array([1.0]))], 2.0),
        bar_charts.bars(HOSTILE, HOSTILE, [(HOSTILE, 1.0, "a"), ("b", 2.0, "b")]),
        bar_charts.stack(HOSTILE, [(HOSTILE, 1.0, "a"), ("b", 2.0, "b")]),
        bar_charts.ratios([verdict(metric=HOSTILE)]),
        bar_charts.waterfall(Waterfall("step", 1.0, 2.0, [PhaseChange(HOSTILE, 1.0, 2.0, 1.0, None)])),
    ]
    for drawing in drawings:
        root = parsed(drawing)
        assert not list(root.iter("script"))
        assert HOSTILE in "".join(root.itertext())


def test_a_place_that_is_no_number_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no position nan"):
        charts.line(0, 0, math.nan, 1, "grid")
