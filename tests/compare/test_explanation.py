from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpubench.compare import explanation, verdicts
from gpubench.compare.comparability import judge
from gpubench.compare.evidence import RunEvidence, Series, Side
from gpubench.compare.explanation import NOTHING, OPEN, UNSETTLED, explain
from gpubench.compare.result import Comparability, Explanation, NullMetric, PhaseChange, Waterfall
from gpubench.compare.warnings import steady_telemetry
from gpubench.metrics import Metric
from gpubench.report.phrases import moves
from gpubench.runs.directory import RunRecord
from gpubench.runs.steps import SteadyWindow
from gpubench.runs.summary import NO_MEASUREMENTS, RankTimes
from gpubench.telemetry import GpuSample, TelemetrySample

MS = 1e-3
STEP = {"data_wait": 1.0, "forward": 10.0, "backward": 20.0, "optimizer": 4.0, "other": 0.1}
"""Milliseconds of a step's phases."""


@dataclass(frozen=True, kw_only=True)
class TimedRun(RunEvidence):
    """Three repeats that differ by the same few per mille in every phase, and nothing known of their steps."""

    clocks: Sequence[int] = field(default_factory=list)

    def series(self, metric: str) -> list[Series] | None:
        return None

    @cached_property
    def telemetry(self) -> list[TelemetrySample]:
        return [
            TelemetrySample(time=float(second), cost=0.0, gpus=[GpuSample(index=0, sm_clock_mhz=clock)])
            for second, clock in enumerate(self.clocks)
        ]


def metric(name: str, value: float, noise: float = 0.0) -> Metric:
    values = [value * (1 - noise), value, value * (1 + noise)]
    return Metric(
        name=name,
        unit="s",
        better=None,
        estimate=value,
        interval=None,
        n=1,
        effective_n=None,
        repeats=values,
        distribution=None,
    )


def run(
    phases: Mapping[str, float] = STEP,
    *,
    noise: float = 0.002,
    batch: int = 16,
    busy: Mapping[int, float] | None = None,
    clocks: Sequence[int] = (),
    starved: float | None = None,
    unexplained: float = 0.0,
) -> TimedRun:
    metrics = {f"phase_{name}": metric(f"phase_{name}", ms * MS, noise) for name, ms in phases.items()}
    metrics["step_time"] = metric("step_time", (sum(phases.values()) + unexplained) * MS, noise)
    if starved is not None:
        metrics["starved_steps"] = metric("starved_steps", starved)
    settings: dict[str, Any] = {"training.batch_size": batch, "training.grad_accumulation": 1}
    record = RunRecord(
        schema_version=1,
        experiment="e",
        run_id="r",
        command="train-bench",
        argv=[],
        status="completed",
        started="",
        host="h",
        pid=1,
        pid_created=0.0,
        git=None,
        world_size=len(busy or [0]),
    )
    return TimedRun(
        label="r",
        path=Path("r"),
        record=record,
        status="completed",
        settings=settings,
        environment={},
        workload={},
        summary=msgspec.structs.replace(
            NO_MEASUREMENTS,
            metrics=list(metrics.values()),
            steady=[SteadyWindow(number, 0, 1, True, 0.0, 10.0) for number in range(3)],
            ranks=[RankTimes(rank, ms * MS, ms * MS, 0.0) for rank, ms in (busy or {}).items()],
        ),
        clocks=clocks,
    )


def explained(
    baseline: RunEvidence,
    candidate: RunEvidence,
    *,
    force: bool = False,
    record: Sequence[NullMetric] = (),
    settled: bool = True,
) -> Explanation:
    ours, theirs = Side("a", (baseline,)), Side("b", (candidate,))
    return explain(ours, theirs, judge(ours, theirs, force=force), record, settled=settled)


