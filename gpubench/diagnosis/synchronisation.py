"""Rules about a CPU that waits for the device, or reads values."""

from gpubench import units
from gpubench.diagnosis import code
from gpubench.diagnosis.case import WORTH, Answers, ProfileCase, at_most, at_place, severity
from gpubench.diagnosis.copies import direction
from gpubench.findings import Finding, Unanswered
from gpubench.sampled import SeenCall
from gpubench.trace.profile import Synchronisation

NAMED = 5  # places that a finding lists
MOST_OF_WAITING = 0.5  # of the cost of waiting: reading the loss is named as the cause from there on
READS = frozenset({"aten::item", "aten::_local_scalar_dense"})


def _threshold(case: ProfileCase) -> str:
    least = f"at least {units.percent(WORTH)} of {case.window()}"
    if case.on_cpu:
        return f"on a CPU, {least}: the wait is cheap there, but on a GPU it empties the queue"
    return f"{least} in which the device is idle for it: waiting for a busy device costs nothing"


def synchronisation(case: ProfileCase) -> Answers:
    if launches_block(case):
        return
    found = [wait for wait in _waits(case) if not _by_scaler(case, wait)]
    cost, of_loss = _cost(case, found), _cost(case, [wait for wait in found if _of_loss(case, wait)])
    if cost < WORTH:
        return
    reads_loss = of_loss >= MOST_OF_WAITING * cost
    calls = [] if reads_loss else code.calls(case, "read")
    waits = [_describe_wait(case, wait, _phase(wait, calls)) for wait in found[:NAMED]]
    # A trace may give a read another phase than the calls have, so that no line is of the phase of the wait.
    readers = [one for one in calls if found and one.phase == found[0].phase] or calls
    if waits and (lines := code.call_places(readers)):  # the first sentence is all that a terminal shows without -v
        waits[0] += f"; read by {lines}"
    yield Finding(
        id="synchronisation",
        title=f"{'values of tensors are read' if case.on_cpu else 'the CPU waits for the device'}"
        + " in the loop" * bool(case.rank.step_numbers),
        severity=severity(cost),
        evidence=[
            *waits,
            *code.call_evidence(calls),
        ],
        cause="training.read_loss reads the loss after every step"
        if reads_loss
        else "the program reads a tensor's value, or asks for a wait, before it launches the next work",
        advice=_of_waits(case, found),
        fix=case.fix(training__read_loss=False) if reads_loss else {},
        expected=at_most(of_loss if reads_loss else cost),
        threshold=_threshold(case),
    )
    needs = case.option("stacks")
    known = reads_loss or calls or any(wait.where for wait in found)
    if needs and not known:
        yield Unanswered("synchronisation", "file and line of what makes the CPU wait", needs)


def _phase(wait: Synchronisation, calls: list[SeenCall]) -> str:
    """Returns the phase of a wait: that of the trace, or else the phases in which the program was seen to read.

    A trace guesses the phase of what is in no annotation, and the calls were seen in the phases that were measured.
    """
    phases = dict.fromkeys(one.phase for one in calls)
    if wait.operator not in READS or not phases or wait.phase in phases:
        return wait.phase
    return units.listed([*phases])


def _of_waits(case: ProfileCase, found: list[Synchronisation]) -> str:
    """Returns advice for reads of values, or for waits that the program asks for, whichever cost more."""
    if case.on_cpu:
        return (
            "compute with whole tensors instead of reading their elements one by one, or read all of them at once "
            f"with tolist(); read what you only show {case.less_often()}"
        )
    reads = _costs(case, [wait for wait in found if wait.operator != wait.call])
    if 2 * reads >= _costs(case, found):
        return (
            f"read values {case.less_often()}: keep them on the device, sum them there, and call .item() when you show "
            "them; a branch on a tensor's value reads it too"
        )
    return "remove waits that nothing needs, such as torch.cuda.synchronize() and Event.synchronize()"


