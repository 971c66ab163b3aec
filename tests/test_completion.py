"""What a shell is told when somebody presses the tab key."""

import subprocess
import sys
from pathlib import Path

import pytest
from running import environment

SCRIPT = """
import sys
sys.argv = ["gpubench", *sys.argv[1:]]
from gpubench.commands import main
try:
    main()
finally:
    print(*{name.partition(".")[0] for name in sys.modules}, file=sys.stderr)
"""
HEAVY = {"torch", "transformers", "diffusers", "numpy", "scipy", "msgspec", "yaml", "pydantic_settings"}


def gpubench(folder: Path, *arguments: str, **known: str) -> subprocess.CompletedProcess[str]:
    """The installed command in all but its file, with a home of its own, from a shell, which typer looks for."""
    home = environment() | {"HOME": str(folder)} | known
    command = ["bash", "-c", '"$@"; exit $?', "bash", sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, cwd=folder, env=home, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("gpubench tr", ["train-bench"]),
        ("gpubench compare --fail", ["--fail-on"]),
        ("gpubench --ver", ["--version"]),
        ("gpubench train-bench --precision b", ["bf16"]),
        ("gpubench train-bench --config resnet", ["resnet18", "resnet50"]),
        ("gpubench memory --model unet2d-", ["unet2d-tiny"]),
        ("gpubench pipe-infer --split ", ["balanced", "even"]),
    ],
)
def test_commands_options_and_their_values_are_completed_and_nothing_heavy_is_loaded(
    tmp_path: Path, line: str, offered: list[str]
) -> None:
    asked = {"_GPUBENCH_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = gpubench(tmp_path, **asked)
    assert done.stdout.split() == offered
    assert HEAVY.isdisjoint(done.stderr.split())


def test_completion_is_shown_and_installed(tmp_path: Path) -> None:
    shown = gpubench(tmp_path, "--show-completion").stdout
    assert "complete -o default -F _gpubench_completion gpubench" in shown
    gpubench(tmp_path, "--install-completion")
    (installed,) = (tmp_path / ".bash_completions").iterdir()
    assert installed.read_text().strip() == shown.strip()
