"""The programs of examples/programs, run alone and as gpubench measures them, with the packages of frameworks.txt.

`make test-frameworks` makes the environment and runs these tests.
"""

import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from places import ROOT
from running import Finished, gpubench, metrics, processes_of

BIN = ROOT / ".venv-frameworks" / "bin"
PROGRAMS = ROOT / "examples" / "programs"
NAMES = sorted(path.name for path in PROGRAMS.glob("*.py"))
WARMUP = 10
PRINTED = re.compile(r"(?:loss|accuracy|steps) [-0-9.e]+")

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code that adds up in several threads has other last digits in every run, also without gpubench."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def python(name: str, *options: str) -> list[str]:
    return [str(BIN / "python"), name, *options]


def torchrun(name: str) -> list[str]:
    return [str(BIN / "torchrun"), "--nproc-per-node", "2", name]


def measure(results: Path, words: Sequence[str], steps: str = "all") -> Finished:
    options = ("--repeats", "1", "--steps", steps, "-q")
    return gpubench("train-bench", *options, "--", *words, results=results, cwd=PROGRAMS)


def alone(words: Sequence[str]) -> list[str]:
    """Returns the losses and accuracies that the program prints without gpubench, and its number of steps."""
    done = subprocess.run(words, cwd=PROGRAMS, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    return PRINTED.findall(done.stdout)


def steps_of_ranks(run: Finished) -> dict[int, list[dict[str, Any]]]:
    ranks = defaultdict(list)
    for step in run.lines("steps.jsonl"):
        ranks[step["rank"]].append(step)
    return ranks


@pytest.mark.parametrize(
    ("words", "ranks"),
    [(python(name, *options), 1) for name in NAMES for options in ((), ("--compile",))]
    + [(torchrun(name), 2) for name in ("accelerated.py", "hf_trainer.py")],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else None,
)
def test_a_program_prints_the_same_with_all_its_steps_measured(tmp_path: Path, words: list[str], ranks: int) -> None:
    printed = alone(words)
    run = measure(tmp_path, words)
    assert run.code == 0, run.stderr
    assert Counter(PRINTED.findall((run.run / "output.log").read_text())) == Counter(printed)
    (own,) = {int(line.split()[1]) for line in printed if line.startswith("steps")}
    samples = 8 if "hf_trainer.py" in words else 32
    found = steps_of_ranks(run)
    assert sorted(found) == list(range(ranks))
    for steps in found.values():
        assert [step["step"] for step in steps] == list(range(own))
        measured = steps[WARMUP:]
        for step in measured:
            assert step["phases"].keys() >= {"data_wait", "forward", "backward", "optimizer", "other"}
        assert any("evaluation" in step["phases"] for step in measured)
        assert median(step["samples"] for step in measured) == samples
        assert sum(step["samples"] for step in measured) / len(measured) == pytest.approx(samples, rel=0.05)
    assert metrics(run)["throughput"]["estimate"] > 0


@pytest.mark.parametrize("words", [*map(python, NAMES), torchrun("accelerated.py")], ids=[*NAMES, "two ranks"])
def test_a_program_is_ended_without_a_trace_of_it(tmp_path: Path, words: list[str]) -> None:
    run = measure(tmp_path, words, steps="20")
    assert run.code == 0, run.stderr
    for steps in steps_of_ranks(run).values():
        assert len(steps) == WARMUP + 20
    output = (run.run / "output.log").read_text()
    assert "Traceback" not in output
    assert "SystemExit" not in output
    time.sleep(0.5)
    assert not processes_of(words)


@pytest.mark.parametrize("name", NAMES)
def test_a_program_is_profiled(tmp_path: Path, name: str) -> None:
    run = gpubench("profile", "--repeats", "1", "-q", "--", *python(name), results=tmp_path, cwd=PROGRAMS)
    assert run.code == 0, run.stderr
    assert "part of a profiled step" in run.stdout
    assert not {"nan", "Traceback"} & set(run.stdout.split())


def test_the_memory_of_a_trainer_is_divided_into_categories(tmp_path: Path) -> None:
    run = gpubench("memory", "-q", "--", *python("hf_trainer.py"), results=tmp_path, cwd=PROGRAMS)
    assert run.code == 0, run.stderr
    (found,) = run.document("memory.json")["ranks"]
    assert found["peak"]["amounts"].keys() >= {"parameters", "gradients", "optimizer_state", "activations", "inputs"}
    assert "Traceback" not in (run.run / "output.log").read_text()
