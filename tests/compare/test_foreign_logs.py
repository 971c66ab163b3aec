"""What is made of the logs of other tools, and what is said of those that cannot be read."""

from pathlib import Path

import numpy as np
import pytest

from gpubench.compare.compare import compare
from gpubench.compare.inputs import find
from gpubench.compare.log_columns import EMPTY, PLAIN, LogColumn
from gpubench.compare.logs import A_LINE, READS, LogEvidence, open_log
from gpubench.errors import DataError, RunDirectoryError, UsageError

MS = LogColumn.of("ms", "ms")


def log(tmp_path: Path, content: str | bytes, name: str = "log.csv", column: LogColumn = MS) -> LogEvidence:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_log(path, column)


def refusal(tmp_path: Path, content: str | bytes, name: str = "log.csv", column: LogColumn = MS) -> tuple[str, str]:
    """The error without the path of the folder, and its hint."""
    with pytest.raises(DataError) as refused:
        log(tmp_path, content, name, column)
    assert "\n" not in refused.value.message
    assert name in refused.value.message
    return refused.value.message.replace(f"{tmp_path}/", ""), refused.value.hint or ""


def test_a_column_is_one_repeat_of_a_metric_in_base_units(tmp_path: Path) -> None:
    run = log(tmp_path, "step,ms\n0,10\n1,12\n2,11\n")
    assert run.record is None
    assert (run.label, run.repeats, run.status) == ("log.csv", 1, "completed")
    metric = run.metrics["ms"]
    assert (metric.unit, metric.better, metric.n, metric.interval) == ("s", "lower", 3, None)
    assert metric.estimate == pytest.approx(0.011)
    assert metric.repeats == [metric.estimate]
    assert metric.distribution is not None
    (series,) = run.series("ms") or []
    assert series.mean() == pytest.approx(metric.estimate)
    assert list(run.steps.total) == pytest.approx([0.010, 0.012, 0.011])
    assert run.series("step_time") is None
    assert run.telemetry == []


@pytest.mark.parametrize(
    ("unit", "base", "scale", "better"),
    [
        ("s", "s", 1.0, "lower"),
        ("us", "s", 1e-6, "lower"),
        ("ns", "s", 1e-9, "lower"),
        ("msec", "s", 1e-3, "lower"),
        ("s/it", "s", 1.0, "lower"),
        ("ms/step", "s", 1e-3, "lower"),
        ("MiB", "B", 2.0**20, "lower"),
        ("kB", "B", 1e3, "lower"),
        ("samples/s", "samples/s", 1.0, "higher"),
    ],
)
def test_units_tell_the_base_unit_and_which_way_is_better(unit: str, base: str, scale: float, better: str) -> None:
    column = LogColumn.of("x", unit)
    assert (column.unit, column.scale, column.better) == (base, scale, better)


def test_a_unit_that_does_not_tell_which_way_is_better_asks(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="lower or higher") as refused:
        LogColumn.of("accuracy", "points")
    assert "--better" in str(refused.value.hint)
    assert LogColumn.of("accuracy", "points", "higher").better == "higher"
    assert LogColumn.of("wait", "s", "higher").better == "higher"


def test_a_column_of_other_things_than_times_has_no_steps(tmp_path: Path) -> None:
    run = log(tmp_path, "rate\n10\n12\n", column=LogColumn.of("rate", "samples/s"))
    assert len(run.steps) == 0
    assert run.series("rate") is not None


