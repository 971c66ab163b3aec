"""Fixes that are tried: what is made of the runs with and without them. The runs are made up here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gpubench.bench import Bench
from gpubench.compare.gate import Condition
from gpubench.compare.losses import Margin
from gpubench.compare.result import Comparisons, Verdict
from gpubench.errors import GpubenchError, Interrupted, OutOfMemory, SettingsError
from gpubench.findings import Finding, Findings
from gpubench.host.schedule import Outcome
from gpubench.report.findings import options
from gpubench.settings.defaults import complete
from gpubench.settings.keys import flatten
from gpubench.settings.loading import Configuration, completed, load
from gpubench.settings.schema import ProfileSettings
from gpubench.trials import unrecorded, verify_speed

FUSED, WORKERS, BATCH = (
    {"training.optimizer_impl": "fused"},
    {"data.workers": 2},
    {"training.batch_size": 16},
)


def finding(name: str, fix: dict[str, Any]) -> Finding:
    return Finding(
        id=name, title=name, severity="high", evidence=[], cause="", advice="", fix=fix, threshold="none"
    )  # fmt: skip


def found(*findings: Finding) -> Findings:
    return Findings(headline="", findings=list(findings), unanswered=[])


@pytest.fixture
def profiled() -> Configuration[Any]:
    return completed(load(ProfileSettings, None, {"model": "gpt2-tiny", "device": "cpu"}), complete)


@dataclass
class Machine(Bench):
    """Measures by the table: how much faster a run with a setting is, or what comes of it."""

    speedup: dict[str, float]
    failing: dict[str, GpubenchError]
    measured: list[list[dict[str, Any]]] = field(default_factory=list)
    """What each call was asked for, as changes from its first configuration."""
    missed: dict[str, str] = field(default_factory=dict)
    """The settings that find nothing to change, with the reasons."""

    def complete(self, configuration: Configuration[Any]) -> Configuration[Any]:
        for key, error in self.failing.items():
            if isinstance(error, SettingsError) and configuration.origins.get(key) == "the fix of a finding":
                raise error
        return completed(configuration, complete)

    def run(self, variants: Sequence[Configuration[Any]], **how: Any) -> list[Outcome]:
        base, *candidates = [flatten(run.settings.model_dump()) for run in variants]
        changes = [{key: value for key, value in one.items() if base[key] != value} for one in candidates]
        self.measured.append(changes)
        return [self._outcome({}), *map(self._outcome, changes)]

    def compare(
        self,
        outcomes: Sequence[Outcome],
        metrics: Sequence[str] = (),
        conditions: Sequence[Condition] = (),
        loss_margin: Margin | None = None,
    ) -> Comparisons:
        _, with_fix = outcomes
        ratio = self.ratio(cast("Any", with_fix).changes)
        outcome = "faster" if ratio > 1.05 else "slower" if ratio < 0.95 else "equivalent"
        verdict = Verdict(
            metric="throughput", unit="samples/s", better="higher", verdict=cast("Any", outcome), baseline=1.0,
            candidate=ratio, ratio=ratio, interval=(ratio * 0.98, ratio * 1.02), margin=0.01, limit=0.01, method="",
        )  # fmt: skip
        return cast("Comparisons", SimpleNamespace(comparisons=[SimpleNamespace(verdicts=[verdict])]))

    def ratio(self, changes: dict[str, Any]) -> float:
        return math.prod(self.speedup.get(key, 1.0) for key in changes)

    def _outcome(self, changes: dict[str, Any]) -> Any:
        error = next((self.failing[key] for key in changes if key in self.failing), None)
        path = Path("fix" if changes else "base")
        recorder = SimpleNamespace(writer=SimpleNamespace(path=path))
        summary = SimpleNamespace(missed={key: reason for key, reason in self.missed.items() if key in changes})
        return SimpleNamespace(recorder=recorder, error=error, changes=changes, summary=summary)


def machine(speedup: dict[str, float] | None = None, failing: dict[str, GpubenchError] | None = None) -> Machine:
    return Machine(speedup or {}, failing or {})


def tried(profiled: Configuration[Any], findings: Findings, measure: Machine) -> Findings:
    """What is known at the end."""
    *_, last = verify_speed(profiled, findings, measure)
    return last


def test_a_fix_that_makes_the_run_faster_is_confirmed_with_its_interval(profiled: Configuration[Any]) -> None:
    known = tried(profiled, found(finding("slow", FUSED)), machine({"training.optimizer_impl": 2.0}))
    trial = known.findings[0].measured
    assert trial is not None
    assert trial.outcome == "confirmed"
    assert (trial.run, trial.baseline) == ("fix", "base")
    assert trial.saving is not None
    assert trial.saving.estimate == pytest.approx(0.5)
    assert trial.saving.low == pytest.approx(1 - 1 / 1.96)
    assert trial.saving.high == pytest.approx(1 - 1 / 2.04)
    assert known.keep == FUSED


@pytest.mark.parametrize(("ratio", "outcome"), [(1.0, "no effect"), (0.5, "worse")])
def test_a_fix_that_does_not_help_is_said_so_and_not_kept(
    profiled: Configuration[Any], ratio: float, outcome: str
) -> None:
    known = tried(profiled, found(finding("slow", FUSED)), machine({"training.optimizer_impl": ratio}))
    trial = known.findings[0].measured
    assert trial is not None
    assert trial.outcome == outcome
    assert known.keep == {}
    assert known.combination is None


def test_confirmed_fixes_are_tried_together(profiled: Configuration[Any]) -> None:
    measure = machine({"training.optimizer_impl": 1.5, "data.workers": 2.0, "training.batch_size": 0.5})
    findings = found(finding("a", FUSED), finding("b", WORKERS), finding("c", BATCH))
    known = tried(profiled, findings, measure)
    assert measure.measured == [[FUSED, WORKERS, BATCH], [FUSED | WORKERS]]
    assert known.combination is not None
    assert known.combination.fix == FUSED | WORKERS
    assert known.combination.measured.saving is not None
    assert known.combination.measured.saving.estimate == pytest.approx(1 - 1 / 3)
    assert known.keep == FUSED | WORKERS


def test_where_fixes_get_in_each_others_way_the_better_one_is_kept(profiled: Configuration[Any]) -> None:
    class Jealous(Machine):
        def ratio(self, changes: dict[str, Any]) -> float:
            return 1.2 if len(changes) > 1 else super().ratio(changes)

    measure = Jealous({"training.optimizer_impl": 1.5, "data.workers": 2.0}, {})
    known = tried(profiled, found(finding("a", FUSED), finding("b", WORKERS)), measure)
    assert known.combination is not None
    assert known.keep == WORKERS


def test_of_two_fixes_for_one_setting_the_one_that_saved_more_is_combined(profiled: Configuration[Any]) -> None:
    four = {"data.workers": 4}
    known = tried(
        profiled,
        found(finding("a", WORKERS), finding("b", FUSED), finding("c", four)),
        machine({"training.optimizer_impl": 1.5, "data.workers": 2.0}),
    )
    assert known.combination is not None
    assert known.combination.fix["data.workers"] in (2, 4)
    assert set(known.combination.fix) == {"data.workers", "training.optimizer_impl"}


def test_a_fix_that_found_nothing_to_change_was_not_applied_whatever_was_measured(
    profiled: Configuration[Any],
) -> None:
    measure = machine({"training.optimizer_impl": 2.0, "data.workers": 2.0})
    measure.missed = {"data.workers": "no DataLoader"}
    both = WORKERS | BATCH  # of which the batch is applied
    known = tried(profiled, found(finding("a", WORKERS), finding("b", FUSED), finding("c", both)), measure)
    first, second, third = (one.measured for one in known.findings)
    assert first is not None
    assert (first.outcome, first.saving, first.reason) == ("not applied", None, "no DataLoader")
    assert second is not None
    assert second.outcome == "confirmed"
    assert third is not None
    assert third.outcome == "confirmed"


@pytest.mark.parametrize("error", [OutOfMemory("out of memory in forward"), SettingsError("that cannot be")])
def test_a_fix_that_cannot_run_has_failed_and_the_others_are_tried(
    profiled: Configuration[Any], error: GpubenchError
) -> None:
    measure = machine({"training.optimizer_impl": 2.0}, {"training.batch_size": error})
    known = tried(profiled, found(finding("a", BATCH), finding("b", FUSED)), measure)
    first, second = (one.measured for one in known.findings)
    assert first is not None
    assert (first.outcome, first.saving, first.reason) == ("failed", None, error.message)
    assert second is not None
    assert second.outcome == "confirmed"


def test_an_interrupt_is_the_users_and_tells_of_nothing(profiled: Configuration[Any]) -> None:
    measure = machine({"training.optimizer_impl": 2.0}, {"training.batch_size": Interrupted("interrupted")})
    with pytest.raises(Interrupted):
        next(verify_speed(profiled, found(finding("a", FUSED), finding("b", BATCH)), measure))


def test_an_interrupt_of_the_combination_comes_after_what_each_fix_saved(profiled: Configuration[Any]) -> None:
    class Impatient(Machine):
        def run(self, variants: Sequence[Configuration[Any]], **how: Any) -> list[Outcome]:
            if self.measured:
                raise Interrupted("interrupted")
            return super().run(variants)

    measure = Impatient({"training.optimizer_impl": 1.5, "data.workers": 2.0}, {})
    becoming = verify_speed(profiled, found(finding("a", FUSED), finding("b", WORKERS)), measure)
    known = next(becoming)
    assert [one.measured and one.measured.outcome for one in known.findings] == ["confirmed", "confirmed"]
    assert known.keep == WORKERS, "what is best until then"
    with pytest.raises(Interrupted):
        next(becoming)


def test_a_finding_without_a_fix_is_left_as_it_is(profiled: Configuration[Any]) -> None:
    findings = found(finding("a", {}))
    measure = machine()
    assert tried(profiled, findings, measure) == findings
    assert measure.measured == []


def test_what_a_fix_is_laid_beside_is_the_profiled_run_without_the_profiler(profiled: Configuration[Any]) -> None:
    base = unrecorded(profiled)
    assert not base.settings.profiling.enabled
    assert base.settings.experiment == "profile-verify"
    assert base.settings.training == profiled.settings.training
    assert completed(base, complete).origins == base.origins, "nothing is chosen anew"


def test_fixes_are_tried_three_times_at_the_least(profiled: Configuration[Any]) -> None:
    once = profiled.with_overrides({"measurement.repeats": 1}, "test")
    assert unrecorded(once).settings.measurement.repeats == 3
    often = profiled.with_overrides({"measurement.repeats": 5}, "test")
    assert unrecorded(often).settings.measurement.repeats == 5


def test_a_fix_reads_as_options() -> None:
    assert options({"performance.compile": True, "data.workers": 2}) == "--performance.compile=true --data.workers=2"


def test_what_is_tried_can_be_written_and_read(profiled: Configuration[Any]) -> None:
    known = tried(profiled, found(finding("a", FUSED)), machine({"training.optimizer_impl": 2.0}))
    assert msgspec.json.decode(msgspec.json.encode(known), type=Findings) == known
