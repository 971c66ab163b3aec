"""Rules about the number of threads that compute an operator on a CPU."""

from gpubench import units
from gpubench.diagnosis.case import Answers, ProfileCase, at_most, severity
from gpubench.diagnosis.cpu_time import time_per_operator
from gpubench.findings import Finding

IN_OPERATORS = 0.2  # of the step: threads speed up operators only
SHARED = 12_000
"""Sharing an operator among threads pays from so many nanoseconds of a clean step per operator on. Training steps
of linear layers were up to 1.2 times as fast with one thread as with two below 10 us per operator, and 0.9 times as
fast at 13 us (PyTorch 2.13, two cores)."""


def too_few_threads(case: ProfileCase) -> Answers:
    threads, cores = case.threads, case.cores
    if cores is not None:
        cores = max(1, int(cores - case.taken))
    within = case.cpu_share("operators") + case.cpu_share("optimizer")
    if threads is None or cores is None or threads >= cores or within < IN_OPERATORS or _too_short_to_share(case):
        return
    saving = within * (1 - threads / cores)
    yield Finding(
        id="too-few-threads",
        title=f"operators compute with {units.counted(threads, 'thread')}, and could with {cores}",
        severity=severity(saving),
        evidence=[
            f"each rank computes with {units.counted(threads, 'thread')} and has "
            f"{units.counted(case.cores or cores, 'core')}",
            f"operators take {units.percent(case.cpu_share('operators'))} of {case.window()}, and those of the "
            f"optimizer {units.percent(case.cpu_share('optimizer'))}",
            *case.taken_evidence(),
        ],
        cause="operators can use no more cores than they have threads",
        advice=_with_threads(cores),
        fix=case.fix(performance__cpu_threads=cores),
        expected=at_most(saving),
        threshold=f"at least {units.percent(IN_OPERATORS)} of {case.window()} in operators, those of the optimizer "
        "included, as threads speed up nothing else",
    )


def too_many_threads(case: ProfileCase) -> Answers:
    threads, cores = case.threads, case.cores
    if threads is None:
        return
    if threads > 1 and (each := _too_short_to_share(case)):
        yield Finding(
            id="too-many-threads",
            title="operators are too short to be shared among threads",
            severity="medium",
            evidence=[
                f"{units.seconds(each / 1e9)} of {case.window(clean=True)} per operator, without waiting",
                f"each rank computes with {units.counted(threads, 'thread')}",
            ],
            cause="starting the threads of an operator, and waiting for the last one, takes longer than they save",
            advice=_with_threads(1),
            fix=case.fix(performance__cpu_threads=1),
            threshold=f"less than {SHARED // 1000} us of {case.window()} per operator; the trace does not show what "
            "threads cost",
        )
    elif cores is not None and threads > cores:
        yield Finding(
            id="too-many-threads",
            title="there are more computing threads than cores",
            severity="medium",
            evidence=[
                f"each rank computes with {units.counted(threads, 'thread')} and has {units.counted(cores, 'core')}"
            ],
            cause="an operator ends with its slowest thread, and a thread without a core has to wait",
            advice=_with_threads(cores),
            fix=case.fix(performance__cpu_threads=cores),
            threshold="from one thread more than there are cores; the trace does not show what it costs",
        )


def _too_short_to_share(case: ProfileCase) -> float | None:
    """Returns the nanoseconds per operator of a clean step if they are too few to share; else None."""
    each = time_per_operator(case)
    return each if each is not None and each < SHARED else None


def _with_threads(number: int) -> str:
    return f"torch.set_num_threads({number}), or OMP_NUM_THREADS={number} before Python starts"
