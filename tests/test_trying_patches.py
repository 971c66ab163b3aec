"""Edits for findings that are tried: which of them a patch has, and what is said of the others. The runs are made."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from idiom_programs import EVALUATING, MEAN, ZEROED, evaluating
from recorded_runs import write_run
from reports import on_terminal

from gpubench.bench import Bench
from gpubench.errors import Interrupted
from gpubench.findings import Finding, Findings
from gpubench.kinds.program.defaults import complete_program
from gpubench.report import patches
from gpubench.report.document import Document
from gpubench.settings.loading import completed, load
from gpubench.settings.programs import ProgramProfileSettings
from gpubench.trials import try_patch

SOURCE = evaluating(MEAN).replace("zero_grad()", "zero_grad(set_to_none=False)") + "total = 0\ntotal += 1\n"
"""A program that evaluates with gradients, and fills gradients with zeros."""


@dataclass
class Machine(Bench):
    """Measures the program as it was, and with each patch as many times as long as `paces` says."""

    folder: Path
    paces: dict[str, float]
    loss: dict[str, float] = field(default_factory=dict)
    """The loss of each step with a patch."""
    interrupted: bool = False
    terminal: Any = field(default_factory=lambda: SimpleNamespace(errors_only=contextlib.nullcontext))

    def complete(self, variant: Any) -> Any:
        return variant

    def run(self, variants: Sequence[Any], **how: Any) -> list[Any]:
        return [self._outcome(one.settings.program.patch) for one in variants]

    def _outcome(self, patch: Path | None) -> Any:
        name = Path(patch).stem if patch else ""
        assert not patch or Path(patch).is_file()
        loss: dict[str, Any] = {"loss": self.loss[name]} if name in self.loss else {}
        path = write_run(self.folder / "results", repeats=5, pace=self.paces.get(name, 1.0), **loss)
        recorder = SimpleNamespace(writer=SimpleNamespace(path=path), completed=lambda: 5)
        error = Interrupted("interrupted", "") if self.interrupted else None
        return SimpleNamespace(recorder=recorder, error=error, summary=SimpleNamespace(missed={}))


def finding(name: str) -> Finding:
    return Finding(id=name, title=name, severity="low", evidence=[], cause="", advice="", threshold="none")


def tried(folder: Path, bench: Machine, *names: str) -> list[Findings]:
    (folder / "train.py").write_text(SOURCE)
    given = {"program.command": "python train.py", "program.directory": str(folder), "training.steps": 20}
    profiled = completed(load(ProgramProfileSettings, None, given), complete_program)
    findings = Findings(headline="", findings=[finding(name) for name in names], unanswered=[])
    (own := folder / "profile").mkdir()
    outcome: Any = SimpleNamespace(
        error=None,
        recorder=SimpleNamespace(
            findings=findings, diagnosis=None, source={"places": {}}, writer=SimpleNamespace(path=own)
        ),
    )
    return list(try_patch(profiled, outcome, bench))


def test_an_edit_that_is_faster_is_in_the_patch_and_another_is_not(tmp_path: Path) -> None:
    bench = Machine(tmp_path, {EVALUATING: 0.5, "best": 0.5})
    first, last = tried(tmp_path, bench, EVALUATING, ZEROED, "pinning")
    outcomes = {one.id: one.measured and one.measured.outcome for one in last.findings}
    assert outcomes == {EVALUATING: "confirmed", ZEROED: "no effect", "pinning": None}
    assert first.patch is None
    assert last.patch
    assert [(one.key, one.value) for one in last.patch.edits] == [(EVALUATING, None)]
    assert last.patch.is_proved
    assert list(last.patch.left) == [ZEROED]
    assert last.patch.left[ZEROED].startswith("1 line in train.py; run as patched: 1.0")
    text = (tmp_path / "profile" / "best.patch").read_text()
    assert "+@torch.no_grad()" in text
    assert "zero_grad" not in "".join(line for line in text.splitlines() if line.startswith("+"))
    assert f"# train.py:10 {EVALUATING}: 2.0" in text
    assert f"| `{EVALUATING}` | train.py:10 | 2.0" in (tmp_path / "profile" / "best.md").read_text()
    assert (tmp_path / "train.py").read_text() == SOURCE
    assert msgspec.json.decode(msgspec.json.encode(last), type=Findings) == last
    shown = on_terminal(Document("", list(patches.blocks(tmp_path / "profile", last.patch))), 1000)
    assert "best.patch, 1 line in train.py; run as patched: 2.0" in shown
    assert f"not in the patch: {ZEROED}: 1 line" in shown


def test_an_edit_that_harms_the_loss_is_not_in_the_patch(tmp_path: Path) -> None:
    bench = Machine(tmp_path, {ZEROED: 0.5}, loss={ZEROED: 9.0})
    _, last = tried(tmp_path, bench, ZEROED)
    (measured,) = [one.measured for one in last.findings]
    assert measured
    assert measured.outcome == "inconclusive"
    assert "harms the loss" in str(measured.reason)
    assert last.patch
    assert not last.patch.changed
    assert not (tmp_path / "profile" / "best.patch").exists()


def test_nothing_is_run_without_an_edit(tmp_path: Path) -> None:
    (only,) = tried(tmp_path, Machine(tmp_path, {}), "small-batch")
    assert only.patch is None


def test_a_user_who_interrupts_keeps_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        tried(tmp_path, Machine(tmp_path, {}, interrupted=True), ZEROED)
