import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from scipy.signal import lfilter
from simulated import Drift, SimulatedRun, run_of, side_of

from gpubench.compare import warnings
from gpubench.compare.compare import _rejections
from gpubench.compare.evidence import RunEvidence, Series, Side
from gpubench.compare.warnings import changed_machine, delay, find_warnings, loss_apart, out_of_turn, rejection
from gpubench.metrics import Metric
from gpubench.runs.directory import RunRecord
from gpubench.runs.other_load import OtherLoad
from gpubench.runs.steps import SteadyWindow, StepTable
from gpubench.runs.summary import NO_MEASUREMENTS
from gpubench.runs.warnings import longer

# Recorded losses of gpt2-tiny on a CPU, batch 8, adamw: the same seed in fp32 and bf16, another seed, and a
# learning rate of 1e-8 in place of 1e-3.
FP32 = [
    5.556, 5.548, 5.542, 5.563, 5.435, 5.466, 5.470, 5.502, 5.380, 5.416, 5.414, 5.447, 5.339, 5.376, 5.366, 5.397,
    5.305, 5.340, 5.322, 5.350, 5.270, 5.302, 5.281, 5.307, 5.234, 5.263, 5.241, 5.265, 5.195, 5.224,
]  # fmt: skip
BF16 = [
    5.556, 5.548, 5.542, 5.562, 5.435, 5.466, 5.470, 5.502, 5.380, 5.416, 5.414, 5.447, 5.339, 5.376, 5.366, 5.397,
    5.305, 5.340, 5.322, 5.350, 5.270, 5.303, 5.281, 5.307, 5.234, 5.263, 5.241, 5.265, 5.196, 5.224,
]  # fmt: skip
OTHER_SEED = [
    5.550, 5.543, 5.557, 5.545, 5.434, 5.458, 5.488, 5.484, 5.380, 5.406, 5.434, 5.431, 5.340, 5.362, 5.386, 5.385,
    5.302, 5.321, 5.341, 5.341, 5.265, 5.282, 5.297, 5.300, 5.227, 5.243, 5.254, 5.259, 5.189, 5.203,
]  # fmt: skip
NOT_LEARNING = [5.556, 5.548, 5.544, 5.559] * 7 + [5.556, 5.548]
CLIMBING = [5.556 + 0.05 * step for step in range(30)]


@dataclass(frozen=True, kw_only=True)
class WatchedRun(RunEvidence):
    """Three repeats of ten seconds, all with the same losses on each rank."""

    losses: list[list[float]] = field(default_factory=list)

    @cached_property
    def steps(self) -> StepTable:
        rows = [
            (repeat, rank, step, loss)
            for repeat in range(3)
            for rank, losses in enumerate(self.losses)
            for step, loss in enumerate(losses)
        ]
        table = np.array(rows, dtype=np.float64).reshape(-1, 4)
        repeat, rank, step = table[:, :3].astype(np.int32).T
        columns = {"repeat": repeat, "rank": rank, "step": step, "loss": table[:, 3]}
        return replace(StepTable.of_totals(np.ones(len(rows))), **columns)


def metric(name: str, *repeats: float) -> Metric:
    return Metric(
        name=name,
        unit="",
        better=None,
        estimate=float(np.mean(repeats)),
        interval=None,
        n=1,
        effective_n=None,
        repeats=list(repeats),
        distribution=None,
    )


