"""What a new user types wrongly is answered with one error and one hint, and what the hint says can be typed."""
# ruff: noqa: E501

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cli import complaint
from known_options import known
from recorded_runs import write_run
from running import Finished, gpubench

from gpubench.commands import main, wrong_words
from gpubench.runs.catalogue import catalogue

CommandLine = Callable[[str], Finished]
MEASURING = ("train-bench", "pipe-infer", "profile", "memory", "tune")
INTERNALS = ("Traceback", "<unicode string>", "Value error", "codec", "Error:", "NoneType", "Input should")


class Mistake(NamedTuple):
    """`typed` is what stands after gpubench; `error` and `hint` are in what is answered."""

    typed: str
    error: str
    hint: str
    folder: str = "."
    leads_on: bool = True
    """Whether what the hint says can be tried here: not where it needs what this machine lacks, or a decision."""


MISTAKES = [
    # what a shell reads, in place of a program and its arguments
    Mistake("train-bench -- OMP_NUM_THREADS=1 python train.py", "no command", "-- env OMP_NUM_THREADS=1 python train.py"),
    Mistake("train-bench OMP_NUM_THREADS=1 python train.py", "unexpected", "-- env OMP_NUM_THREADS=1 python train.py"),
    Mistake("train-bench -- 'python train.py'", "no command 'python train.py'", "train-bench -- python train.py"),
    Mistake("profile 'python train.py'", "unexpected argument", "gpubench profile -- python train.py"),
    Mistake("train-bench -- 'python train.py | tee log'", "no command", "-- bash -c 'python train.py | tee log'"),
    Mistake("train-bench -- 'cd src && python train.py'", "no command", "-- bash -c 'cd src && python train.py'"),
    Mistake("train-bench -- cd src '&&' python train.py", "belongs to a shell", "bash -c 'cd src && python train.py'"),
    Mistake("train-bench -- cd src", "belongs to a shell", "--program.directory=src -- python train.py"),
    Mistake("memory -- source env/bin/activate", "belongs to a shell", "memory -- env/bin/python train.py"),
    Mistake("tune -- export A=1", "belongs to a shell", "gpubench tune -- bash -c 'export A=1 && python train.py'"),
    Mistake("train-bench -- python '$FOLDER/train.py'", "there is no file", "python {scene}/train.py"),
    # a program without --, or without what starts it
    Mistake("train-bench train.py", "unexpected argument 'train.py'", "train-bench -- python train.py"),
    Mistake("train-bench -- train.py", "train.py is not executable", "train-bench -- python train.py"),
    Mistake("memory -- train.sh", "train.sh is not executable", "memory -- bash train.sh"),
    Mistake("train-bench -- ./bare.py", "no line with #!", "train-bench -- python ./bare.py"),
    Mistake("train-bench --steps 20 python train.py --lr 3", "unexpected argument 'python'", "--steps 20 -- python train.py --lr 3"),
    Mistake("profile torchrun --nproc-per-node 2 train.py", "'torchrun'", "profile -- torchrun --nproc-per-node 2 train.py", leads_on=False),
    Mistake("train-bench -- notes.ipynb", "not executable", "-- jupyter nbconvert --to notebook --execute notes.ipynb", leads_on=False),
    Mistake("profile -- python notes.ipynb", "a notebook", "profile -- jupyter nbconvert --to notebook --execute notes.ipynb", leads_on=False),
    Mistake("train-bench -- python trian.py", "there is no file trian.py in {scene}", "train-bench -- python train.py"),
    Mistake("train-bench trian.py", "unexpected argument 'trian.py'", "-- python train.py"),
    Mistake("tune -- pyhton train.py", "no command 'pyhton'", "gpubench tune -- python train.py"),
    Mistake("train-bench --", "no program stands behind --", "gpubench train-bench -- python train.py"),
    Mistake("train-bench -- --steps 20 python train.py", "--steps stands behind --", "train-bench --steps 20 -- python train.py"),
    Mistake("train-bench '-- python train.py'", "is one word", "gpubench train-bench -- python train.py"),
    Mistake("pipe-infer -- python infer.py", "pipe-infer runs no program", "train-bench --inference -- python", leads_on=False),
    # --vs and git
    Mistake("train-bench --vs data.workers 2 -- python train.py", "--vs data.workers has no value", "--vs data.workers=2 -- python train.py"),
    Mistake("train-bench --vs data.wokers=2 -- python train.py", "unknown setting", "did you mean 'data.workers'?"),
    Mistake("train-bench --vs data.workers=2,4 -- python train.py", "'2,4'", "gpubench tune --try data.workers=2,4"),
    Mistake("train-bench --vs training.lr=3 -- python train.py", "unknown setting 'training.lr'", "an argument of the program is changed by --vs-args '--lr 3'", leads_on=False),
    Mistake("train-bench --vs optim.name=sgd -- python train.py", "unknown setting 'optim.name'", "--vs-args '--name sgd'", leads_on=False),
    Mistake("train-bench --vs-ref main -- python repository/src/run.py", "{scene} is in none", "cd {scene}/repository, and give the program as python src/run.py", leads_on=False),
    Mistake("train-bench --vs-ref main", "--vs-ref needs a program", "-- python train.py", leads_on=False),
    # an option with a near name, of another tool, or with one dash
    Mistake("train-bench --step 20", "there is no option --step", "did you mean '--steps'?"),
    Mistake("train-bench --out x", "there is no option --out", "did you mean '--results'?"),
    Mistake("memory --output x", "there is no option --output", "did you mean '--results'?"),
    Mistake("train-bench -o x", "there is no option -o", "did you mean '--results'?"),
    Mistake("train-bench -steps 20", "two dashes", "gpubench train-bench --steps 20"),
    Mistake("compare one two -margin 1%", "two dashes", "gpubench compare one two --margin 1%"),
    Mistake("train-bench --bs 4", "no option --bs", "did you mean '--batch-size'?"),
    Mistake("train-bench --gpus 1", "no option --gpus", "did you mean '--world-size'?"),
    Mistake("train-bench --bf16", "no option --bf16", "did you mean '--precision bf16'?"),
    Mistake("tune --time 10m", "no option --time", "did you mean '--budget'?"),
    Mistake("profile --vs precision=bf16", "no option --vs", "it is an option of gpubench train-bench, gpubench pipe-infer", leads_on=False),
    Mistake("profile --traces x", "no option --traces", "did you mean '--trace'?", leads_on=False),
    Mistake("train-bench -steps 20 -- python train.py", "two dashes", "gpubench train-bench --steps 20 -- python train.py"),
    Mistake("train-bench --lr 3 -- python train.py", "no option --lr", "comes after it: gpubench train-bench -- python train.py --lr 3"),
    Mistake("train-bench --bs=4 --steps 9 -- python train.py", "no option --bs", "gpubench train-bench --steps 9 -- python train.py --bs=4"),
    Mistake("train-bench --data.batch_size 8 -- python train.py", "no option --data.batch_size", "-- python train.py --data.batch_size 8"),
    Mistake("train-bench --gpus 2 -- python train.py", "no option --gpus", "-- torchrun --nproc-per-node 2 train.py"),
    Mistake("train-bench --training.epoch=5", "no option --training.epoch", "did you mean '--training.epochs'?"),
    Mistake("history --metric step_time", "no option --metric", "gpubench history step_time"),
    Mistake("compare one two --metrics step_time", "no option --metrics", "did you mean '--metric'?"),
    Mistake("runs --last 5", "no option --last", "did you mean '--limit'?"),
    Mistake("train-bench --steps", "--steps has no value", "write --steps N", leads_on=False),
    # what a formatted text makes of a command
    Mistake("train-bench \u2013steps 20", "unexpected argument", "gpubench train-bench --steps 20"),
    Mistake("train-bench \u2014 python train.py", "unexpected argument", "gpubench train-bench -- python train.py"),
    Mistake("train-bench --precision \u201cbf16\u201d", "precision", "gpubench train-bench --precision bf16"),
    Mistake("compare one two \u2212\u2212margin 1%", "no such run", "gpubench compare one two --margin 1%"),
    # a value with a near name, or without its unit
    Mistake("train-bench --precision fp16", "precision = 'fp16'", "did you mean 'amp'?", leads_on=False),
    Mistake("train-bench --precision fp16 -- python train.py", "precision = 'fp16'", "did you mean 'bf16'?"),
    Mistake("train-bench --precision BF16", "precision = 'BF16'", "did you mean 'bf16'?"),
    Mistake("train-bench --device cuda:1", "device = 'cuda:1'", "CUDA_VISIBLE_DEVICES=1", leads_on=False),
    Mistake("train-bench --steps 1,000", "training.steps = '1,000'", "did you mean '1000'?"),
    Mistake("train-bench --steps 20s", "training.steps = '20s'", "did you mean '--seconds 20'?"),
    Mistake("profile --steps 2min -- python train.py", "training.steps = '2min'", "it counts steps: --steps 20", leads_on=False),
    Mistake("memory --steps 5s", "memory.steps = '5s'", "did you mean '5'?"),
    Mistake("memory --device-memory 24", "'24' has no unit", "did you mean 24GiB?"),
    Mistake("memory --device-memory -1GiB", "'-1GiB' is not a size", "write 80GiB, 80GB or bytes", leads_on=False),
    Mistake("memory --device-memory 24g", "'24g' is not a size", "did you mean 24GiB?"),
    Mistake("tune --memory 22 -- python train.py", "--memory: '22' has no unit", "did you mean '--memory 22GiB'?"),
    Mistake("tune --budget 4 -- python train.py", "--budget '4' has no unit", "did you mean '--budget 4m' or '--budget 4h'?"),
    Mistake("tune --only optimizer.fused", "there is no setting 'optimizer.fused'", "'training.optimizer_impl'"),
    Mistake("tune --only wokers,precision", "there is no setting 'wokers'", "did you mean 'data.workers'?"),
    Mistake("tune --only precision=bf16", "--only precision=bf16 has a value", "did you mean --try precision=bf16?"),
    Mistake("tune --try data.workers:1,2", "is not KEY=VALUE", "--try data.workers=1,2"),
    Mistake("memory --predict --device-model a1000", "no accelerator is called 'a1000'", "'a100-40gb'? gpubench memory --help lists all"),
    Mistake("memory --predict --device-model 4090", "no accelerator is called '4090'", "did you mean 'rtx-4090'"),
    Mistake("compare one two --margin 2", "--margin '2'", "did you mean --margin 2%?"),
    Mistake("compare one two --fail-on 'step_time>2'", "'2' is not a percentage", 'did you mean --fail-on "step_time>2%"?'),
    Mistake("compare one two --format text", "--format 'text'", "terminal, markdown", leads_on=False),
    Mistake("history foo", "no run has a metric 'foo'", "for example throughput, step_time, ", leads_on=False),
    Mistake("history stepp_time", "no run has a metric 'stepp_time'", "did you mean 'step_time'"),
    Mistake("runs --since 30", "neither an age nor a date", "did you mean '--since 30d'?"),
    Mistake("runs --command train", "not a command of a run", "did you mean 'train-bench'?"),
    Mistake("train-bench --repeats 0", "repeats = '0'", "did you mean '1'?"),
    Mistake("pipe-infer --steps=-1", "sampling.steps = '-1'", "did you mean '1'?", leads_on=False),
    Mistake("train-bench --steps ten", "training.steps = 'ten'", "it is a whole number, such as ", leads_on=False),
    Mistake("train-bench --profiling.enabled=maybe", "profiling.enabled = 'maybe'", "it is true or false, such as false", leads_on=False),
    Mistake("train-bench --model gpt2-xxl", "called 'gpt2-xxl'", "did you mean 'gpt2'? a model of your own is module:callable"),
    Mistake("compare one two --fail-on slower", "not METRIC>X%", 'such as --fail-on "step_time>2%"', leads_on=False),
    Mistake("compare one two --fail-on throughptu", "not METRIC>X%", 'did you mean --fail-on "throughput>2%"?'),
    Mistake("memory --batch-size 8,16,", "training.batch_size = '8,16,'", "gpubench tune --try training.batch_size=8,16"),
    Mistake("pipe-infer --unet big", "model.unet = 'big'", "for example dummy", leads_on=False),
    Mistake("train-bench --profile -- python train.py", "no option --profile", "did you mean '--profiling.enabled'?"),
    Mistake("compare one two --csv", "no option --csv", "did you mean '--format csv'?"),
    Mistake("compare one two --md", "no option --md", "did you mean '--format markdown'?"),
    Mistake("runs --where 'throughput>100'", "throughput is a metric", "--sort throughput", leads_on=False),
    Mistake("runs --sort age", "no run has a metric or setting 'age'", "did you mean 'started'?"),
    Mistake("compare latest latest", "is on two sides", "gpubench compare latest~1 latest", leads_on=False),
    # a file or a folder of another kind
    Mistake("profile trace.json", "a trace is given by --trace", "gpubench profile --trace trace.json", leads_on=False),
    Mistake("profile memory.pickle", "--snapshot", "gpubench memory --snapshot memory.pickle", leads_on=False),
    Mistake("train-bench mine.yaml", "settings are given by --config", "gpubench train-bench --config mine.yaml"),
    Mistake("train-bench --config train.py", "train.py is a program", "gpubench train-bench -- python train.py"),
    Mistake("profile --config train.py", "train.py is a program", "gpubench profile -- python train.py"),
    Mistake("train-bench --config trace.json", "trace.json is a trace", "gpubench profile --trace trace.json", leads_on=False),
    Mistake("train-bench --config weights.bin", "control characters", "--print-config", leads_on=False),
    Mistake("train-bench --config mine.yml", "no preset or file 'mine.yml'", "did you mean 'mine.yaml'?"),
    Mistake("train-bench gpt2-tiny", "a model is given by --model", "gpubench train-bench --model gpt2-tiny"),
    Mistake("memory h100", "a GPU is given by --device-model", "gpubench memory --predict --device-model h100"),
    Mistake("pipe-infer src", "a model is given by --model", "gpubench pipe-infer --model src", leads_on=False),
    Mistake("judge --base HEAD~1", "needs a program", "gpubench judge --base HEAD~1 -- python train.py", leads_on=False),
    Mistake("history one", "one names runs", "gpubench history --experiment one"),
    Mistake("tune --resume nowhere", "nowhere does not exist", "there is no search in results", leads_on=False),
    Mistake("runs show train.py", "a file, not a run directory", "give a run directory", leads_on=False),
    Mistake("runs", "the results folder results does not exist", "add --results .", folder="results", leads_on=False),
    Mistake("history", "the results folder results does not exist", "add --results ..", folder="results/one", leads_on=False),
    Mistake("runs show latest", "0 runs", "add --results .", folder="results", leads_on=False),
    # a word that another command line has as a command, or in another place
    Mistake("runs rm latest", "gpubench runs has no command 'rm'", "gpubench runs remove latest", leads_on=False),
    Mistake("runs info latest", "gpubench runs has no command 'info'", "gpubench runs show latest"),
    Mistake("runs latest", "gpubench runs has no command 'latest'", "gpubench runs show latest"),
    Mistake("runs rename latest foo", "gpubench runs has no command 'rename'", "gpubench runs tag latest --name foo", leads_on=False),
    Mistake("runs compare one two", "gpubench runs has no command 'compare'", "gpubench compare one two"),
    Mistake("runs shwo latest", "gpubench runs has no command 'shwo'", "did you mean 'show'?"),
    Mistake("runs show lastest", "lastest: no such run", "did you mean 'latest'?"),
    Mistake("runs show", "gpubench runs show needs RUN", "for example gpubench runs show latest"),
    Mistake("run show latest", "there is no command 'run'", "gpubench runs show latest"),
    Mistake("run info latest", "there is no command 'run'", "gpubench runs info latest", leads_on=False),
    Mistake("train-bench --vs-args --d 32 -- python train.py", "is two: quote them", "--vs-args '--d 32' -- python train.py"),
    Mistake("train-bench --vs-args=--d 32 -- python train.py", "is two: quote them", "--vs-args '--d 32' -- python train.py"),
    Mistake("train-bench --vs-args 'python train.py --d 3' -- python train.py", "begins with the program", "--vs-args='--d 3'", leads_on=False),
    Mistake("memory --vs-args 'python3 train.py' -- python train.py", "begins with the program", "give only what is added", leads_on=False),
    Mistake("train-bench --vs-args 'train.py --d 3' -- python train.py", "begins with the program", "--vs-args='--d 3'", leads_on=False),
    Mistake("compare latest~1 one", "is on two sides", "latest is the newest run of train-bench", leads_on=False),
    Mistake("runs --sort speed", "no run has a metric or setting 'speed'", "did you mean 'throughput'?"),
    Mistake("show latest", "there is no command 'show'", "gpubench runs show latest"),
    Mistake("python train.py", "there is no command 'python'", "gpubench train-bench -- python train.py"),
    Mistake("train.py", "there is no command 'train.py'", "gpubench train-bench -- python train.py"),
    Mistake("run train.py", "there is no command 'run'", "gpubench train-bench -- python train.py"),
    Mistake("trian-bench python train.py", "there is no command 'trian-bench'", "gpubench train-bench -- python train.py"),
    Mistake("run -- python train.py", "there is no command 'run'", "gpubench train-bench -- python train.py"),
    Mistake("trian-bench --steps 5", "there is no command 'trian-bench'", "gpubench train-bench --steps 5"),
    Mistake("diff one two", "there is no command 'diff'", "gpubench compare one two"),
    Mistake("-v train-bench --steps 5", "-v stands before the command", "gpubench train-bench -v --steps 5"),
    Mistake("--results results runs", "--results stands before the command", "gpubench runs --results results"),
    Mistake("compare one vs two", "vs: no such run", "gpubench compare one two"),
    Mistake("compare one two --json x.json", "x.json: no such run", "gpubench compare one two --json > x.json", leads_on=False),
    Mistake("--install-completion fish", "takes no value", "start fish", leads_on=False),
]  # fmt: skip


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder as a user has it: programs, settings, files of other tools, and runs of two experiments."""
    folder = tmp_path_factory.mktemp("scene").resolve()
    for name in (
        "train.py",
        "src/train.py",
        "infer.py",
        "train.sh",
        "bare.py",
        "env/bin/activate",
        "repository/src/run.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("pass\n")
    (folder / "bare.py").chmod(0o755)
    (folder / "repository/.git").mkdir(parents=True)
    (folder / "env/bin/python").symlink_to(sys.executable)
    (folder / "notes.ipynb").write_text('{"cells": []}')
    (folder / "trace.json").write_text('{"traceEvents": []}')
    (folder / "mine.yaml").write_text("training: {steps: 4}\n")
    for name in ("memory.pickle", "weights.bin"):
        (folder / name).write_bytes(b"PK\x03\x04")
    for name in ("one", "two"):
        write_run(folder / "results", name, repeats=1, steps=12)
    catalogue(folder / "results")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def answer(
    scene: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str], str], Finished]:
    """Calls the command line in this process, with the Python of the tests as `python`."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FOLDER", str(scene))

    def call(words: list[str], folder: str = ".") -> Finished:
        monkeypatch.chdir(scene / folder)
        monkeypatch.setattr(sys, "argv", ["gpubench", *words])
        with pytest.raises(SystemExit) as exited:
            main()
        return Finished(int(exited.value.code or 0), *capsys.readouterr(), scene / "results")

    return call


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.typed)
def test_a_mistake_has_one_error_and_one_hint_that_leads_on(
    scene: Path, answer: Callable[..., Finished], mistake: Mistake
) -> None:
    before = sorted(scene.rglob("*"))
    words = shlex.split(mistake.typed)
    done = answer(words, mistake.folder)
    error, hint = complaint(done)
    assert mistake.error.format(scene=scene) in error
    assert mistake.hint.format(scene=scene) in hint
    assert done.stdout == ""
    assert not [word for word in INTERNALS if word in done.stderr]
    assert len(hint) < 300
    assert sorted(scene.rglob("*")) == before
    if mistake.leads_on:
        assert any(answer(_tried(again)).code == 0 for again in _following(words, hint)), hint


