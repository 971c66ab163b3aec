"""`gpubench train-bench -- PROGRAM`: what the host makes of a program of the user."""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import forked
import pytest
from places import SUPPORT
from running import Finished, gpubench, metrics, processes_of, started

from gpubench.diagnosis.rules import EAGER
from gpubench.findings import Finding, Findings
from gpubench.kinds.program.defaults import complete_program
from gpubench.kinds.program.recorder import ProgramRecorder
from gpubench.settings.loading import completed, load
from gpubench.settings.programs import ProgramSettings

PROGRAM = str(SUPPORT / "training_program.py")


def measure(results: Path, *words: str, options: Sequence[str] = (), cwd: Path | None = None) -> Finished:
    few = ("--repeats", "1", "--steps", "20", "-q")
    return gpubench("train-bench", *few, *options, "--", *words, results=results, cwd=cwd)


def takes(steps: int, end: str | int = 0) -> list[str]:
    return [sys.executable, PROGRAM, str(steps), str(end)]


def errors(run: Finished) -> tuple[str, str]:
    """Returns the error and its hint, which must be the only two lines on stderr but for warnings."""
    error, hint = (line for line in run.stderr.splitlines() if not line.startswith("warning: "))
    return error.removeprefix("error: "), hint.removeprefix("hint: ")


def test_a_program_leaves_a_run_directory_like_any_other_run(tmp_path: Path) -> None:
    run = measure(tmp_path, *takes(500))
    assert run.code == 0
    assert metrics(run)["step_time"]["estimate"] == pytest.approx(0.002)
    assert metrics(run)["throughput"]["estimate"] == pytest.approx(4 / 0.002)
    assert run.document("run.json")["workload"]["samples_per_step"] == 4
    assert run.document("environment.json")["torch"]["version"] == "2.1.0"  # the program's, not that of gpubench
    assert run.document("environment.json")["host"]["name"]
    assert "took 30 steps" in (run.run / "output.log").read_text()
    assert "took 30 steps" not in (run.run / "run.log").read_text()
    assert len(run.lines("steps.jsonl")) == 30
    assert f"{PROGRAM} 500 0, 4 samples a step on cpu" in run.stdout
    assert (run.run / "report.html").is_file()


@pytest.mark.parametrize(("seconds", "share"), [(15e-6, None), (100e-6, "5 %")])
def test_what_gpubench_itself_takes_is_told_and_a_warning_where_it_is_more_than_one_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, share: str | None
) -> None:
    monkeypatch.setenv("PROBE_TIME", str(seconds))
    run = measure(tmp_path, *takes(500))
    assert metrics(run)["probe_time"]["estimate"] == pytest.approx(seconds)
    assert metrics(run)["probe_share"]["estimate"] == pytest.approx(seconds / 0.002)
    said = [line for line in run.document("summary.json")["warnings"] if line.startswith("gpubench itself took")]
    assert [line.partition(" of a step")[0] for line in said] == ([f"gpubench itself took {share}"] if share else [])


@pytest.mark.parametrize(
    ("command", "words"), [("train-bench", ()), ("profile", ()), ("memory", ("--", sys.executable, "t.py"))]
)
def test_samples_per_step_is_refused_where_it_means_nothing(tmp_path: Path, command: str, words: Sequence[str]) -> None:
    found = gpubench(command, "--samples-per-step", "7", *words, results=tmp_path)
    assert found.code == 2
    assert f"'samples_per_step' is a setting of train-bench -- PROGRAM, not of {command}\n" in found.stderr


def test_a_program_can_take_all_of_its_steps(tmp_path: Path) -> None:
    run = measure(tmp_path, *takes(45), options=["--steps", "all"])
    assert (run.code, len(run.lines("steps.jsonl"))) == (0, 45)