def run(
    label: str = "r",
    *,
    status: str = "completed",
    error: dict[str, str | None] | None = None,
    losses: list[list[float]] | None = None,
    others: OtherLoad | None = None,
    settings: dict[str, Any] | None = None,
    metrics: list[Metric] | None = None,
    throttled: dict[str, float] | None = None,
    problems: list[str] | None = None,
    host: str = "one",
    repeats: int = 3,
    settled: bool = True,
) -> WatchedRun:
    record = RunRecord(
        schema_version=1,
        experiment="e",
        run_id=label,
        command="train-bench",
        argv=[],
        status="failed" if error else "completed",
        started="",
        host=host,
        pid=1,
        pid_created=0.0,
        git=None,
        world_size=1,
        error=error,
    )
    return WatchedRun(
        label=label,
        path=Path(label),
        record=record,
        status=status,
        settings={"model.name": "gpt2-tiny", "data.workers": 0} | (settings or {}),
        environment={"cpu.logical_cores": 4},
        workload={},
        summary=msgspec.structs.replace(
            NO_MEASUREMENTS,
            metrics=list(metrics or []),
            steady=[SteadyWindow(number, 0, 10, settled or number > 0, 0.0, 10.0) for number in range(repeats)],
            throttled=throttled or {},
            others=others,
        ),
        problems=problems or [],
        losses=losses or [],
    )


def started(made: RunEvidence, when: str) -> RunEvidence:
    """The run as if it had begun at another time."""
    assert made.record
    return replace(made, record=structs.replace(made.record, started=when))


def side(*runs: RunEvidence, label: str = "b") -> Side:
    return Side(label, runs)


FINE = side(run(), label="a")


def said_of(*runs: RunEvidence) -> list[str]:
    """Beside a baseline that gives no cause for doubt."""
    return find_warnings(FINE, side(*runs))


def apart(ours: list[float] | Series, theirs: list[float] | Series) -> str | None:
    return loss_apart(side(run(losses=[list(ours)]), label="a"), side(run(losses=[list(theirs)])))


def test_two_sound_runs_leave_no_doubt() -> None:
    assert find_warnings(FINE, side(run(losses=[FP32]))) == []


def test_a_run_that_failed_is_told_with_its_reason() -> None:
    error: dict[str, str | None] = {"kind": "OutOfMemory", "message": "8 GiB did not suffice", "hint": None}
    assert said_of(run(status="failed", error=error)) == ["b: the run failed: 8 GiB did not suffice"]
    assert said_of(run(status="interrupted")) == ["b: the run was interrupted: no reason was recorded"]


def test_unfinished_runs_of_a_group_are_counted_and_one_is_named() -> None:
    found = said_of(run("r1"), run("r2", status="interrupted"), run("r3", status="interrupted"))
    assert found == ["b: 2 of 3 runs were not completed; r2 was interrupted: no reason was recorded"]


def test_a_loss_that_was_not_finite_rejects() -> None:
    error: dict[str, str | None] = {"kind": "NonFiniteLoss", "message": "the loss became nan at step 3", "hint": None}
    broken = run(status="failed", error=error, throttled={"SwPowerCap": 0.5})
    assert rejection(side(broken)) == "the run failed: the loss became nan at step 3"
    assert said_of(broken) == ["b: clocks were throttled by SwPowerCap for 50.0 % of the steady time"]


def test_skipped_steady_steps_reject() -> None:
    assert rejection(side(run(metrics=[metric("skipped_steps", 0.0, 3.0)]))) == (
        "the gradient scaler skipped 3 steady steps, which took time but did no work"
    )
    assert rejection(side(run(metrics=[metric("skipped_steps", 0.0, 0.0)]))) is None


def test_a_loss_that_is_not_finite_rejects() -> None:
    assert rejection(side(run(losses=[[*FP32[:7], np.inf, *FP32[8:]]]))) == (
        "the loss is not finite at step 7 (counting from 0)"
    )
    assert rejection(side(run(losses=[[*FP32[:7], np.nan, *FP32[8:]]]))) is None  # it is unknown


