"""Rules about a device that is fed too slowly."""

from gpubench import units
from gpubench.diagnosis import fixes, measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.compilation import is_broken
from gpubench.diagnosis.measures import HOST_WORTH, Answers
from gpubench.diagnosis.python import explains_waiting, waiting, waits_for_host
from gpubench.diagnosis.synchronisation import launches_block
from gpubench.findings import Finding, Unanswered, severity
from gpubench.trace.profile import Launches

EVERYWHERE = 0.5  # most launches: then it is not single places in Python that hold the device up


def launch_bound(case: Case) -> Answers:
    """A GPU that waits for the host, where no long stretches of Python explain it."""
    cost = waits_for_host(case)
    if cost < HOST_WORTH or launches_block(case) or is_broken(case):
        return
    if measures.recorded_eagerly(case):
        yield Unanswered("launch-bound", "launches of the compiled model", "profiling.keep_compile")
        return
    if explains_waiting(case):
        return
    many = _everywhere(case)
    yield Finding(
        id="launch-bound" if many else "python-bound",
        title="the GPU waits for the host's next launch",
        severity=severity(cost),
        evidence=[*_evidence(case), *phrases.less_recording(case, cost)],
        cause="kernels are done before Python and PyTorch have launched the next ones"
        if many
        else "code between the operators keeps the host from launching the next one",
        advice="torch.compile(mode='reduce-overhead') launches many kernels at once, as a CUDA graph; a larger batch "
        "makes each of them longer"
        if many
        else "move what need not happen in every step out of the loop, or compile what can be",
        fix=fixes.compiling(case),
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(HOST_WORTH)} of the step on: recording slows the host, so that less may be the "
        "profiler's own",
    )


def works(launches: Launches) -> int:
    """What the calls brought, of a trace that tells; one each otherwise."""
    return launches.works or launches.calls


def _everywhere(case: Case) -> bool:
    """Whether most kernels are short, or most launches come late; not where most kernels are launched with others
    already, as CUDA graphs do it."""
    launches = case.rank.launches
    if launches is None:
        return True
    most = EVERYWHERE * works(launches)
    return launches.calls >= most and max(launches.short, launches.late) >= most


def _evidence(case: Case) -> list[str]:
    launches = case.rank.launches
    said = [f"the GPU is idle {phrases.a_step(case, waiting(case))} until the host launches the next work"]
    if launches is not None and launches.calls:
        brought, calls = works(launches), launches.calls
        by = "" if brought == calls else f", launched by {units.counted(calls, 'call')}"
        said.append(
            f"{launches.short} of {brought} kernels and copies last under 10 us{by}; before {launches.late} of them "
            "the GPU was already idle"
        )
    starved = case.metrics.get("starved_steps")
    if starved is not None and starved.estimate > 0:
        said.append(f"{units.percent(starved.estimate)} of the clean run's steps began with the GPU out of work")
    return said