def _following(words: list[str], hint: str) -> Iterator[list[str]]:
    """Yields the command lines that a hint may mean: the one that it has, or the one typed with what it offers."""
    if found := re.search(r"(?:^|: |example )gpubench (?!\S+ --help)([^;]+)", hint):
        yield shlex.split(found[1])
        return
    offered = re.match(r"(?:did you mean )?'?(.+?)'?(?:\?|,| or |$)", hint)
    assert offered
    new = [word.strip("\"'") for word in offered[1].split(" ")]
    for at, word in enumerate(words):
        _, equals, value = word.partition("=")
        if len(new) == 2:
            yield [*words[:at], *new, *words[at + 2 :]]
            yield [*words[:at], *new, *words[at + 1 :]]
        yield [*words[:at], *new, *words[at + 1 :]]
        yield [*words[:at], f"{new[0]}{equals}{value}", *words[at + 1 :]]
        yield [*words[:at], ",".join([*new, *word.split(",")[1:]]), *words[at + 1 :]]


def _tried(words: list[str]) -> list[str]:
    """Returns a command line that is checked as a whole, without measuring anything."""
    return [words[0], "--print-config", *words[1:]] if words[0] in MEASURING else words


@pytest.mark.parametrize(
    "typed",
    [
        "-V",
        "help",
        "help train-bench",
        "help runs show",
        "runs help",
        "runs list",
        "runs ls --json",
        "runs --limit 1 ls",
        "train-bench -vq --print-config",
        "train-bench --print-config -- ./help --vs 1",
        "train-bench --print-config -- python train.py --vs data.workers=2 --help | \u2013x",
        "train-bench --print-config --vs-args '-steps 3' -- python train.py",
        "train-bench --print-config --vs-args -steps -- python train.py",
        "train-bench --print-config --vs-args \u2013x -- python train.py",
        "train-bench --print-config -- bash -c 'cd src && python train.py'",
        "train-bench --print-config -- python -m train",
        "train-bench --print-config --config settings.json",
        "train-bench --print-config --vs 'data.workers = 2' -- python train.py",
        "tune --print-config --budget '1h 30min' --memory 22GiB --only 'data.workers precision'",
    ],
)
def test_what_has_a_meaning_is_not_refused(scene: Path, answer: Callable[..., Finished], typed: str) -> None:
    (scene / "help").write_text("#!/bin/sh\n")
    (scene / "help").chmod(0o755)
    (scene / "settings.json").write_text('{"training": {"steps": 4}}')
    done = answer(shlex.split(typed))
    assert (done.code, done.stderr) == (0, "")