def test_a_side_that_compiles_in_some_of_its_steady_steps_is_not_called_slower() -> None:
    def compiling(steps: int) -> Side:
        found = run()
        return side(replace(found, summary=msgspec.structs.replace(found.summary, compiled=steps)), label=f"{steps}")

    some, most = compiling(2), compiling(20)
    assert delay(some) == "torch.compile compiled code in 2 of 30 steady steps, which their times include: " + longer(
        {}
    )
    assert (delay(most), delay(compiling(0))) == (None, None)
    for sides, rejected in (((compiling(0), some), "slower"), ((some, compiling(0)), "faster")):
        found = _rejections(*sides)
        assert found == {rejected: f"2: {delay(some)}"}
        assert f"2: {delay(some)}" in find_warnings(*sides)
    assert _rejections(compiling(0), most) == {}


def test_a_run_without_losses_is_not_rejected() -> None:
    assert rejection(side(run())) is None
    assert rejection(side(run(losses=[[np.nan] * 10]))) is None


def test_throttled_clocks_are_told_with_their_share() -> None:
    found = said_of(run("r1", throttled={"SwPowerCap": 0.6}), run("r2"))
    assert found == ["b: clocks were throttled by SwPowerCap for 30.0 % of the steady time"]


def load(**known: Any) -> OtherLoad:
    """Returns the load by others on a machine with four cores."""
    usual: dict[str, Any] = {"cores": 0.1, "processes": {}, "steal": 0.0, "gpu_share": None, "slowdown": None}
    return OtherLoad(machine_cores=4, **usual | known)


def test_other_processes_are_told() -> None:
    assert said_of(run(others=load(gpu_share=1 / 3))) == [
        "b: other processes were on its GPUs in 33.3 % of the checks around its repeats"
    ]
    assert said_of(run(others=load(cores=1.1))) == ["b: other processes kept 1.1 cores busy while it ran"]
    assert said_of(run(others=load())) == []


def test_what_others_took_of_the_cpu_is_laid_beside_what_the_runs_had() -> None:
    disturbed = side(run(others=load(slowdown=0.75)), run(others=load(slowdown=0.25)), run())
    assert warnings.disturbance(disturbed) == pytest.approx(0.5)
    assert warnings.disturbance(side(run(others=load()))) is None


def test_a_machine_that_was_slower_by_its_reference_workload_is_reported_and_raises_the_limit() -> None:
    fast, slow = (
        side(run(metrics=[metric("yardstick_time", 2e-3)])),
        side(run(metrics=[metric("yardstick_time", 2.2e-3)])),
    )
    assert warnings.machine_speed(fast, slow) == pytest.approx(1.1)
    assert warnings.accountable(fast, slow) == pytest.approx(1.1**2 - 1)
    assert warnings.accountable(slow, fast) == pytest.approx(1.1**2 - 1)
    assert changed_machine(fast, slow) == "the machine itself was 10.0 % slower for b, by its reference workload"
    assert changed_machine(fast, fast) is None
    assert warnings.machine_speed(side(run()), slow) is None
    absurd = side(run(metrics=[metric("yardstick_time", 1e-300)]))
    assert math.isfinite(warnings.accountable(absurd, slow))


def test_two_runs_out_of_turn_are_told() -> None:
    assert str(out_of_turn(side(run()), side(run()))).startswith("one run each, not interleaved")


def test_groups_are_told_if_all_of_one_were_made_before_the_other() -> None:
    def made(*hours: int) -> list[RunEvidence]:
        return [started(run(f"r{hour}"), f"2026-01-01T{hour:02}:00:00Z") for hour in hours]

    before, after = side(*made(1, 2, 3), label="old"), side(*made(4, 5), label="new")
    for sides in ((before, after), (after, before)):
        assert str(out_of_turn(*sides)).startswith("all runs of old were made before those of new")
    assert out_of_turn(side(*made(1, 3, 5)), side(*made(2, 4, 6))) is None
    assert out_of_turn(side(*made(1, 3)), side(*made(2))) is None


def test_time_that_the_hypervisor_took_is_told() -> None:
    assert said_of(run(others=load(steal=0.05))) == [
        "b: the hypervisor gave 5 % of the CPU to other guests while it ran"
    ]
    assert said_of(run(others=load(steal=0.01))) == []


