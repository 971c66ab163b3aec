"""Rules about a few long times in which the host is in no operator: code of the program's own, or what it waits for."""

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.compilation import is_broken
from gpubench.diagnosis.measures import HOST_WORTH, WORTH, Answers
from gpubench.diagnosis.synchronisation import launches_block
from gpubench.findings import Finding, Unanswered, severity
from gpubench.trace.profile import Stretch

LONG = 50_000
"""Nanoseconds. From one operator to the next a few microseconds of Python pass, and with the call of a module and its
hooks tens: what lasts longer is no cost of calling."""
MOST = 0.5  # of the idle time: what makes most of it is named as the cause


def python_bound(case: Case) -> Answers:
    """On a GPU only where they explain most of the time that it waits for the host."""
    stretches = long_ones(case)
    cost, least = measures.unrecorded(case, long_share(case)), measures.host_worth(case)
    if case.rank.device is not None:
        cost, least = min(cost, waits_for_host(case)), HOST_WORTH
        if not explains_waiting(case) or launches_block(case) or is_broken(case):
            return
    if not stretches or cost < least or measures.recorded_eagerly(case):
        return
    cause, advice = _reason(case, stretches[0])
    yield Finding(
        id="python-bound",
        title="the step is held up by code between its operators",
        severity=severity(cost),
        evidence=[
            f"the longest time outside any operator is {units.seconds(stretches[0].length / 1e9)}",
            *(_told(case, one) for one in stretches),
            *phrases.less_recording(case, cost),
        ],
        cause=cause,
        advice=advice,
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(least)} of the step on in stretches of {LONG // 1000} us and more: between "
        "two operators lie a few us, and with a module's call tens",
    )
    needs = measures.option(case, "stacks")
    if needs and all(one.where is None for one in stretches):
        yield Unanswered("python-bound", "file and line of the code between operators", needs)


def long_ones(case: Case) -> list[Stretch]:
    """Places with long stretches that are worth naming, the longest first."""
    known = case.rank.python.longest if case.rank.python else []
    return [one for one in known if one.length >= LONG and measures.share(case, one.total) >= WORTH]


def long_share(case: Case) -> float:
    """The fraction of the recorded step that they take."""
    return measures.share(case, sum(one.total for one in long_ones(case)))


def waits_for_host(case: Case) -> float:
    """The fraction of a clean step in which a GPU has nothing to do for Python and launches, but for those that fill
    gradients with zeros: they are another rule's."""
    return measures.unrecorded(case, measures.share(case, waiting(case)))


def waiting(case: Case) -> int:
    """Nanoseconds of the recorded steps of the same."""
    return max(0, case.rank.idle.get("python_and_launch", 0) - case.rank.zeroing_idle)


def explains_waiting(case: Case) -> bool:
    """Whether long stretches may be most of why a GPU waits for the host."""
    enough = measures.unrecorded(case, long_share(case)) >= HOST_WORTH
    waits = measures.share(case, waiting(case))
    return enough and long_share(case) >= MOST * waits


def _reason(case: Case, longest: Stretch) -> tuple[str, str]:
    """Cause and advice; that the loop does it is said only where its phases are known."""
    if longest.phase == "backward":
        return (
            "autograd runs no operator meanwhile: hooks or functions of your own do something else, or wait",
            "take what need not happen in every step out of the hooks",
        )
    phased = any(phase.name != "other" for phase in case.rank.phases)
    if phased and longest.phase == "other":
        return (
            "the loop does other things than training between its phases",
            "move what need not happen in every step out of the loop",
        )
    return (
        "code of your own between operators, or something that it waits for",
        "move what need not happen in every step out of it; do the rest with operators, or beside the step, in the "
        "loader's workers or a thread",
    )


def _told(case: Case, one: Stretch) -> str:
    module = f" of {one.module}" if one.module else ""
    after = f", after {one.after}" if one.after else ""
    return (
        f"in {one.phase}{module}{after}{phrases.place(one.where)}: {phrases.times_a_step(case, one.count)}, "
        f"{phrases.a_step(case, one.total)}"
    )
