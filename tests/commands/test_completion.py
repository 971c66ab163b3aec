"""What a shell is told when somebody presses the tab key."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from recorded_runs import edit, write_run
from running import environment

from gpubench.commands import completion
from gpubench.runs.catalogue import catalogue
from gpubench.runs.directory import RUN

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
        ("gpubench memory --device-model h200", ["h200", "h200-nvl"]),
        ("gpubench train-bench --training.warm", ["--training.warmup_steps"]),
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


def words(offered: completion.Offered) -> list[str]:
    return [word for word, _ in offered]


def test_runs_and_what_is_known_of_them_are_completed(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(params={"results": tmp_path}, parent=None, info_name="runs")
    first, second = (write_run(tmp_path, name, repeats=1, steps=12) for name in ("one", "two"))
    edit(first / RUN, name="base", tags=["weekly"])
    (first / "config.yaml").write_text("training:\n  batch_size: 8\nprecision: fp32\n")
    (second / "config.yaml").write_text("training:\n  batch_size: 16\nprecision: fp32\n")
    assert words(completion.runs(context, "ba")) == []  # nothing has listed the runs yet
    catalogue(tmp_path)
    assert words(completion.runs(context, "ba")) == ["base"]
    assert words(completion.runs(context, first.name[:8])) == [second.name, first.name]
    assert words(completion.runs(context, "t")) == ["two/latest"]
    assert words(completion.experiments(context, "")) == ["one", "two"]
    assert words(completion.tags(context, "")) == ["weekly"]
    assert words(completion.conditions(context, "batch")) == ["batch_size=16", "batch_size=8"]
    assert words(completion.conditions(context, "prec")) == ["precision="]
    assert words(completion.sort_keys(context, "thr")) == ["throughput"]
    assert words(completion.metrics(context, ""))[:2] == ["throughput", "step_time"]
    assert words(completion.hosts(context, "")) == [entry.record.host for entry in catalogue(tmp_path)][:1]


def test_searches_and_what_they_try_are_completed(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(params={"results": tmp_path}, parent=None, info_name="tune")
    for name in ("tune-1", "tune-2", "other"):
        (tmp_path / name).mkdir()
    for name in ("tune-1", "tune-2"):
        (tmp_path / name / "tune.json").touch()
    assert words(completion.searches(context, "")) == [f"{tmp_path}/tune-2", f"{tmp_path}/tune-1"]
    assert words(completion.tuned(context, "data.work")) == ["data.workers"]
    assert words(completion.tuned(context, "precision,data.work")) == ["precision,data.workers"]
    assert words(completion.tried("data.work")) == ["data.workers="]
    assert words(completion.tuned(context, "seed")) == []


def test_settings_are_completed_with_their_values() -> None:
    context: Any = SimpleNamespace(params={}, parent=None, info_name="train-bench")
    assert words(completion.assignments(context, "performance.comp")) == [
        "performance.compile=true",
        "performance.compile=false",
        *(word for word in words(completion.assignments(context, "performance.compile_mode"))),
    ]
    assert words(completion.assignments(context, "training.warm")) == ["training.warmup_steps="]


def test_traces_are_completed_and_a_single_folder_is_opened(tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    for name in ("rank0.pt.trace.json.gz", "rank1.json", "notes.txt", ".hidden.json"):
        (tmp_path / "traces" / name).touch()
    inside = [f"{tmp_path}/traces/{name}" for name in ("rank0.pt.trace.json.gz", "rank1.json")]
    assert words(completion.traces(f"{tmp_path}/tr")) == inside
    assert words(completion.traces(f"{tmp_path}/traces/rank1")) == inside[1:]
    assert words(completion.traces(f"{tmp_path}/nowhere/")) == []


def test_a_name_that_a_shell_could_evaluate_is_not_offered(tmp_path: Path) -> None:
    context: Any = SimpleNamespace(params={"results": tmp_path}, parent=None, info_name="runs")
    edit(write_run(tmp_path, repeats=1, steps=12) / RUN, name="$(touch x)", tags=["`touch x`", "a;b", "good"])
    catalogue(tmp_path)
    assert words(completion.runs(context, "$")) == []
    assert words(completion.tags(context, "")) == ["good"]