def test_fewer_steps_than_asked_for_are_measured(tmp_path: Path) -> None:
    run = measure(tmp_path, *takes(25))
    assert (run.code, len(run.lines("steps.jsonl"))) == (0, 25)


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (
            takes(8),
            "the program ended after 8 of 30 optimizer steps, and the warm-up takes 10",
            "--training.warmup_steps",
        ),
        (takes(7, 3), "the program exited with code 3 in step 7", "the last line it printed"),
        (takes(7, "kill"), "the program was killed by SIGKILL in step 7 or later", "out of memory"),
        ([sys.executable, "-c", "print(1)"], "no process of the program was seen to import torch", "last: 1"),
        ([sys.executable, "-c", "raise SystemExit('no data')"], "exited with code 1 before its first", "no data"),
        (
            ["sh", "-c", "echo '[rank1]: OSError: no disk'; echo errors.ChildFailedError:; echo report; exit 1"],
            "exited with code 1 before its first",
            "[rank1]: OSError: no disk",
        ),
        ([sys.executable, "-I", "-c", "1"], "no Python process was seen that imports sitecustomize", "-I"),
        (["true"], "no Python process was seen that imports sitecustomize", "-S"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], "was killed by SIGKILL", "out of memory"),
    ],
    ids=[
        "ends early",
        "fails",
        "killed in a step",
        "no torch",
        "fails before",
        "torchrun",
        "isolated",
        "no Python",
        "killed",
    ],
)
def test_a_program_that_cannot_be_measured_gets_one_error(
    tmp_path: Path, words: list[str], error: str, hint: str
) -> None:
    run = measure(tmp_path, *words)
    assert run.code == 1
    said, advice = errors(run)
    assert error in said
    assert hint in advice
    assert run.document("run.json")["status"] == "failed"
    assert run.document("run.json")["error"]["message"] == said


KILLED_WHILE_LOOKING = """
import os, torch
first, second = (torch.optim.SGD([torch.nn.Parameter(torch.ones(()))]) for _ in range(2))
for _ in range(12):
    first.step()
os.kill(os.getpid(), 9)
"""


def test_the_steps_until_a_program_is_killed_are_kept_while_it_is_unknown_which_updates_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(forked.PROGRAMS, "1")
    run = measure(tmp_path, sys.executable, "-c", KILLED_WHILE_LOOKING, options=["--steps", "all"])
    assert run.code == 1
    received = len(run.lines("steps.jsonl"))
    assert 1 <= received <= 12
    assert f"the program was killed by SIGKILL in step {received} or later" in errors(run)[0]


@pytest.mark.parametrize(
    ("end", "seen"),
    [
        ("close", "the connection to gpubench was closed in the program"),
        ("exec", "the process was replaced by another program, as by os.execv,"),
        ("leave", "the process ended without Python's exit handlers, as by os._exit,"),
        ("daemon", "the process ended without Python's exit handlers, as by os._exit,"),
    ],
)
def test_a_program_that_loses_its_connection_is_measured_until_then_and_the_run_says_what_was_seen(
    tmp_path: Path, end: str, seen: str
) -> None:
    run = measure(tmp_path / "long", *takes(25, end))
    assert run.code == 0, run.stderr
    assert len(run.lines("steps.jsonl")) == 25
    assert any(
        each.startswith(f"{seen} when 25 of 30 optimizer steps had been received; ")
        for each in run.document("summary.json")["warnings"]
    )
    assert run.document("run.json")["repeats"] == 1
    if end == "close":
        assert "worked on" in (run.run / "output.log").read_text()
    if end == "daemon":  # seen as the one before
        return
    run = measure(tmp_path / "short", *takes(1, end), options=["--steps", "all"])
    assert run.code == 1
    assert errors(run)[0] == f"{seen} when 1 optimizer step had been received"


@pytest.mark.parametrize("place", ["", "within"])
def test_a_script_is_found_in_the_directory_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    script = tmp_path / place / "train.sh"
    script.parent.mkdir(exist_ok=True)
    script.touch(mode=0o755)
    monkeypatch.chdir(tmp_path)
    given = {"program.command": "./train.sh", "program.directory": place or None}
    settings = completed(load(ProgramSettings, None, given), complete_program).settings
    assert settings.program.words == ["./train.sh"]