def gradient_scaler(case: ProfileCase) -> Answers:
    """Finds the waits of fp16's gradient scaler, which reads on the CPU whether gradients overflowed."""
    found = [wait for wait in _waits(case) if _by_scaler(case, wait)]
    cost = _cost(case, found)
    if cost < WORTH:
        return
    yield Finding(
        id="gradient-scaler",
        title=f"the gradient scaler makes the CPU wait {case.in_every_step()}",
        severity=severity(cost),
        evidence=[_describe_wait(case, wait, wait.phase) for wait in found],
        cause="fp16 needs a scaled loss, and the scaler reads on the CPU whether gradients overflowed",
        advice="bf16 has the range of fp32 and needs no scaler, on GPUs of compute capability 8.0 and later",
        fix=case.fix(precision="bf16") if (case.compute_capability or 0) >= 8 else {},
        expected=at_most(cost),
        threshold=_threshold(case),
    )


def blocking_launches(case: ProfileCase) -> Answers:
    if not launches_block(case):
        return
    cost = case.idle_share("synchronisation") + case.idle_share("python_and_launch")
    yield Finding(
        id="blocking-launches",
        title="every launch waits until its kernel is done",
        severity=severity(cost),
        evidence=["the environment has CUDA_LAUNCH_BLOCKING set"],
        cause="CUDA_LAUNCH_BLOCKING, a setting for debugging, is on",
        advice="unset CUDA_LAUNCH_BLOCKING",
        expected=at_most(cost),
        threshold="wherever it is set, because every measurement under it is wrong",
    )


def launches_block(case: ProfileCase) -> bool:
    """Tells whether CUDA_LAUNCH_BLOCKING is set: every wait and every gap between kernels then comes from it."""
    switch = str(case.environment.get("variables.CUDA_LAUNCH_BLOCKING", "0"))
    return not case.on_cpu and switch not in ("", "0")


def _waits(case: ProfileCase) -> list[Synchronisation]:
    """Returns the waits that cost time, the most costly first.

    A wait for a GPU that is busy, or has more work queued, costs nothing. Waits for copies are left out, and on a CPU
    the optimizer's reads of its step counts, in inference gpubench's own wait for the result, and the reads of anomaly
    detection in the backward pass.
    """
    found = [
        wait
        for wait in case.rank.synchronisations
        if direction(case, wait) is None
        and not (case.on_cpu and wait.phase == "optimizer")
        and not _for_result(case, wait)
        and not (wait.phase == "backward" and wait.operator in READS and case.rank.anomaly)
        and _costs(case, [wait])
    ]
    return sorted(found, key=lambda wait: _costs(case, [wait]), reverse=True)


def _by_scaler(case: ProfileCase, wait: Synchronisation) -> bool:
    return case.setting("precision") == "amp" and wait.phase == "optimizer" and wait.operator in READS


def _of_loss(case: ProfileCase, wait: Synchronisation) -> bool:
    """Tells whether the wait is gpubench's own read of the loss, which a setting switches off."""
    return case.setting("training.read_loss") is True and wait.phase == "other" and wait.operator in READS


def _for_result(case: ProfileCase, wait: Synchronisation) -> bool:
    """Tells whether the wait is the one for the device with which gpubench itself ends a forward pass."""
    own = case.infers and case.setting("model.name") is not None
    return own and wait.phase == "forward" and wait.call.endswith("DeviceSynchronize")


def _cost(case: ProfileCase, waits: list[Synchronisation]) -> float:
    return case.share(_costs(case, waits))


def _costs(case: ProfileCase, waits: list[Synchronisation]) -> int:
    """Returns the nanoseconds that the waits cost: on a GPU the time that it is idle because of them."""
    return sum(wait.blocked if case.on_cpu else wait.idle for wait in waits)


def _describe_wait(case: ProfileCase, wait: Synchronisation, phase: str) -> str:
    call = f" ({wait.call})" if wait.call and wait.call != wait.operator else ""
    idle = f", and the GPU is idle {case.time_per_step(wait.idle)}" if wait.idle else ""
    blocked = f"{'' if case.on_cpu else 'the CPU waits '}{case.time_per_step(wait.blocked)}"
    return f"{wait.operator}{call}{at_place(wait.where)} in {phase}: {case.calls_per_step(wait.calls)}, {blocked}{idle}"
