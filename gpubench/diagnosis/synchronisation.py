"""Rules about a host that waits for the device, which then waits for the host."""

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.copies import direction
from gpubench.diagnosis.measures import WORTH, Answers
from gpubench.findings import Finding, Unanswered, severity
from gpubench.trace.profile import Synchronisation

NAMED = 5  # places that a finding lists
MOST = 0.5  # of what waiting costs: then the fix that is known is for most of it
READS = frozenset({"aten::item", "aten::_local_scalar_dense"})

THRESHOLD = (
    f"from {units.percent(WORTH)} of the step on in which the device is idle for it: waiting for a device that is busy "
    "costs nothing"
)
ON_CPU = f"on a CPU, from {units.percent(WORTH)} of the step on: there it costs little, on a GPU it empties the queue"


def synchronisation(case: Case) -> Answers:
    if launches_block(case):
        return
    found = [wait for wait in _waits(case) if not _by_scaler(case, wait)]
    on_cpu = case.rank.device is None
    cost, of_loss = _cost(case, found), _cost(case, [wait for wait in found if _of_loss(case, wait)])
    if cost < WORTH:
        return
    reads_loss = of_loss >= MOST * cost
    yield Finding(
        id="synchronisation",
        title="values are read on the host in the loop" if on_cpu else "the host waits for the device in the loop",
        severity=severity(cost),
        evidence=[_told(case, wait) for wait in found[:NAMED]],
        cause="training.read_loss reads the loss on the host after every step"
        if reads_loss
        else "a value is read on the host, or a wait is asked for, before the next work is launched",
        advice="read values once in many steps: sum them on the device, and call .item() when they are shown",
        fix=case.fix(training__read_loss=False) if reads_loss else {},
        expected=measures.at_most(of_loss if reads_loss else cost),
        threshold=ON_CPU if on_cpu else THRESHOLD,
    )
    needs = measures.option(case, "stacks")
    if needs and not reads_loss and all(wait.where is None for wait in found):
        yield Unanswered("synchronisation", "file and line of what makes the host wait", needs)


def gradient_scaler(case: Case) -> Answers:
    """The scaler of fp16 reads on the host whether gradients overflowed: its wait is the precision's."""
    found = [wait for wait in _waits(case) if _by_scaler(case, wait)]
    cost = _cost(case, found)
    if cost < WORTH:
        return
    capability = str(measures.gpu(case).get("compute_capability", ""))
    modern = capability.partition(".")[0].isdecimal() and int(capability.partition(".")[0]) >= 8
    yield Finding(
        id="gradient-scaler",
        title="the gradient scaler makes the host wait in every step",
        severity=severity(cost),
        evidence=[_told(case, wait) for wait in found],
        cause="fp16 needs its loss scaled, and the scaler reads on the host whether gradients overflowed",
        advice="bf16 has the range of fp32 and needs no scaler, on GPUs of compute capability 8.0 and later",
        fix=case.fix(precision="bf16") if modern else {},
        expected=measures.at_most(cost),
        threshold=THRESHOLD,
    )


def blocking_launches(case: Case) -> Answers:
    if not launches_block(case):
        return
    cost = measures.idle(case, "synchronisation") + measures.idle(case, "python_and_launch")
    yield Finding(
        id="blocking-launches",
        title="every launch waits until its kernel is done",
        severity=severity(cost),
        evidence=["the environment has CUDA_LAUNCH_BLOCKING set"],
        cause="CUDA_LAUNCH_BLOCKING, which is for debugging",
        advice="unset CUDA_LAUNCH_BLOCKING",
        expected=measures.at_most(cost),
        threshold="wherever it is set, since nothing is measured rightly under it",
    )


def launches_block(case: Case) -> bool:
    """Then every wait and every gap between kernels comes of that."""
    switch = str(case.environment.get("variables.CUDA_LAUNCH_BLOCKING", "0"))
    return case.rank.device is not None and switch not in ("", "0")


def _waits(case: Case) -> list[Synchronisation]:
    """Those that cost time, the most costly first; a wait for a GPU that is busy, or has its next work, costs none.

    Not those of copies; nor, on a CPU, the optimizer's own reading of its step counts.
    """
    on_cpu = case.rank.device is None
    found = [
        wait
        for wait in case.rank.synchronisations
        if direction(case, wait) is None and not (on_cpu and wait.phase == "optimizer") and _costs(case, [wait])
    ]
    return sorted(found, key=lambda wait: _costs(case, [wait]), reverse=True)


def _by_scaler(case: Case, wait: Synchronisation) -> bool:
    return case.setting("precision") == "amp" and wait.phase == "optimizer" and wait.operator in READS


def _of_loss(case: Case, wait: Synchronisation) -> bool:
    """The loop's own reading, which comes after the optimizer; the model's is not switched off by a setting."""
    return case.setting("training.read_loss") is True and wait.phase == "other" and wait.operator in READS


def _cost(case: Case, waits: list[Synchronisation]) -> float:
    """The fraction of the step that they cost."""
    return measures.share(case, _costs(case, waits))


def _costs(case: Case, waits: list[Synchronisation]) -> int:
    """Nanoseconds: on a GPU the time that it is idle for them."""
    return sum(wait.blocked if case.rank.device is None else wait.idle for wait in waits)


def _told(case: Case, wait: Synchronisation) -> str:
    call = f" ({wait.call})" if wait.call and wait.call != wait.operator else ""
    idle = f", and the GPU is idle {phrases.a_step(case, wait.idle)}" if wait.idle else ""
    return (
        f"{wait.operator}{call}{phrases.place(wait.where)} in {wait.phase}: "
        f"{phrases.times_a_step(case, wait.calls)}, the host waits {phrases.a_step(case, wait.blocked)}{idle}"
    )
