"""Rules about batches that give the hardware too little to do at a time."""

from gpubench import units
from gpubench.diagnosis import fixes, measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.dispatch import SHORT_OPERATOR, between_calls, calling
from gpubench.diagnosis.launches import works
from gpubench.diagnosis.measures import HOST_WORTH, Answers
from gpubench.diagnosis.python import waits_for_host
from gpubench.findings import Finding, severity

SHORT_WORK = 0.5  # most of the computing: then a kernel's fixed cost, not its work, makes the step
ROOM = 0.5  # activations double with the batch, at most all that is held
DOUBLED = 0.5  # of the time for each sample, where a batch twice as large takes no longer: the best that can be
FIXED = 0.5  # most of the step: then samples share it, as the batch grows, before their own work counts
LARGER = 4  # times: twice as many samples would still leave a quarter of the step and more to what is fixed


def small_batch(case: Case) -> Answers:
    """A GPU that keeps up with its launches, and still has little to do in each."""
    launches, device = case.rank.launches, case.rank.device
    if launches is None or device is None or measures.recorded_eagerly(case):
        return
    if waits_for_host(case) >= HOST_WORTH:
        return
    if device.compute <= 0 or launches.short_total / device.compute < SHORT_WORK:
        return
    used = measures.memory_used(case)
    fits = used is None or used <= ROOM
    cost = measures.share(case, launches.short_total) * DOUBLED
    yield Finding(
        id="small-batch",
        title="kernels are too short to fill the GPU",
        severity=severity(cost),
        evidence=[
            f"{launches.short} of {works(launches)} kernels and copies last under 10 us; they make "
            f"{units.percent(launches.short_total / device.compute)} of the computing time",
            *([f"the clean run held {units.percent(used)} of the GPU's memory"] if used is not None else []),
        ],
        cause="a batch gives each kernel less work than starting and ending it takes",
        advice="a batch twice as large, with the learning rate set anew"
        if fits
        else "a batch twice as large, if activation checkpointing or a smaller type makes room for it",
        fix=fixes.larger_batch(case, 2) if fits else {},
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(SHORT_WORK)} of the computing time in kernels under 10 us, of which several "
        f"are fixed cost; the saving is per sample: at most {units.percent(DOUBLED)} of them, where twice the samples "
        "take no longer",
    )


def small_batch_on_cpu(case: Case) -> Answers:
    """Operators are short, and most of the step takes as long for one sample as for many."""
    python, size = case.rank.python, case.setting("training.batch_size") or case.setting("work.micro_batch")
    if case.rank.device is not None or python is None or measures.recorded_eagerly(case):
        return
    optimizer = measures.phase_share(case, "optimizer")
    calls = measures.unrecorded(case, max(between_calls(case), calling(case)))
    fixed = min(1.0, optimizer + calls)
    if not python.operators or python.operator_median > SHORT_OPERATOR or fixed < FIXED:
        return
    saving = fixed * (1 - 1 / LARGER)
    yield Finding(
        id="small-batch",
        title="a batch is too small for what every step costs anyhow",
        severity=severity(saving),
        evidence=[
            *([f"a batch has {units.counted(size, 'sample')}"] if size else []),
            f"{units.percent(fixed)} of {phrases.whole(case)} takes as long with more of them: "
            + " and ".join(said for part, said in _parts(optimizer, calls) if part > 0),
            f"half of the operators take no more than {units.seconds(python.operator_median / 1e9)}",
            *phrases.less_recording(case, calls),
        ],
        cause="the optimizer goes through all parameters, and every operator is called, whatever the batch",
        advice=f"a batch {LARGER} times as large, with the learning rate set anew",
        fix=fixes.larger_batch(case, LARGER),
        expected=measures.at_most(saving),
        threshold=f"from {units.percent(FIXED)} of the step on that does not grow with the batch, where half of the "
        f"operators take under {SHORT_OPERATOR // 1000} us; the saving is per sample, of that part alone",
    )


def _parts(optimizer: float, calls: float) -> list[tuple[float, str]]:
    return [
        (optimizer, f"{units.percent(optimizer)} the optimizer"),
        (calls, f"{units.percent(calls)} Python and the calling of operators"),
    ]
