"""`gpubench compare` as a command: what it refuses, where its output goes, and what it exits with."""

import csv
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli import complaint
from compared import comparison, comparisons, verdict
from running import Finished, environment

from gpubench.commands import output
from gpubench.compare.evidence import Side
from gpubench.compare.result import Comparisons, GateResult
from gpubench.errors import RunFailed
from gpubench.report import comparison as report
from gpubench.report.document import Document
from gpubench.report.terminal import Terminal

CommandLine = Callable[..., Finished]
LOGS = ("--column", "ms", "--unit", "ms")


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Three groups of five logs of step times: `base`, one that `repeats` it, and one that is 10 % `slower`."""
    rng = np.random.default_rng(1)
    for name, factor in (("base", 1.0), ("repeats", 1.0), ("slower", 1.1)):
        (tmp_path / name).mkdir()
        for number in range(5):
            steps = factor * 10 * (1 + rng.normal(0, 0.001, 60)) * (1 + rng.normal(0, 0.001))
            (tmp_path / name / f"{number}.csv").write_text("ms\n" + "\n".join(f"{step:.6f}" for step in steps))
    return tmp_path


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Answers every comparison with the given one; what was asked is in the dictionary that comes back."""

    build = report.document

    def answer(document: Comparisons, left_out: list[str] | None = None) -> dict[str, Any]:
        asked: dict[str, Any] = {}

        def find(names: list[str], results: Path, **known: Any) -> tuple[list[Any], list[str]]:
            asked.update(names=names, results=results, **known)
            return [Side(name, ()) for name in names], left_out or []

        def compare(sides: list[Any], **known: Any) -> Comparisons:
            asked.update(known)
            return document

        monkeypatch.setattr("gpubench.compare.inputs.find", find)
        monkeypatch.setattr("gpubench.compare.compare.compare", compare)
        monkeypatch.setattr(report, "document", lambda found, _sides=(), **options: build(found, **options))
        return asked

    return answer


def result(outcome: Any, metric: str = "step_time") -> GateResult:
    return GateResult(f"{metric}>2%", metric, "new", 0.02, 0.031, (0.026, 0.037), 1e-5, outcome)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ([], "give two runs or more", "gpubench compare latest~1 latest"),
        (["a"], "give two runs or more", "gpubench compare latest~1 latest"),
        (["--null"], "--null needs exactly one group of runs", "--null results/EXPERIMENT"),
        (["--null", "a", "b"], "--null needs exactly one group of runs", "--null results/EXPERIMENT"),
        (["--null", "a", "--fail-on", "step_time>2%"], "so --fail-on and --html have no effect", "leave them out"),
        (["--null", "a", "--html", "x.html"], "so --fail-on and --html have no effect", "leave them out"),
        (["--null", "a", "--format", "csv"], "--null has no csv output", "markdown or json"),
        (["a", "b", "--strict"], "--strict without --fail-on", "--fail-on"),
        (["a", "b", "--json", "--format", "csv"], "--json and --format csv contradict", "leave one out"),
        (["a", "b", "--unit", "ms"], "describe a --column", "--column NAME"),
        (["a", "b", "--column", "ms"], "needs a --unit", "--unit ms"),
        (["a", "b", "--margin", "0.005"], "--margin '0.005' is not a percentage", "0.5%"),
        (["a", "b", "--margin", "-1%"], "--margin '-1%' is not a percentage", "0.5%"),
        (["--null", "a", "--assume", "1%"], "so --assume has no effect", "leave --assume out"),
        (["a", "b", "--assume", "2"], "--assume '2' is not a percentage", "--assume 2%"),
        (["a", "b", "--margin", "100%"], "--margin '100%' is not a percentage below 100 %", "0.5%"),
        (["a", "b", "--fail-on", "step_time>2"], "'2' is not a percentage", "step_time>2%"),
        (["a", "b", "--html", "."], "is a directory", "page.html"),
        (["a", "b", "--html", "no/where.html"], "there is no folder no", "mkdir -p no"),
        (["a", "b", "--format", "pdf"], "pdf", "it is one of terminal"),
        (["a", "b", "--better", "sideways"], "sideways", "it is one of lower"),
        (["a", "b", "--color"], "--color", "--help"),
        (["a", "b"], "a", ""),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_in_a_line(
    command_line: CommandLine, arguments: list[str], error: str, hint: str
) -> None:
    done = command_line("compare", *arguments)
    said, advised = complaint(done)
    assert error in said
    assert hint in advised
    assert done.stdout == ""


