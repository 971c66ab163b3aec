"""Logs whose numbers are rounded: no verdict rests on what rounding alone can make."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from gpubench.compare.compare import compare, null
from gpubench.compare.evidence import Side
from gpubench.compare.log_columns import LogColumn
from gpubench.compare.logs import open_log
from gpubench.compare.result import Verdict

Written = Callable[[float], str]


def whole(value: float) -> str:
    return f"{value:.0f}"


def exact(value: float) -> str:
    return repr(float(value))


def tenth(value: float) -> str:
    return f"{value:.1f}"


def hundredth(value: float) -> str:
    return f"{value:.2f}"


def logs(folder: Path, name: str, truth: float, noise: float, unit: str, written: Written, number: int = 1) -> Side:
    """A side of logs with 200 rounded values of which the true mean is `truth`."""
    rng, column, runs = np.random.default_rng(len(name)), LogColumn.of("v", unit), []
    for one in range(number):
        path = folder / f"{name}{one}.csv"
        path.write_text("v\n" + "\n".join(written(truth + noise * draw) for draw in rng.standard_normal(200)) + "\n")
        runs.append(open_log(path, column))
    return Side(name, tuple(runs))


def judged(sides: Sequence[Side], margin: float = 0.005) -> Verdict:
    (comparison,) = compare(sides, margin=margin).comparisons
    return comparison.verdicts[0]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    ("truths", "unit", "written"),
    [
        ((30.6, 31.4), "ms", whole),
        ((31.45, 31.55), "ms", whole),
        ((0.306, 0.314), "s", hundredth),
        ((9.6, 10.4), "it/s", whole),
        ((5.06, 5.14), "it/s", tenth),
    ],
)
def test_a_verdict_is_withheld_where_half_a_tick_exceeds_the_margin(
    tmp_path: Path, truths: tuple[float, float], unit: str, written: Written, number: int
) -> None:
    sides = [
        logs(tmp_path, name, truth, truth * 1e-4, unit, written, number)
        for name, truth in zip(("a", "bb"), truths, strict=True)
    ]
    found = judged(sides)
    assert found.verdict == "withheld"
    assert str(found.reason).startswith("its values are rounded, which may change their mean by ")
    assert judged(sides, margin=0.2).verdict in ("equivalent", "inconclusive")


def test_what_rounding_can_make_is_part_of_the_error(tmp_path: Path) -> None:
    """100.4 and 100.6 ms are both equal to a log in whole milliseconds, or differ by 1 %."""
    sides = [logs(tmp_path, name, truth, 1e-3, "ms", whole, 3) for name, truth in (("a", 100.4), ("bb", 100.6))]
    found = judged(sides)
    assert found.interval
    assert found.interval[0] < 1.002 < found.interval[1]
    assert found.verdict == "inconclusive"


def test_rounding_averages_out_of_values_that_are_spread_over_ticks(tmp_path: Path) -> None:
    sides = [logs(tmp_path, name, truth, 2, "ms", whole, 5) for name, truth in (("a", 30.6), ("bb", 33.0))]
    assert judged(sides).verdict == "slower"
    written = [logs(tmp_path, name, truth, 2, "ms", exact, 5) for name, truth in (("c", 30.6), ("dd", 33.0))]
    assert written[0].runs[0].rounding("v") == 0
    assert judged(sides).ratio == pytest.approx(judged(written).ratio, rel=0.02)


def test_equal_rounded_runs_do_not_teach_that_there_is_no_noise(tmp_path: Path) -> None:
    rounded = logs(tmp_path, "rounded", 30.6, 1e-3, "ms", whole, 6)
    (learned,) = null(rounded).metrics
    assert learned.spread == pytest.approx(0.5 / 31 / np.sqrt(3))
