"""Which logs of other tools are read without naming a column, what is left out of them, and what is said of others."""

import gzip
import json
import math
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import logs_made
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs_made import (
    FORMATS,
    benchmarks,
    hyperfine,
    modded_nanogpt,
    nanogpt,
    times,
    titan_line,
    torchtitan,
    totals,
    trainer,
    trainer_of,
)

from gpubench.compare.compare import compare, null
from gpubench.compare.inputs import find
from gpubench.compare.log_columns import LogColumn
from gpubench.compare.logs import LogEvidence, open_log
from gpubench.errors import DataError, RunDirectoryError
from gpubench.foreign_files import LONGEST


def log(tmp_path: Path, content: str | bytes, name: str = "a.log") -> LogEvidence:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return open_log(path)


def refusal(tmp_path: Path, content: str | bytes, name: str = "a.log") -> tuple[str, str]:
    """The error without the path of the folder, and its hint."""
    with pytest.raises(DataError) as refused:
        log(tmp_path, content, name)
    assert "\n" not in refused.value.message
    assert name in refused.value.message
    assert refused.value.hint
    return refused.value.message.replace(f"{tmp_path}/", ""), refused.value.hint.replace(f"{tmp_path}/", "")


def values(run: LogEvidence) -> list[float]:
    return [float(f"{value:.6g}") for value in run.values]