def test_a_warmup_that_did_not_end_is_told() -> None:
    assert said_of(run(settled=False)) == [
        "b: 1 of 3 repeats may not be past the warm-up: raise training.warmup_steps or --steps"
    ]


def test_steps_that_do_not_fill_the_wall_are_told() -> None:
    assert said_of(run(metrics=[metric("closure_error", 0.001, 0.02)])) == [
        "b: phases, steps and wall time disagree by 2 %"
    ]
    assert said_of(run(metrics=[metric("closure_error", 0.004)])) == []


def test_a_group_from_several_machines_is_told() -> None:
    found = said_of(run("r1", host="one"), run("r2", host="two"))
    assert found == ["b: its runs come from 2 machines, one, two, and vary as those do"]


def test_a_repeat_or_a_run_that_lies_far_from_the_others_is_told() -> None:
    rng = np.random.default_rng(1)
    steps = [Drift(offset=0.003).repeat(rng, slowdown) for slowdown in (1.0, 1.4, 1.0)]
    said = "{} took 38.6 % more time than {}: an outlier, which is part of the mean"
    assert told(side_of(steps)) == [f"simulated: {said.format('1 of its 3 repeats', 'their median')}"]
    runs = tuple(run_of([repeat], label=f"{number}.csv") for number, repeat in enumerate(steps))
    assert told(Side("logs", runs)) == [f"logs: {said.format('1.csv', 'the median of the 3 runs')}"]
    assert told(side_of([Drift(offset=0.02).repeat(rng) for _ in range(3)])) == []


def test_steps_that_were_held_up_are_told_with_their_share_of_the_time() -> None:
    steps = Drift(steps=200, offset=0).repeat(np.random.default_rng(2))
    steps[::20] *= 10
    said = (
        "10 of its 200 steady steps took more than twice the median, up to 10.1 x: "
        "such spikes account for 31.0 % of its time"
    )
    assert told(side_of([steps])) == [f"simulated: {said}"]


@dataclass(frozen=True, kw_only=True)
class Evaluating(SimulatedRun):
    """Every twentieth step has an evaluation of 0.9 s."""

    def series(self, metric: str) -> list[Series] | None:
        found = super().series("step_time") or []
        apart = [np.where(np.arange(len(times)) % 20 == 0, 0.9, 0.0) for times in found]
        return apart if metric == "phase_evaluation" else [one + more for one, more in zip(found, apart, strict=True)]


def test_steps_with_an_evaluation_are_no_spikes() -> None:
    steady = run_of([Drift(steps=200, offset=0).repeat(np.random.default_rng(2))])
    evaluating = Evaluating(**{one.name: getattr(steady, one.name) for one in fields(steady)})
    assert told(Side("simulated", (evaluating,))) == []


@pytest.mark.parametrize("total", [-0.04, 0.02])
def test_steps_that_drift_through_a_run_are_told(total: float) -> None:
    steps = [Drift(steps=200, offset=0, noise=0.002, trend=total).repeat(np.random.default_rng(n)) for n in range(3)]
    (said,) = told(side_of(steps))
    word = "slower" if total > 0 else "faster"
    assert said.startswith("simulated: its steps drift: they became up to ")
    assert f" {word} from beginning to end in 3 of 3 repeats" in said


def test_steps_of_the_usual_noise_neither_drift_nor_have_spikes() -> None:
    rng = np.random.default_rng(4)
    found = [told(side_of([Drift(steps=198, noise=0.005).repeat(rng)])) for _ in range(200)]
    assert sum(map(bool, found)) <= 4


def told(side: Side) -> list[str]:
    """What is said of the steps of a side, beside an equal one."""
    return [said for said in find_warnings(side, side) if any(word in said for word in ("outlier", "spikes", "drift"))]


