"""The session of the README, from a slow program to a gate that keeps it quick, with the files a user would have."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from running import Finished, decided, gpubench

from gpubench.findings import Findings
from gpubench.trace.profile import Profile

SESSION = Path(__file__).parents[1] / "examples" / "session"
pytestmark = pytest.mark.alone

QUICK = ("-q", "--steps", "5", "--training.warmup_steps=2", "--training.grad_accumulation=4", "--logging.graph=false",
         "--measurement.count_flops=false")  # fmt: skip
"""What shortens a run and leaves its two troubles: each alone takes a third of the step or more."""
TROUBLES = ("too-few-workers", "repeated-reduction")
RECORDED = ("--repeats", "1", "--profiling.wait=0", "--profiling.active=1")


@dataclass(frozen=True)
class Session:
    """The folder of the program, and its commands."""

    folder: Path
    steps: ModuleType

    def run(self, step: str, *more: str, keep: dict[str, Any] | None = None) -> Finished:
        command = getattr(self.steps, step).arguments(keep or {})
        return gpubench(*command[1:], *more, results=self.folder / "results", cwd=self.folder)

    @property
    def profiled(self) -> Path:
        return max((self.folder / "results" / "profile").iterdir(), key=lambda path: path.name)

    def findings(self) -> Findings:
        return msgspec.json.decode((self.profiled / "findings.json").read_bytes(), type=Findings)


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(SESSION), *sys.path])
        return import_module("session")


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, steps: ModuleType) -> Session:
    """Diagnosed, and each fix tried."""
    folder = tmp_path_factory.mktemp("session") / "program"
    shutil.copytree(SESSION, folder, ignore=shutil.ignore_patterns("results", "__pycache__"))
    found = Session(folder, steps)
    done = found.run("FINDINGS", *QUICK, *RECORDED)
    assert not done.code, done.stderr
    (folder / "shown.txt").write_text(done.stdout)
    return found


def test_both_troubles_are_named_and_their_fixes_confirmed(session: Session) -> None:
    by_id = {one.id: one for one in session.findings().findings}
    fixes: dict[str, Any] = {}
    for name in TROUBLES:
        trouble = by_id[name]
        assert trouble.severity == "high"
        assert trouble.measured
        assert trouble.measured.saving
        assert trouble.measured.run
        assert (session.folder / trouble.measured.run / "run.json").is_file()
        fixes |= trouble.fix
    assert fixes.keys() == {"data.workers", "distributed.sync_gradients"}
    assert fixes["data.workers"] >= 1, "by the machine's cores"
    assert fixes["distributed.sync_gradients"] == "last"
    for name in TROUBLES:
        measured = by_id[name].measured
        assert measured
        decided(measured.outcome, measured.reason, measured)
        assert measured.outcome == "confirmed", measured
    together = session.findings().combination
    assert together
    assert together.fix == fixes
    assert session.findings().keep.items() <= fixes.items(), "both, or where the two are not told apart the better one"
    shown = (session.folder / "shown.txt").read_text()
    for said in ("waits for", "confirmed", "together, ", "keep: --", "ui.perfetto.dev"):
        assert said in shown


def test_the_advice_is_followed_judged_and_kept_by_a_gate(session: Session) -> None:
    findings = session.findings()
    confirmed = [one for one in findings.findings if one.measured and one.measured.outcome == "confirmed"]
    assert findings.keep or not confirmed
    keep = findings.keep or {key: value for one in findings.findings for key, value in one.fix.items()}
    changed = session.run("CHANGE", *QUICK, "--repeats", "3", "--json", keep=keep)
    assert not changed.code, changed.stderr
    judged = session.run("JUDGE", "--format", "json")
    assert not judged.code, judged.stderr
    (comparison,) = json.loads(judged.stdout)["comparisons"]
    assert comparison["memory"] is None
    throughput = next(one for one in comparison["verdicts"] if one["metric"] == "throughput")
    assert "<svg" in (session.folder / "change.html").read_text()
    decided(throughput["verdict"], throughput["reason"], throughput)
    assert throughput["verdict"] == "faster", throughput
    reverted = session.run("GATE")
    assert reverted.code == 3, reverted.stderr
    assert reverted.stderr.startswith("regression: throughput")


def test_its_memory_is_told_by_phase(session: Session) -> None:
    done = session.run("MEMORY", "-q", "--json")
    assert not done.code, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert [rank["rank"] for rank in run["memory"]["ranks"]] == [0, 1]
    steady = [phase for phase in run["memory"]["ranks"][0]["phases"] if phase["stage"] == "steady"]
    parameters = 4 * (3 * 32 * 32 * 1024 + 1024 + 1024 * 10 + 10)
    assert all(phase["end"]["parameters"] == parameters for phase in steady)


def test_a_profiled_run_keeps_its_clean_repeats_its_traces_and_what_they_show(session: Session) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = session.profiled
    steps = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    assert {one["repeat"] for one in steps} == {0}, "the recorded repeat is none of the measured ones"
    assert json.loads((path / "run.json").read_text())["repeats"] == 1
    traces = sorted(path.glob("profiler_traces/*"))
    assert [one.name.split(".")[0] for one in traces] == ["rank0", "rank0"]
    profile = msgspec.json.decode((path / "profile.json").read_bytes(), type=Profile)
    assert profile.ranks[0].step_numbers == [3], "the last cycle's"
    findings = session.findings()
    assert findings.overhead is not None
    page = (path / "report.html").read_text()
    assert findings.findings[0].title[1:] in page
    tried = [one.measured for one in findings.findings if one.measured]
    assert len(tried) >= len(TROUBLES)
    assert all(trial.outcome[1:] in page for trial in tried)  # a sentence may begin with it
    folders = [folder for folder in (path / "tensorboard").iterdir() if folder.is_dir()]
    tags = {tag for folder in folders for tag in EventAccumulator(str(folder)).Reload().Tags()["scalars"]}
    assert {"profile/host/data_loader", "profile/host/operators"} <= tags


@pytest.mark.parametrize(
    ("name", "lines"), [("MEASURE", slice(0, 5)), ("FINDINGS", slice(0, 2)), ("PARTS", slice(2, 4))]
)
def test_a_picture_holds_the_lines_that_it_is_told_to(
    steps: ModuleType, name: str, lines: slice, tmp_path: Path
) -> None:
    cut: Callable[..., str] = steps.cut
    text = ["head", "1. \x1b[31mfirst\x1b[0m", "part of a step", "python", "-v also shows"]
    shown = cut("\n" + "\n".join(text) + "\n", getattr(steps, name))
    assert shown == "\n".join(text[lines])
    shown = f"{shown} first"
    steps.picture("title", shown, tmp_path / "one.svg")
    svg = (tmp_path / "one.svg").read_text()
    assert "first" in svg
    assert "url(" not in svg.replace("url(#", ""), "it asks nothing of another server"
