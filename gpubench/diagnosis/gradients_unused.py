"""The rule about forward passes that record gradients for no backward pass."""

from gpubench import units
from gpubench.diagnosis.case import NOTABLE, Answers, ProfileCase, at_place, severity
from gpubench.findings import Finding


def unused_gradients(case: ProfileCase) -> Answers:
    """Finds validation in training mode, and outputs that are detached: both need no gradients."""
    found = case.rank.unused_gradients
    if found is None or case.share(found.total) < NOTABLE:
        return
    yield Finding(
        id="unused-gradients",
        title="forward passes record gradients that no backward pass uses",
        severity=severity(case.share(found.total)),
        evidence=[
            f"calls of {units.listed(found.modules)}{at_place(found.where)}: {case.calls_per_step(found.calls)}, "
            f"{case.time_per_step(found.total)}"
        ],
        cause="the model is called with gradients on for something else than its own training, such as a validation, "
        "or outputs that are detached: the calls count as forward passes, and keep activations that nothing needs",
        advice="call the model under torch.no_grad() for that, and in a validation after model.eval(), without which "
        "dropout is active and batch norm changes its statistics; validate less often if that is most of the time",
        place="model",
        threshold=f"at least {units.percent(NOTABLE)} of {case.window()}; how much of that time gradients take is "
        "not in a trace",
    )