def test_the_warm_up_is_found_and_cut(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(10, 0.05, 100)
    noise[:12] += 5
    run = log(tmp_path, "ms\n" + "\n".join(map(str, noise)))
    (window,) = run.windows
    assert (window.first, window.steps, window.settled) == (12, 88, True)
    assert run.metrics["ms"].estimate == pytest.approx(noise[12:].mean() / 1e3)


@pytest.mark.parametrize(
    "content",
    [
        "step,ms\n0,10\n1,12\n",
        "step;ms\n0;10\n1;12\n",
        "step\tms\n0\t10\n1\t12\n",
        "step, ms \n0, 10 \n1, 12\n",
        'step,"ms"\n0,"10"\n1,"12"\n',
        '"a, b",ms\n"1, 2",10\n"3, 4",12\n',
        "a;b,c;ms\n1;2,5;10\n1;2,5;12\n",
        "\ufeffms\n10\n12\n",
        "\n\nms\n\n10\n\n12\n\n",
        "ms\r\n10\r\n12\r\n",
        "ms,\n10,\n12,\n",
        "ms\n1e1\n12.0",
    ],
)
def test_dialects_of_csv_read_alike(tmp_path: Path, content: str) -> None:
    run = log(tmp_path, content)
    assert list(run.values) == pytest.approx([0.010, 0.012])
    assert not run.problems


def test_json_lines_read_alike(tmp_path: Path) -> None:
    run = log(tmp_path, '{"ms": 10, "a": [1]}\n\n{"ms": 12.0}\n', "log.jsonl")
    assert list(run.values) == pytest.approx([0.010, 0.012])


@pytest.mark.parametrize("content", ['[{"ms": 10}, {"ms": 12}]', '{\n  "ms": 10\n}\n', "[\n{}]"])
def test_a_json_document_is_no_table_of_one_long_column(tmp_path: Path, content: str) -> None:
    reason, hint = refusal(tmp_path, content, "log.json")
    assert reason.startswith("log.json:1: ")
    assert hint == A_LINE


def test_a_log_of_few_independent_steps_says_that_their_mean_is_not_known_well(tmp_path: Path) -> None:
    """Of 20 steps with a correlation of 0.9, two standard errors cover the truth in 57 % of all cases."""
    rng = np.random.default_rng(4)
    for name, steps in (("long.csv", 200), ("short.csv", 9)):
        (tmp_path / name).write_text("ms\n" + "\n".join(map(str, 10 + 0.01 * rng.standard_normal(steps))))
    found, _ = find([str(tmp_path / "long.csv"), str(tmp_path / "short.csv")], tmp_path, column=MS)
    (comparison,) = compare(found).comparisons
    assert [one for one in comparison.warnings if "independent" in one] == [
        "short.csv: its 9 steady steps have the information of 9 independent ones, "
        "which are too few to tell how precise their mean is: give a longer log"
    ]


def test_a_folder_of_logs_without_a_column_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("ms\n1\n2\n")
    with pytest.raises(RunDirectoryError, match=r"log\.csv has no column that names the time of a step") as refused:
        find([str(tmp_path)], tmp_path)
    assert "add --column ms --unit ms" in str(refused.value.hint)
    assert find([str(tmp_path)], tmp_path, column=MS)


def test_json_lines_may_be_called_json(tmp_path: Path) -> None:
    assert list(log(tmp_path, '{"ms": 10}\n{"ms": 12}\n', "log.json").values) == pytest.approx([0.010, 0.012])


def test_rows_without_a_value_are_passed_over_and_counted(tmp_path: Path) -> None:
    run = log(tmp_path, "step,ms\n0,10\n1,\n2, \n3\n4,12\n")
    assert list(run.values) == pytest.approx([0.010, 0.012])
    assert run.problems == ["3 rows without ms were skipped"]
    run = log(tmp_path, '{"ms": 10}\n{"ms": null}\n{"loss": 1}\n{"ms": 12}\n', "log.jsonl")
    assert list(run.values) == pytest.approx([0.010, 0.012])
    assert run.problems == ["2 rows without ms were skipped"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("step,ms\n0,10\n\n1,fast\n", "log.csv:4: ms: 'fast' is not a number"),
        ("step;ms\n0;10,5\n1;11\n", "log.csv:2: ms: '10,5' is not a number"),
        ("step,ms\n0,10,5\n1,11\n", "log.csv:2: 3 cells under 2 columns"),
        ('ms\n"1,234"\n2\n', "log.csv:2: ms: '1,234' is not a number"),
        ("ms\n10\nnan\n", "log.csv:3: ms: 'nan' is not a possible value"),
        ("ms\n10\n-inf\n", "log.csv:3: ms: '-inf' is not a possible value"),
        ("ms\n10\n1e400\n", "log.csv:3: ms: '1e400' is not a possible value"),
        ("ms\n10\n-1\n", "log.csv:3: ms: '-1' cannot be the time of a step"),
        ("ms\n10\n0.0\n", "log.csv:3: ms: '0.0' cannot be the time of a step"),
        ("ms\n10\n", "log.csv has 1 value of ms"),
        ("ms\n", "log.csv has 0 values of ms"),
        ("", "log.csv has no column 'ms'"),
        ("ms,ms\n1,2\n", "log.csv has 2 columns 'ms'"),
        (b"ms\n1\n\xff\n", "log.csv is not UTF-8 text: invalid start byte"),
        ("ms\n1\n".encode("utf-16"), "log.csv is not UTF-8 text: invalid start byte"),
        ('ms\n"' + "1" * 200_000, "log.csv cannot be read: field larger than field limit (131072)"),
    ],
)
def test_a_csv_that_cannot_be_read_says_where_and_why(tmp_path: Path, content: str | bytes, reason: str) -> None:
    message, hint = refusal(tmp_path, content)
    assert message == reason
    assert hint


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"ms": 1}\n\n{"ms": tru', "log.jsonl:3: "),
        ('{"ms": 1}\n[1]\n', "log.jsonl:2: "),
        ('{"ms": 1}\n{"ms": ' + "[" * 100_000, "log.jsonl:2: "),
        ('{"ms": 1}\n{"ms": NaN}\n', "log.jsonl:2: "),
        ('{"ms": 1}\n{"ms": "x"}\n', "log.jsonl:2: ms: 'x' is not a number"),
        ('{"ms": 1}\n{"ms": {}}\n', "log.jsonl:2: ms: {} is not a number"),
        ('{"ms": 1}\n{"ms": true}\n', "log.jsonl:2: ms: True is not a possible value"),
        ('{"ms": 1}\n{"ms": 1' + "0" * 400 + "}\n", "log.jsonl:2: ms: "),
        ('{"mss": 1}\n{"loss": 2}\n', "log.jsonl has no column 'ms'"),
        ('{"ms": null}\n', "log.jsonl has 0 values of ms"),
        (b'{"a": "\xff"}\n', "log.jsonl:1: "),
    ],
)
def test_json_lines_that_cannot_be_read_say_where_and_why(tmp_path: Path, content: str | bytes, reason: str) -> None:
    message, hint = refusal(tmp_path, content, "log.jsonl")
    assert message.startswith(reason)
    assert hint