def test_what_was_asked_is_passed_on(command_line: CommandLine, canned: Callable[..., dict[str, Any]]) -> None:
    asked = canned(comparisons(comparison(verdict())))
    options = (
        "--margin",
        "1 %",
        "--assume",
        "2%",
        "--metric",
        "mfu",
        "--metric",
        "phase_*",
        "--force",
        "--skip-invalid",
    )
    done = command_line("compare", "a", "b", "c", *options, "--results", "elsewhere", "--fail-on", "mfu>2%")
    assert (done.code, done.stderr) == (0, "")
    assert (asked["names"], asked["results"], asked["skip_invalid"]) == (["a", "b", "c"], Path("elsewhere"), True)
    assert (asked["margin"], asked["assumed"], asked["metrics"], asked["force"]) == (
        0.01,
        0.02,
        ["mfu", "phase_*"],
        True,
    )
    assert [condition.text for condition in asked["conditions"]] == ["mfu>2%"]
    assert asked["column"] is None


def test_runs_are_looked_up_where_train_bench_writes_them(
    command_line: CommandLine, canned: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = canned(comparisons(comparison(verdict())))
    command_line("compare", "a", "b")
    assert asked["results"] == Path("results")
    monkeypatch.setenv("GPUBENCH_RESULTS", "scratch")
    command_line("compare", "a", "b")
    assert asked["results"] == Path("scratch")


@pytest.mark.parametrize(
    ("outcomes", "strict", "code", "said"),
    [
        (["passed"], True, 0, ""),
        (["inconclusive"], False, 0, ""),
        (["inconclusive"], True, 4, "undecided: step_time worse by 3.1 % > 2 %\n"),
        (["regressed"], False, 3, "regression: step_time worse by 3.1 % > 2 %\n"),
        (["inconclusive", "regressed", "passed"], True, 3, "regression: step_time worse by 3.1 % > 2 %\n"),
        (
            ["regressed", "regressed"],
            True,
            3,
            "regression: step_time worse by 3.1 % > 2 %; step_time worse by 3.1 % > 2 %\n",
        ),
    ],
)
def test_the_gate_decides_the_exit_code(
    command_line: CommandLine,
    canned: Callable[..., dict[str, Any]],
    outcomes: list[str],
    strict: bool,
    code: int,
    said: str,
) -> None:
    canned(comparisons(comparison(verdict()), gate=[result(outcome) for outcome in outcomes]))
    done = command_line("compare", "a", "b", "--fail-on", "step_time>2%", *(["--strict"] if strict else []))
    assert (done.code, done.stderr) == (code, said)
    assert "new is 3.1 % slower than base" in done.stdout


@pytest.mark.parametrize("arguments", [["--json"], ["--format", "json"], ["--json", "--format", "json"]])
def test_json_is_one_document_and_nothing_else(
    command_line: CommandLine, canned: Callable[..., dict[str, Any]], arguments: list[str]
) -> None:
    canned(comparisons(comparison(verdict()), gate=[result("regressed")]))
    done = command_line("compare", "a", "b", "--fail-on", "step_time>2%", *arguments)
    assert done.code == 3
    assert json.loads(done.stdout)["gate"][0]["outcome"] == "regressed"


def test_a_page_is_written_beside_any_format(
    command_line: CommandLine, canned: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    canned(comparisons(comparison(verdict())))
    done = command_line("compare", "a", "b", "--html", "out.html", "--format", "csv")
    assert (done.code, done.stderr) == (0, "wrote out.html\n")
    assert len(list(csv.reader(io.StringIO(done.stdout)))) == 2
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]
    again = command_line("compare", "a", "b", "--html", "out.html", "--format", "html", "-q")
    assert (again.stdout, again.stderr) == ((tmp_path / "out.html").read_text(), "")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_page_that_cannot_be_written_is_a_clear_error(
    command_line: CommandLine, canned: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    canned(comparisons(comparison(verdict())))
    (tmp_path / "locked").mkdir(mode=0o500)
    done = command_line("compare", "a", "b", "--html", "locked/out.html")
    assert done.code == 1
    assert done.stderr.startswith("error: cannot write locked/out.html")


def test_logs_of_another_tool_are_compared(command_line: CommandLine, logs: Path) -> None:
    done = command_line("compare", "base", "slower", *LOGS, "--fail-on", "ms>5%")
    assert done.code == 3, done
    assert re.match(r"slower is (9|10)\.\d+ % slower than base in ms \(95 % interval ", done.stdout), done.stdout
    assert re.fullmatch(r"regression: ms worse by \S+ % > 5 %\n", done.stderr), done.stderr


def test_the_same_logs_give_the_same_document_twice(command_line: CommandLine, logs: Path) -> None:
    first, second = (command_line("compare", "base", "slower", *LOGS, "--json").stdout for _ in range(2))
    assert first == second
    (only,) = json.loads(first)["comparisons"]
    assert [entry["verdict"] for entry in only["verdicts"]] == ["slower"]


def test_a_repetition_passes_the_gate(command_line: CommandLine, logs: Path) -> None:
    done = command_line("compare", "base", "repeats", *LOGS, "--fail-on", "ms>1%", "--strict")
    assert (done.code, done.stderr) == (0, "")
    assert "are equivalent in ms" in done.stdout


def test_markdown_can_be_appended_to_a_pull_request(command_line: CommandLine, logs: Path) -> None:
    done = command_line("compare", "base", "slower", *LOGS, "--format", "markdown")
    assert done.stdout.startswith("### slower is ")
    assert "\n| metric | baseline | candidate | change | verdict |\n|---|---|---|---|---|\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--metric", "mss"], "mss", "did you mean 'ms'?"),
        (["--fail-on", "step_tim>2%"], "names no metric that was compared for slower", "it is one of ms"),
        (["--fail-on", "step_time>2%"], "is a metric, but none that was compared for slower", "it is one of ms"),
        (["--metric", "step_time"], "is a metric, but none that every run has", "it is one of ms"),
        (["--fail-on", "latency_p99>2%"], "is a metric, but none that was compared", "needs 299 steps or more"),
    ],
)
def test_a_metric_that_is_not_there_is_refused_with_the_nearest(
    command_line: CommandLine, logs: Path, arguments: list[str], error: str, hint: str
) -> None:
    said, advised = complaint(command_line("compare", "base", "slower", *LOGS, *arguments))
    assert error in said
    assert hint in advised


