"""Steps that take another time from some step on: what is found of it, warned of and diagnosed."""

import numpy as np
import pytest
from cases_made import case, cpu, ids
from recorded_runs import step

from gpubench.diagnosis.changed_level import slower_from_a_step_on
from gpubench.findings import Finding
from gpubench.runs.levels import BeforeAndAfter, ChangedLevel, changed_level
from gpubench.runs.steps import LevelShift, Repeat, measure
from gpubench.runs.summary import summarise
from gpubench.telemetry import CpuSample, TelemetrySample

AT = 40


def repeat(factor: float, number: int = 0, phase: str = "forward", at: int = AT) -> Repeat:
    """80 steps of about 10 ms, whose phase takes longer from step `at` on so that they take `factor` times as long."""
    made, rng, now = Repeat(number, 10), np.random.default_rng(number), 1e9 + 100 * number
    for count in range(80):
        usual = step(count, number)
        more = usual.total * (factor - 1) * (count >= at) + 1e-5 * rng.standard_normal()
        phases = usual.phases | {phase: usual.phases[phase] + more}
        made.steps[0].append(step(count, number, time=now, total=usual.total + more, phases=phases))
        now += usual.total + more
    return made


def test_a_window_has_the_place_and_the_factor_of_its_change() -> None:
    (measured,) = measure([repeat(5)])
    assert measured.window.level
    assert measured.window.level.step == AT
    assert measured.window.level.factor == pytest.approx(5, rel=0.05)
    assert measure([repeat(1)])[0].window.level is None


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((5.1,), "from step 40 on a step takes 5.1"),
        ((5.1, 5.1, 1), "in 2 of 3 repeats, so that the mean depends on how long the program ran"),
        ((2, 1, 1), "in 1 of 3 repeats"),
        ((1.2, 1, 1), None),
        ((1, 1), None),
    ],
)
def test_a_change_that_most_repeats_have_or_a_large_one_is_warned_of(
    factors: tuple[float, ...], expected: str | None
) -> None:
    said = summarise([repeat(factor, number) for number, factor in enumerate(factors)], None, "fp32").warnings
    found = [one for one in said if "so that the mean depends" in one]
    assert bool(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_steps_that_become_faster_late_are_warned_of_and_those_that_do_early_are_warm_up() -> None:
    late, early = (measure([repeat(0.3, at=at)])[0].window for at in (60, 20))
    assert (late.first, early.first) == (10, 20)
    assert early.level is None
    said = summarise([repeat(0.3, at=60)], None, "fp32").warnings
    assert any(one.startswith("up to step 60 a step takes 3.") for one in said)


def test_what_changed_with_the_level_is_known_by_phase_and_memory() -> None:
    made = [repeat(3, number, "backward") for number in range(3)]
    samples = [
        TelemetrySample(time=1e9 + 100 * number + at, cost=0.0, cpu=CpuSample(memory_rss_bytes=int(size)))
        for number in range(3)
        for at, size in ((0.2, 1e9), (1.0, 2e9))
    ]
    found = changed_level(measure(made), samples)
    assert found
    assert (found.level.step, found.repeats) == (AT, (3, 3))
    assert next(iter(found.phases)) == "backward"
    assert found.level.factor == pytest.approx(3, rel=0.05)
    assert found.memory == BeforeAndAfter(1e9, 2e9)
    assert changed_level(measure([repeat(1)]), []) is None
    assert changed_level(measure([repeat(3), repeat(1, 1), repeat(1, 2)]), []) is None
    assert changed_level([], []) is None


def found_in(changed: ChangedLevel | None) -> list[Finding]:
    return [one for one in slower_from_a_step_on(case(cpu(), changed=changed)) if isinstance(one, Finding)]


def changed(main: str = "forward", **known: BeforeAndAfter) -> ChangedLevel:
    phases = {main: BeforeAndAfter(0.004, 0.044), "other": BeforeAndAfter(0.006, 0.006)}
    return ChangedLevel(
        level=LevelShift(40, 5.0),
        repeats=(3, 3),
        step_time=BeforeAndAfter(0.01, 0.05),
        phases=phases,
        memory=known.get("memory"),
        clock=known.get("clock"),
    )


def test_steps_that_become_slower_are_a_finding_that_names_what_changed() -> None:
    (finding,) = found_in(changed())
    assert finding.title == "from step 40 on a step takes 5 times as long"
    assert finding.severity == "high"
    assert finding.evidence[0] == "a step takes 10 ms before and 50 ms after, in 3 of 3 repeats"
    assert finding.cause == "100.0 % of the difference is in forward"
    assert "set_flush_denormal" in finding.advice
    (grown,) = found_in(changed("data_wait", memory=BeforeAndAfter(1e9, 3e9)))
    assert "memory has grown" in grown.advice
    (throttled,) = found_in(changed(clock=BeforeAndAfter(1980, 1200)))
    assert throttled.cause == "the clock of the GPU went down"
    (waiting,) = found_in(changed("data_wait"))
    assert "denormal" not in waiting.advice


def test_steps_that_do_not_become_slower_are_no_finding() -> None:
    assert found_in(None) == []
    faster = ChangedLevel(LevelShift(40, 0.2), (3, 3), BeforeAndAfter(0.05, 0.01), {}, None, None)
    assert found_in(faster) == []
    assert "slower-from-a-step-on" not in ids(case(cpu()))
