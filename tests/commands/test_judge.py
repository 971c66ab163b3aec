"""`gpubench judge -- PROGRAM`: an edit is judged by running it, and what cannot be judged is refused before it runs."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli import complaint
from places import SUPPORT
from running import Finished, gpubench, started

PROGRAM = (SUPPORT / "training_program.py").read_text()
FAST = PROGRAM.replace("STEP_SECONDS = 0.002", "STEP_SECONDS = 0.001")
SLOW = PROGRAM.replace("STEP_SECONDS = 0.002", "STEP_SECONDS = 0.004")
FEW = ("--steps", "12", "--training.warmup_steps", "2", "-q", "--rounds", "3")
TRAIN = ("--", sys.executable, "train.py", "500", "0")


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=n", "-c", "user.email=e")
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def judged(repository: Path, *options: str) -> tuple[Finished, Any]:
    done = gpubench("judge", *FEW, "--json", *options, *TRAIN, results=repository.parent / "results", cwd=repository)
    return done, json.loads(done.stdout) if done.stdout else None


def test_a_faster_edit_is_kept_and_a_slower_one_discarded_and_both_are_in_the_ledger(repository: Path) -> None:
    ledger = str(repository.parent / "edits.jsonl")
    (repository / "train.py").write_text(FAST)
    done, found = judged(repository, "--ledger", ledger)
    assert (done.code, found["decision"]) == (0, "keep"), done
    assert found["gain"] == pytest.approx(2)
    assert (found["rounds"], found["ending"], len(found["values"])) == (3, "decided", 3)
    seeds = [json.loads((Path(run) / "run.json").read_text())["order_seed"] for run in found["runs"][0]]
    assert found["order_seeds"] * 2 == seeds
    assert found["base"]["commit"] == git(repository, "rev-parse", "HEAD")
    assert (found["base"]["edit"], bool(found["edited"]["edit"])) == ("", True)
    assert json.loads((Path(found["runs"][0][1]) / "decision.json").read_text()) == found
    git(repository, "commit", "-qam", "second")
    (repository / "train.py").write_text(SLOW)
    done, found = judged(repository, "--ledger", ledger)
    assert (done.code, found["decision"]) == (3, "discard"), done
    shown = gpubench("judge", "--ledger", ledger, "--json", results=repository.parent / "results", cwd=repository)
    document = json.loads(shown.stdout)
    assert [edit["decision"] for edit in document["edits"]] == ["keep", "discard"]
    assert document["together"]["gain"] == pytest.approx(2)


def test_an_edit_that_fails_is_refused_and_a_base_that_fails_is_an_error(repository: Path) -> None:
    (repository / "train.py").write_text("raise SystemExit('no data')")
    done, found = judged(repository)
    assert (done.code, found["decision"], found["rounds"]) == (5, "refused", 0), done
    assert "exited with code 1" in found["reasons"][0]
    assert "no data" in found["reasons"][1]
    git(repository, "commit", "-qam", "broken")
    (repository / "train.py").write_text(FAST)
    done, found = judged(repository)
    assert (done.code, found) == (1, None)
    assert "the base does not run: the program exited with code 1" in done.stderr
    assert "HEAD runs in a clone, which has no untracked files" in done.stderr


def ends(steps: int, how: str) -> str:
    """The program, which ends after so many steps."""
    return PROGRAM.replace("int(sys.argv[1]), sys.argv[2]", f"{steps}, {how!r}")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param("3", "exited with code 3 in step 7", id="fails"),
        pytest.param("kill", "killed by SIGKILL in step 7 or later", id="is killed", marks=pytest.mark.stress),
        pytest.param("hang", "has made no progress for 2 s, in step 7 or later", id="hangs", marks=pytest.mark.stress),
    ],
)
def test_an_edit_that_fails_after_its_warm_up_is_refused_and_not_judged_by_its_first_steps(
    repository: Path, how: str, said: str
) -> None:
    (repository / "train.py").write_text(ends(7, how))
    done, found = judged(repository, "--measurement.stall_timeout", "2")
    assert (done.code, found["decision"], found["rounds"]) == (5, "refused", 0), done
    assert said in found["reasons"][0]
    # Without those that say how certain times are.
    assert found["warnings"] == ["a repeat of HEAD has 14 steps, and one of working tree has 7 steps"]


@pytest.mark.stress
def test_an_edit_that_ends_early_is_judged_by_the_steps_it_has_and_named(repository: Path) -> None:
    (repository / "train.py").write_text(ends(9, "0"))
    done, found = judged(repository)
    assert (done.code, found["rounds"]) == (3, 3), done
    assert "a repeat of HEAD has 14 steps, and one of working tree has 9 steps" in found["warnings"]


@pytest.mark.stress
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (ends(1, "0"), "the program ended after 1 of 14 optimizer steps, and the warm-up takes 2"),
        ("import torch", "the program ended, and no optimizer step was seen"),
        ("import time\ntime.sleep(600)", "no optimizer step"),
        ("pass", "was seen to import torch"),
        (PROGRAM.replace("import", "open('untracked.txt')\nimport", 1), "exited with code 1"),
    ],
    ids=["ends in its warm-up", "trains nothing", "hangs", "prints nothing", "needs a file that is missing"],
)
def test_an_edit_that_measures_nothing_is_refused_with_the_reason(repository: Path, program: str, said: str) -> None:
    (repository / "train.py").write_text(program)
    done, found = judged(repository, "--program.patience", "8")
    assert (done.code, found["decision"], found["rounds"]) == (5, "refused", 0), done
    assert said in " ".join(found["reasons"])


@pytest.mark.stress
def test_a_base_that_reads_an_untracked_file_is_an_error_that_says_so(repository: Path) -> None:
    git(repository, "rm", "-q", "--cached", "train.py")
    (repository / "start.py").write_text("import runpy\nrunpy.run_path('train.py', run_name='__main__')\n")
    git(repository, "add", "start.py")
    git(repository, "commit", "-qm", "a start")
    (repository / "start.py").write_text("import runpy\n\nrunpy.run_path('train.py', run_name='__main__')\n")
    words = ("--", sys.executable, "start.py", "500", "0")
    done = gpubench("judge", *FEW, *words, results=repository.parent / "results", cwd=repository)
    assert done.code == 1, done
    assert "the base does not run" in done.stderr
    assert "untracked" in done.stderr


def test_an_edit_that_changes_while_it_is_judged_is_refused(repository: Path) -> None:
    (repository / "log.txt").write_text("")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "a log")
    (repository / "train.py").write_text(f"open('log.txt', 'a').write('a line')\n{FAST}")
    done, found = judged(repository)
    assert (done.code, found["decision"], found["ending"]) == (5, "refused", "failed"), done
    assert "files that git tracks have changed while it was judged" in found["answer"]


def test_two_sets_of_arguments_are_judged_in_the_working_tree(repository: Path) -> None:
    (repository / "train.py").write_text(f"{PROGRAM}\n")
    done, found = judged(repository, "--base-args", "old", "--args", "new")
    assert done.code == 3, done
    assert [found[side]["label"] for side in ("base", "edited")] == ["+ old", "+ new"]
    assert found["base"]["ref"] is None
    assert found["base"]["edit"] == found["edited"]["edit"] != ""


def test_ctrl_c_keeps_what_was_measured_and_says_how_to_go_on(repository: Path) -> None:
    (repository / "train.py").write_text(FAST)
    results = repository.parent / "results"
    slowly = (*FEW[:-1], "30", "--margin", "99%", "--json", *TRAIN)  # which a gain of 100 % does not reach soon
    with started("judge", *slowly, results=results, cwd=repository) as run:
        run.wait_for("*/*/summary.json")
        run.process.send_signal(signal.SIGINT)
        done = run.finish(60)
    assert done.code == 130, done
    found = json.loads(done.stdout)
    assert (found["decision"], found["ending"]) == ("undecided", "interrupted")
    assert json.loads((Path(found["runs"][0][1]) / "decision.json").read_text()) == found
    assert f"gpubench judge --resume {found['runs'][0][1]} goes on" in done.stderr


def test_what_is_undecided_goes_on_unless_the_program_has_changed(repository: Path) -> None:
    (repository / "train.py").write_text(FAST)
    _, found = judged(repository)
    run = Path(found["runs"][0][1])
    resume = ("judge", "--resume", str(run), "-q", "--json")
    results = repository.parent / "results"
    decided = gpubench(*resume, results=results, cwd=repository)
    assert (decided.code, "it is decided: keep" in decided.stderr) == (2, True), decided
    cut = found | {"decision": "undecided", "rounds": 2, "values": found["values"][:2]}
    (run / "decision.json").write_text(json.dumps(cut))
    done = gpubench(*resume, results=results, cwd=repository)
    again = json.loads(done.stdout)
    assert (done.code, again["rounds"], len(again["runs"])) == (0, 3, 2), done
    assert again["order_seeds"] == [*found["order_seeds"], None], "one round needs no seed"
    assert again["started"] == found["started"]
    (repository / "train.py").write_text(SLOW)
    changed = gpubench(*resume, results=results, cwd=repository)
    assert (changed.code, "the program has changed since" in changed.stderr) == (2, True), changed
    (run / "decision.json").write_text("{}")
    assert "cannot be read" in gpubench(*resume, results=results, cwd=repository).stderr


def test_a_judgement_of_somebody_else_runs_nothing_without_trust(
    repository: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., Finished]
) -> None:
    (repository / "train.py").write_text(FAST)
    _, found = judged(repository)
    run = Path(found["runs"][0][1])
    cut = found | {"decision": "undecided", "rounds": 2, "values": found["values"][:2]}
    (run / "decision.json").write_text(json.dumps(cut))
    monkeypatch.chdir(repository)
    monkeypatch.setenv("XDG_STATE_HOME", str(repository.parent / "of somebody else"))
    before = sorted(run.parent.iterdir())
    said, hint = complaint(command_line("judge", "--resume", str(run)))
    assert "names code" in said
    assert "--trust" in hint
    assert sorted(run.parent.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "said", "hint"),
    [
        (TRAIN, "no file that git tracks has changed since HEAD", "--base"),
        (("--base", "none", *TRAIN), "there is no commit 'none'", "main"),
        (("--base", " ", *TRAIN), "--base is empty", "leave it out"),
        ((), "judge needs a program", "gpubench judge -- python train.py"),
        (("--rounds", "2", *TRAIN), "--rounds '2' is not a number from 3 to 30", "--rounds 10"),
        (("--rounds", "31", *TRAIN), "--rounds '31'", "--rounds 10"),
        (("--budget", "10", *TRAIN), "--budget '10' has no unit", "10m"),
        (("--margin", "1", *TRAIN), "--margin '1' is not a percentage", "1%"),
        (("--metric", "speed", *TRAIN), "--metric 'speed' is not a metric that judge decides by", "throughput"),
        (("--max-memory", "0", *TRAIN), "--max-memory 0 leaves no memory", "22GiB"),
        (("--measurement.repeats=5", *TRAIN), "decides itself how many repeats", "--rounds"),
        (("--program.ref=main", *TRAIN), "program.ref is the commit of the base", "--base main"),
        (("--resume", "none"), "none", ""),
        (("--resume", "none", "--margin", "1%"), "--resume goes on with the settings", "leave out"),
        (("--ledger", "none.jsonl"), "there is no ledger none.jsonl", "judge --ledger FILE"),
        (("--ledger", "none.jsonl", "--base", "main"), "base has no effect on a ledger that is shown", "program"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_runs(
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    command_line: Callable[..., Finished],
    options: tuple[str, ...],
    said: str,
    hint: str,
) -> None:
    monkeypatch.chdir(repository)
    message, advice = complaint(command_line("judge", *options))
    assert said in message
    assert hint in advice
    assert not (repository / "results").exists()


def test_without_git_there_is_nothing_to_judge_against(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Callable[..., Finished]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    assert "not a git repository" in complaint(command_line("judge", *TRAIN))[0]
