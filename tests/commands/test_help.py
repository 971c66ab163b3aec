"""What the command line shows before it runs anything, whole: every help, what shells offer, and refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from running import Finished
from test_command_line import commands

from gpubench.commands import app

CommandLine = Callable[..., Finished]
Golden = Callable[[str, str], None]

COMPLETED = (
    *("train-bench --", "pipe-infer --", "profile --", "memory --", "tune --", "train-bench --training.l"),
    *("train-bench --precision ", "train-bench --model gpt2", "train-bench --device ", "train-bench --config b"),
    *("train-bench --vs performance.comp", "train-bench --steps ", "train-bench --measure-peak ", "tune --precision a"),
    *("pipe-infer --precision ", "pipe-infer --unet ", "pipe-infer --split ", "pipe-infer --baseline "),
    *("tune --only precision,performance.comp", "tune --try data.w"),
    *("pipe-infer --model ", "pipe-infer --world-size ", "memory --device-model a100", "memory --experiment "),
)
REFUSED = (
    *("train-bench --steps", "train-bench --steps many", "train-bench --inference=yes", "train-bench --measure-peak 3"),
    *("train-bench --samples-per-step 4", "train-bench --model gpt2-tiny -- true", "train-bench --batch-size 4,,8"),
    *("train-bench --batch-sizes 4", "train-bench --steps 4 --training.steps 5", "train-bench --unet tiny"),
    *("profile --trace a.json --steps 4", "profile --trace a.json --inference", "profile --samples-per-step x -- true"),
    *("memory --spare 5%", "memory --spare 5% -- true", "memory --find-batch-size=5", "memory --measure-peak"),
    *("memory --samples-per-step 3 -- true", "tune --resume . --steps 4", "tune --measure-peak=5"),
    *("pipe-infer --verify=maybe", "pipe-infer --step-ms fast", "pipe-infer --split", "pipe-infer --training.steps 4"),
)


def named() -> list[str]:
    return [name for name, _ in commands(typer.main.get_command(app))]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns what a command prints, under the name that the installed one has."""

    def shown(*arguments: str) -> str:
        with pytest.raises(SystemExit):
            app(arguments, prog_name="gpubench")
        return capsys.readouterr().out

    return shown


@pytest.mark.parametrize("name", named())
def test_the_help_is_the_golden_one(show: Callable[..., str], golden: Golden, name: str) -> None:
    _, *words = name.split()
    golden(f"help-{'-'.join(words) or 'gpubench'}.txt", show(*words, "--help"))


def test_what_shells_offer_is_the_golden_text(
    show: Callable[..., str], golden: Golden, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)  # experiments of the results folder are offered
    monkeypatch.setenv("_GPUBENCH_COMPLETE", "complete_zsh")
    shown = []
    for line in COMPLETED:
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"gpubench {line}")
        shown.append(f"gpubench {line}<TAB>\n{show()}")
    golden("completion.txt", "\n".join(shown))


def test_what_is_refused_is_the_golden_text(command_line: CommandLine, golden: Golden) -> None:
    shown = []
    for line in REFUSED:
        done = command_line(*line.split(" "))
        assert (done.code, done.stdout) == (2, ""), line
        shown.append(f"gpubench {line}\n{done.stderr}")
    golden("refused.txt", "\n".join(shown))
