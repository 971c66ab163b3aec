"""Rules about operators on a CPU that are too short for what calling them costs."""

from gpubench import units
from gpubench.diagnosis import fixes, measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import HOST_WORTH, Answers
from gpubench.diagnosis.python import long_share
from gpubench.findings import Finding, severity

SHORT_OPERATOR = 5_000
"""Nanoseconds, recorded. Calling one costs a few microseconds: on one element an addition takes 1.3 us where gradients
are recorded, and 11 us with its backward pass, of some five operators and nodes (PyTorch 2, one core)."""
EACH = 15_000
"""Nanoseconds of the clean step for each operator, waiting left out: calling it, forward and back, is then a good part
of them. A step of few large operators has 20 us and more for each, though most of them, an optimizer's, are short."""


def dispatch_bound(case: Case) -> Answers:
    """On a CPU, many short operators with Python between them."""
    outside, least = measures.unrecorded(case, between_calls(case)), measures.host_worth(case)
    if case.rank.device is not None or measures.recorded_eagerly(case):
        return
    if outside < least and not _short_operators(case):
        return
    cost = max(outside, measures.unrecorded(case, calling(case)))
    expected = measures.at_most(cost) if cost >= least else None
    yield Finding(
        id="dispatch-bound",
        title="much of the step is calling operators, not arithmetic",
        severity=severity(cost) if expected else "medium",
        evidence=[*_evidence(case), *phrases.less_recording(case, cost)],
        cause="operators are so short that calling them costs as much as they do",
        advice="torch.compile, or a larger batch, which gives each call more to do; work on whole tensors in place of "
        "loops over their parts",
        fix=fixes.compiling(case),
        expected=expected,
        threshold=f"from {units.percent(least)} of the step outside operators on, but for long stretches; or where "
        f"half of the operators take under {SHORT_OPERATOR // 1000} us, and a step has no more than {EACH // 1000} us "
        "for each: calling one costs a few us",
    )


def _short_operators(case: Case) -> bool:
    """Whether calling them is a good part of the clean step."""
    python, each = case.rank.python, _for_each(case)
    if python is None or each is None:
        return False
    return python.operator_median <= SHORT_OPERATOR and each <= EACH and calling(case) >= HOST_WORTH


def _for_each(case: Case) -> float | None:
    """Nanoseconds of the clean step for each operator, but for waiting; None without operators."""
    python, host = case.rank.python, case.rank.host
    if python is None or not python.operators:
        return None
    working = case.rank.wall - host.get("data_loader", 0) - host.get("communication", 0)
    return working / python.operators / (1 + max(0.0, case.overhead or 0.0))


def between_calls(case: Case) -> float:
    """The fraction of the recorded step that lies between operators, in other than long stretches."""
    return max(0.0, measures.host(case, "python") - long_share(case))


def calling(case: Case) -> float:
    """The fraction of the recorded step that calling operators takes, at most: half of them are done, calls and all, in
    the median time, and half of the stretches between them, too."""
    python = case.rank.python
    each = python.operator_median + python.median if python else 0
    return min(1.0, measures.share(case, python.operators * each if python else 0))


def _evidence(case: Case) -> list[str]:
    python, outside, each = case.rank.python, case.rank.host.get("python", 0), _for_each(case)
    said = [f"the main thread is outside any operator for {phrases.a_step(case, outside)}"] if outside else []
    if python is not None and each is not None:
        number, median = units.digits(python.operators / measures.steps(case)), python.operator_median
        said += [
            f"{number} operators {phrases.each_step(case)}, half of them within {units.seconds(median / 1e9)}",
            f"{units.seconds(each / 1e9)} of {phrases.whole(case, clean=True)} for each, but for waiting",
        ]
    return said
