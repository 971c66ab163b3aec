"""Batches and fixes that are tried on the device: what is made of the runs. The runs are made up here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from footprints_made import MIB, of_phases, phase, predicted
from hypothesis import given
from hypothesis import settings as limited
from hypothesis import strategies as st

from gpubench.bench import Bench
from gpubench.compare.gate import Condition
from gpubench.compare.losses import Margin
from gpubench.compare.result import Comparisons, Verdict
from gpubench.errors import GpubenchError, Interrupted, OutOfMemory, SettingsError, WorkerLost
from gpubench.findings import Finding, Findings
from gpubench.host.schedule import Outcome
from gpubench.kinds.memory.recorder import MemoryRecorder
from gpubench.kinds.memory.settings import MemorySettings
from gpubench.memory.batch_sizes import BatchSizes, LinearFit
from gpubench.memory.footprint import Footprint
from gpubench.metrics import DEFINITIONS, Metric
from gpubench.registry import kind_of
from gpubench.runs.summary import Summary
from gpubench.settings.defaults import complete
from gpubench.settings.keys import flatten
from gpubench.settings.loading import Configuration, completed, load
from gpubench.settings.schema import CompletedTrainSettings
from gpubench.trials import (
    MOST_TRIES,
    NOTABLE,
    SEARCH_PRECISION,
    Searched,
    TriedFixes,
    confirm,
    peak_of,
    saved,
    verify_memory,
)

PEAK = 1000 * MIB
"""Of the run as it was."""
FUSED, WORKERS, CHECKPOINTED = (
    {"training.optimizer_impl": "fused"},
    {"data.workers": 2},
    {"model.activation_checkpointing": True},
)


class Made(MemoryRecorder):
    """Of a run that came to these footprints."""

    def __init__(self, name: str, *ranks: Footprint) -> None:
        self._found = {(0, rank): found for rank, found in enumerate(ranks)}
        self.writer = cast("Any", SimpleNamespace(path=Path(name)))


def holding(size: int, later: int = 0) -> Footprint:
    """Of `size` bytes at its peak, and so many more that its allocator takes when that is over."""
    found = of_phases(predicted(), [phase("steady", "backward", {"activations": size})], "steady", "backward")
    assert found.timeline.reserved is not None
    reserved = [*found.timeline.reserved[:-1], size + later]
    return msgspec.structs.replace(found, timeline=msgspec.structs.replace(found.timeline, reserved=reserved))


def ended(name: str, *ranks: Footprint, error: GpubenchError | None = None) -> Outcome:
    return Outcome(Made(name, *ranks), "failed" if error else "completed", summary([]), error)


def summary(metrics: list[Metric]) -> Summary:
    return Summary(metrics, [], [], None, None, None, {}, [])


def timed(throughput: float) -> Outcome:
    known = DEFINITIONS["throughput"]
    found = Metric("throughput", known.unit, known.better, throughput, None, 2, None, [throughput] * 2, None)
    return Outcome(cast("Any", None), "completed", summary([found]), None)


def judge(outcomes: Sequence[Outcome]) -> Comparisons:
    """A change of 5 % is one; one of 1 % is none."""
    without, with_fix = outcomes
    before, after = (one.summary["throughput"].estimate for one in (without, with_fix))
    ratio = after / before
    outcome = (
        "faster" if ratio > 1.05 else "slower" if ratio < 0.95 else "equivalent" if 0.99 < ratio < 1.01
        else "withheld"
    )  # fmt: skip
    verdict = Verdict(
        metric="throughput", unit="samples/s", better="higher", verdict=cast("Any", outcome), baseline=before,
        candidate=after, ratio=ratio, interval=(ratio - 0.01, ratio + 0.01), margin=0.01, limit=0.01, method="",
    )  # fmt: skip
    return cast("Comparisons", SimpleNamespace(comparisons=[SimpleNamespace(verdicts=[verdict])]))


@dataclass
class Machine(Bench):
    """Runs nothing: a batch takes 1 MiB a sample, and what goes beyond `memory` is out of memory."""

    memory: int = 1 << 40
    factors: dict[str, float] = field(default_factory=dict)
    """What a run with a setting takes, as a multiple of PEAK."""
    speeds: dict[str, float] = field(default_factory=dict)
    """The same of its speed."""
    failing: dict[str, GpubenchError] = field(default_factory=dict)
    """Errors of runs with a setting; SettingsError as it is checked."""
    later: int = 0
    followed: list[Configuration[Any]] = field(default_factory=list)
    timed: list[Configuration[Any]] = field(default_factory=list)

    @property
    def timing(self) -> Bench:
        return Timer(self)

    @property
    def batches(self) -> list[int]:
        return [one.settings.training.batch_size for one in self.followed]

    def complete(self, configuration: Configuration[Any]) -> Configuration[Any]:
        for error in self._errors(configuration, "the fix of a finding"):
            if isinstance(error, SettingsError):
                raise error
        return completed(configuration, complete)

    def run(self, variants: Sequence[Configuration[Any]], **how: Any) -> list[Outcome]:
        self.followed += variants
        return [self._outcome(run) for run in variants]

    def compare(
        self,
        outcomes: Sequence[Outcome],
        metrics: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        loss_margin: Margin | None = None,
    ) -> Comparisons:
        return judge(outcomes)

    def time(self, runs: Sequence[Configuration[Any]]) -> list[Outcome]:
        self.timed += runs
        return [timed(float(run.settings.training.batch_size) * self._product(run, self.speeds)) for run in runs]

    def _errors(self, run: Configuration[Any], origin: str) -> list[GpubenchError]:
        return [error for key, error in self.failing.items() if run.origins.get(key) == origin]

    def _outcome(self, run: Configuration[Any]) -> Outcome:
        batch_size = run.settings.training.batch_size
        if run.origins["training.batch_size"] != "a batch to confirm":
            (error, *_) = [*self._errors(run, "the fix of a finding"), None]
            return ended("fix", holding(round(PEAK * self._product(run, self.factors))), error=error)
        (error, *_) = [*self._errors(run, "a batch to confirm"), None]
        if batch_size * MIB > self.memory:
            error = error or OutOfMemory("out of memory in backward")
        return ended(str(batch_size), *([] if error else [holding(batch_size * MIB, self.later)]), error=error)

    def _product(self, run: Configuration[Any], factors: dict[str, float]) -> float:
        product = 1.0
        for key, factor in factors.items():
            product *= factor if run.origins.get(key) == "the fix of a finding" else 1.0
        return product


class Timer(Bench):
    """Times what a machine runs."""

    def __init__(self, machine: Machine) -> None:
        self.kind = kind_of("train-bench")
        self._machine = machine

    def run(self, variants: Sequence[Configuration[Any]], **how: Any) -> list[Outcome]:
        return self._machine.time(variants)


@pytest.fixture(scope="module")
def run() -> Configuration[Any]:
    given = {"model": "gpt2-tiny", "device": "cpu", "find_batch_size": True}
    return completed(load(MemorySettings, None, given), complete)


def foretold(largest: int | None, limit: int) -> BatchSizes:
    """`limit` in samples."""
    line = LinearFit(0.0, 0.0, 0.0)
    return BatchSizes(capacity=2 * limit * MIB, spare=0.5, limit=limit * MIB, points=[], line=line, largest=largest)


def finding(name: str, fix: dict[str, Any]) -> Finding:
    return Finding(
        id=name, title=name, severity="high", evidence=[], cause="", advice="", fix=fix, threshold="none"
    )  # fmt: skip


def findings(*fixes: dict[str, Any]) -> Findings:
    return Findings(headline="", findings=[finding(f"f{place}", fix) for place, fix in enumerate(fixes)], unanswered=[])


def searched(found: BatchSizes, run: Configuration[Any], machine: Machine) -> tuple[BatchSizes, Outcome | None]:
    """What is known at the end, and the run of the largest that fits."""
    *_, last = [Searched(found, None), *confirm(found, run, machine)]
    return last.found, last.best


def tried(before: Outcome, run: Configuration[Any], found: Findings, machine: Machine) -> TriedFixes:
    *_, last = verify_memory(before, run, found, machine)
    return last


# Batch sizes


def test_a_prediction_that_holds_is_run_once_and_timed_with_its_halves(run: Configuration[Any]) -> None:
    machine = Machine()
    found, best = searched(foretold(100, limit=100), run, machine)
    assert (found.largest, machine.batches) == (100, [100])
    assert [(one.batch_size, one.total, one.reason) for one in found.confirmed] == [(100, 100 * MIB, None)]
    assert [(one.batch_size, one.throughput) for one in found.speeds] == [(25, 25.0), (50, 50.0), (100, 100.0)]
    assert best is not None
    assert peak_of(best) == 100 * MIB


def test_a_prediction_that_was_too_hopeful_is_halved_until_one_fits_and_then_closed_in_on(
    run: Configuration[Any],
) -> None:
    machine = Machine()
    found, best = searched(foretold(100, limit=60), run, machine)
    assert machine.batches == [100, 50, 75, 62, 56, 59, 60]
    assert found.largest == 60
    assert [one.total for one in found.confirmed] == [size * MIB for size in machine.batches]
    assert [one.reason for one in found.confirmed if one.batch_size <= 60] == [None] * 4
    assert {one.reason for one in found.confirmed if one.batch_size > 60} == {"leaves too little memory free"}
    assert best is not None
    assert peak_of(best) == 60 * MIB


def test_of_predictions_of_8_where_1_fits_1_is_found(run: Configuration[Any]) -> None:
    machine = Machine(memory=MIB)
    found, best = searched(foretold(8, limit=1), run, machine)
    assert machine.batches == [8, 4, 2, 1]
    assert found.largest == 1
    assert [one.total for one in found.confirmed] == [None, None, None, MIB]
    assert [one.reason for one in found.confirmed] == ["out of memory in backward"] * 3 + [None]
    assert [one.batch_size for one in found.speeds] == [1]
    assert best is not None


def test_that_none_fits_is_said_only_when_1_was_tried(run: Configuration[Any]) -> None:
    machine = Machine(memory=0)
    found, best = searched(foretold(1000, limit=0), run, machine)
    assert machine.batches == [1000, 500, 250, 125, 62, 31, 15, 7, 3, 1], "however many it takes"
    assert (found.largest, best, found.speeds, machine.timed) == (None, None, [], [])


def test_where_none_is_predicted_to_fit_none_is_run(run: Configuration[Any]) -> None:
    machine = Machine()
    found = foretold(None, limit=10)
    assert searched(found, run, machine) == (found, None)
    assert machine.followed == []


@limited(max_examples=60, deadline=None)
@given(largest=st.integers(1, 3000), limit=st.integers(0, 3000), memory=st.integers(0, 3000))
def test_the_largest_that_is_found_fits_and_is_near_the_largest_that_does(
    run: Configuration[Any], largest: int, limit: int, memory: int
) -> None:
    machine = Machine(memory=memory * MIB)
    found, _ = searched(foretold(largest, limit), run, machine)
    true = min(largest, limit, memory)
    assert len(set(machine.batches)) == len(machine.batches), "none is run twice"
    if not true:
        assert (found.largest, machine.batches[-1]) == (None, 1)
        return
    assert found.largest is not None
    assert found.largest <= true <= 2 * found.largest
    assert found.largest in machine.batches
    if len(machine.batches) < MOST_TRIES:
        assert true - found.largest < max(1, SEARCH_PRECISION * found.largest)


def test_what_the_allocator_holds_after_the_peak_has_to_fit_as_well(run: Configuration[Any]) -> None:
    machine = Machine(later=40 * MIB)
    found, _ = searched(foretold(100, limit=100), run, machine)
    assert machine.batches[0] == 100
    assert found.confirmed[0].total == 140 * MIB
    assert found.largest is not None
    assert 57 <= found.largest <= 60


def test_of_several_ranks_the_fullest_has_to_fit() -> None:
    assert peak_of(ended("run", holding(7 * MIB), holding(5 * MIB, later=4 * MIB), holding(8 * MIB))) == 9 * MIB
    assert peak_of(ended("run", holding(7 * MIB), error=OutOfMemory("out of memory"))) is None
    assert peak_of(ended("run")) is None
    assert peak_of(None) is None


@pytest.mark.parametrize("error", [Interrupted("interrupted"), SettingsError("that cannot be")])
def test_what_is_not_for_want_of_memory_ends_the_search(run: Configuration[Any], error: GpubenchError) -> None:
    machine = Machine(failing={"training.batch_size": error})
    with pytest.raises(type(error), match=error.message):
        searched(foretold(100, limit=60), run, machine)
    assert machine.batches == [100]
    assert machine.timed == []


def test_a_process_that_was_killed_had_too_little_memory(run: Configuration[Any]) -> None:
    machine = Machine(failing={"training.batch_size": WorkerLost("the worker was killed by SIGKILL")})
    found, best = searched(foretold(4, limit=4), run, machine)
    assert machine.batches == [4, 2, 1]
    assert (found.largest, best) == (None, None)
    assert {one.reason for one in found.confirmed} == {"the worker was killed by SIGKILL"}


def test_each_run_is_told_of_as_it_ends(run: Configuration[Any]) -> None:
    told = list(confirm(foretold(8, limit=2), run, Machine()))
    assert [one.found.largest for one in told] == [None, None, 2, 2, 2]
    assert [len(one.found.confirmed) for one in told] == [1, 2, 3, 4, 4]
    assert [len(one.found.speeds) for one in told] == [0, 0, 0, 0, 2]
    assert [one.best and peak_of(one.best) for one in told] == [None, None, *[2 * MIB] * 3]


def test_an_interrupt_while_batches_are_timed_is_the_users(run: Configuration[Any]) -> None:
    class Impatient(Machine):
        def time(self, runs: Sequence[Configuration[Any]]) -> list[Outcome]:
            return [Outcome(cast("Any", None), "interrupted", summary([]), Interrupted("interrupted")) for _ in runs]

    becoming = confirm(foretold(8, limit=8), run, Impatient())
    assert next(becoming).found.largest == 8, "what was found stays"
    with pytest.raises(Interrupted):
        next(becoming)


def test_a_batch_is_confirmed_in_a_run_like_the_one_asked_for(run: Configuration[Any]) -> None:
    machine = Machine()
    searched(foretold(64, limit=64), run, machine)
    (tried,) = machine.followed
    before, after = (flatten(one.settings.model_dump(mode="json")) for one in (run, tried))
    assert {key: value for key, value in after.items() if value != before[key]} == {
        "experiment": f"{run.settings.experiment}-verify",
        "memory.find_batch_size": False,
        **({"memory.advise": False} if before["memory.advise"] else {}),
        "training.batch_size": 64,
        **({"data.samples": 128} if before["data.samples"] < 128 else {}),
    }
    assert {type(one.settings) for one in machine.timed} == {CompletedTrainSettings}
    assert [one.settings.training.batch_size for one in machine.timed] == [16, 32, 64]
    assert {one.settings.measurement.repeats for one in machine.timed} == {2}


# Fixes


def test_a_fix_is_confirmed_by_what_it_saves_with_what_it_costs(run: Configuration[Any]) -> None:
    machine = Machine(
        factors={"model.activation_checkpointing": 0.75}, speeds={"model.activation_checkpointing": 0.8}
    )  # fmt: skip
    found = tried(ended("base", holding(PEAK)), run, findings(CHECKPOINTED), machine)
    (trial,) = [one.measured for one in found.findings.findings]
    assert trial is not None
    assert trial.saving is not None
    assert trial.cost is not None
    assert (trial.outcome, trial.saving.estimate, trial.reason) == ("confirmed", 0.25, None)
    assert trial.cost.verdict == "slower"
    assert trial.cost.change == pytest.approx(-0.2)
    assert trial.cost.interval == pytest.approx((-0.21, -0.19))
    assert (trial.run, trial.baseline) == ("fix", "base")
    assert [(one.fix, one.peak, one.efficient) for one in found.trades.trades] == [
        (CHECKPOINTED, PEAK * 3 // 4, True), ({}, PEAK, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("factor", "outcome"),
    [(1.0, "no effect"), (1 - 0.8 * NOTABLE, "no effect"), (1 - 1.2 * NOTABLE, "confirmed"), (1.1, "worse")],
)
def test_a_fix_that_saves_next_to_nothing_has_no_effect(run: Configuration[Any], factor: float, outcome: str) -> None:
    machine = Machine(factors={"data.workers": factor})
    found = tried(ended("base", holding(PEAK)), run, findings(WORKERS), machine)
    (trial,) = [one.measured for one in found.findings.findings]
    assert trial is not None
    assert trial.outcome == outcome


def test_several_fixes_are_tried_alone_and_together(run: Configuration[Any]) -> None:
    machine = Machine(factors={"training.optimizer_impl": 0.5, "model.activation_checkpointing": 0.6})
    found = tried(ended("base", holding(PEAK)), run, findings(FUSED, {}, CHECKPOINTED), machine)
    first, without, last = (one.measured for one in found.findings.findings)
    assert without is None
    assert [one and one.saving and one.saving.estimate for one in (first, last)] == pytest.approx([0.5, 0.4])
    together = found.trades.trades[0]
    assert (together.fix, together.peak) == (FUSED | CHECKPOINTED, round(PEAK * 0.3))
    assert len(machine.followed) == 3
    assert len(machine.timed) == 4
    assert found.findings.combination is not None
    assert found.findings.combination.fix == FUSED | CHECKPOINTED
    assert saved(found.findings.combination.measured) == pytest.approx(0.7)
    assert found.findings.keep == FUSED | CHECKPOINTED


@pytest.mark.parametrize(
    ("speeds", "kept"),
    [
        ({}, FUSED | CHECKPOINTED),
        ({"training.optimizer_impl": 1.2}, FUSED | CHECKPOINTED),
        ({"training.optimizer_impl": 0.97}, FUSED | CHECKPOINTED),
        ({"training.optimizer_impl": 0.8}, CHECKPOINTED),
        ({"training.optimizer_impl": 0.8, "model.activation_checkpointing": 0.9}, {}),
    ],
)
def test_what_saves_most_is_kept_unless_it_was_found_to_be_slower(
    run: Configuration[Any], speeds: dict[str, float], kept: dict[str, Any]
) -> None:
    factors = {"training.optimizer_impl": 0.5, "model.activation_checkpointing": 0.6}
    found = tried(
        ended("base", holding(PEAK)), run, findings(FUSED, CHECKPOINTED), Machine(factors=factors, speeds=speeds)
    )
    assert found.findings.keep == kept


def test_what_was_not_confirmed_is_not_combined(run: Configuration[Any]) -> None:
    machine = Machine(factors={"training.optimizer_impl": 0.5, "data.workers": 1.2})
    found = tried(ended("base", holding(PEAK)), run, findings(FUSED, WORKERS), machine)
    assert found.findings.combination is None
    assert [one.fix for one in found.trades.trades] == [FUSED, {}, WORKERS]
    assert found.findings.keep == FUSED


def test_of_several_fixes_of_one_setting_the_first_that_saved_most_is_combined(run: Configuration[Any]) -> None:
    machine = Machine(factors={"data.workers": 0.5, "training.optimizer_impl": 0.6})
    found = tried(
        ended("base", holding(PEAK)), run, findings(WORKERS, {"data.workers": 4}, FUSED), machine
    )  # fmt: skip
    assert [one.fix for one in found.trades.trades if len(one.fix) > 1] == [WORKERS | FUSED]


@pytest.mark.parametrize("error", [OutOfMemory("out of memory in forward"), SettingsError("that cannot be")])
def test_a_fix_that_cannot_run_has_failed_and_the_others_are_tried(
    run: Configuration[Any], error: GpubenchError
) -> None:
    machine = Machine(factors={"training.optimizer_impl": 0.5}, failing={"data.workers": error})
    found = tried(ended("base", holding(PEAK)), run, findings(WORKERS, FUSED), machine)
    first, second = (one.measured for one in found.findings.findings)
    assert first is not None
    assert second is not None
    assert (first.outcome, first.saving, second.outcome) == ("failed", None, "confirmed")
    assert first.reason == error.message
    assert [(one.fix, one.reason) for one in found.trades.trades if one.peak is None] == [(WORKERS, error.message)]
    assert len(machine.timed) == 2, "what failed is not timed"


def test_an_interrupt_while_fixes_are_tried_is_the_users(run: Configuration[Any]) -> None:
    machine = Machine(failing={"data.workers": Interrupted("interrupted")})
    with pytest.raises(Interrupted):
        next(verify_memory(ended("base", holding(PEAK)), run, findings(WORKERS, FUSED), machine))
    assert machine.timed == []


def test_what_fixes_save_is_known_before_anything_is_timed(run: Configuration[Any]) -> None:
    machine = Machine(factors={"data.workers": 0.5})
    early, late = verify_memory(ended("base", holding(PEAK)), run, findings(WORKERS), machine)
    before, after = (known.findings.findings[0].measured for known in (early, late))
    assert before is not None
    assert after is not None
    assert (before.saving, before.cost) == (after.saving, None)
    assert after.cost is not None
    assert after.cost.verdict == "equivalent"
    assert [one.throughput for one in early.trades.trades] == [None, None]


def test_without_a_fix_nothing_is_run(run: Configuration[Any]) -> None:
    machine = Machine()
    given = findings({})
    found = tried(ended("base", holding(PEAK)), run, given, machine)
    assert found.findings == given
    assert [(one.fix, one.peak) for one in found.trades.trades] == [({}, PEAK)]
    assert (machine.followed, machine.timed) == ([], [])
