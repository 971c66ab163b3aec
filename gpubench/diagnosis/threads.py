"""Rules about the threads of a run on a CPU."""

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import Answers
from gpubench.findings import Finding, severity

IN_OPERATORS = 0.2  # of the step: threads speed up nothing else


def too_few_threads(case: Case) -> Answers:
    threads, cores = measures.threads(case), measures.cores(case)
    within = measures.host(case, "operators") + measures.host(case, "optimizer")
    if threads is None or cores is None or threads >= cores or within < IN_OPERATORS:
        return
    saving = within * (1 - threads / cores)
    yield Finding(
        id="too-few-threads",
        title="cores are left idle",
        severity=severity(saving),
        evidence=[
            f"each rank computes with {units.counted(threads, 'thread')} and has {units.counted(cores, 'core')}",
            f"operators take {units.percent(within)} of {phrases.whole(case)}",
        ],
        cause="operators can use no more cores than they are given threads",
        advice=f"torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores} before Python starts",
        fix=case.fix(performance__cpu_threads=cores),
        expected=measures.at_most(saving),
        threshold=f"from {units.percent(IN_OPERATORS)} of the step in operators on, as threads speed up nothing else",
    )


def too_many_threads(case: Case) -> Answers:
    threads, cores = measures.threads(case), measures.cores(case)
    if threads is None or cores is None or threads <= cores:
        return
    yield Finding(
        id="too-many-threads",
        title="threads take turns on too few cores",
        severity="medium",
        evidence=[f"each rank computes with {units.counted(threads, 'thread')} and has {units.counted(cores, 'core')}"],
        cause="an operator ends with its slowest thread, and one without a core has to wait for its turn",
        advice=f"torch.set_num_threads({cores}), or OMP_NUM_THREADS={cores} before Python starts",
        fix=case.fix(performance__cpu_threads=cores),
        threshold="from one thread more than there are cores; what it costs does not follow from the trace",
    )
