"""What lies in examples/ does what it says."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import EXAMPLES
from running import environment, gpubench
from sides_made import make_runs

WORKFLOW = EXAMPLES / "ci" / "model.yml"
QUICK = (
    "--steps=2",
    "--training.warmup_steps=1",
    "--repeats=1",
    "--performance.cpu_threads=1",
    "--logging.graph=false",
)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "custom_model:build", "--model.arguments.width=16", "--batch-size=8"),
        ("--model", "resnet-tiny", "--data", "custom_data:loader", "--batch-size=16"),
        ("--model", "resnet-tiny", "--data", "custom_data:photos", "--batch-size=2", "--data.workers=1"),
    ],
)
def test_a_model_and_data_of_ones_own_are_measured(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = gpubench("train-bench", *arguments, *QUICK, results=tmp_path, cwd=EXAMPLES)
    assert done.code == 0, done.stderr
    assert [step["step"] for step in done.lines("steps.jsonl")] == [0, 1, 2]


def test_every_example_is_listed_in_the_readme() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    files = [path for path in EXAMPLES.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 3
    for path in files:
        name = path.relative_to(EXAMPLES)
        assert path.name == "README.md" or f"]({name})" in listed or f"`{name}`" in listed, path


def run_step(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """What the runner would do for a step of the workflow, in `folder` and with the shell that Actions uses."""
    (script,) = [step["run"] for step in workflow_steps() if step.get("name") == name]
    known = environment() | {"GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    script = f'gpubench() {{ {sys.executable} -m gpubench "$@"; }}\n{script}'
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(shell, cwd=folder, env=known, capture_output=True, text=True, timeout=120, check=False)


def workflow_steps() -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text())["jobs"]["compare"]["steps"]
    return steps


@pytest.mark.parametrize(("slower", "code", "said"), [(1.1, 3, "regression: step_time worse by"), (1.0, 0, "")])
def test_the_gate_of_the_workflow_stops_what_is_slower(tmp_path: Path, slower: float, code: int, said: str) -> None:
    for side, times in (("base", 1.0), ("head", slower)):
        make_runs(tmp_path / "results", side, times)
    done = run_step("Compare", tmp_path)
    assert done.returncode == code, done
    assert said in done.stderr
    assert (tmp_path / "summary.md").read_text().startswith("### head ")
    assert (tmp_path / "compare.html").read_text().startswith("<!doctype html>")


def test_the_workflow_uploads_what_its_comparison_writes() -> None:
    (upload,) = [step for step in workflow_steps() if "upload-artifact" in step.get("uses", "")]
    (compare,) = [step for step in workflow_steps() if step.get("name") == "Compare"]
    assert upload["if"] == "always()"
    for path in upload["with"]["path"].split():
        assert path in compare["run"]