def test_a_missing_column_offers_the_nearest_and_lists_all(tmp_path: Path) -> None:
    _, hint = refusal(tmp_path, "step,step_ms,loss\n0,1,2\n", column=LogColumn.of("step ms", "ms"))
    assert hint == "did you mean 'step_ms'? its columns are step, step_ms, loss"
    _, hint = refusal(tmp_path, ",".join(f"column{n}" for n in range(100)) + "\n")
    assert hint.endswith("column19, ...")


def test_the_hint_fits_what_is_not_a_number(tmp_path: Path) -> None:
    for cell, hint in (('"1,5"', PLAIN), ('"1,234.5"', PLAIN), ("N/A", EMPTY), ("-", EMPTY), ('"a, b"', EMPTY)):
        assert refusal(tmp_path, f"ms\n10\n{cell}\n")[1] == hint
    assert refusal(tmp_path, "\n")[1] == "the file has no column names"


def test_a_rate_of_nothing_is_refused(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, "ips\n10\n0\n", column=LogColumn.of("ips", "img/s"))
    assert message == "log.csv:3: ips: '0' cannot be the rate of a step"
    assert hint == EMPTY


@pytest.mark.parametrize(
    ("unit", "shown"),
    [("it/s", "it/s"), ("tokens/s", "tokens/s"), ("img/sec", "img/s"), ("samples/second", "samples/s")],
)
def test_a_rate_is_all_the_work_over_all_the_time(tmp_path: Path, unit: str, shown: str) -> None:
    run = log(tmp_path, "r\n100\n100\n10\n", column=LogColumn.of("r", unit))
    metric = run.metrics["r"]
    assert (metric.unit, metric.better) == (shown, "higher")
    assert metric.estimate == pytest.approx(3 / (0.01 + 0.01 + 0.1))


@pytest.mark.parametrize("spike", [1.0, 10.0])
def test_times_and_rates_of_the_same_steps_get_the_same_verdict(tmp_path: Path, spike: float) -> None:
    rng = np.random.default_rng(3)
    times = [0.1 * (1 + 0.001 * rng.standard_normal(150)) for _ in range(2)]
    times[1][rng.choice(150, 8, replace=False)] *= spike
    found = []
    for kind, column in (("times", LogColumn.of("x", "s")), ("rates", LogColumn.of("x", "img/s"))):
        (tmp_path / kind).mkdir()
        for side, values in zip("ab", times, strict=True):
            cells = values if kind == "times" else 128 / values
            (tmp_path / kind / f"{side}.csv").write_text("\n".join(["x", *map(repr, cells.tolist())]))
        sides, _ = find([str(tmp_path / kind / f"{side}.csv") for side in "ab"], tmp_path, column=column)
        found.append(compare(sides, assumed=0.002).comparisons[0].verdicts[0])
    by_time, by_rate = found
    assert by_time.verdict == by_rate.verdict == ("equivalent" if spike == 1 else "slower")
    assert by_time.ratio
    assert by_rate.ratio == pytest.approx(1 / by_time.ratio)
    assert by_time.interval
    assert by_rate.interval == pytest.approx((1 / by_time.interval[1], 1 / by_time.interval[0]))
    assert by_rate.p_value == pytest.approx(by_time.p_value)


def test_a_folder_or_nothing_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    for name, reason in (("folder.csv", "Is a directory"), ("none.csv", "No such file or directory")):
        with pytest.raises(DataError, match=f"{name} cannot be read: {reason}") as refusal:
            open_log(tmp_path / name, MS)
        assert refusal.value.hint == READS
