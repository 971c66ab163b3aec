"""benchmarks/memory_check.py, which holds predictions of memory to what a GPU took: its bars, and a run on the CPU."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import footprints_made
import msgspec
import pytest
from places import BENCHMARKS
from running import HOST, PATIENCE, SMALL, environment

from gpubench.memory.footprint import Footprint

SETTINGS = {"model": "gpt2", "precision": "bf16"}


@pytest.fixture
def memory_check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("memory_check")


@pytest.fixture
def check(memory_check: Any) -> Callable[..., Any]:
    """Of a measured and a predicted footprint, of the same settings."""

    def call(measured: Footprint, predicted: Footprint, snapshot: int | None = None) -> Any:
        sides = (memory_check.Followed(SETTINGS, found) for found in (measured, predicted))
        return memory_check.check(*sides, snapshot)

    return call


def taken(found: Footprint, allocated: float = 1.0, reserved: float = 1.0) -> Footprint:
    """The same, but for this much of what was allocated and reserved at the peak."""
    level = found.peak.level
    assert level.reserved is not None
    changed = msgspec.structs.replace(
        level, allocated=round(allocated * level.allocated), reserved=round(reserved * level.reserved)
    )
    return msgspec.structs.replace(found, phases=[], peak=msgspec.structs.replace(found.peak, level=changed))


def test_a_prediction_passes_within_2_percent_of_allocated_and_5_of_reserved(
    memory_check: Any, check: Callable[..., Any]
) -> None:
    real = taken(footprints_made.predicted())
    foretold = taken(real, allocated=0.981, reserved=1.049)
    found = check(real, foretold)
    assert found.judged
    assert found.broken == []
    assert memory_check.row("job", found)[-1] == "met"


def test_each_bar_that_is_missed_is_named_with_by_how_much(check: Callable[..., Any]) -> None:
    real = taken(footprints_made.predicted())
    foretold = taken(real, allocated=0.9, reserved=1.1)
    read_back = round(1.5 * real.peak.level.allocated)
    found = check(real, foretold, read_back)
    assert found.broken == [
        "allocated: -10.0 % from the measurement, bar 2 %",
        "reserved: +10.0 % from the measurement, bar 5 %",
        "read back: +50.0 % from the measurement, bar 2 %",
    ]


def test_the_most_that_was_reserved_counts_not_what_was_at_the_peak(memory_check: Any) -> None:
    found = footprints_made.predicted()
    grown = [msgspec.structs.replace(one, level=taken(found, reserved=2.0).peak.level) for one in found.phases[-1:]]
    figures = memory_check.Figures.of(msgspec.structs.replace(found, phases=grown))
    assert found.peak.level.reserved is not None
    assert figures.reserved == 2 * found.peak.level.reserved


def test_phases_that_do_not_sum_are_named(check: Callable[..., Any]) -> None:
    found = footprints_made.predicted()
    (first, *others) = found.phases
    short = msgspec.structs.replace(first, peak={"parameters": first.level.total - 1})
    broken = check(found, msgspec.structs.replace(found, phases=[short, *others])).broken
    assert broken == [f"predicted: the categories of {first.stage} {first.phase} do not sum to its total"]


def test_runs_of_different_settings_are_not_held_to_each_other(memory_check: Any) -> None:
    real = taken(footprints_made.predicted())
    measured = memory_check.Followed(SETTINGS, real)
    predicted = memory_check.Followed(SETTINGS | {"precision": "fp32"}, real)
    found = memory_check.check(measured, predicted)
    assert found.broken == ["precision: measured with bf16, predicted with fp32"]


def test_on_a_cpu_both_are_told_and_nothing_is_judged(
    tmp_path: Path, memory_check: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = memory_check.command
    monkeypatch.setattr(memory_check, "command", lambda *of, **options: [*HOST, *real(*of, **options)[1:]])
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    alike = ("--precision=fp32", "--batch-size=4")
    code = memory_check.main([f"--results={tmp_path}", "--device=cpu", *SMALL, *alike])
    said = capsys.readouterr().out
    assert code == 0, said
    found = json.loads((tmp_path / "memory_check.json").read_text())
    assert found["settings"]["model"] == "small_model:build"
    assert found["measured"]["reserved"] is None
    assert found["predicted"]["reserved"] >= found["predicted"]["allocated"] > found["measured"]["allocated"] > 0
    assert found["predicted"]["other"] > 0
    assert "not judged on a CPU" in said


def test_a_run_that_fails_ends_the_check_with_its_error(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "memory_check.py"), f"--results={tmp_path}", "--model=nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    assert done.returncode == 1
    assert "nothing" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