def test_the_waterfall_sums_to_the_change_of_the_step() -> None:
    found = explained(run(), run(STEP | {"backward": 24.1, "forward": 10.5})).waterfall
    assert found is not None
    assert found.per == "step"
    assert [phase.phase for phase in found.phases] == ["data_wait", "forward", "backward", "optimizer", "other"]
    assert sum(phase.change for phase in found.phases) == pytest.approx(found.candidate - found.baseline, rel=1e-12)
    assert found.candidate - found.baseline == pytest.approx(4.6 * MS)


def test_a_phase_that_one_side_lacks_took_no_time_there() -> None:
    found = explained(run(), run(STEP | {"exposed_communication": 3.1}))
    assert found.waterfall is not None
    names = [phase.phase for phase in found.waterfall.phases]
    assert names[3:5] == ["exposed_communication", "optimizer"]
    communication = found.waterfall.phases[3]
    assert communication.baseline == 0
    assert communication.change == pytest.approx(3.1 * MS)
    assert found.notes == ["exposed communication accounts for +3.10 ms of the +3.10 ms (100 %)"]


def test_a_phase_of_a_later_version_comes_before_the_rest_of_the_step() -> None:
    found = explained(run(STEP | {"checkpoint": 1.0}), run()).waterfall
    assert found is not None
    assert [phase.phase for phase in found.phases][-3:] == ["optimizer", "checkpoint", "other"]


def test_what_the_phases_leave_open_is_the_rest() -> None:
    found = explained(run(), run(unexplained=2.0)).waterfall
    assert found is not None
    assert found.phases[-1].phase == "rest"
    assert sum(phase.change for phase in found.phases) == pytest.approx(found.candidate - found.baseline, rel=1e-12)


def test_steps_of_other_sizes_are_explained_by_the_sample() -> None:
    found = explained(run(), run({name: 2 * ms for name, ms in STEP.items()} | {"backward": 56.0}, batch=32))
    assert found.waterfall is not None
    assert found.waterfall.per == "sample"
    assert found.waterfall.baseline == pytest.approx(35.1 * MS / 16)
    assert found.waterfall.candidate - found.waterfall.baseline == pytest.approx(0.5 * MS)
    assert found.notes == ["backward accounts for +500 us of the +500 us a sample (100 %)"]


def test_the_largest_cause_is_named_first_with_its_share() -> None:
    found = explained(run(), run(STEP | {"forward": 10.5, "backward": 24.1}))
    assert found.notes == [
        "backward accounts for +4.10 ms of the +4.60 ms (89 %)",
        "forward accounts for +500 us of the +4.60 ms (11 %)",
    ]


def test_a_phase_that_moved_against_the_step_claims_no_share() -> None:
    backward, forward = explained(run(), run(STEP | {"forward": 6.2, "backward": 25.4})).notes
    assert backward == "backward changed by +5.40 ms, while the whole changed by +1.60 ms"
    assert forward == "forward changed by -3.80 ms, while the whole changed by +1.60 ms"


def test_changes_within_their_noise_are_not_named() -> None:
    found = explained(run(noise=0.05), run(STEP | {"backward": 20.3}, noise=0.05))
    assert found.notes == ["no phase with a large share of the change exceeds its own noise"]


@pytest.mark.parametrize("settled", [True, False])
def test_no_sentence_denies_an_interval_that_excludes_zero(settled: bool) -> None:
    doubtful = PhaseChange("forward", 1.0, 1.5, 0.5, (0.1, 0.9), 0.2)
    other = PhaseChange("backward", 1.0, 1.0, 0.0, (-0.1, 0.1), 1.0)
    found = Waterfall("step", 2.0, 2.5, [doubtful, other])
    said = explanation._silence(found) if settled else explanation._unsettled(found)
    assert said == ["no phase changed after the correction for 2 phases; judged alone, forward would have"]


def test_nothing_is_named_as_the_cause_of_a_change_that_is_not_settled() -> None:
    ours, theirs = run(), run(STEP | {"forward": 14.0})
    assert explained(ours, theirs, settled=False).notes == ["forward changed by +4 ms", OPEN]
    noisy = run(noise=0.05), run(STEP | {"backward": 20.3}, noise=0.05)
    assert explained(*noisy, settled=False).notes == [UNSETTLED]
    assert explained(ours, theirs).notes[0].startswith("forward accounts for +4 ms")


