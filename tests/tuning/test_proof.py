"""A patch of proved settings: what it has, and what its runs show."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from patched_programs import PLAIN
from recorded_runs import write_run
from reports import on_terminal

from gpubench import proof
from gpubench.bench import Bench
from gpubench.compare.intervals import MetricSample, ratio
from gpubench.errors import Interrupted, ProgramFailed
from gpubench.gain import Gain
from gpubench.patches.diff import applied
from gpubench.patches.result import ProvedPatch
from gpubench.report import patches
from gpubench.report.document import Document
from gpubench.settings.programs import CommandSettings

SIDE: Any = SimpleNamespace(settings=SimpleNamespace(measurement=SimpleNamespace(repeats=4)))
SIDES = [SIDE] * 2


class Pair(Bench):
    """Stands in for the runs of all versions, of which all but the first take `pace` times as long."""

    def __init__(self, folder: Path, pace: float, *, error: Any = None, observed: Any = None, **changes: Any) -> None:
        self.terminal: Any = SimpleNamespace(errors_only=contextlib.nullcontext)
        self._folder, self._pace, self._error, self._observed = folder, pace, error, observed
        self._changes = changes

    def run(self, variants: Sequence[Any], **how: Any) -> list[Any]:
        if isinstance(self._error, Interrupted):
            raise self._error
        paths = [
            write_run(self._folder, repeats=4),
            *(write_run(self._folder, repeats=4, pace=self._pace, **self._changes) for _ in variants[1:]),
        ]
        if self._observed:
            file = paths[1] / "run.json"
            file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | {"observed": self._observed}))
        if self._error:
            (paths[1] / "summary.json").unlink()
            (paths[1] / "steps.jsonl").unlink()
        return [
            SimpleNamespace(
                recorder=SimpleNamespace(writer=SimpleNamespace(path=path), completed=lambda: 4), error=error
            )
            for path, error in zip(paths, (None, *(self._error for _ in variants[1:])), strict=True)
        ]


def made(folder: Path) -> ProvedPatch:
    (folder / "train.py").write_text(PLAIN)
    lines = PLAIN.splitlines()
    loader = next(number for number, line in enumerate(lines, 1) if line.startswith("loader ="))
    source = {"places": {"loader": f"train.py:{loader}"}, "device_type": "cpu"}
    command = CommandSettings(command="python train.py", directory=folder)
    parts = [
        proof.ProvedSettings({"data.workers": 2}, "2.00 x [1.90, 2.10] with the others"),
        proof.ProvedSettings({"performance.sdpa": "fused"}, "1.10 x [1.05, 1.15] with the others"),
    ]
    program = proof.PatchedProgram(command, source, "python train.py")
    patch = proof.make(parts, program, folder)
    proof.describe(patch, program, folder)
    return patch


def test_a_patch_has_what_each_of_its_hunks_contributes(tmp_path: Path) -> None:
    patch = made(tmp_path)
    text = (tmp_path / "best.patch").read_text()
    assert patch.changed == {"train.py": 1}
    assert "@@ data.workers=2: 2.00 x [1.90, 2.10] with the others\n" in text
    assert list(patch.left) == ["performance.sdpa"]
    assert "# train.py:9 data.workers=2: 2.00 x [1.90, 2.10] with the others\n" in text
    assert applied(text.encode(), lambda name: (tmp_path / name).read_bytes())
    assert "--vs program.patch=" in (tmp_path / "best.md").read_text()
    assert (tmp_path / "train.py").read_text() == PLAIN


def test_settings_whose_part_is_not_proved_are_left_out_and_named(tmp_path: Path) -> None:
    program = proof.PatchedProgram(CommandSettings(command="python train.py", directory=tmp_path), {}, "")
    (tmp_path / "train.py").write_text(PLAIN)
    threads = [proof.ProvedSettings({"performance.cpu_threads": 1}, "")]
    patch = proof.make(threads, program, tmp_path, unproved=["data.prefetch"])
    assert patch.changed
    assert patch.left == {"data.prefetch": proof.UNPROVED}
    assert not proof.make([], program, tmp_path, unproved=["data.prefetch"]).left, "there is no patch"


def test_the_patched_program_is_run_and_judged(tmp_path: Path) -> None:
    patch, bench = made(tmp_path), Pair(tmp_path, 0.5, observed={"data.workers": 2})
    found = proof.prove(patch, SIDES, bench, float("inf"), None)
    assert found.gain
    assert found.gain.low <= 2.0 <= found.gain.high
    assert found.found.startswith("run as patched: 2.0")
    assert not found.remarks
    shown = on_terminal(Document("", list(patches.blocks(tmp_path, found))), 1000)
    assert f"patch: {tmp_path}/best.patch, 1 line in train.py; run as patched: " in shown
    assert f"apply it: git apply {tmp_path}/best.patch " in shown
    assert "not in the patch: performance.sdpa: " in shown


def test_the_settings_from_outside_are_run_beside_it_and_have_their_gain_in_the_same_rounds(tmp_path: Path) -> None:
    patch = msgspec.structs.replace(made(tmp_path), settings_gain=Gain(1.0, 0.9, 1.1))
    bench = Pair(tmp_path, 0.5)
    found = proof.prove(patch, [SIDE] * 3, bench, float("inf"), None)
    assert found.settings_gain
    assert found.settings_gain.low <= 2.0 <= found.settings_gain.high
    assert not found.differs
    assert f"run as patched: {found.gain} ({found.settings_gain} by the settings from outside), " in found.found


def test_an_edit_without_effect_is_named(tmp_path: Path) -> None:
    patch = msgspec.structs.replace(made(tmp_path), settings_gain=Gain(2.0, 1.9, 2.1))
    found = proof.prove(patch, SIDES, Pair(tmp_path, 1.0, observed={"data.workers": 0}), float("inf"), None)
    assert found.differs
    said = "at train.py:9 it is 2, and the patched program runs with 0"
    assert f"data.workers did not take effect: {said}" in found.remarks
    assert found.remarks[0].startswith("the settings from outside gave 2.00 x [1.90, 2.10], which the patch does not")


def test_a_patched_program_that_does_not_run_is_said(tmp_path: Path) -> None:
    found = proof.prove(made(tmp_path), SIDES, Pair(tmp_path, 1.0, error=ProgramFailed("it ends")), float("inf"), None)
    assert found.gain is None
    assert found.found == "run as patched: it ends"


def test_a_user_can_interrupt_it(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        proof.prove(made(tmp_path), SIDES, Pair(tmp_path, 1.0, error=Interrupted("x")), float("inf"), None)


@pytest.mark.parametrize(
    ("seconds", "versions", "rounds"),
    [(None, 2, 6), (100.0, 2, 5), (60.0, 2, 3), (59.0, 2, 0), (-1.0, 2, 0), (90.0, 3, 3), (89.0, 3, 0)],
)
def test_a_patch_is_run_as_often_as_there_is_time(seconds: float | None, versions: int, rounds: int) -> None:
    assert proof.rounds_in(seconds, 10.0, versions) == rounds


def test_a_patch_that_was_not_run_says_so(tmp_path: Path) -> None:
    patch = msgspec.structs.replace(made(tmp_path), reason="the time limit left none for it")
    assert patch.found == "not run: the time limit left none for it"


def gain_of(log_ratio: float, sigma: float, rounds: int, rng: np.random.Generator) -> Gain:
    """The gain in interleaved runs of two simulated programs that differ by `log_ratio`."""
    sides = (MetricSample(np.exp(rng.normal(rate, sigma, rounds))) for rate in (0.0, log_ratio))
    found = ratio(*sides, paired=True)
    assert found
    return Gain(found.estimate, *found.interval)


@pytest.mark.parametrize("sigma", [0.01, 0.05])
@pytest.mark.parametrize("rounds", [5, 12])
def test_a_patch_with_the_gain_of_its_settings_is_hardly_ever_said_to_differ(sigma: float, rounds: int) -> None:
    rng = np.random.default_rng(1)
    trials = [(gain_of(0.4, sigma, rounds, rng), gain_of(0.4, sigma, proof.ROUNDS, rng)) for _ in range(400)]
    assert np.mean([ProvedPatch(changed={}, settings_gain=one, gain=patch).differs for one, patch in trials]) <= 0.05


@pytest.mark.parametrize("sigma", [0.01, 0.05])
def test_a_patch_of_which_an_edit_has_no_effect_is_said_to_differ(sigma: float) -> None:
    rng = np.random.default_rng(2)
    trials = [(gain_of(0.4, sigma, 12, rng), gain_of(0.1, sigma, proof.ROUNDS, rng)) for _ in range(400)]
    assert np.mean([ProvedPatch(changed={}, settings_gain=one, gain=patch).differs for one, patch in trials]) >= 0.95
