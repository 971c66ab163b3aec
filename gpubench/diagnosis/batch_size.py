"""Rules about batches that are too small to keep the device busy."""

from gpubench import units
from gpubench.diagnosis.case import CPU_WORTH, NOTABLE, WORTH, Answers, ProfileCase, at_most, severity
from gpubench.diagnosis.cpu_time import SHORT_OPERATOR, between_calls, calling, waits_for_cpu, works
from gpubench.diagnosis.matrix_products import rows
from gpubench.findings import Finding
from gpubench.trace.profile import Operator, short_shapes

SHORT_WORK = 0.5  # of the computing time: with more of it in short kernels, their fixed cost dominates
MANY = 20  # short kernels: a window of fewer is a part of a step, and shows nothing of its batch
FITTING = 0.5  # of the GPU's memory: all of it may be activations, which double with the batch
DOUBLED = 0.5  # of the time per sample: the upper limit of the saving, where a batch twice as large takes no longer
FIXED = 0.5  # of the step: with more of it independent of the batch size, a larger batch pays off
THIN = 8  # rows of a product: with so few, reading the weights takes longer than the arithmetic on any CPU
LARGER = 4  # factor of the batch size: with a factor of 2 the fixed cost would still be a quarter of the step or more


def small_batch(case: ProfileCase) -> Answers:
    """Finds short kernels on a GPU that does not wait for its launches: a larger batch gives each kernel more work."""
    launches, device = case.rank.launches, case.rank.device
    if launches is None or device is None or case.recorded_eagerly:
        return
    if waits_for_cpu(case) >= CPU_WORTH:
        return
    if launches.short < MANY or device.compute <= 0 or launches.short_total / device.compute < SHORT_WORK:
        return
    cost = case.share(launches.short_total) * DOUBLED
    if cost < WORTH:
        return
    used = case.memory_used
    fits = used is None or used <= FITTING
    yield Finding(
        id="small-batch",
        title="kernels are too short to fill the GPU: the batch is too small",
        severity=severity(cost),
        evidence=[
            f"{launches.short} of {works(launches)} kernels and copies last under 10 us; they take "
            f"{units.percent(launches.short_total / device.compute)} of the computing time",
            *(
                [f"the run without the profiler held {units.percent(used)} of the GPU's memory"]
                if used is not None
                else []
            ),
        ],
        cause="a batch gives each kernel less work than its fixed cost",
        advice=f"double the batch size, {_caveat(case)}"
        if fits
        else f"double the batch size, if {'activation checkpointing or ' if case.trains else ''}a smaller data type "
        "frees enough memory",
        fix=case.batch_fix(2) if fits else {},
        expected=case.less_work(cost),
        threshold=f"at least {units.percent(SHORT_WORK)} of the computing time in kernels under 10 us, of which "
        f"several are fixed cost; the saving is per sample, at most {units.percent(DOUBLED)} of the time in these "
        "kernels, where twice the samples take no longer",
    )


def small_batch_on_cpu(case: ProfileCase) -> Answers:
    """Finds a step on a CPU whose time hardly depends on the batch size.

    That is so if most operators are short, or if products have few rows and read all weights for them.
    """
    python, size = case.rank.python, case.setting("training.batch_size") or case.setting("work.micro_batch")
    if not case.on_cpu or python is None or case.recorded_eagerly:
        return
    optimizer = case.phase_share("optimizer")
    calls = case.without_recording(max(between_calls(case), calling(case)))
    thin = [one for one in case.rank.operators if (number := rows(one)) is not None and number <= THIN]
    reading = case.share(sum(one.host for one in thin))
    short = python.operators > 0 and python.operator_median <= SHORT_OPERATOR and optimizer + calls >= FIXED
    if short:
        reading = 0.0  # most of it is in the calls
    elif reading >= NOTABLE and optimizer + reading >= FIXED:
        calls = 0.0
    else:
        return
    fixed = min(1.0, optimizer + calls + reading)
    saving = fixed * (1 - 1 / LARGER)
    yield Finding(
        id="small-batch",
        title="the batch is too small for the fixed cost of a step"
        if case.rank.step_numbers
        else "the batch is too small for the fixed cost of its operators",
        severity=severity(saving),
        evidence=[
            *([f"a batch has {units.counted(size, 'sample')}"] if size else []),
            f"{units.percent(fixed)} of {case.window()} does not grow with the batch size: "
            + " and ".join(sentence for part, sentence in _fixed_parts(optimizer, calls, reading) if part > 0),
            *([f"half of the operators take at most {units.seconds(python.operator_median / 1e9)}"] if short else []),
            *(_thin(case, one) for one in sorted(thin, key=lambda one: -one.host)[:2] if reading),
            *case.recording_evidence(calls),
        ],
        cause=("the optimizer updates all parameters and " if case.trains and optimizer else "")
        + (
            "every operator is called once a step, whatever the batch size"
            if short
            else "products read all weights once a step, whatever the batch size"
        ),
        advice=f"make the batch {LARGER} times as large, {_caveat(case)}",
        fix=case.batch_fix(LARGER),
        expected=at_most(saving),
        threshold=f"at least {units.percent(FIXED)} of {case.window()} does not grow with the batch size, and half of "
        f"the operators take under {SHORT_OPERATOR // 1000} us, or at least {units.percent(NOTABLE)} is in products "
        f"of at most {THIN} rows; the saving is per sample, of that part alone",
    )


def _thin(case: ProfileCase, one: Operator) -> str:
    times = f"{case.calls_per_step(one.calls)}, {case.time_per_step(one.host)}"
    return f"{one.name} {short_shapes(one.shapes)}: {times}"


def _caveat(case: ProfileCase) -> str:
    if case.infers:
        return "if its latency is low enough for its users"
    return "and adjust the learning rate" if case.trains else "and in training adjust the learning rate"


def _fixed_parts(optimizer: float, calls: float, reading: float) -> list[tuple[float, str]]:
    return [
        (optimizer, f"{units.percent(optimizer)} in the optimizer"),
        (calls, f"{units.percent(calls)} in Python and in calling operators"),
        (reading, f"{units.percent(reading)} in matrix products of at most {THIN} rows"),
    ]