def test_phases_are_judged_together_and_each_keeps_its_own_interval() -> None:
    """One of five phases that moved by as much as its noise allows once in 25 times is no news."""
    moved = STEP | {"forward": 10 * (1 + 0.0047)}
    waterfall = explained(run(noise=0.002), run(moved, noise=0.002)).waterfall
    assert waterfall
    forward = phase(waterfall.phases, "forward")
    assert forward.interval
    assert forward.interval[0] > 0
    assert forward.p_value
    assert forward.p_value > 0.05
    (said,) = explained(run(noise=0.002), run(moved, noise=0.002)).notes
    assert said == "no phase changed after the correction for 5 phases; judged alone, forward would have"


def test_a_single_repeat_is_taken_to_vary_as_those_of_the_other_side() -> None:
    many, one = run(noise=0.02), run(STEP | {"forward": 10.5})
    lone = replace(
        one,
        summary=msgspec.structs.replace(
            one.summary,
            metrics=[msgspec.structs.replace(each, repeats=[each.estimate]) for each in one.summary.metrics],
            steady=one.summary.steady[:1],
        ),
    )
    waterfall = explained(many, lone).waterfall
    assert waterfall
    forward = phase(waterfall.phases, "forward")
    half = 4.303 * 0.02 * 10 * MS * (1 / 3 + 1) ** 0.5  # Student's t with the two degrees of freedom of three
    assert forward.interval == pytest.approx((forward.change - half, forward.change + half), rel=1e-3)


def test_what_is_nothing_but_rounding_is_no_change() -> None:
    """What all other phases leave of a step is often 1e-17 s."""
    ours, theirs = run(STEP | {"other": 1.81e-14}, noise=0.0), run(STEP | {"other": 2.5e-14}, noise=0.0)
    waterfall = explained(ours, theirs).waterfall
    assert waterfall
    other = phase(waterfall.phases, "other")
    assert (other.baseline, other.candidate, other.change, other.interval) == (0.0, 0.0, 0.0, (0.0, 0.0))
    assert all(move.interval == "" for move in moves(waterfall))


def phase(phases: Sequence[PhaseChange], name: str) -> PhaseChange:
    return next(one for one in phases if one.phase == name)


def test_work_that_differs_is_not_explained_unless_forced() -> None:
    withheld = Comparability(comparable=False, forced=False, reasons=[], differences=[])
    ours, theirs = Side("a", (run(),)), Side("b", (run(),))
    assert explain(ours, theirs, withheld) == NOTHING
    forced = Comparability(comparable=False, forced=True, reasons=[], differences=[])
    assert explain(ours, theirs, forced).waterfall is not None


def test_a_side_without_phases_has_no_waterfall() -> None:
    found = explained(run({}, unexplained=30.0), run(clocks=[1000]))
    assert found.waterfall is None
    assert found.notes == []


def test_a_side_without_step_times_is_not_explained() -> None:
    empty = run()
    empty.metrics.clear()
    assert explained(empty, empty) == NOTHING


def test_the_rank_that_moved_alone_is_named() -> None:
    ours = run(busy={0: 30.0, 1: 30.0, 2: 30.0, 3: 30.0})
    theirs = run(STEP | {"backward": 22.1}, busy={0: 30.0, 1: 30.1, 2: 30.0, 3: 32.1})
    found = explained(ours, theirs)
    assert [change.rank for change in found.ranks][:2] == [3, 1]
    assert "rank 3 became 2.10 ms busier, the others did not change" in found.notes


def test_waiting_goes_with_the_slow_rank() -> None:
    phases = STEP | {"exposed_communication": 1.0}
    ours = run(phases, busy={0: 30.0, 1: 30.0})
    theirs = run(phases | {"exposed_communication": 3.0}, busy={0: 30.0, 1: 32.0})
    assert any("of waiting in exposed communication is a consequence" in note for note in explained(ours, theirs).notes)