def test_a_list_and_a_run_that_is_shown_have_entries_of_one_shape(answer: Callable[..., Finished]) -> None:
    import json

    listed, shown = (json.loads(answer(shlex.split(f"runs {more} --json")).stdout) for more in ("", "show latest"))
    assert list(listed) == list(shown)
    entry, again = listed["runs"][0], shown["runs"][0]
    assert list(entry) == list(again)
    assert {key for key in entry if entry[key] != again[key]} == {"documents"}
    assert entry["documents"] is None
    assert again["documents"]["metrics"]


@pytest.mark.parametrize(("width", "whole"), [(60, False), (100, True)])
def test_a_narrow_listing_keeps_what_was_run_and_its_result(
    answer: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch, width: int, whole: bool
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    _, _, head, row, *_ = answer(["runs"]).stdout.splitlines()
    assert {"run", "command", "model", "result"} <= set(head.split())
    assert ("status" in head) is whole
    assert len(row) <= width
    assert "train-bench" in row
    assert "samples/s" in row
    assert answer(["runs", "show", row.split()[0]]).code == 0


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("mian", "did you mean 'main'?"),
        ("HAED", "did you mean 'HEAD'?"),
        ("mian~0", "did you mean 'main~0'?"),
        ("main~7", "git log --oneline main"),
        ("zzzzzz", "its branches and tags are"),
    ],
)
def test_a_commit_that_does_not_exist_is_named_with_the_nearest(
    tmp_path: Path, command_line: Callable[..., Finished], ref: str, hint: str
) -> None:
    (tmp_path / "train.py").touch()
    for command in ("init -q -b main", "add train.py", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", "-C", tmp_path, *command.split()], check=True)
    error, said = complaint(command_line("train-bench", "--vs-ref", ref, "--", sys.executable, "train.py"))
    assert error == f"there is no commit '{ref}' in the repository of {tmp_path}"
    assert hint in said
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("command", ["judge --base", "train-bench --vs-ref"])
def test_a_commit_without_its_option_is_answered_with_the_option(
    tmp_path: Path, command_line: Callable[..., Finished], command: str
) -> None:
    (tmp_path / "train.py").touch()
    for words in ("init -q -b main", "add train.py", "-c user.name=a -c user.email=a@b commit -qm first"):
        subprocess.run(["git", "-C", tmp_path, *words.split()], check=True)
    name, option = command.split()
    error, hint = complaint(command_line(name, "main"))
    assert error == f"unexpected argument 'main': a commit is given by {option}"
    assert hint == f"gpubench {command} main -- python train.py"


def test_a_repository_without_the_commit_says_why(tmp_path: Path, command_line: Callable[..., Finished]) -> None:
    def git(*words: str, folder: str = ".") -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always")
        subprocess.run(["git", *who, "-C", tmp_path / folder, *words], check=True, capture_output=True)

    def refused(folder: str, ref: str) -> tuple[str, str]:
        given = ("--vs-ref", ref, f"--program.directory={tmp_path / folder}", "--", sys.executable, "train.py")
        return complaint(command_line("train-bench", *given))

    folder = tmp_path / "made"
    folder.mkdir()
    (folder / "train.py").touch()
    git("init", "-q", "-b", "main", folder="made")
    for ref in ("HEAD", "HEAD~1", "main"):
        error, hint = refused("made", ref)
        assert error == f"the repository of {folder} has no commit yet"
        assert "git commit" in hint
    git("add", "train.py", folder="made")
    for message in ("first", "second"):
        git("commit", "-q", "--allow-empty", "-m", message, folder="made")
    git("clone", "-q", "--depth", "1", folder.as_uri(), "shallow")
    assert "git fetch --unshallow" in refused("shallow", "HEAD~1")[1]
    git("checkout", "-q", "--orphan", "other", folder="made")
    error, hint = refused("made", "HEAD")
    assert "no commit 'HEAD'" in error
    assert hint == "the branch that is checked out has no commit yet; others are main"
    git("checkout", "-q", "-f", "--detach", "main", folder="made")
    assert "did you mean 'HEAD~1'" in refused("made", "HAED~1")[1]
    git("worktree", "add", "-q", str(tmp_path / "worktree"), folder="made")
    assert "did you mean 'main'" in refused("worktree", "mian")[1]
    git("clone", "-q", "--bare", folder.as_uri(), "bare")
    (tmp_path / "bare" / "train.py").touch()
    assert "bare repository" in refused("bare", "HEAD")[1]


def test_without_git_a_comparison_with_a_commit_says_what_to_do(
    tmp_path: Path, command_line: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "train.py").touch()
    error, hint = complaint(command_line("train-bench", "--vs-ref", "main", "--", sys.executable, "train.py"))
    assert "not a git repository" in error
    assert hint.endswith("gpubench compare latest~1 latest")


def test_a_program_that_refuses_an_option_of_gpubench_is_answered_with_where_it_belongs(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    given = [sys.executable, str(program)]
    done = gpubench("train-bench", "--", *given, "--vs", "data.workers=2", results=tmp_path / "results")
    assert done.code == 1
    fixed = shlex.join(["--results", str(tmp_path / "results"), "--vs", "data.workers=2", "--", *given])
    assert done.stderr.splitlines()[-1] == f"hint: options of gpubench come before --: gpubench train-bench {fixed}"


def test_every_option_that_a_word_of_another_tool_may_mean_exists(answer: Callable[..., Finished]) -> None:
    options = known()
    meant = {name for names in wrong_words.OPTIONS.values() for name in names}
    assert {
        name for name in meant if f"--{name.replace('_', '-')}" not in options and f"--{name}" not in options
    } == set()
    assert not wrong_words.OPTIONS.keys() & {"steps", "repeats", "results", "config", "precision"}


def test_no_word_of_another_tool_hides_a_command() -> None:
    import typer

    from gpubench.commands import app

    command: Any = typer.main.get_command(app)
    assert not wrong_words.COMMANDS.keys() & command.commands.keys()
    assert not wrong_words.OF_RUNS.keys() & command.commands["runs"].commands.keys()
    assert set(wrong_words.OF_RUNS.values()) <= command.commands["runs"].commands.keys()
