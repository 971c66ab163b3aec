"""Wording that several rules share for a time, a count or a place."""

from gpubench import units
from gpubench.diagnosis import measures
from gpubench.diagnosis.case import Case

LONG_NAME = 80  # characters


def a_step(case: Case, part: int) -> str:
    """Return a time per step with its share of the step, as "1.2 ms a step (3.4 %)"."""
    spent = units.seconds(part / measures.steps(case) / 1e9)
    return f"{spent} {each_step(case)} ({units.percent(measures.share(case, part))})"


def each_step(case: Case) -> str:
    """Return what a count or a time refers to: a step, or the whole trace if nothing marks steps."""
    return "a step" if case.rank.step_numbers else "in the trace"


def whole(case: Case, clean: bool = False) -> str:
    """Return what a fraction refers to; with `clean`, the step without the overhead of recording."""
    if clean and case.overhead is not None:
        return "a clean step"
    return "the step" if case.rank.step_numbers else "the trace"


def less_recording(case: Case, left: float) -> list[str]:
    """Say how much longer recording made the step, and what is left of a part of `left` of a clean one.

    The list is empty where recording is not known to cost anything.
    """
    if case.overhead is None or case.overhead <= 0:
        return []
    longer = f"{units.difference(case.overhead)} longer" if case.overhead < 1 else f"{1 + case.overhead:.1f} x as long"
    if left <= 0:
        return [f"recording made the step {longer}, which is more than that part of it"]
    return [f"recording made the step {longer}; without that overhead, {units.percent(left)} of a clean step is left"]


def times_a_step(case: Case, calls: int) -> str:
    """Return a count per step, as "3 times a step", or "2 times in 6 steps" if there is less than one a step."""
    if calls < measures.steps(case):
        return f"{units.counted(calls, 'time')} in {units.counted(measures.steps(case), 'step')}"
    each = calls / measures.steps(case)
    return f"{units.digits(each)} time{'s' * (each != 1)} {each_step(case)}"


def place(where: str | None) -> str:
    """Return " at train.py:12", or an empty string if stacks were not recorded."""
    return f" at {where}" if where else ""


def shortened(name: str) -> str:
    """Return a kernel's name, cut after LONG_NAME characters, most of which are template arguments."""
    return name if len(name) <= LONG_NAME else f"{name[:LONG_NAME]}..."


def on_amd(case: Case) -> bool:
    """Say whether the trace is of an AMD GPU, from its name or from kernels of AMD's matrix product library."""
    name = case.rank.device_name
    return name.startswith("AMD") if name else any(one.name.startswith("Cijk_") for one in case.rank.kernels)


def matrix_units(case: Case) -> str:
    """Return what the GPU's manufacturer calls its matrix units."""
    return "the matrix cores" if on_amd(case) else "the tensor cores"
