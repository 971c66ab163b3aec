"""The worked example of the README, from a slow script to a gate that keeps it fast, with the files of a user."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

import forked
import msgspec
import pytest
from places import EXAMPLES
from running import Finished, decided, gpubench

from gpubench.findings import Findings
from gpubench.trace.profile import Profile

SESSION = EXAMPLES / "session"
pytestmark = pytest.mark.alone

QUICK = ("-q", "--steps", "6", "--training.warmup_steps=2", "--program.grace=1")
TROUBLES = {"too-few-workers": "data.workers", "unfused-optimizer": "training.optimizer_impl"}
RECORDED = ("--repeats", "1", "--profiling.wait=0", "--profiling.active=1")


@dataclass(frozen=True)
class Session:
    """The repository of the script, and its commands."""

    folder: Path
    steps: ModuleType

    def run(self, step: str, *more: str) -> Finished:
        _, command, *given = getattr(self.steps, step).arguments
        end = given.index("--") if "--" in given else len(given)
        return gpubench(command, *given[:end], *more, *given[end:], results=self.folder / "results", cwd=self.folder)

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
def session(tmp_path_factory: pytest.TempPathFactory, steps: ModuleType) -> Iterator[Session]:
    """Diagnosed, and each fix tried."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv(forked.PROGRAMS, "1")
        found = Session(steps.check_in(tmp_path_factory.mktemp("session")), steps)
        done = found.run("FINDINGS", *QUICK, *RECORDED)
        assert not done.code, done.stderr
        (found.folder / "shown.txt").write_text(done.stdout)
        yield found


def test_both_troubles_are_named_and_their_fixes_confirmed(session: Session) -> None:
    by_id = {one.id: one for one in session.findings().findings}
    for name, setting in TROUBLES.items():
        trouble = by_id[name]
        assert trouble.severity != "low"
        assert trouble.fix.keys() == {setting}
        assert trouble.measured
        assert trouble.measured.run
        assert (session.folder / trouble.measured.run / "run.json").is_file()
        decided(trouble.measured.outcome, trouble.measured.reason, trouble.measured)
        assert trouble.measured.outcome == "confirmed", trouble.measured
    shown = (session.folder / "shown.txt").read_text()
    for said in ("waits", "confirmed", "num_workers=", "fused=True", "keep: --", "ui.perfetto.dev"):
        assert said in shown


def test_the_edit_is_confirmed_against_the_commit_and_kept_by_a_gate(session: Session) -> None:
    before = (session.folder / "train.py").read_text()
    session.steps.edit(session.folder)
    edited = (session.folder / "train.py").read_text()
    done = session.run("CONFIRM", *QUICK, "--repeats", "3", "--json")
    assert not done.code, done.stderr
    document = json.loads(done.stdout)
    (comparison,) = document["comparisons"]
    assert (session.folder / "train.py").read_text() == edited != before
    throughput = next(one for one in comparison["verdicts"] if one["metric"] == "throughput")
    decided(throughput["verdict"], throughput["reason"], throughput)
    assert throughput["verdict"] == "faster", throughput
    reverted = session.run("GATE")
    assert reverted.code == 3, reverted.stderr
    assert reverted.stderr.startswith("regression: throughput")


def test_a_profiled_run_keeps_its_clean_repeats_its_traces_and_what_they_show(session: Session) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = session.profiled
    steps = [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]
    assert {one["repeat"] for one in steps} == {0}, "the recorded repeat is none of the measured ones"
    assert json.loads((path / "run.json").read_text())["repeats"] == 1
    assert list(path.glob("profiler_traces/*"))
    profile = msgspec.json.decode((path / "profile.json").read_bytes(), type=Profile)
    assert len(profile.ranks[0].step_numbers) == 1
    findings = session.findings()
    assert findings.overhead is not None
    page = (path / "report.html").read_text()
    assert findings.findings[0].title[1:] in page
    tried = [one.measured for one in findings.findings if one.measured]
    assert len(tried) >= len(TROUBLES)
    assert all(trial.outcome in page.lower() for trial in tried)  # a sentence may begin with it
    folders = [folder for folder in (path / "tensorboard").iterdir() if folder.is_dir()]
    tags = {tag for folder in folders for tag in EventAccumulator(str(folder)).Reload().Tags()["scalars"]}
    assert {"profile/host/data_loader", "profile/host/operators"} <= tags


@pytest.mark.parametrize(("name", "lines"), [("MEASURE", slice(0, 5)), ("FINDINGS", slice(0, 2))])
def test_a_picture_holds_the_lines_that_it_is_told_to(
    steps: ModuleType, name: str, lines: slice, tmp_path: Path
) -> None:
    cut: Callable[..., str] = steps.cut
    text = ["head", "1. \x1b[31mfirst\x1b[0m", "part of a profiled step", "python", "-v also shows"]
    shown = cut("\n" + "\n".join(text) + "\n", getattr(steps, name))
    assert shown == "\n".join(text[lines])
    shown = f"{shown} first"
    steps.picture("title", shown, tmp_path / "one.svg")
    svg = (tmp_path / "one.svg").read_text()
    assert "first" in svg
    assert "url(" not in svg.replace("url(#", ""), "it asks nothing of another server"
