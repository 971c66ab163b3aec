"""What a run directory says when it is read back, and how it is refused when it says nothing."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded_runs import WARMUP, edit, step, write_run

from gpubench.compare.evidence import open_run
from gpubench.errors import RunDirectoryError
from gpubench.events import Step
from gpubench.runs.directory import (
    CONFIG,
    ENVIRONMENT,
    FAILED,
    INTERRUPTED,
    RUN,
    RUNNING,
    SCHEMA_VERSION,
    STEPS,
    SUMMARY,
)
from gpubench.runs.steps import SteadyWindow, StepTable, read_steps, slowest_rank


def lines(*steps: Step, **changes: Any) -> bytes:
    return b"".join(msgspec.json.encode(msgspec.to_builtins(one) | changes) + b"\n" for one in steps)


def read(tmp_path: Path, content: bytes) -> tuple[StepTable, list[str]]:
    problems: list[str] = []
    path = tmp_path / STEPS
    path.write_bytes(content)
    return read_steps(path, problems), [problem.removeprefix(str(path)) for problem in problems]


def test_a_real_run_is_read_as_it_was_summarised(finished_run: Path) -> None:
    run = open_run(finished_run)
    assert run.label == run.path.name
    assert run.status == "completed"
    assert run.settings["training.warmup_steps"] == 1
    assert run.environment["torch.version"]
    assert run.telemetry
    assert len(run.steps) == 5
    assert not run.problems
    (step_times,) = run.series("step_time") or []
    assert step_times.mean() == pytest.approx(run.metrics["step_time"].estimate, rel=1e-12)


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_mean_of_a_series_is_its_repeats_estimate(tmp_path: Path, ranks: int) -> None:
    run = open_run(write_run(tmp_path, repeats=3, ranks=ranks))
    for name in ("step_time", "phase_forward", "phase_backward", "phase_other"):
        series = run.series(name)
        assert series is not None
        assert [one.mean() for one in series] == pytest.approx(run.metrics[name].repeats, rel=1e-12)
        assert {len(one) for one in series} == {30 - WARMUP}
    assert not run.problems


def test_only_what_has_steps_behind_it_has_a_series(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path))
    assert run.series("final_loss") is None
    assert run.series("phase_of_the_moon") is None
    throughput, step_time = run.series("throughput"), run.series("step_time")
    assert throughput is not None
    assert step_time is not None
    np.testing.assert_array_equal(throughput, step_time)


def test_the_rank_whose_window_took_longest_speaks(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, ranks=3))
    window = run.windows[1]
    ranks = run.steps.steady(window)
    assert sorted(ranks) == [0, 1, 2]
    slowest = ranks[slowest_rank(ranks)]
    assert set(slowest.rank) == {0}
    assert set(slowest.repeat) == {1}
    assert list(slowest.step) == list(range(WARMUP, 30))


def test_opening_a_run_reads_no_steps(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    shutil.rmtree(path / STEPS, ignore_errors=True)
    (path / STEPS).unlink()
    run = open_run(path)
    assert not run.problems
    assert run.series("step_time") is None
    assert run.problems[0] == f"{path / STEPS} cannot be read: No such file or directory"


def test_lost_steps_are_named(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    kept = (path / STEPS).read_bytes().splitlines(keepends=True)[:45]
    (path / STEPS).write_bytes(b"".join(kept))
    run = open_run(path)
    series = run.series("step_time")
    assert series is not None
    assert [len(one) for one in series] == [20, 5]
    assert run.problems == [f"{path / STEPS} lacks 15 of the 20 steady steps of repeat 2"]


def test_rows_of_any_order_come_sorted(tmp_path: Path) -> None:
    steps = [step(number, repeat, rank) for repeat in range(2) for rank in range(3) for number in range(5)]
    mixed = random.Random(0).sample(steps, len(steps))
    table, problems = read(tmp_path, lines(*mixed))
    assert not problems
    assert list(zip(table.repeat, table.rank, table.step, strict=True)) == [(s.repeat, s.rank, s.step) for s in steps]
    assert list(table.total) == [s.total for s in steps]
    assert list(table.phases["forward"]) == [s.phases["forward"] for s in steps]


def test_of_two_lines_for_one_step_the_first_counts(tmp_path: Path) -> None:
    table, (problem,) = read(tmp_path, lines(step(0), step(1), step(2)) + lines(step(1), total=5.0))
    assert list(table.total) == [step(number).total for number in range(3)]
    assert "1 steps occur more than once, such as step 1 of repeat 1 on rank 0" in problem


def test_a_torn_last_line_is_passed_over_and_named(tmp_path: Path) -> None:
    table, (problem,) = read(tmp_path, lines(step(0), step(1)) + lines(step(2))[:-30])
    assert len(table) == 2
    assert problem.startswith(":3: ")


@pytest.mark.parametrize(
    "changes",
    [
        {"total": 0},
        {"total": -1.0},
        {"total": "0.01"},
        {"total": None},
        {"total": 1e300},
        {"step": -1},
        {"step": 1.5},
        {"step": 2**31},
        {"repeat": 2**16},
        {"rank": 10**30},
        {"samples": True},
        {"skipped": "no"},
        {"phases": {"forward": "0.1"}},
        {"phases": {"for\nward": 0.1}},
        {"phases": {f"phase{number}": 0.1 for number in range(100)}},
        {"phases": []},
    ],
    ids=str,
)
def test_a_line_that_cannot_be_is_named_and_passed_over(tmp_path: Path, changes: dict[str, Any]) -> None:
    table, (problem,) = read(tmp_path, lines(step(0)) + lines(step(1), **changes) + lines(step(2)))
    assert list(table.step) == [0, 2]
    assert problem.startswith(":2: ")
    assert set(table.phases) == {"forward", "backward", "other"}


@pytest.mark.parametrize("value", [b"NaN", b"Infinity", b"1e400", b"0x1", b"\xff", b"[" * 100_000])
def test_a_number_that_is_none_is_named_and_passed_over(tmp_path: Path, value: bytes) -> None:
    bad = lines(step(1), total=123.0).replace(b"123.0", value)
    table, (problem,) = read(tmp_path, lines(step(0)) + bad + lines(step(2)))
    assert list(table.step) == [0, 2]
    assert problem.startswith(":2: ")


def test_few_bad_lines_are_named_and_the_others_counted(tmp_path: Path) -> None:
    table, problems = read(tmp_path, lines(step(0)) + b"\n" + b"torn\n" * 50 + lines(step(1)))
    assert len(table) == 2
    assert [problem.split(":")[1] for problem in problems[:-1]] == [str(number) for number in range(3, 23)]
    assert problems[-1] == ": 30 more lines are invalid"


def test_line_numbers_hold_far_into_a_file(tmp_path: Path) -> None:
    many = [step(number) for number in range(3000)]
    table, (problem,) = read(tmp_path, lines(*many) + b"torn\n" + lines(step(3000)))
    assert len(table) == 3001
    assert problem.startswith(":3001: ")


def test_phases_of_a_later_version_are_kept(tmp_path: Path) -> None:
    later = step(1, phases={"forward": 0.25, "prefetch to the moon": 0.125})
    table, problems = read(tmp_path, lines(step(0), later, step(2)))
    assert not problems
    assert list(table.phases["prefetch to the moon"]) == [0, 0.125, 0]
    assert list(table.phases["backward"]) == [step(0).phases["backward"], 0, step(2).phases["backward"]]


def test_a_phase_first_met_far_into_a_file_is_zero_before(tmp_path: Path) -> None:
    early = [step(number) for number in range(3000)]
    table, _ = read(tmp_path, lines(*early) + lines(step(3000, phases={"late": 1.0})))
    assert table.phases["late"].sum() == table.phases["late"][-1] == 1.0


def test_a_whole_number_may_be_written_with_a_point_and_a_part_of_one_not(tmp_path: Path) -> None:
    with_point, part = (lines(step(1), samples=number) for number in (8.0, 8.5))
    for beside in (lines(step(0)), b"broken\n"):
        table, problems = read(tmp_path, beside + with_point)
        assert table.samples[-1] == 8
        assert len(problems) == beside.count(b"broken")
        table, problems = read(tmp_path, beside + part)
        assert 1 not in table.step
        assert problems


def test_a_step_without_a_loss_has_nan(tmp_path: Path) -> None:
    table, problems = read(
        tmp_path, lines(step(0), step(1, loss=None), step(2, skipped=True)) + lines(step(3), loss=None)
    )
    assert not problems
    assert list(np.isnan(table.loss)) == [False, True, False, True]
    assert list(table.skipped) == [False, False, True, False]


@pytest.mark.parametrize("phase", ["forward", 'a "quoted" name'])
def test_a_loss_that_is_not_finite_is_infinite(tmp_path: Path, phase: str) -> None:
    given = [step(0), step(1, loss=None), step(2, loss=None, not_finite=True), step(3)]
    table, problems = read(tmp_path, lines(*[msgspec.structs.replace(one, phases={phase: one.total}) for one in given]))
    assert not problems
    assert list(np.isinf(table.loss)) == [False, False, True, False]
    assert list(np.isnan(table.loss)) == [False, True, False, False]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\x00" * 1000, lines(step(0))[:-1]])
def test_files_of_no_or_one_line_read(tmp_path: Path, content: bytes) -> None:
    table, _ = read(tmp_path, content)
    assert len(table) == content.count(b"{") // 2
    assert table.steady(SteadyWindow(0, 5, 5, True, 0, 0)) == {}


def test_settings_and_environment_that_do_not_read_are_problems(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (path / CONFIG).write_text("training: {steps: [")
    (path / ENVIRONMENT).unlink()
    run = open_run(path)
    assert run.settings == run.environment == {}
    assert run.problems[0].startswith(f"{path / CONFIG} cannot be read: ")
    assert run.problems[1] == f"{path / ENVIRONMENT} is missing"
    assert run.metrics


def test_settings_are_plain_values(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    (path / CONFIG).write_text("a: .nan\nb: 2020-01-01\nc: {1: [x]}\n")
    assert open_run(path).settings == {"a": None, "b": "2020-01-01", "c.1": ["x"]}


@pytest.mark.parametrize("status", [FAILED, INTERRUPTED])
def test_a_run_that_did_not_end_well_counts_with_what_it_measured(tmp_path: Path, status: str) -> None:
    run = open_run(write_run(tmp_path, status=status))
    assert run.status == status
    assert run.repeats == 2


def test_a_run_of_the_first_schema_reads(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    record = json.loads((path / RUN).read_text())
    record = {name: value for name, value in record.items() if name not in ("workload", "interleaved_with")}
    (path / RUN).write_text(json.dumps(record | {"schema_version": 1}))
    assert open_run(path).workload == {}


def test_a_run_that_still_runs_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path, status=RUNNING)
    with pytest.raises(RunDirectoryError, match=r"is still running \(process \d+ on ") as refused:
        open_run(path)
    assert refused.value.hint


def test_a_run_that_goes_on_is_read_up_to_now_if_asked_for(tmp_path: Path) -> None:
    path = write_run(tmp_path, status=RUNNING)
    run = open_run(path, running=True)
    assert run.status == RUNNING
    assert run.metrics
    (path / SUMMARY).unlink()
    with pytest.raises(RunDirectoryError, match="it is running"):
        open_run(path, running=True)


def remove_summary(path: Path) -> None:
    (path / SUMMARY).unlink()


def measure_nothing(path: Path) -> None:
    edit(path / SUMMARY, metrics=[], steady=[])


def not_a_number(path: Path) -> None:
    (path / SUMMARY).write_text((path / SUMMARY).read_text().replace('"estimate": 0.01', '"estimate": NaN', 1))


def lose_a_repeat(path: Path) -> None:
    edit(path / SUMMARY, steady=json.loads((path / SUMMARY).read_text())["steady"][:1])


def absurd_window(path: Path) -> None:
    (window, other) = json.loads((path / SUMMARY).read_text())["steady"]
    edit(path / SUMMARY, steady=[window | {"steps": 10**20}, other])


def negative_time(path: Path) -> None:
    metrics = json.loads((path / SUMMARY).read_text())["metrics"]
    edit(path / SUMMARY, metrics=[metric | {"repeats": [-1.0, 1.0]} for metric in metrics])


def beyond_measure(path: Path) -> None:
    metrics = json.loads((path / SUMMARY).read_text())["metrics"]
    edit(path / SUMMARY, metrics=[metric | {"estimate": 1e300} for metric in metrics])


def test_a_run_whose_loss_diverged_is_compared(tmp_path: Path) -> None:
    path = write_run(tmp_path)
    metrics = json.loads((path / SUMMARY).read_text())["metrics"]
    diverged = [metric | {"repeats": [3.35e38] * 2, "estimate": 3.35e38} for metric in metrics[:1]]
    edit(path / SUMMARY, metrics=[*metrics, *(each | {"name": "final_loss", "unit": ""} for each in diverged)])
    assert open_run(path).metrics["final_loss"].estimate == 3.35e38


def newer_schema(path: Path) -> None:
    edit(path / RUN, schema_version=SCHEMA_VERSION + 1)


def no_record(path: Path) -> None:
    (path / RUN).unlink()


def folder_for_a_file(path: Path) -> None:
    (path / SUMMARY).unlink()
    (path / SUMMARY).mkdir()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove_summary, "has no measurements, because summary.json is missing: it failed: not enough memory"),
        (measure_nothing, "nothing was measured: it failed: not enough memory"),
        (not_a_number, "summary.json is damaged: JSON is malformed"),
        (lose_a_repeat, "throughput has 2 repeats, and there are 1 steady windows"),
        (absurd_window, "repeat 1 has 100000000000000000000 steady steps from step 10"),
        (negative_time, "throughput is not positive"),
        (beyond_measure, "is damaged: throughput is 1e+300"),
        (newer_schema, f"schema version {SCHEMA_VERSION + 1}, newer than {SCHEMA_VERSION}"),
        (no_record, "is not a run directory: it has no run.json"),
        (folder_for_a_file, "summary.json cannot be read: Is a directory"),
    ],
)
def test_a_run_that_says_nothing_is_refused_with_its_path(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    path = write_run(tmp_path, status=FAILED)
    damage(path)
    with pytest.raises(RunDirectoryError) as refused:
        open_run(path)
    assert reason in refused.value.message
    assert str(path) in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.hint
