"""What `benchmarks/fuzz.py` found: damaged input that once crashed, hung or filled the memory. And its quick form."""

import gzip
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import profiles_made
import pytest
from cli import complaint
from places import BENCHMARKS
from recorded_runs import write_run
from running import PATIENCE, Finished, environment
from traces_made import document as trace_document
from traces_made import slice_
from tunings_made import TUNED

from gpubench import foreign_files
from gpubench.errors import DataError
from gpubench.kinds.pipeline.resuming import _sha256_of_tensor
from gpubench.report.document import Document
from gpubench.report.page import render
from gpubench.runs.directory import (
    CONFIG,
    ENVIRONMENT,
    FINDINGS,
    PROFILE,
    RUN,
    STEPS,
    SUMMARY,
    TELEMETRY,
    to_json,
    write_document,
)
from gpubench.settings import yaml_text
from gpubench.trace.file import opened

CommandLine = Callable[..., Finished]

HOLE = 1 << 40
"""Bytes of a file that takes no room on the disk, and has none in memory."""
ALIASES = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))])
MERGES = "\n".join(
    ["m0: &m0 {k: 1}", *(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}" for n in range(1, 12))]
)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two that are whole."""
    return write_run(tmp_path / "results"), write_run(tmp_path / "results")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param(ALIASES, "it expands to more than 20,000 values", id="aliases of aliases"),
        pytest.param(MERGES, "it expands to more than 20,000 values", id="merges of merges"),
        pytest.param("a: &a [*a]", "it contains itself", id="a list in itself"),
        pytest.param("a: &a {b: *a}", "it contains itself", id="a mapping in itself"),
        pytest.param("a: 1\nb: {c: 2, c: 3}", "line 2 gives c a second time", id="a key twice: the last one counted"),
        pytest.param("[" * 100_000, "it is nested deeper than 64 levels", id="brackets: the stack overflowed"),
        pytest.param("? " * 100_000, "it is nested deeper than 64 levels", id="keys of keys"),
        pytest.param("a: 2026-99-99", "month must be in 1..12", id="a date that is none"),
        pytest.param("a: !!bool x", "a value does not fit its tag", id="a word that is no truth value"),
        pytest.param("a: !!timestamp x", "a value does not fit its tag", id="a word that is no time"),
        pytest.param("a: !!int ''", "a value does not fit its tag", id="an integer of no digits"),
        pytest.param("a: 0x" + "f" * 9000, "a number in it is too long", id="a number that Python does not print"),
        pytest.param("a: !!python/object/apply:os.abort []", "could not determine a constructor", id="code"),
    ],
)
def test_yaml_that_would_do_harm_is_refused_in_a_configuration_and_in_a_run(
    command_line: CommandLine, tmp_path: Path, runs: tuple[Path, Path], text: str, reason: str
) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    said, _ = complaint(command_line("train-bench", "--config", "mine.yaml", "--print-config"))
    assert "mine.yaml cannot be read as YAML" in said
    assert reason in said
    shutil.copyfile(tmp_path / "mine.yaml", runs[0] / CONFIG)
    said, _ = complaint(command_line("compare", *map(str, runs)))
    assert f"{CONFIG} cannot be read: " in said
    assert reason in said


def test_yaml_with_a_few_aliases_is_read() -> None:
    text = "seed: &one 1\nbase: &base {steps: *one, epochs: null}\ntraining: {<<: *base, epochs: 2}\n"
    assert yaml_text.parse(text)["training"] == {"steps": 1, "epochs": 2}


def test_a_setting_that_is_no_number_differs_from_itself_and_is_not_given_twice(
    command_line: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "mine.yaml").write_text("performance: {cpu_threads: .nan}")
    said, _ = complaint(command_line("profile", "--config", "mine.yaml", "--print-config"))
    assert said.startswith("performance.cpu_threads = nan: ")


@pytest.mark.parametrize("name", [RUN, SUMMARY, CONFIG, ENVIRONMENT, STEPS, TELEMETRY])
def test_a_file_of_a_run_that_is_one_large_hole_is_not_read_into_memory(
    command_line: CommandLine, runs: tuple[Path, Path], name: str
) -> None:
    os.truncate(runs[0] / name, HOLE)
    said, _ = complaint(command_line("compare", *map(str, runs)))
    assert f"{name} cannot be read: " in said
    assert any(reason in said for reason in ("larger than 256 MiB", "longer than 16 MiB", "does not fit in memory"))


def test_a_configuration_that_is_one_large_hole_is_refused(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    os.truncate(tmp_path / "mine.yaml", HOLE)
    said, _ = complaint(command_line("memory", "--config", "mine.yaml", "--print-config"))
    assert said.endswith("it is larger than 1 MiB")


@pytest.mark.parametrize("name", ["log.csv", "log.jsonl"])
def test_a_log_without_ends_of_lines_is_refused_early(command_line: CommandLine, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("step_ms\n10\n" if name.endswith("csv") else '{"step_ms": 10}\n')
    os.truncate(tmp_path / name, 3 * foreign_files.LONGEST)
    said, _ = complaint(command_line("compare", name, name, "--column", "step_ms", "--unit", "ms"))
    assert said.endswith("a line of it is longer than 16 MiB")


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e101"])
def test_a_value_whose_square_is_no_number_is_refused(command_line: CommandLine, tmp_path: Path, value: str) -> None:
    rows = [str(10 + number % 3) for number in range(40)]
    (tmp_path / "log.csv").write_text("\n".join(["step_ms", *rows[:14], value, *rows]))
    (tmp_path / "fine.csv").write_text("\n".join(["step_ms", *rows]))
    options = ("--column", "step_ms", "--unit", "points", "--better", "lower")
    said, _ = complaint(command_line("compare", "log.csv", "fine.csv", *options))
    assert said == f"log.csv:16: step_ms: '{value}' is not a possible value"


def test_a_latent_whose_header_is_said_to_go_on_forever_has_no_tensor(tmp_path: Path) -> None:
    content = (2**64 - 1).to_bytes(8, "little") + b"abc"
    assert _sha256_of_tensor(content).startswith("e3b0c44298fc1c14")  # of nothing
    file = tmp_path / "00000.safetensors"
    os.mkfifo(file)
    with pytest.raises(OSError, match="not a regular file"):
        foreign_files.content(file)


def unpacked(file: Path) -> bytes:
    with opened(file) as packed:
        return b"".join(iter(lambda: packed.read(50), b""))


@pytest.mark.parametrize("parts", [1, 3])
def test_zeros_behind_what_is_compressed_are_passed_over_whatever_their_number(tmp_path: Path, parts: int) -> None:
    content = trace_document([slice_("aten::mm", 0, 9)])
    size = -(-len(content) // parts)
    members = [gzip.compress(content[at : at + size]) + bytes(100) for at in range(0, len(content), size)]
    file = tmp_path / "trace.json.gz"
    file.write_bytes(b"".join(members))
    os.truncate(file, 2**26)
    assert unpacked(file) == content


@pytest.mark.parametrize("damage", [-1, -5, -9, 20])
def test_what_is_compressed_and_cut_off_or_changed_is_refused(tmp_path: Path, damage: int) -> None:
    packed = gzip.compress(trace_document([slice_("aten::mm", 0, 9)]))
    file = tmp_path / "trace.json.gz"
    for content in (packed[:damage], packed[:damage] + bytes([packed[damage] ^ 255]) + packed[damage:][1:]):
        file.write_bytes(content)
        with pytest.raises(DataError, match="cut short or damaged"):
            unpacked(file)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("conclusion", "tried", 0, "rate"), 1e308),
        (("conclusion", "tried", 0, "runs"), 0),
        (("conclusion", "tried", 0, "runs"), -1),
        (("conclusion", "tried", 0, "peak"), 1e308),
        (("conclusion", "tried", 0, "combination"), [1]),
        (("conclusion", "dropped", 0, "factor"), "performance.compile one more word"),
        (("conclusion", "dropped", 0, "level"), 2),
        (("conclusion", "contributions", 0, "level"), 0),
        (("conclusion", "ladder", 0, "level"), -1),
        (("conclusion", "gain"), [1e308, 1e308, 1e308]),
        (("conclusion", "best"), []),
        (("conclusion", "interactions"), [{"factors": ["data.workers"], "levels": [1], "effect": [1, 1, 1]}]),
        (("conclusion", "noise", "sigma"), 1e308),
        (("blocks", 0, "runs", 0, "combination"), [9, 9, 9]),
        (("blocks", 0, "runs", 0, "throughput"), 1e308),
        (("treatments", 1, "name"), "data.workers"),
        (("treatments",), []),
        (("seconds",), 1e308),
        (("budget",), -1.0),
        (("ready_data",), [1e308, "run"]),
    ],
    ids=str,
)
def test_an_impossible_search_is_refused(
    command_line: CommandLine, tmp_path: Path, path: tuple[str | int, ...], value: Any
) -> None:
    document = json.loads(to_json(TUNED))
    holder = document
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "tune.json").write_text(json.dumps(document))
    for more in ((), ("--json",)):
        said, _ = complaint(command_line("runs", "show", "search", *more))
        assert "tune.json cannot be read: " in said


@pytest.mark.parametrize("value", [1e308, -1e308])
@pytest.mark.parametrize("name", ["estimate", "low", "high"])
def test_a_finding_with_an_impossible_saving_is_left_out_and_reported(
    command_line: CommandLine, tmp_path: Path, name: str, value: float
) -> None:
    run = write_run(tmp_path / "results")
    write_document(run / PROFILE, profiles_made.profile())
    document = json.loads(to_json(profiles_made.findings()))
    saving = {"estimate": 0.1, "low": 0.05, "high": 0.2, name: value}
    document["findings"][0]["measured"] = {"outcome": "confirmed", "saving": saving, "run": None, "baseline": None}
    write_document(run / FINDINGS, document)
    done = command_line("runs", "show", str(run))
    assert done.code == 0, done
    assert f"{FINDINGS} cannot be read: " in (done.stdout + done.stderr).replace("\n", " ")


@pytest.mark.parametrize("number", ["9" * 5000, "²"], ids=["thousands of digits", "a superscript"])
@pytest.mark.parametrize(
    "arguments",
    ["judge --rounds {} -- python x", "tune --runs {}", "runs --limit {}", "loader --data a:b --batch-size {}"],
)
def test_a_count_that_python_does_not_read_is_refused(command_line: CommandLine, arguments: str, number: str) -> None:
    said, _ = complaint(command_line(*arguments.format(number).split()))
    assert "not" in said


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("HOME", "TMPDIR", "COLUMNS", "NO_COLOR", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))  # it sets them, and they are to be as they were
    return importlib.import_module("fuzz")


def test_damaged_input_of_every_kind_is_read_or_refused_and_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "fuzz.py"), "--quick", "--seed", "7", "--findings", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=PATIENCE)
    assert done.returncode == 0, done.stderr + done.stdout
    (last,) = [line for line in done.stdout.splitlines() if line.startswith("| all ")]
    _, cases, refused, accepted, findings = (cell.strip() for cell in last.split("|")[1:-1])
    assert int(refused) + int(accepted) == int(cases) == 27
    assert min(int(refused), int(accepted)) > 0
    assert findings == "0"
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_with_a_case_is_seen(fuzz: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<p>fine</p>")
    fine = fuzz.Ended(0, "{}", "", 2**20, False)
    assert fuzz.complaint(fine, "json", [page]) is None
    assert fuzz.complaint(fuzz.Ended(2, "", "error: no\nhint: so\n", 2**20, False), "text", []) is None
    trace = "Traceback (most recent call last)\nKeyError: 5"
    for ended, kind, said in (
        (fuzz.Ended(-9, "", "", 2**20, True), "text", "hang"),
        (fuzz.Ended(-11, "", "", 2**20, False), "text", "exit code -11"),
        (fuzz.Ended(1, "", trace, 2**20, False), "text", "traceback: KeyError: 5"),
        (fuzz.Ended(2, "", "", 2**20, False), "text", "0 lines of error"),
        (fuzz.Ended(0, "", "error: no\n", 2**20, False), "text", "1 lines of error"),
        (fuzz.Ended(0, "", "", 2**31, False), "text", "2048 MiB of memory"),
        (fuzz.Ended(0, "\x1b[2J", "", 2**20, False), "text", "control character"),
        (fuzz.Ended(0, "NaN", "", 2**20, False), "json", "no JSON"),
        (fuzz.Ended(0, "<img src=x>", "", 2**20, False), "html", "'<img' in a page"),
    ):
        assert said in fuzz.complaint(ended, kind, [page])
    page.write_text(render(Document("fine", [])))
    assert fuzz.complaint(fine, "json", [page]) is None
    page.write_text(render(Document("fine", [])).replace("</main>", "<script>alert(1)</script></main>"))
    assert "in a page" in fuzz.complaint(fine, "json", [page])
    page.write_text('<p onclick="x">')
    assert "in a page" in fuzz.complaint(fine, "json", [page])


def test_a_file_that_is_touched_is_noticed(fuzz: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    before = fuzz.tree(tmp_path)
    assert fuzz.tree(tmp_path) == before
    (tmp_path / "a").write_text("2")
    assert fuzz.tree(tmp_path) != before