def test_too_few_repeats_are_told() -> None:
    assert said_of(run(repeats=1)) == [
        "b: one repeat only, so the variation between processes is unknown: raise --repeats"
    ]
    assert said_of(run(repeats=2)) == ["b: 2 repeats only, whose interval is wide: raise --repeats"]
    assert said_of(run("r1", repeats=1), run("r2", repeats=2)) == []


def test_what_could_not_be_read_is_counted() -> None:
    assert said_of(run(problems=["x:3: torn"])) == ["b: x:3: torn"]
    assert said_of(run(problems=["x:3: torn", "x:4: torn"])) == ["b: 2 problems in reading it, the first: x:3: torn"]


def test_precision_and_seed_do_not_set_losses_apart() -> None:
    assert apart(FP32, FP32) is None
    assert apart(FP32, BF16) is None
    assert apart(FP32, OTHER_SEED) is None


@pytest.mark.parametrize("broken", [NOT_LEARNING, CLIMBING], ids=["not learning", "climbing"])
def test_an_optimizer_that_does_not_work_is_seen(broken: list[float]) -> None:
    assert apart(FP32, broken)
    assert apart(broken, BF16)


def test_losses_apart_are_told_with_both_ways() -> None:
    assert apart(FP32, NOT_LEARNING) == (
        "the losses developed differently over 30 steps: from 5.56 to 5.29 in a and from 5.56 to 5.55 in b"
    )


def test_losses_apart_are_among_the_warnings() -> None:
    found = find_warnings(side(run(losses=[FP32]), label="a"), side(run(losses=[NOT_LEARNING])))
    assert found == [apart(FP32, NOT_LEARNING)]


def test_a_loss_that_is_not_finite_is_apart() -> None:
    assert apart(FP32, [*FP32[:9], np.inf, *FP32[10:]]) == "the loss of b is not finite at step 9 (counting from 0)"


def test_the_loss_of_a_step_is_the_mean_of_its_ranks() -> None:
    ours = side(run(losses=[FP32]), label="a")
    higher, lower = [loss + 1 for loss in FP32], [loss - 1 for loss in FP32]
    assert loss_apart(ours, side(run(losses=[higher, lower]))) is None
    assert loss_apart(ours, side(run(losses=[NOT_LEARNING, NOT_LEARNING]))) is not None


def test_losses_of_different_work_or_too_few_steps_are_not_compared() -> None:
    ours = side(run(losses=[FP32]))
    assert loss_apart(ours, side(run(losses=[NOT_LEARNING], settings={"model.name": "other"}))) is None
    assert loss_apart(ours, side(run())) is None
    assert apart(FP32[:9], NOT_LEARNING[:9]) is None


def learning(rng: np.random.Generator, steps: int, fall: float, noise: float, start: float = 5.5) -> Series:
    """A loss that falls and levels out, with steps that are correlated by 0.5."""
    scatter = lfilter([1.0], [1.0, -0.5], rng.standard_normal(steps)) * np.sqrt(0.75)
    return np.asarray(start - fall * (1 - np.exp(-3 * np.arange(steps) / steps)) + noise * scatter)


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("fall", [0.0, 0.5])
def test_losses_that_fall_alike_are_hardly_ever_called_apart(noise: float, fall: float) -> None:
    rng = np.random.default_rng(1)
    pairs = [(learning(rng, 50, fall, noise), learning(rng, 50, fall, noise, start=5.9)) for _ in range(200)]
    assert sum(apart(*pair) is not None for pair in pairs) <= 6


@pytest.mark.parametrize(("steps", "noise"), [(20, 0.01), (50, 0.01), (200, 0.1)])
def test_a_loss_that_stays_while_the_other_falls_is_seen(steps: int, noise: float) -> None:
    rng = np.random.default_rng(2)
    pairs = [(learning(rng, steps, 0.5, noise), learning(rng, steps, 0.0, noise)) for _ in range(100)]
    assert sum(apart(*pair) is not None for pair in pairs) >= 95
