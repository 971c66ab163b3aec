"""The rule about steps that take longer from some step of a repeat on."""

from collections.abc import Callable

from gpubench import units
from gpubench.diagnosis.case import Answers, ProfileCase, severity
from gpubench.findings import Finding
from gpubench.runs.levels import BeforeAndAfter
from gpubench.runs.stats import LEVEL
from gpubench.text import words

MAIN = 0.5  # of the difference of the step time: a phase with as much is where the time is
NAMED = 3  # phases
ALIKE = 0.05  # of memory, or of a clock: what changed by less did not change
COMPUTING = ("forward", "backward", "optimizer")


def slower_from_a_step_on(case: ProfileCase) -> Answers:
    found = case.changed
    if found is None or found.level.factor < LEVEL:
        return
    change = found.step_time.change
    main = next((name for name, phase in found.phases.items() if phase.change >= MAIN * change), None)
    some, all_of_them = found.repeats
    evidence = [f"a step takes {_times(found.step_time)}, in {some} of {units.counted(all_of_them, 'repeat')}"]
    evidence += [
        f"{words(name)}: {_times(phase)}" for name, phase in list(found.phases.items())[:NAMED] if phase.change
    ]
    if found.memory:
        evidence.append(f"memory of the processes: {_both(found.memory, units.size)}")
    if found.clock:
        evidence.append(f"clock of the GPU: {_both(found.clock, lambda mhz: f'{mhz:.0f} MHz')}")
    throttled = found.clock is not None and found.clock.after < (1 - ALIKE) * found.clock.before
    grown = found.memory is not None and found.memory.after > (1 + ALIKE) * found.memory.before
    where = f"{units.percent(found.phases[main].change / change)} of the difference is in {words(main)}" if main else ""
    if throttled:
        cause, advice = "the clock of the GPU went down", "cool the GPU, or raise its power limit"
    elif grown:
        cause = where or "no phase has most of the difference"
        advice = "look for what the program keeps from step to step, as its memory has grown"
    elif case.on_cpu and main in COMPUTING:
        cause = where
        advice = (
            "compare what the program computes before and after that step; if values go to 0, subnormal numbers slow "
            "arithmetic on a CPU: try torch.set_flush_denormal(True)"
        )
    else:
        cause = where or "no phase has most of the difference"
        advice = "compare what the program does before and after that step"
    yield Finding(
        id="slower-from-a-step-on",
        title=f"from step {found.level.step} on a step takes {units.digits(found.level.factor)} times as long",
        severity=severity(1 - 1 / found.level.factor),
        evidence=evidence,
        cause=cause,
        advice=advice,
        threshold=f"steps of two levels that differ by {units.percent(LEVEL - 1)} or more, in half of the repeats",
    )


def _times(found: BeforeAndAfter) -> str:
    return _both(found, units.seconds)


def _both(found: BeforeAndAfter, written: Callable[[float], str]) -> str:
    return f"{written(found.before)} before and {written(found.after)} after"