@pytest.mark.parametrize("name", FORMATS)
def test_a_log_of_each_format_is_read_by_itself_and_a_faster_one_is_found(tmp_path: Path, name: str) -> None:
    for folder, step in (("before", 0.1), ("after", 0.09)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(FORMATS[name](times(step)))
    sides, _ = find([str(tmp_path / folder / name) for folder in ("before", "after")], tmp_path)
    (comparison,) = compare(sides).comparisons
    (verdict,) = comparison.verdicts
    assert verdict.verdict == "faster"
    assert verdict.ratio == pytest.approx(0.9 if verdict.unit == "s" else 1 / 0.9, rel=0.02)


@pytest.mark.parametrize("name", FORMATS)
def test_neither_the_name_of_a_file_nor_a_mark_at_its_beginning_matters(tmp_path: Path, name: str) -> None:
    content = FORMATS[name](times())
    assert values(log(tmp_path, content, "file")) == values(log(tmp_path, content, name))
    assert values(log(tmp_path, f"\ufeff{content}", "file")) == values(log(tmp_path, content, name))


def test_json_lines_and_states_are_known_by_their_first_sign(tmp_path: Path) -> None:
    rows = "\ufeff" + "\n".join(json.dumps({"dt": 10 + n, "loss": float("nan")}) for n in range(3))
    state = "\ufeff" + trainer_of([{"dt": 10 + n} for n in range(3)])
    for content in (rows, f"\n{rows[1:]}", state):
        (tmp_path / "log.txt").write_text(content)
        assert values(open_log(tmp_path / "log.txt", LogColumn.of("dt", "ms"))) == [0.01, 0.011, 0.012]


def test_the_rates_of_torchtitan_are_tokens_per_second(tmp_path: Path) -> None:
    run = log(tmp_path, torchtitan([0.1, 0.2]))
    (metric,) = run.metrics.values()
    assert (run.kind_of_log, metric.name, metric.unit, metric.better) == (
        "a log of torchtitan",
        "tps",
        "tokens/s",
        "higher",
    )
    assert metric.estimate == pytest.approx(2 / (1 / 7000 + 1 / 3500))
    assert (run.repeats, run.tick, run.problems) == (1, 1.0, [])


@pytest.mark.parametrize(
    ("prefix", "rate"),
    [
        ("", "tps: 7,000"),
        ("0: [rank0]:", "tps: 7,000"),
        ("[default0]:", "tps:  7,000"),
        ("0%|    | 1/10\r", "tps: 7000"),
        ("", "wps: 7,000"),
    ],
)
def test_lines_of_torchtitan_may_have_prefixes_and_other_spaces(tmp_path: Path, prefix: str, rate: str) -> None:
    line = titan_line(10, "7,000", rank=prefix).replace("tps: 7,000", rate)
    run = log(tmp_path, f"{line}\n{line.replace('10  ', '20  ')}\n")
    assert values(run) == values(log(tmp_path, torchtitan([0.1, 0.1])))
    assert len(run.values) == 2


def test_of_several_ranks_the_first_one_is_read(tmp_path: Path) -> None:
    lines = [
        titan_line(step, rate, rank=f"[rank{rank}]:")
        for step in (10, 20, 30)
        for rank, rate in ((10, "6,000"), (1, "7,000"), (2, "8,000"))
    ]
    run = log(tmp_path, "\n".join(lines))
    assert run.metrics["tps"].estimate == pytest.approx(7000)
    assert run.problems == ["6 lines were left out: 6 of other ranks"]


def test_of_ranks_without_a_prefix_the_first_line_of_each_step_is_read(tmp_path: Path) -> None:
    lines = [titan_line(step, rate, rank="") for step in (10, 20, 30) for rate in ("7,000", "8,000")]
    run = log(tmp_path, "\n".join(lines))
    assert run.metrics["tps"].estimate == pytest.approx(7000)
    assert run.problems == ["3 lines were left out: 3 of other ranks"]


@pytest.mark.parametrize(
    "between",
    [
        "Saving the checkpoint (or staging if async is enabled).",
        "Saving the checkpoint.",
        "Staging the checkpoint.",
        "Saving a full checkpoint in last step, step 25.",
        "Saving a model only checkpoint in torch.float32 at last step, step 25.",
        "Dumping profiler traces at step 25",
        "Dumping memory snapshot at step 25",
    ],
)
def test_steps_with_something_else_between_them_are_left_out(tmp_path: Path, between: str) -> None:
    lines = [titan_line(step, "1,000" if step == 30 else "7,000") for step in range(10, 60, 10)]
    lines.insert(2, f"[rank0]:[titan] 2025-06-01 10:00:00,123 - root - INFO - {between}")
    run = log(tmp_path, "\n".join(lines))
    assert run.metrics["tps"].estimate == pytest.approx(7000)
    assert run.problems[0].startswith("1 line was left out: 1 with a ")


def test_validation_of_torchtitan_is_left_out_and_the_next_steps_are_fewer(tmp_path: Path) -> None:
    lines = [titan_line(step, "7,000") for step in range(10, 80, 10)]
    lines.insert(4, titan_line(45, "9,000", of="validate step"))
    lines.insert(3, titan_line(30, "9,000", of="validate step"))
    lines.insert(3, "[rank0]:[titan] 2025-06-01 10:00:00,123 - root - INFO - Saving the checkpoint.")
    run = log(tmp_path, "\n".join(lines))
    assert len(run.values) == 6  # the checkpoint is before the validation, and its time is not in the steps after it
    assert run.problems == ["3 lines were left out: 2 of validation and 1 of another number of steps"]


def test_the_first_step_and_gaps_are_left_out_because_they_are_other_numbers_of_steps(tmp_path: Path) -> None:
    steps = [1, 10, 20, 30, 50, 60, 70]
    run = log(tmp_path, "\n".join(titan_line(step, "7,000" if step > 10 else "100") for step in steps))
    assert run.metrics["tps"].estimate == pytest.approx(7000)
    assert run.problems == ["3 lines were left out: 3 of another number of steps"]


def test_two_runs_in_one_file_are_refused_with_the_line_to_cut_at(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, torchtitan(times(count=3)) + torchtitan(times(count=3)))
    assert message == "a.log:6: step 10 follows step 30: the file holds more than one run"
    assert "head -n 5" in hint
    assert "tail -n +6" in hint
    lines = (tmp_path / "a.log").read_text().splitlines(keepends=True)
    for part in (lines[:5], lines[5:]):
        assert len(log(tmp_path, "".join(part), "part.log").values) == 3


def test_the_iteration_that_evaluates_is_left_out_of_nanogpt(tmp_path: Path) -> None:
    lines = nanogpt([0.1] * 30, first=0).splitlines()
    at = lines.index("iter 20: loss 2.8000, time 100.00ms, mfu 35.00%")
    lines[at] = lines[at].replace("100.00ms", "2500.00ms")
    lines[at:at] = ["step 20: train loss 2.1, val loss 2.2", "saving checkpoint to out"]
    run = log(tmp_path, "\n".join(lines))
    assert values(run) == [0.1] * 28
    assert run.problems == ["2 lines were left out: 2 with an evaluation"]
    assert run.metrics["step_time"].unit == "s"
    assert run.tick == pytest.approx(1e-5)


def test_an_evaluation_between_two_logged_iterations_is_part_of_neither(tmp_path: Path) -> None:
    lines = [f"iter {n}: loss 2.8, time 100.00ms" for n in range(0, 50, 10)]
    lines.insert(3, "step 25: train loss 2.1, val loss 2.2")
    run = log(tmp_path, "\n".join(lines))
    assert len(run.values) == 5
    assert "one of 10 iterations is logged" in run.problems[0]


def test_times_of_modded_nanogpt_are_differences_without_evaluation(tmp_path: Path) -> None:
    lines = [
        "step:0/6 val_loss:10.8 train_time:0ms step_avg:0.02ms",
        "step:1/6 train_time:100ms step_avg:100.00ms",
        "step:2/6 train_time:150ms step_avg:75.00ms",
        "step:2/6 val_loss:9.1 train_time:200ms step_avg:100.00ms",
        "step:3/6 train_time:10ms step_avg:nanms",
        "step:4/6 train_time:110ms step_avg:100.00ms",
        "step:6/6 train_time:310ms step_avg:100.00ms",
    ]
    run = log(tmp_path, "\n".join(lines))
    assert values(run) == [0.1, 0.1, 0.1]
    assert run.problems == ["2 lines were left out: 1 in which the clock starts again and 1 of another number of steps"]
    assert run.tick == pytest.approx(1e-3)


def test_a_clock_that_stands_still_is_refused(tmp_path: Path) -> None:
    lines = [f"step:{n}/9 train_time:{n // 2}s step_avg:500.00ms" for n in range(9)]
    message, _ = refusal(tmp_path, "\n".join(lines))
    assert message == "a.log: the clock shows the same time at steps 0 and 1"


def test_units_that_change_are_refused_with_the_line(tmp_path: Path) -> None:
    content = "iter 0: loss 2.8, time 100.00ms\niter 1: loss 2.8, time 0.10s\n"
    assert refusal(tmp_path, content)[0] == "a.log:2: step_time: the unit is s, and ms in the lines before"


@pytest.mark.parametrize(
    ("time", "reason"),
    [
        ("nan", "'nan' is not a possible value"),
        ("-5.00", "'-5.00' cannot be the time of a step"),
        ("0.00", "'0.00' cannot be the time of a step"),
        ("inf", "'inf' is not a possible value"),
        ("1.2.3", "'1.2.3' is not a number"),
    ],
)
def test_an_impossible_time_of_a_console_is_refused_with_the_line(tmp_path: Path, time: str, reason: str) -> None:
    lines = ["iter 0: loss 2.8, time 100.00ms", f"iter 1: loss 2.8, time {time}ms"]
    message, hint = refusal(tmp_path, "\n".join(lines))
    assert message == f"a.log:2: step_time: {reason}"
    assert "leave this line out" in hint


def test_one_step_is_too_few(tmp_path: Path) -> None:
    message, _ = refusal(tmp_path, torchtitan([0.1]))
    assert message == "a.log has 1 value of tps"
    message, _ = refusal(tmp_path, nanogpt([0.1, 0.1]))
    assert message == "a.log has 1 value of step_time; 1 line was left out: 1 with an evaluation"


def test_the_trainer_of_transformers_has_times_of_its_rows(tmp_path: Path) -> None:
    evaluation = {"eval_loss": 2.0, "eval_runtime": 1.0, "step": 40}
    state = json.loads(trainer([0.10001] * 12))
    state["log_history"].insert(4, evaluation)
    state["save_steps"] = 60
    run = log(tmp_path, json.dumps(state))
    assert values(run) == [0.10001] * 9
    # the evaluation at step 40 and the checkpoint at 60 are part of the next rows; the last checkpoint is part of none
    assert run.problems == ["3 rows were left out: 1 of evaluation, 1 with an evaluation and 1 with a checkpoint"]
    assert run.tick == pytest.approx(1e-5)
    assert run.kind_of_log == "a state of the Trainer of transformers"


def test_without_times_of_rows_the_trainer_has_one_rate_of_all(tmp_path: Path) -> None:
    rows = [{"loss": 2.9, "step": 10}, {"eval_loss": 1.0, "eval_samples_per_second": 9.0, "step": 10}, totals(64.0)]
    run = log(tmp_path, trainer_of(rows))
    (metric,) = run.metrics.values()
    assert (metric.name, metric.unit, metric.repeats) == ("train_samples_per_second", "samples/s", [64.0])
    assert run.series("train_samples_per_second") is None
    assert "1 row was left out: 1 of evaluation" in run.problems[0]
    assert "of the whole training" in run.problems[0]


def test_trainings_of_several_files_are_the_units_of_a_side(tmp_path: Path) -> None:
    for folder, rate in (("before", 64.0), ("after", 71.0)):
        (tmp_path / folder).mkdir()
        for number in range(4):
            (tmp_path / folder / f"{number}.json").write_text(trainer_of([totals(rate + number / 10)]))
    sides, _ = find([str(tmp_path / "before"), str(tmp_path / "after")], tmp_path)
    (verdict,) = compare(sides).comparisons[0].verdicts
    assert (verdict.verdict, verdict.units, verdict.level) == ("faster", (4, 4), "run")
    assert null(sides[0]).metrics[0].units == 4


def test_a_state_that_was_saved_in_training_says_what_to_give(tmp_path: Path) -> None:
    message, hint = refusal(tmp_path, trainer_of([{"loss": 2.9, "step": 10}]), "trainer_state.json")
    assert message == ("trainer_state.json has no column that names the time of a step, or a rate: it has loss, step")
    assert "include_num_input_tokens_seen" in hint


def test_a_column_of_the_trainer_is_read_by_its_name(tmp_path: Path) -> None:
    rows = [{"loss": 2.9, "step_time": 0.1 + n / 100, "step": n} for n in range(4)]
    for content in (trainer_of(rows), json.dumps(json.loads(trainer_of(rows)))):
        _, hint = refusal(tmp_path, content, "state.json")
        assert hint == "if step_time is one: add --column step_time --unit s, or another unit"
        run = open_log(tmp_path / "state.json", LogColumn.of("step_time", "s"))
        assert values(run) == [0.1, 0.11, 0.12, 0.13]


def test_a_rate_that_a_callback_adds_to_the_rows_of_the_trainer_is_read(tmp_path: Path) -> None:
    rows = [{"loss": 2.9, "tokens_per_second": 70.0 + n, "step": n} for n in range(3)]
    run = log(tmp_path, trainer_of([*rows, {"eval_loss": 1.0, "step": 3}, totals(64.0)]))
    assert run.metrics["tokens_per_second"].estimate == pytest.approx(3 / (1 / 70 + 1 / 71 + 1 / 72))
    assert run.problems == ["2 rows without tokens_per_second were skipped"]


@pytest.mark.parametrize(
    ("header", "name", "unit"),
    [
        ("epoch,step,train/device/samples_per_sec", "train/device/samples_per_sec", "samples/s"),
        (
            "step,train|device|batches_per_sec,validate|device|samples_per_sec",
            "train|device|batches_per_sec",
            "batches/s",
        ),
        ("step,step_ms", "step_ms", "s"),
        ("step,Step time (ms)", "Step time (ms)", "s"),
        ("step,iter_time_s,val_step_ms", "iter_time_s", "s"),
        ("step,batches_per_sec,tokens_per_second_per_gpu", "tokens_per_second_per_gpu", "tokens/s"),
        ("step,tok/s", "tok/s", "tokens/s"),
        ("step,s/it", "s/it", "s"),
        ("step,ms_per_step", "ms_per_step", "s"),
        ("step,it/s", "it/s", "it/s"),
        ("step,images/sec", "images/sec", "images/s"),
    ],
)
def test_the_column_of_a_table_that_names_a_speed_is_found(tmp_path: Path, header: str, name: str, unit: str) -> None:
    rows = [",".join(str(10 + n + place) for place in range(header.count(",") + 1)) for n in range(3)]
    assert [(one.name, one.unit) for one in log(tmp_path, "\n".join([header, *rows])).metrics.values()] == [
        (name, unit)
    ]
    lines = [json.dumps(dict(zip(header.split(","), map(int, row.split(",")), strict=True))) for row in rows]
    assert list(log(tmp_path, "\n".join(lines)).metrics) == [name]


@pytest.mark.parametrize(
    ("header", "hint"),
    [
        ("step,step_time,loss", "add --column step_time --unit s"),
        ("step,dt_ms", "add --column dt_ms --unit ms"),
        ("step,throughput", "add --column throughput --unit samples/s"),
        ("step,step duration", "add --column 'step duration' --unit s"),
        ("step,loss", "--column NAME --unit UNIT"),
        ("step,timestamp,total_time,loss", "--column NAME --unit UNIT"),
        ("step,val_samples_per_sec,flops_per_sec,tokens_per_step", "--column NAME --unit UNIT"),
    ],
)
def test_a_table_without_such_a_column_says_how_to_name_it(tmp_path: Path, header: str, hint: str) -> None:
    content = "\n".join([header, *(",".join([str(n + 1)] * (header.count(",") + 1)) for n in range(3))])
    message, said = refusal(tmp_path, content, "metrics.csv")
    assert hint in said
    assert message.endswith(f"it has {header.replace(',', ', ')}")


def test_sparse_rows_of_a_table_are_counted(tmp_path: Path) -> None:
    run = log(tmp_path, logs_made.throughput_monitor(times(count=5)), "metrics.csv")
    assert run.problems == ["1 row without train/device/samples_per_sec was skipped"]


def test_the_rounds_of_a_benchmark_are_the_steps_of_one_process(tmp_path: Path) -> None:
    run = log(tmp_path, benchmarks(test_a=[0.1, 0.11, 0.12], test_b=[0.5] * 9))
    assert list(run.metrics) == ["t.py::test_a", "t.py::test_b"]
    assert run.repeats == 1
    assert [len(series) for name in run.metrics for series in run.series(name) or []] == [3, 9]
    assert run.metrics["t.py::test_b"].estimate == pytest.approx(0.5)


def test_benchmarks_that_only_one_side_has_are_not_compared(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(benchmarks(test_a=times(0.1), test_b=times(0.2), test_c=times(0.3)))
    (tmp_path / "b.json").write_text(benchmarks(test_d=times(0.1), test_c=times(0.2), test_b=times(0.2)))
    sides, _ = find([str(tmp_path / "a.json"), str(tmp_path / "b.json")], tmp_path)
    verdicts = compare(sides).comparisons[0].verdicts
    assert [(one.metric, one.verdict) for one in verdicts] == [
        ("t.py::test_b", "inconclusive"),
        ("t.py::test_c", "faster"),
    ]


def test_without_its_rounds_a_benchmark_has_only_a_mean(tmp_path: Path) -> None:
    content = json.dumps({"benchmarks": [{"fullname": "t.py::a", "stats": {"mean": 0.1, "stddev": 0.01, "rounds": 9}}]})
    run = log(tmp_path, content)
    assert run.metrics["t.py::a"].repeats == [0.1]
    assert run.series("t.py::a") is None
    assert run.tick is None
    assert "--benchmark-save-data" in run.problems[0]


def test_each_time_of_hyperfine_is_a_process_of_its_own(tmp_path: Path) -> None:
    run = log(tmp_path, hyperfine({"train": [1.0001, 1.1002, 1.2003], "infer": [2.0, 2.1]}))
    assert list(run.metrics) == ["train", "infer"]
    assert run.metrics["train"].repeats == [1.0001, 1.1002, 1.2003]
    assert run.metrics["infer"].repeats == [2.0, 2.1]
    assert (run.repeats, len(run.steps), run.series("train")) == (3, 0, None)
    (tmp_path / "b.log").write_text(hyperfine({"train": [0.8001, 0.8102, 0.8203]}))
    sides, _ = find([str(tmp_path / "a.log"), str(tmp_path / "b.log")], tmp_path)
    (verdict,) = compare(sides).comparisons[0].verdicts
    assert (verdict.verdict, verdict.level, verdict.units) == ("faster", "repeat", (3, 3))


def test_two_commands_alone_are_compared_whatever_they_are_called(tmp_path: Path) -> None:
    for name, content in (
        ("a", hyperfine({"python old.py": times(1.0, 5)})),
        ("b", hyperfine({"python new.py": times(0.8, 5)})),
    ):
        (tmp_path / name).write_text(content)
    sides, _ = find([str(tmp_path / "a"), str(tmp_path / "b")], tmp_path)
    (comparison,) = compare(sides).comparisons
    assert [(one.metric, one.verdict) for one in comparison.verdicts] == [("time", "faster")]
    assert "a: its time is that of 'python old.py'" in comparison.warnings


@pytest.mark.parametrize(
    ("codes", "reason"), [((0, 1, 0), "ended with exit code 1"), ((0, None, 0), "was killed"), ((0, -9, 2), "code -9")]
)
def test_a_command_that_failed_is_not_compared(tmp_path: Path, codes: Sequence[int | None], reason: str) -> None:
    message, hint = refusal(tmp_path, hyperfine({"train": [1.0, 1.1, 1.2]}, codes))
    assert message.startswith("a.log: train: ")
    assert reason in message
    assert "--ignore-failure" in hint


def test_results_of_the_same_name_are_refused(tmp_path: Path) -> None:
    content = json.dumps({"results": [{"command": "a", "times": [1.0, 2.0]}] * 2})
    assert refusal(tmp_path, content)[0] == "a.log has 2 results called 'a'"


@pytest.mark.parametrize("bad", ["-1", "0", "NaN", "Infinity", "1e999", '"x"', "{}", "null", "true", "[]"])
def test_an_impossible_time_of_a_result_is_refused(tmp_path: Path, bad: str) -> None:
    for content in (
        f'{{"results": [{{"command": "a", "times": [1.0, {bad}]}}]}}',
        f'{{"benchmarks": [{{"fullname": "a", "stats": {{"data": [1.0, {bad}]}}}}]}}',
    ):
        message, hint = refusal(tmp_path, content)
        assert message.startswith("a.log: a: ")
        assert hint == "measure it again"


@pytest.mark.parametrize(
    ("content", "reason", "hint"),
    [
        ("", "a.log is empty", "--column"),
        ("\n  \n", "a.log is empty", "--column"),
        (b"\x7fELF\x00\x01", "a.log is not a log: it is not UTF-8 text", "--column"),
        ("step,ms\n1,2\n".encode("utf-16"), "a.log is not a log: it is not UTF-8 text", "--column"),
        (b"step,ms\n1,\xff\n", "a.log is not UTF-8 text: invalid start byte", "UTF-8"),
        (gzip.compress(b"step: 1", mtime=0), "a.log is compressed", "<(zcat a.log)"),
        ("nothing of interest\nhere\n", "a.log is not a log that gpubench reads", "torchtitan"),
        ("1,2\n3,4\n", "a.log is not a log that gpubench reads", "--column"),
        ('{"traceEvents": []}', "a.log is a trace", "gpubench profile --trace a.log"),
        ('{"a": 1, "b": 2}', "a.log is not a result that gpubench reads: its keys are a, b", "hyperfine --export-json"),
        ("{}", "a.log is not a result that gpubench reads: its keys are none", "hyperfine"),
        ('{"results": 1}', "a.log is not a result that gpubench reads: its keys are results", "hyperfine"),
        ('{"results": [1, {"command": 2}]}', "a.log is not a result that gpubench reads", "hyperfine"),
        ('{"benchmarks": [{"stats": 1}]}', "a.log is not a result that gpubench reads", "pytest"),
        ('[{"ms": 1}, {"ms": 2}]', "a.log is a JSON list", "jq -c"),
        ('{"results": [\n{"command":', "a.log:2: it is not valid JSON: ", "whole JSON document"),
        ('{"a": ' + "[" * 100_000, "a.log: it is not valid JSON: ", "whole JSON document"),
        ("{'loss': 2.9}\n", "a.log:1: it is not valid JSON: ", "whole JSON document"),
    ],
)  # fmt: skip
def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path, content: str | bytes, reason: str, hint: str) -> None:
    message, said = refusal(tmp_path, content)
    assert message.startswith(reason)
    assert hint in said


def read_or_refused(path: Path) -> LogEvidence | None:
    """The log; None if it is refused as every bad input is."""
    try:
        run = open_log(path)
    except DataError as error:
        refused = error
    else:
        assert all(math.isfinite(value) and value > 0 for value in run.values)
        return run
    assert "\n" not in refused.message
    assert refused.hint
    return None


@pytest.mark.parametrize("name", FORMATS)
def test_a_log_that_is_cut_off_anywhere_is_read_or_refused(tmp_path: Path, name: str) -> None:
    content, path = FORMATS[name](times(count=5)), tmp_path / name
    path.write_text(content)
    assert read_or_refused(path)
    for end in range(0, len(content), max(1, len(content) // 60)):
        path.write_text(content[:end])
        read_or_refused(path)


PARTS = (
    "step: 1", "step: 20", " tps: 7,0", "validate ", "iter 3: loss 1, time 5ms", "step 3: train loss ", "[rank1]:",
    "0: ", "step:3/9", " train_time:5ms", "Saving the checkpoint", "\x1b[31m", "\r", "\n", "\n", "{", "[", '"', ",",
    "nan", "-", "ms", "it/s", "9" * 40, "\u0660", "\x00", '"results": [', '"log_history": [', "1e400",
)  # fmt: skip


@given(st.lists(st.sampled_from(PARTS), max_size=60))
def test_whatever_a_file_holds_it_is_read_or_refused(parts: list[str]) -> None:
    with tempfile.NamedTemporaryFile("w") as file:
        file.write("".join(parts))
        file.flush()
        read_or_refused(Path(file.name))


def test_what_would_take_long_is_bounded(tmp_path: Path) -> None:
    lines = [titan_line(1, "7,000", rank=f"[rank{rank}]:") for rank in range(20_000)]
    assert refusal(tmp_path, "\n".join(lines))[0].startswith("a.log has 1 value of tps; 4,095 lines were left out")
    assert "not a log" in refusal(tmp_path, "step: 1 iter 1: loss " * 200_000)[0]
    assert "a line of it is longer than 16 MiB" in refusal(tmp_path, "x" * LONGEST)[0]
    rows = [{"step": step, "train_runtime": float(n)} for n, step in enumerate((1, 10**11, 10**12 - 1))]
    evaluations = [{"eval_loss": 1.0, "step": step} for step in range(1000)]
    message, _ = refusal(tmp_path, trainer_of([*rows[:1], *evaluations, *rows[1:]], save_steps=7))
    assert message.startswith("a.log has 0 values of step_time; 1,002 rows were left out")


def test_logs_of_different_tools_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(torchtitan(times()))
    (tmp_path / "b.log").write_text(nanogpt(times()))
    for names in (["a.log", "b.log"], ["."]):
        with pytest.raises(RunDirectoryError) as refused:
            find([str(tmp_path / name) for name in names], tmp_path)
        assert refused.value.message == (
            f"{tmp_path / 'a.log'} is a log of torchtitan and {tmp_path / 'b.log'} is a log of nanoGPT"
        )


def test_a_log_of_a_folder_that_cannot_be_read_is_left_out_on_demand(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.log").write_text(torchtitan(times(seed=number)))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"\x00")
    with pytest.raises(RunDirectoryError, match=r"config\.json is not a result") as refused:
        find([str(tmp_path)], tmp_path)
    assert "--skip-invalid leaves it out" in str(refused.value.hint)
    (side,), left_out = find([str(tmp_path)], tmp_path, skip_invalid=True)
    assert (len(side.runs), len(left_out)) == (3, 1)


def test_a_column_of_a_log_that_has_none_is_told_to_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(torchtitan(times()))
    with pytest.raises(DataError) as refused:
        open_log(path, LogColumn.of("tps", "tokens/s"))
    assert refused.value.hint == "leave --column and --unit out: it is a log of torchtitan"


def test_a_log_may_come_from_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = modded_nanogpt(times())
    writer = threading.Thread(target=path.write_text, args=(content,))
    writer.start()
    run = open_log(path)
    writer.join()
    assert values(run) == values(log(tmp_path, content))


def test_a_file_larger_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpubench.foreign_files.MOST", 100)
    assert refusal(tmp_path, torchtitan(times()))[0] == "a.log cannot be read: it is larger than 0 MiB"


def test_the_times_of_a_benchmark_are_drawn_only_where_they_are_one_series(tmp_path: Path) -> None:
    assert len(log(tmp_path, benchmarks(test_a=times(count=9))).steps) == 9
    assert len(log(tmp_path, benchmarks(test_a=times(count=9), test_b=times())).steps) == 0
    assert np.allclose(
        log(tmp_path, nanogpt(times(count=9))).steps.total, log(tmp_path, nanogpt(times(count=9))).values
    )