@pytest.mark.parametrize(
    ("words", "options", "error"),
    [
        (["nosuch"], (), "there is no command 'nosuch'"),
        (["./train.py"], (), "./train.py is not executable"),
        ([], (), "no program stands behind --"),
        (["true"], ("--program.directory=nosuch",), "there is no directory nosuch"),
        (["true"], ("--batch-size", "8"), "--batch-size configures a model of gpubench"),
        (["true"], ("--precision", "amp"), "precision"),
        (["true"], ("--distributed.world_size=2",), "'distributed.world_size' is a setting of train-bench"),
        (["true"], ("--training.optimizer=sgd",), "'training.optimizer' is a setting of train-bench"),
        (["true"], ("--vs", "training.batch_size=8"), "'training.batch_size' is a setting of train-bench"),
        (["true"], ("--vs-ref", "HEAD"), "not a git repository"),
        (["sh", "\udcff.sh"], (), "is not UTF-8, as a configuration is"),
        (["true"], ("--vs-ref", "HEAD", "--vs-args", "x"), "different comparisons"),
        (["true"], ("--steps", "some"), "training.steps"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_written(
    tmp_path: Path, words: list[str], options: tuple[str, ...], error: str
) -> None:
    (tmp_path / "train.py").touch()
    run = measure(tmp_path / "results", *words, options=options, cwd=tmp_path)
    assert run.code == 2
    assert error in errors(run)[0]
    assert not run.runs


@pytest.mark.parametrize(
    ("words", "options", "error"),
    [
        (takes(7, "hang"), ("--measurement.stall_timeout=1",), "has made no progress for 1 s, in step 7"),
        (["sleep", "7653"], ("--program.patience=1",), "has taken no optimizer step 1 s after its start"),
        (takes(500, "hang"), ("--program.grace=1",), None),
    ],
    ids=["a step", "before the first step", "after the last step"],
)
def test_a_program_that_does_not_go_on_is_ended(
    tmp_path: Path, words: list[str], options: tuple[str, ...], error: str | None
) -> None:
    run = measure(tmp_path, *words, options=options)
    assert run.code == (1 if error else 0)
    assert error is None or error in errors(run)[0]
    assert not processes_of(words)


def test_the_processes_that_a_program_leaves_behind_are_ended(tmp_path: Path) -> None:
    stray = "import subprocess; subprocess.Popen(['sleep', '7654'], start_new_session=True)"
    own = f"import runpy, sys; sys.argv[1:] = ['500', '0']; runpy.run_path({PROGRAM!r}, run_name='__main__')"
    run = measure(tmp_path, sys.executable, "-c", f"{stray}; {own}")
    assert run.code == 0
    assert not processes_of(["sleep", "7654"])


def test_all_ranks_of_a_program_are_measured(tmp_path: Path) -> None:
    ranks = [f"RANK={rank} WORLD_SIZE=2 {sys.executable} {PROGRAM} 500 0 &" for rank in (0, 1)]
    run = measure(tmp_path, "sh", "-c", f"{' '.join(ranks)} wait")
    assert run.code == 0
    assert run.document("run.json")["world_size"] == 2
    assert metrics(run)["throughput"]["estimate"] == pytest.approx(2 * 4 / 0.002)


def on_machine(number: int, folder: Path, *arguments: str, options: Sequence[str] = ()) -> tuple[str, ...]:
    """Returns the command of one of two machines, which have one rank each."""
    variables = f"RANK={number} LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 STORE={folder}"
    program = ("env", *variables.split(), sys.executable, PROGRAM, *arguments)
    return ("train-bench", "--steps", "20", "-q", *options, "--", *program)


def test_machines_measure_one_program_in_every_repeat_and_that_of_rank_zero_writes(tmp_path: Path) -> None:
    words = ("500", "0")
    with (
        started(
            *on_machine(0, tmp_path, *words, options=["--repeats", "2"]), results=tmp_path / "0", cwd=tmp_path
        ) as first,
        started(
            *on_machine(1, tmp_path, *words, options=["--repeats", "2"]), results=tmp_path / "1", cwd=tmp_path
        ) as second,
    ):
        runs = first.finish(60), second.finish(60)
    assert [run.code for run in runs] == [0, 0], runs
    assert runs[0].document("run.json")["world_size"] == 2
    steps = {(line["repeat"], line["rank"]) for line in runs[0].lines("steps.jsonl")}
    assert steps == {(repeat, rank) for repeat in (0, 1) for rank in (0, 1)}
    assert not runs[1].results.exists()
    assert runs[1].stdout == ""
    assert socket.gethostname() in runs[1].stderr


def test_rank_zero_that_moves_to_another_machine_is_an_error_on_both(tmp_path: Path) -> None:
    program = f"WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 STORE={tmp_path} exec {sys.executable} {PROGRAM} 500 0"
    runs = []
    with ExitStack() as stack:
        for number in (0, 1):
            script = f"[ -e {number} ] && r={1 - number} || r={number}; touch {number}; RANK=$r {program}"
            words = ("train-bench", "--repeats", "3", "--steps", "20", "-q", "--", "sh", "-c", script)
            runs.append(stack.enter_context(started(*words, results=tmp_path / f"r{number}", cwd=tmp_path)))
        ended = [run.finish(60) for run in runs]
    for run in ended:
        assert run.code == 1
        assert "rank 0 was on different machines in two repeats" in run.stderr


def test_a_program_that_fails_on_one_machine_fails_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")  # the batch system has started gpubench once for each rank
    program = ("env", "WORLD_SIZE=2", f"STORE={tmp_path}", sys.executable, PROGRAM)
    ranks = (*program, "500", "hang"), ("env", "RANK=1", *program, "7", "5")
    with (
        started("train-bench", "-q", "--", *ranks[0], results=tmp_path / "0", cwd=tmp_path) as first,
        started("train-bench", "-q", "--", *ranks[1], results=tmp_path / "1", cwd=tmp_path) as second,
    ):
        runs = first.finish(60), second.finish(60)
    assert [run.code for run in runs] == [1, 1]
    said = [run.document("run.json")["error"]["message"] for run in runs]
    assert said[1] == "the program exited with code 5 in step 7"
    assert said[0] == f"on {socket.gethostname()}, {said[1]}"
    assert f"failed: {runs[1].run}\n" in runs[1].stderr


def test_output_is_kept_up_to_a_limit_and_does_not_stop_the_program(tmp_path: Path) -> None:
    much = "import os; [os.write(1, b'x' * 99 + b'\\n') for _ in range(700_000)]; print('the end')"
    run = measure(tmp_path, sys.executable, "-c", f"{much}; raise SystemExit(3)")
    assert "last: the end" in errors(run)[1]
    assert (run.run / "output.log").stat().st_size == 64 * 2**20


def test_output_without_line_ends_is_kept(tmp_path: Path) -> None:
    much = "import os; [os.write(1, b'x' * 65536) for _ in range(1600)]"
    run = measure(tmp_path, sys.executable, "-c", f"{much}; raise SystemExit(3)", options=["--program.patience=30"])
    assert "exited with code 3" in errors(run)[0]


def test_a_rank_that_takes_no_step_is_named(tmp_path: Path) -> None:
    one = f"WORLD_SIZE=2 {sys.executable} {PROGRAM} 500 0"
    run = measure(tmp_path / "ends", "sh", "-c", one)
    assert errors(run)[0] == "rank 1 of 2 took no optimizer step until the program ended"
    run = measure(tmp_path / "waits", "sh", "-c", f"{one}; sleep 600", options=["--measurement.stall_timeout=1"])
    assert errors(run)[0] == "rank 1 of 2 took no optimizer step 1 s after the others"


def test_a_program_is_compared_with_itself_given_more_arguments(tmp_path: Path) -> None:
    more = "more 'two words'"
    run = measure(tmp_path, *takes(500), options=["--repeats", "2", "--vs-args", more, "--json"])
    assert run.code == 0
    (compared,) = json.loads(run.stdout)["comparisons"]
    assert [compared[side]["label"] for side in ("baseline", "candidate")] == ["baseline", f"+ {more}"]
    assert compared["comparability"]["comparable"]
    assert {each["key"] for each in compared["comparability"]["differences"]} == {"program.command"}


def test_a_directory_is_compared_with_a_commit_and_left_as_it_is(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout

    own = tmp_path / "folder" / "train.py"
    own.parent.mkdir()
    own.write_text(Path(PROGRAM).read_text())
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "first")
    own.write_text(own.read_text().replace('"samples": 4', '"samples": 5'))
    (tmp_path / ".gitignore").write_text("results\n")
    before = git("status", "--porcelain"), git("worktree", "list")
    words = (sys.executable, "train.py", "500", "0")
    run = measure(tmp_path / "results", *words, options=["--vs-ref", "main"], cwd=own.parent)
    assert run.code == 0
    old, new = (json.loads((each / "run.json").read_text()) for each in run.runs)
    assert [each["workload"]["samples_per_step"] for each in (old, new)] == [4, 5]
    assert [each["git"]["dirty"] for each in (old, new)] == [False, True]
    assert old["git"]["commit"] == git("rev-parse", "HEAD").strip()
    assert (git("status", "--porcelain"), git("worktree", "list")) == before
    (own.parent / "venv").symlink_to(sys.prefix)
    untracked = ("venv/bin/python", "train.py", "500", "0")
    assert measure(tmp_path / "results2", *untracked, options=["--vs-ref", "main"], cwd=own.parent).code == 0
    words = (sys.executable, str(own), "500", "0")
    run = measure(tmp_path / "results3", *words, options=["--vs-ref", "main"], cwd=own.parent)
    assert run.code == 2
    assert errors(run)[1].startswith("give its path relative to the directory: -- ")
    assert errors(run)[1].endswith(" train.py 500 0")


def test_the_run_of_a_program_is_repeated_from_its_configuration(tmp_path: Path) -> None:
    run = measure(tmp_path, *takes(500))
    again = gpubench("train-bench", "--config", str(run.run / "config.yaml"), "-q", results=tmp_path / "again")
    assert again.code == 0
    assert len(again.lines("steps.jsonl")) == 30


def test_a_program_is_recorded_and_diagnosed_with_advice_instead_of_settings(tmp_path: Path) -> None:
    options = ("--repeats", "1", "--steps", "20", "-q", "--sort", "operators=calls")
    run = gpubench("profile", *options, "--", *takes(500), results=tmp_path)
    assert run.code == 0
    assert run.run.parent.name == "profile"
    assert run.document("run.json")["command"] == "program-profile"
    assert "Operators, by calls" in run.stdout
    assert "Operators, by calls" in (run.run / "report.html").read_text()
    assert run.stdout.splitlines()[0] == "CPU: 50 % of the step waits for the data, 45 % in operators"
    (finding,) = run.document("findings.json")["findings"]
    workers = finding["fix"]["data.workers"]  # as many as cores are free, which depends on the machine
    assert finding["fix"] == {"data.workers": workers}
    assert finding["code"] == f"DataLoader(..., num_workers={workers}) at train.py:31"
    assert EAGER not in run.document("profile.json")["ranks"][0]["notes"], "a compiled program is recorded as it runs"
    assert len(run.lines("steps.jsonl")) == 30  # of the repeat that was not recorded


def test_a_measured_program_can_be_recorded_too(tmp_path: Path) -> None:
    run = measure(tmp_path, *takes(500), options=["--profiling.active=2"])
    assert run.code == 0
    assert "samples/s" in run.stdout.splitlines()[0]
    assert f"traces: {run.run / 'profiler_traces'}" in run.stdout
    assert run.document("profile.json")["ranks"]
    assert len(run.lines("steps.jsonl")) == 30  # of the repeat that was not recorded


def test_the_fixes_of_a_recorded_program_are_tried_without_an_edit(tmp_path: Path) -> None:
    options = ("--repeats", "1", "--steps", "20", "-q", "--verify")
    run = gpubench("profile", *options, "--", *takes(500), results=tmp_path)
    assert run.code == 0
    (profiled,) = (tmp_path / "profile").iterdir()
    (finding,) = json.loads((profiled / "findings.json").read_text())["findings"]
    assert finding["measured"]["outcome"] == "confirmed"  # the stand-in waits less with workers
    assert finding["fix"]
    assert json.loads((profiled / "findings.json").read_text())["keep"] == finding["fix"]


def test_a_setting_that_the_probe_changes_can_be_compared(tmp_path: Path) -> None:
    run = measure(tmp_path, *takes(500), options=["--repeats", "2", "--vs", "data.workers=1", "--json"])
    assert run.code == 0
    (compared,) = json.loads(run.stdout)["comparisons"]
    (difference,) = compared["comparability"]["differences"]
    assert (difference["key"], difference["baseline"], difference["candidate"]) == ("data.workers", 0, 1)
    assert compared["verdicts"][0]["verdict"] == "faster"


def test_a_fix_is_kept_only_if_it_can_be_made_from_outside(tmp_path: Path) -> None:
    given = {"program.command": "true", "results": str(tmp_path)}
    recorder = ProgramRecorder(completed(load(ProgramSettings, None, given), complete_program), [])
    fixes: list[dict[str, Any]] = [{"precision": "bf16"}, {"precision": "fp16"}, {"training.steps": 3}, {}]
    usual: dict[str, Any] = {"id": "", "title": "", "severity": "low", "evidence": [], "cause": "", "threshold": ""}
    made = [Finding(**usual, advice="do it", fix=fix) for fix in fixes]
    found = recorder.addressed(Findings("", made, [])).findings
    recorder.close("failed", recorder.summary())
    assert [one.fix for one in found] == [{"precision": "bf16"}, {}, {}, {}]
    assert found[0].code.startswith("with torch.autocast(")
    assert "compare" in found[0].advice  # the losses, which another type changes
    assert [one.code for one in found[1:]] == [""] * 3


def test_a_setting_that_finds_nothing_to_change_is_reported_in_the_run_and_in_the_comparison(tmp_path: Path) -> None:
    run = measure(tmp_path, *takes(500), options=["--repeats", "2", "--vs", "performance.sdpa=math", "--json"])
    assert run.code == 0
    (compared,) = json.loads(run.stdout)["comparisons"]
    assert compared["candidate"]["label"] == "sdpa=math"
    assert {verdict["verdict"] for verdict in compared["verdicts"]} == {"withheld"}
    assert any("performance.sdpa was not applied" in warning for warning in compared["warnings"])
    without, given = (json.loads((each / "summary.json").read_text())["missed"] for each in run.runs)
    assert (without, given) == ({}, {"performance.sdpa": "there is no attention"})


def test_a_recording_needs_enough_steps(tmp_path: Path) -> None:
    run = gpubench("profile", "--repeats", "1", "-q", "--steps", "1", "--", *takes(11), results=tmp_path)
    assert run.code == 1
    error, hint = errors(run)
    assert error == "the program ended before its recording was complete"
    assert "profiling.active" in hint


def test_the_page_of_a_recorded_program_is_in_its_directory(tmp_path: Path) -> None:
    run = gpubench("profile", "--html", "page.html", "--", "true", results=tmp_path)
    assert run.code == 2
    assert "report.html" in errors(run)[1]


def test_print_config_shows_what_would_be_run(tmp_path: Path) -> None:
    run = measure(tmp_path, "true", "a b", options=["--print-config"])
    assert run.code == 0
    assert "command: true 'a b'" in run.stdout
    assert not run.runs


def follow(results: Path, *words: str, options: Sequence[str] = ()) -> Finished:
    return gpubench("memory", "-q", *options, "--", *words, results=results)


def test_the_memory_of_a_program_is_reported_as_that_of_a_model(tmp_path: Path) -> None:
    run = follow(tmp_path, *takes(500), options=["--device-memory", "1MiB"])
    assert run.code == 0
    assert run.run.parent.name == "memory"
    assert run.stdout.splitlines()[0].startswith("peak 13.7 KiB in the forward pass: 71 % activations, 29 % parameters")
    assert "fits in 1 MiB" in run.stdout.splitlines()[0]
    (found,) = run.document("memory.json")["ranks"]
    assert found["peak"]["amounts"] == {"parameters": 4000, "activations": 5 * 2000}
    assert found["notes"] == ["a note"]
    assert found["kept"] == [2000, 2000]
    assert "growth" in [each["id"] for each in run.document("findings.json")["findings"]]
    assert metrics(run)["peak_memory_allocated"]["estimate"] == 14_000
    assert (run.run / "report.html").is_file()
    again = gpubench("memory", "--config", str(run.run / "config.yaml"), "-q", results=tmp_path / "again")
    assert again.code == 0
    compared = gpubench("compare", str(run.run), str(again.run), "--json", results=tmp_path)
    (comparison,) = json.loads(compared.stdout)["comparisons"]
    assert [each["metric"] for each in comparison["verdicts"]] == ["peak_memory_allocated"]
    assert comparison["comparability"]["comparable"]


def test_the_fullest_rank_of_a_program_is_reported(tmp_path: Path) -> None:
    ranks = [f"RANK={rank} WORLD_SIZE=2 {sys.executable} {PROGRAM} 500 0 &" for rank in (0, 1)]
    run = follow(tmp_path, "sh", "-c", f"{' '.join(ranks)} wait")
    assert run.code == 0
    assert [each["rank"] for each in run.document("memory.json")["ranks"]] == [0, 1]
    assert metrics(run)["peak_memory_allocated"]["estimate"] == 14_001


def test_the_memory_of_two_versions_of_a_program_is_compared(tmp_path: Path) -> None:
    run = follow(tmp_path, *takes(500), options=["--vs-args", "9", "--json"])
    assert run.code == 0
    (compared,) = json.loads(run.stdout)["comparisons"]
    assert compared["candidate"]["label"] == "+ 9"
    assert [each["metric"] for each in compared["verdicts"]] == ["peak_memory_allocated"]
    assert len(run.runs) == 2


def test_the_memory_fixes_of_a_program_are_tried_without_an_edit(tmp_path: Path) -> None:
    run = follow(tmp_path, *takes(500), options=["--verify"])
    assert run.code == 0
    findings, trades = (json.loads((run.runs[0] / name).read_text()) for name in ("findings.json", "trades.json"))
    found = {each["id"]: each for each in findings["findings"]}
    narrow, by_hand = found["wide-activations"], found["micro-batch"]
    assert narrow["fix"] == {"precision": "bf16"}
    assert narrow["measured"]["outcome"] == "confirmed"
    assert narrow["measured"]["saving"]["estimate"] == pytest.approx(5 / 14)
    assert narrow["measured"]["cost"]["verdict"] == "equivalent"
    assert "train.py:35" in narrow["code"]
    assert (by_hand["fix"], by_hand["code"]) == ({}, "DataLoader(...) at train.py:31")
    assert findings["keep"] == {"precision": "bf16"}
    assert [(each["fix"], each["peak"]) for each in trades["trades"]] == [({"precision": "bf16"}, 9000), ({}, 14_000)]


def test_the_memory_until_a_failure_is_kept(tmp_path: Path) -> None:
    run = follow(tmp_path, *takes(3, 7))
    assert run.code == 1
    assert errors(run)[0] == "the program exited with code 7 in step 3"
    assert run.document("memory.json")["ranks"][0]["peak"]["amounts"]["activations"] == 3 * 2000


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--predict"], "--predict needs a model that gpubench can build"),
        (["--find-batch-size"], "--find-batch-size needs a model"),
        (["--verify", "--vs", "precision=bf16"], "--verify tries the fixes of one program"),
        (["--device", "cuda"], "--device: a program chooses its device itself"),
        (["--inference"], "--inference: memory follows a program from one optimizer step to the next"),
        (["--html", "page.html"], "--html needs --snapshot or --trace"),
        (["--performance.compile=true"], "'performance.compile' is a setting of"),
        (["--snapshot", "file"], "--snapshot reads a file, and a program after -- is run"),
    ],
)
def test_what_the_memory_of_a_program_cannot_be_asked_is_refused(
    tmp_path: Path, options: Sequence[str], error: str
) -> None:
    run = follow(tmp_path, "true", options=options)
    assert run.code == 2
    assert error in errors(run)[0]
    assert not run.runs
