"""The rule about a recording that begins before the program has warmed up."""

from gpubench import units
from gpubench.diagnosis.case import WORTH, Answers, Estimated, ProfileCase, severity, shortened
from gpubench.findings import Finding
from gpubench.trace.first_calls import OUTLIER, SLOW, SLOW_ALLOCATION
from gpubench.trace.profile import FirstCall, FirstKind

NAMED = 3  # calls in the evidence
LEAST = 0.05  # of the time of all such calls: a shorter kind is not named as a cause

_CAUSES: dict[FirstKind, str] = {
    "load": "a kernel's code is loaded when it is first launched",
    "initialise": "the driver and libraries create contexts, handles and memory when they are first used",
    "operator": "an operator compiles or loads its code when it is first called",
    "autotune": "the first convolution of each size measures several algorithms",
    "capture": "a CUDA graph is captured once, and its launches do not run meanwhile",
    "compile": "torch.compile compiles a graph when it is first called",
}


def not_warmed_up(case: ProfileCase) -> Answers:
    """Finds idle time under calls that a program makes only in its first steps.

    Later steps do not have it, so that no saving is expected; the finding comes before smaller ones.
    """
    cost, found = case.idle_share("first_calls"), case.rank.first_calls
    if cost < WORTH or not found:
        return
    spent = sum(one.host for one in found)
    kinds = dict.fromkeys(one.kind for one in found if one.host >= LEAST * spent)
    yield Estimated(
        Finding(
            id="not-warmed-up",
            title="the recording has calls that a program makes only in its first steps",
            severity=severity(cost),
            evidence=[
                f"the GPU is idle {case.time_per_step(case.rank.idle['first_calls'])} under them",
                *(_describe(one) for one in found[:NAMED]),
                *(["other delays of the CPU are left out, as later steps need not have them"] * case.warms_up),
            ],
            cause="; ".join(_CAUSES[kind] for kind in kinds),
            advice="run some steps before the recording: torch.profiler.schedule(wait=1, warmup=3, active=3), or "
            "a few batches of every size before the profiler" + _if_it_repeats(list(kinds)),
            threshold=f"at least {units.percent(WORTH)} of {case.window()} idle under launches of a new kernel from "
            f"{SLOW // 10**6} ms on (a launch takes about 10 us), under other calls from {SLOW // 10**6} ms on "
            f"(memory: {SLOW_ALLOCATION // 10**6} ms) that take {OUTLIER} times as long as usual, and under calls that "
            "load, compile, capture or measure",
        ),
        cost,
    )


def _describe(one: FirstCall) -> str:
    said = {
        "autotune": f"{one.what} measures algorithms",
        "capture": "capture and instantiation of CUDA graphs",
    }.get(one.kind, shortened(one.what))
    return f"{said}: {units.counted(one.calls, 'call')}, {units.seconds(one.host / 1e9)} of the CPU in all"


def _if_it_repeats(kinds: list[FirstKind]) -> str:
    if "autotune" in kinds:
        return "; if sizes vary all the time, torch.backends.cudnn.benchmark = False ends the measuring"
    return "; if it goes on, look for sizes or code that change from step to step" if "compile" in kinds else ""
