"""Words that several rules have for a time, a count or a place."""

from gpubench import units
from gpubench.diagnosis import measures
from gpubench.diagnosis.case import Case

LONG_NAME = 80  # characters


def a_step(case: Case, part: int) -> str:
    """ "1.2 ms a step (3.4 %)"."""
    return f"{units.seconds(part / measures.steps(case) / 1e9)} a step ({units.percent(measures.share(case, part))})"


def times_a_step(case: Case, calls: int) -> str:
    """ "3 times a step"; "2 times in 6 steps" where it is less than one."""
    if calls < measures.steps(case):
        return f"{units.counted(calls, 'time')} in {units.counted(measures.steps(case), 'step')}"
    each = calls / measures.steps(case)
    return f"{units.digits(each)} time{'s' * (each != 1)} a step"


def place(where: str | None) -> str:
    """ " at train.py:12", or nothing where stacks were not recorded."""
    return f" at {where}" if where else ""


def shortened(name: str) -> str:
    """A kernel's name without most of its template arguments."""
    return name if len(name) <= LONG_NAME else f"{name[:LONG_NAME]}..."
