"""`gpubench compare` on the logs of other tools, as a user gives them: what it says, and what follows its hints."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from cli import complaint
from logs_made import FORMATS, benchmarks, nanogpt, times, titan_line, torchtitan
from running import Finished

CommandLine = Callable[..., Finished]


def pair(folder: Path, name: str) -> tuple[str, str]:
    """Two logs of one format, of which the second is 10 % faster."""
    suffix = Path(name).suffix
    for side, step in (("before", 0.1), ("after", 0.09)):
        (folder / f"{side}{suffix}").write_text(FORMATS[name](times(step, seed=len(side))))
    return f"before{suffix}", f"after{suffix}"


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "hyperfine.json"])
def test_two_logs_need_no_options(command_line: CommandLine, tmp_path: Path, name: str) -> None:
    before, after = pair(tmp_path, name)
    done = command_line("compare", before, after)
    assert (done.code, done.stderr) == (0, "")
    assert re.match(rf"{after} is (9|1[01])\.\d % faster than {before} in ", done.stdout), done.stdout
    assert "if equal processes differ by at most 5 %), beyond the 0.5 % margin" in done.stdout


def test_runs_of_hyperfine_are_equal_processes_that_show_how_they_differ(
    command_line: CommandLine, tmp_path: Path
) -> None:
    done = command_line("compare", *pair(tmp_path, "hyperfine.json"))
    assert (done.code, done.stderr) == (0, "")
    assert "beyond the 0.5 % margin" in done.stdout
    assert "40 repeats" in done.stdout
    assert "train of a result of hyperfine" in done.stdout


def test_what_was_left_out_is_said_in_a_line(command_line: CommandLine, tmp_path: Path) -> None:
    before, after = pair(tmp_path, "torchtitan.log")
    with (tmp_path / after).open("a") as file:
        file.write(f"{titan_line(400, '9,000', of='validate step')}\n")
    done = command_line("compare", before, after, "-v")
    assert f"warning: {after}: 1 line was left out: 1 of validation\n" in done.stdout


def test_a_folder_of_logs_is_a_side_of_several_runs(command_line: CommandLine, tmp_path: Path) -> None:
    for side, step in (("before", 0.1), ("after", 0.098)):
        (tmp_path / side).mkdir()
        for number in range(5):
            (tmp_path / side / f"{number}.log").write_text(nanogpt(times(step, seed=number)))
    done = command_line("compare", "before", "after", "--fail-on", "step_time>5%", "--json")
    assert done.code == 0
    (comparison,) = json.loads(done.stdout)["comparisons"]
    assert comparison["baseline"]["runs"] == 5
    assert comparison["verdicts"][0]["verdict"] == "faster"
    noise = command_line("compare", "--null", "before")
    assert noise.code == 0
    assert noise.stdout.startswith("on this machine, expect to see changes of step time above ")


def test_each_benchmark_is_a_metric_that_can_be_named(command_line: CommandLine, tmp_path: Path) -> None:
    for side, step in (("a.json", 0.1), ("b.json", 0.12)):
        (tmp_path / side).write_text(benchmarks(test_one=times(0.2), test_two=times(step)))
    done = command_line("compare", "a.json", "b.json", "--metric", "t.py::test_two", "--fail-on", "t.py::test_*>10%")
    assert done.code == 3
    assert "b.json is 20.0 % slower than a.json in t.py::test_two" in done.stdout
    assert "regression: t.py::test_two worse by 20.0 % " in done.stderr


def test_a_hint_that_names_a_column_reads_it(command_line: CommandLine, tmp_path: Path) -> None:
    for side in "ab":
        (tmp_path / f"{side}.csv").write_text(
            "\n".join(["step,loss,Step time", *(f"{n},1,{0.1 + n}" for n in range(9))])
        )
    said, advised = complaint(command_line("compare", "a.csv", "b.csv"))
    assert said == ("a.csv has no column that names the time of a step, or a rate: it has step, loss, Step time")
    added = advised.partition("add ")[2].partition(",")[0]
    done = command_line("compare", "a.csv", "b.csv", *shlex.split(added))
    assert done.code == 0, done
    assert "Step time of a table" in done.stdout


def test_logs_of_two_tools_are_not_compared(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(torchtitan(times()))
    (tmp_path / "b.log").write_text(nanogpt(times()))
    said, advised = complaint(command_line("compare", "a.log", "b.log"))
    assert said == "a.log is a log of torchtitan and b.log is a log of nanoGPT"
    assert "CSV" in advised


def test_a_trace_among_logs_is_sent_to_profile(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    said, advised = complaint(command_line("compare", "trace.json", "trace.json"))
    assert said == "trace.json is a trace"
    assert advised == "gpubench profile --trace trace.json --against AFTER"


def test_a_log_and_a_folder_without_logs_say_what_is_wrong(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(torchtitan(times()))
    (tmp_path / "empty").mkdir()
    (tmp_path / "one.json").write_text(benchmarks(test_one=times(), test_two=times()))
    (tmp_path / "other.json").write_text(benchmarks(test_three=times()))
    assert complaint(command_line("compare", "a.log", "empty"))[0] == "empty holds no runs"
    assert complaint(command_line("compare", "--null", "a.log"))[1] == "give a folder of four logs or more"
    assert "have no metric in common" in complaint(command_line("compare", "one.json", "other.json"))[0]
    assert complaint(command_line("compare", "a.log", "a.log"))[0] == "a.log is on two sides, a.log and a.log"
    assert complaint(command_line("compare", "a.log", "b.log"))[0].startswith("b.log: no such run")