def test_ranks_that_moved_together_are_not_singled_out() -> None:
    ours, theirs = run(busy={0: 30.0, 1: 30.0}), run(STEP | {"backward": 22.0}, busy={0: 32.0, 1: 32.0})
    assert not any("rank" in note for note in explained(ours, theirs).notes)


def test_no_more_than_five_ranks_are_shown() -> None:
    busy = {rank: 30.0 + rank for rank in range(8)}
    found = explained(run(busy=dict.fromkeys(busy, 30.0)), run(busy=busy)).ranks
    assert [change.rank for change in found] == [7, 6, 5, 4, 3]


def test_ranks_are_not_compared_between_worlds_of_other_sizes() -> None:
    assert explained(run(busy={0: 30.0}), run(busy={0: 30.0, 1: 30.0})).ranks == []
    assert explained(run(busy={0: 30.0}), run(busy={0: 30.0})).ranks == []


def test_a_slower_clock_and_more_work_add_up_to_the_change() -> None:
    theirs = run({name: 1.131 * ms for name, ms in STEP.items()}, clocks=[1755] * 5)
    found = explained(run(clocks=[1980] * 5), theirs)
    clock = found.clock
    assert clock is not None
    assert (clock.baseline_mhz, clock.candidate_mhz) == (1980, 1755)
    assert clock.by_clock + clock.by_work == pytest.approx(0.131)
    assert clock.by_clock == pytest.approx(0.128, abs=5e-4)
    assert found.notes[0] == (
        "the SM clock fell from 1980 to 1755 MHz, which can explain +12.8 % of +13.1 %; work changed by +0.3 %"
    )


def test_a_clock_that_changed_while_the_time_did_not_is_made_up_for_by_work() -> None:
    clock = explained(run(clocks=[1000]), run(clocks=[900])).clock
    assert clock is not None
    assert clock.by_clock == pytest.approx(-clock.by_work)
    assert clock.by_clock > 0.1


def test_a_clock_that_stayed_is_no_news() -> None:
    found = explained(run(clocks=[1980]), run(STEP | {"backward": 24.0}, clocks=[1980]))
    assert found.clock is not None
    assert not any("clock" in note for note in found.notes)


def test_without_a_clock_on_both_sides_nothing_is_said_of_it() -> None:
    assert explained(run(clocks=[1980]), run()).clock is None
    assert explained(run(clocks=[1980]), run(clocks=[0])).clock is None


def test_telemetry_outside_the_steady_windows_does_not_count() -> None:
    watched = run(clocks=[1000] * 30)
    assert [sample.time for sample in steady_telemetry(watched)] == list(range(11))


def test_phases_that_grew_while_the_device_was_idle_are_called_symptoms() -> None:
    notes = explained(run(starved=0.03), run(STEP | {"data_wait": 9.0}, starved=0.92)).notes
    assert notes[0].startswith("data wait accounts for +8")
    assert notes[1].startswith("the device was idle at the start of 92.0 % of the steps (3 % before)")


@pytest.mark.parametrize(("noise", "told"), [(0.002, True), (0.05, True), (0.6, False)])
def test_a_ratio_whose_interval_says_nothing_is_unknown_everywhere(noise: float, told: bool) -> None:
    ours, theirs = Side("base", (run(noise=noise),)), Side("new", (run(STEP | {"forward": 10.01}, noise=noise),))
    found = verdicts.judge(ours.runs[0].metrics["step_time"], ours, theirs, verdicts.Circumstances()).verdict
    assert (found.ratio is not None) == (found.interval is not None) == told
    assert (found.noise_floor is not None) == (found.resolvable is not None) == told
    assert found.too_noisy != told
    assert (found.reason == verdicts.TOO_FAR_APART) != told
    assert found.more_repeats is None or found.more_repeats <= verdicts.MOST_ADVISED
