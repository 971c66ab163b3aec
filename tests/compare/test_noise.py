"""What is on record of how equal runs vary, when it holds, and what it does to a comparison."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from recorded_runs import edit, side, write_run

from gpubench.compare import noise
from gpubench.compare.compare import compare, null
from gpubench.compare.evidence import open_run
from gpubench.compare.explanation import UNSETTLED
from gpubench.runs.directory import ENVIRONMENT, NOISE, SUMMARY

GPU = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-1", "power_cap_w": 700.0, "sm_clock_max_mhz": 1980}


def gpu_run(results: Path, clock: int, slowdown: float = 1.0, repeats: int = 2, **gpu: Any) -> Path:
    """A run on a GPU whose clock was read at some moment, all of whose times are longer by the same factor."""
    path = write_run(results, repeats=repeats)
    edit(path / ENVIRONMENT, gpus=[GPU | {"sm_clock_mhz": clock, "memory_clock_mhz": clock} | gpu])
    summary = json.loads((path / SUMMARY).read_text())
    for metric in summary["metrics"]:
        factor = {"s": slowdown, "samples/s": 1 / slowdown}.get(metric["unit"], 1.0)
        metric["repeats"] = [value * factor for value in metric["repeats"]]
        metric["estimate"] *= factor
    edit(path / SUMMARY, metrics=summary["metrics"])
    return path


def equal_runs(results: Path) -> list[Path]:
    """Five that differ by 2 %, with what they teach on record in the first."""
    paths = [gpu_run(results, 345 + 300 * n, slowdown) for n, slowdown in enumerate((1.0, 1.02, 0.98, 1.015, 0.985))]
    noise.write(null(side(*paths)), paths[0])
    return paths


def test_a_gpu_is_the_same_machine_whatever_its_clocks_were(tmp_path: Path) -> None:
    idle, busy = (noise.machine(open_run(gpu_run(tmp_path, clock))) for clock in (345, 1980))
    assert idle == busy
    assert idle["gpus"][0]["power_cap_w"] == 700.0
    assert noise.machine(open_run(gpu_run(tmp_path, 345, power_cap_w=500.0))) != idle
    assert noise.machine(open_run(gpu_run(tmp_path, 345, uuid="GPU-2"))) != idle


def test_what_gpu_runs_taught_is_used_when_the_clocks_are_others(tmp_path: Path) -> None:
    first = equal_runs(tmp_path / "equal")[0]
    other = gpu_run(tmp_path / "other", 1755, 1.03)
    (comparison,) = compare([side(first), side(other)]).comparisons
    judged = {verdict.metric: verdict for verdict in comparison.verdicts}
    verdict = judged["step_time"]
    assert (verdict.verdict, verdict.level, verdict.units) == ("inconclusive", "run", (1, 1))
    assert verdict.interval
    assert verdict.interval[0] < 1 < verdict.interval[1]
    assert verdict.method == "Student's t; single runs with the recorded variation of equal ones"
    assert (
        compare([side(first), side(gpu_run(tmp_path / "slow", 1755, 1.2))]).comparisons[0].verdicts[0].verdict
        == "slower"
    )


def test_a_record_that_holds_momentary_clocks_is_used_too(tmp_path: Path) -> None:
    """As records were once written."""
    first = equal_runs(tmp_path / "equal")[0]
    edit(first / NOISE, machine={"host.name": "here", "gpus": [GPU | {"sm_clock_mhz": 1, "memory_clock_mhz": 1}]})
    assert noise.on_record(side(first), side(gpu_run(tmp_path / "other", 1755)))
    edit(first / NOISE, machine={"host.name": "there", "gpus": [GPU]})
    assert not noise.on_record(side(first), side(gpu_run(tmp_path / "other", 1755)))


def test_phases_of_two_runs_vary_as_those_of_equal_runs_did(tmp_path: Path) -> None:
    first = equal_runs(tmp_path / "equal")[0]
    (comparison,) = compare([side(first), side(gpu_run(tmp_path / "other", 1755, 1.03))]).comparisons
    waterfall = comparison.explanation.waterfall
    assert waterfall
    assert all(phase.p_value is None or phase.p_value > 0.05 for phase in waterfall.phases)
    assert comparison.explanation.notes == [UNSETTLED]


def test_runs_of_one_repeat_each_teach_how_runs_vary(tmp_path: Path) -> None:
    runs = [gpu_run(tmp_path, 345, slowdown, repeats=1) for slowdown in (1.0, 1.01)]
    assert {entry.level for entry in null(side(*runs)).metrics} == {"run"}
    runs = [gpu_run(tmp_path, 345, slowdown, repeats=2) for slowdown in (1.0, 1.01)]
    assert {entry.level for entry in null(side(*runs)).metrics} == {"repeat"}


def test_a_single_repeat_beside_another_uses_what_repeats_taught(tmp_path: Path) -> None:
    many = gpu_run(tmp_path / "many", 345, repeats=6)
    one, other = (gpu_run(tmp_path / name, 345, repeats=1) for name in ("one", "other"))
    alone = compare([side(one), side(other)]).comparisons[0].verdicts[0]
    assert alone.level == "step"
    learned = null(side(many))
    noise.write(msgspec.structs.replace(learned, runs=[one.name]), one)
    verdict = compare([side(one), side(other)]).comparisons[0].verdicts[0]
    assert verdict.level == "repeat"
    assert verdict.noise_floor == pytest.approx(
        next(entry.noise_floor for entry in learned.metrics if entry.metric == verdict.metric)
    )
