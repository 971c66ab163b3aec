"""How finely the numbers of a log show what they measured."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from gpubench.compare.log_columns import LogColumn, clock_step
from gpubench.compare.logs import open_log


def tick(tmp_path: Path, cells: list[str], unit: str = "ms", name: str = "log.csv") -> float | None:
    path = tmp_path / name
    rows = [f'{{"x": {cell}}}' for cell in cells] if name.endswith("l") else ["x", *cells]
    path.write_text("\n".join(rows))
    return open_log(path, LogColumn.of("x", unit)).tick


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
@pytest.mark.parametrize(
    ("cells", "unit", "expected"),
    [
        (["10", "11", "12"], "ms", 1e-3),
        (["10.5", "11.25", "12"], "ms", 1e-5),
        (["10.50", "11.00"], "ms", 1e-5),
        (["0.1", "0.3"], "s", 0.1),
        (["0.5", "10"], "it/s", 0.1),
        (["6989", "7015"], "tokens/s", 1.0),
        (["1.5e-2", "2.0e-2"], "s", 1e-3),
        (["1e1", "2e1"], "ms", 1e-2),
        (["1.25E-05", "2E-05"], "s", 1e-7),
        (["1.5", "2.5"], "MiB", 0.1 * 2**20),
        (["0.10127637", "0.1"], "s", 1e-8),
        (["0.1012763713231452", "0.1"], "s", 0.0),
        (["101.2763713231452", "1"], "ms", 0.0),
        (["7000.123456789012", "7001"], "tokens/s", 0.0),
    ],
)
def test_the_resolution_is_the_finest_decimal_that_is_written(
    tmp_path: Path, name: str, cells: list[str], unit: str, expected: float
) -> None:
    assert tick(tmp_path, cells, unit, name) == pytest.approx(expected, rel=1e-9)


def by_clock(step: float, mean: float, spread: float, count: int) -> NDArray[np.float64]:
    """Times of successive steps by a clock that advances by `step`; a step in which it does not advance is left out."""
    ends = np.cumsum(np.random.default_rng(2).normal(mean, spread, count))
    between = np.diff(np.floor(ends / step) * step)
    return between[between > 0]


@pytest.mark.parametrize("step", [1 / 64, 0.0156, 0.001])
@pytest.mark.parametrize(("mean", "spread"), [(0.1, 0.02), (0.3, 0.05)])
@pytest.mark.parametrize("digits", [17, 9, 6])
def test_a_coarse_clock_is_seen_through_its_digits(
    tmp_path: Path, step: float, mean: float, spread: float, digits: int
) -> None:
    cells = [f"{value:.{digits}f}" for value in by_clock(step, mean, spread, 60)]
    assert tick(tmp_path, cells, "s") == pytest.approx(step, rel=1e-3)


def test_a_coarse_clock_is_seen_in_two_values_only(tmp_path: Path) -> None:
    assert tick(tmp_path, ["93.75", "109.375"] * 10) == pytest.approx(1 / 64, rel=1e-6)
    assert tick(tmp_path, ["93.75", "109.375"] * 2) == pytest.approx(1e-6)  # four times show nothing


@pytest.mark.parametrize("digits", [2, 3, 4, 6, 17])
@pytest.mark.parametrize("count", [5, 12, 50, 1000])
def test_no_clock_is_seen_in_times_without_one(digits: int, count: int) -> None:
    rng = np.random.default_rng(1)
    written = 0.0 if digits == 17 else 10.0**-digits
    for spread in (0.001, 0.02, 0.3):
        for _ in range(20):
            values = np.abs(rng.normal(0.5, spread, count)).round(digits) + written
            assert clock_step(values, written) == written


@pytest.mark.parametrize("cells", [["5", "5", "5"], ["0.1", "0.1"], ["100"] * 50])
def test_equal_times_have_the_resolution_that_is_written(tmp_path: Path, cells: list[str]) -> None:
    decimals = len(cells[0].partition(".")[2])
    assert tick(tmp_path, cells) == pytest.approx(10.0 ** -(decimals + 3))


def test_a_time_that_is_far_from_the_others_hides_no_clock(tmp_path: Path) -> None:
    cells = [*by_clock(0.0156, 0.1, 0.02, 60).round(5).astype(str), "3599.9987"]
    assert tick(tmp_path, cells, "s") == pytest.approx(0.0156, rel=1e-3)
