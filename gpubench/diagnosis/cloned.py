"""The rule about tensors that are cloned without need."""

from gpubench import units
from gpubench.diagnosis.case import NOTABLE, Answers, ProfileCase, at_place, severity
from gpubench.findings import Finding
from gpubench.trace.copies import CLONE

UNCHANGED = ("same", "device_to_device")
"""The kinds of copies that change neither type nor layout."""
BY_PROGRAM = ("forward", "other")
"""The phases in which the program's own code clones. In others, autograd and optimizers clone what they need."""


def needless_clones(case: ProfileCase) -> Answers:
    """Finds clones that are copies of the same type and layout. Whether they are needed cannot be seen in a trace."""
    found = [
        one
        for one in case.rank.copies
        if one.kind in UNCHANGED and one.phase in BY_PROGRAM and one.example.startswith(CLONE)
    ]
    cost = case.share(sum(case.spent(one) for one in found))
    if cost < NOTABLE:
        return
    costly = sorted(found, key=lambda one: case.spent(one), reverse=True)
    yield Finding(
        id="clones",
        title=f"tensors are cloned within {case.window()}, without a change of type or layout",
        severity=severity(cost),
        evidence=[
            f"{one.example}: {case.calls_per_step(one.calls)} in {one.phase}, "
            f"{case.time_per_step(case.spent(one))}{at_place(one.where)}"
            for one in costly[:3]
        ],
        cause="clone() copies the whole tensor, also one that contiguous() or another operator has just made",
        advice="leave clone() out wherever neither the tensor nor its copy is changed in place afterwards",
        place="model",
        expected=case.less_work(cost),
        threshold=f"at least {units.percent(NOTABLE)} of {case.window()}, as some clones are needed",
    )
