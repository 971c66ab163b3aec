"""Words that several rules have for a time, a count or a place."""

from gpubench import units
from gpubench.diagnosis import measures
from gpubench.diagnosis.case import Case

LONG_NAME = 80  # characters


def a_step(case: Case, part: int) -> str:
    """ "1.2 ms a step (3.4 %)"."""
    spent = units.seconds(part / measures.steps(case) / 1e9)
    return f"{spent} {each_step(case)} ({units.percent(measures.share(case, part))})"


def each_step(case: Case) -> str:
    """What a count or a time is of: where nothing marks steps, the whole trace."""
    return "a step" if case.rank.step_numbers else "in the trace"


def whole(case: Case, clean: bool = False) -> str:
    """What a fraction is of; `clean` where recording has been taken off."""
    if clean and case.overhead is not None:
        return "a clean step"
    return "the step" if case.rank.step_numbers else "the trace"


def less_recording(case: Case, left: float) -> list[str]:
    """That recording made the host's part larger, and what is left of it; nothing where recording is not known to
    cost anything."""
    if case.overhead is None or case.overhead <= 0:
        return []
    longer = f"{units.difference(case.overhead)} longer" if case.overhead < 1 else f"{1 + case.overhead:.1f} x as long"
    if left <= 0:
        return [f"recording made the step {longer}, by more than that part of it"]
    return [
        f"recording made the step {longer}; with all of that taken off, {units.percent(left)} of a clean one is left"
    ]


def times_a_step(case: Case, calls: int) -> str:
    """ "3 times a step"; "2 times in 6 steps" where it is less than one."""
    if calls < measures.steps(case):
        return f"{units.counted(calls, 'time')} in {units.counted(measures.steps(case), 'step')}"
    each = calls / measures.steps(case)
    return f"{units.digits(each)} time{'s' * (each != 1)} {each_step(case)}"


def place(where: str | None) -> str:
    """ " at train.py:12", or nothing where stacks were not recorded."""
    return f" at {where}" if where else ""


def shortened(name: str) -> str:
    """A kernel's name without most of its template arguments."""
    return name if len(name) <= LONG_NAME else f"{name[:LONG_NAME]}..."


def on_amd(case: Case) -> bool:
    """Whether the trace is of one of AMD's GPUs: by its name, or by kernels of AMD's library of matrix products."""
    name = case.rank.device_name
    return name.startswith("AMD") if name else any(one.name.startswith("Cijk_") for one in case.rank.kernels)


def matrix_units(case: Case) -> str:
    """As the maker of the GPU calls them."""
    return "the matrix cores" if on_amd(case) else "the tensor cores"
