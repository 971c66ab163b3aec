"""What each use of the command line loads: asked of the interpreter, as a stopwatch would depend on the machine."""

import subprocess
import sys
from pathlib import Path

import pytest

WORKER_SIDE = {"torch", "transformers", "diffusers", "tensorboard", "wandb"}
SETTINGS = {"pydantic_settings", "yaml"}
HOST = {"numpy", "scipy", "msgspec"}

SCRIPT = """
import sys
from gpubench.commands import main
try:
    main()
except SystemExit as exited:
    print("code", exited.code or 0, *{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "unwanted"),
    [
        (["--help"], 0, WORKER_SIDE | SETTINGS | HOST),
        (["train-bench", "--help"], 0, WORKER_SIDE | SETTINGS | HOST),
        (["--version"], 0, WORKER_SIDE | SETTINGS | HOST),
        (["train-bench", "--config", "resnet50", "--print-config"], 0, WORKER_SIDE | HOST),
        (["train-bench", "--steps", "x"], 2, WORKER_SIDE | HOST),
        (["train-bench", "--model", "resnet5"], 2, WORKER_SIDE | HOST),
        (["train-bnch"], 2, WORKER_SIDE | SETTINGS | HOST),
    ],
)
def test_what_is_not_needed_is_not_loaded(tmp_path: Path, arguments: list[str], code: int, unwanted: set[str]) -> None:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    word, exited, *loaded = done.stderr.splitlines()[-1].split()
    assert (word, int(exited)) == ("code", code)
    assert "typer" in loaded
    assert unwanted.isdisjoint(loaded)


def test_the_host_starts_without_torch() -> None:
    script = "import sys, gpubench.host.schedule, gpubench.report.after_run, gpubench.report.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert {"torch", "transformers", "diffusers"}.isdisjoint(done.stdout.split())


def test_compare_loads_neither_torch_nor_settings_nor_the_live_view(finished_run: Path) -> None:
    arguments = ["compare", str(finished_run), str(finished_run), "--json"]  # refused when all is read and loaded
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=60)
    word, exited, *loaded = done.stderr.splitlines()[-1].split()
    assert (word, exited) == ("code", "2")
    assert "numpy" in loaded
    assert (WORKER_SIDE | {"pydantic_settings", "jinja2", "scipy"}).isdisjoint(loaded)