def test_null_says_what_the_workload_can_resolve(command_line: CommandLine, logs: Path) -> None:
    done = command_line("compare", "--null", "base", *LOGS)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.startswith("on this machine, expect to see changes of ms above ")
    assert "repeats" not in done.stdout  # a log is one run
    document = json.loads(command_line("compare", "--null", "base", *LOGS, "--json").stdout)
    assert document["metrics"][0]["metric"] == "ms"
    assert command_line("compare", "--null", "base", *LOGS, "--format", "markdown").stdout.startswith("### ")


def test_a_reader_that_leaves_changes_no_exit_code(logs: Path) -> None:
    command = [sys.executable, "-m", "gpubench", "compare", "base", "slower", *LOGS, "--fail-on", "ms>5%"]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, cwd=logs, env=environment(), timeout=60, check=False
    )
    os.close(writing)
    assert done.returncode == 3
    assert re.fullmatch(r"regression: ms worse by \S+ % > 5 %\n", done.stderr), done.stderr


def with_stdout(logs: Path, redirected: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpubench", "compare", "base", "slower", *LOGS, *options]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *command],
        stderr=subprocess.PIPE, text=True, cwd=logs, env=environment(), timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_an_error_in_a_line(logs: Path) -> None:
    done = with_stdout(logs, ">/dev/full", "--format", "csv")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("error: cannot write to stdout: No space left")
    assert "Traceback" not in done.stderr


def test_a_closed_stdout_is_an_error_in_a_line(logs: Path) -> None:
    done = with_stdout(logs, ">&-")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "error: cannot write to stdout: it is closed"
    assert "Traceback" not in done.stderr


def test_settings_are_not_printed_to_a_closed_stdout(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    done = command_line("train-bench", "--print-config")
    assert done.code == 1
    assert done.stderr.splitlines()[0] == "error: cannot write to stdout: it is closed"


def test_what_is_drawn_for_stdout_has_its_width_and_colours_and_writes_nothing_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            self.write("")

    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "33")
    terminal = Terminal(quiet=True, verbosity=0)
    shown = terminal.render(Document("x" * 30 + " of words", []))
    assert shown == f"\x1b[1m{'x' * 30} of\x1b[0m\n\x1b[1mwords\x1b[0m\n"


def test_a_file_is_replaced_whole_and_a_link_to_it_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    page_ = tmp_path / "pages" / "page.html"
    link, dangling = tmp_path / "latest.html", tmp_path / "next.html"
    page_.write_text("old")
    before = page_.stat().st_ino
    link.symlink_to("pages/page.html")
    dangling.symlink_to("pages/next.html")
    for path in (link, dangling):
        output.write_file(path, "new")
        assert path.is_symlink()
        assert path.read_text() == "new"
    assert page_.stat().st_ino != before
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["next.html", "page.html"]


def test_a_link_that_leads_nowhere_is_an_error_and_stays(tmp_path: Path) -> None:
    loop = tmp_path / "loop.html"
    loop.symlink_to("loop.html")
    with pytest.raises(RunFailed, match="cannot write"):
        output.write_file(loop, "page")
    assert loop.is_symlink()


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    output.write_file(pipe, "page")
    reader.join(timeout=60)
    assert read == ["page"]
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
