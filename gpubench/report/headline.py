"""The verdict in one sentence, complete enough to be pasted into a pull request."""

from collections.abc import Sequence

from gpubench import units
from gpubench.comparison.result import Comparability, Comparison, Verdict
from gpubench.comparison.verdicts import leading
from gpubench.report.phrases import cell, change, decimals, figures, large, to_settle, width
from gpubench.report.plain import clean, words

SPEEDS = ("faster", "slower")


def headline(comparison: Comparison) -> str:
    """Such as "new is 3.1 % slower than base in step time (95 % interval 2.6 to 3.7 %), beyond the 0.5 % margin"."""
    comparability, verdict = comparison.comparability, leading(comparison.verdicts)
    if not (comparability.comparable or comparability.forced):
        return f"withheld: {_obstacle(comparability)}"
    if verdict is None:
        return "nothing to compare: no metric is known of both sides"
    if verdict.verdict == "withheld":
        return f"withheld: {clean(verdict.reason or words(verdict.metric))}"
    if verdict.verdict == "rejected":  # the reason begins with the side that it is about
        return f"rejected, {clean(verdict.reason or words(verdict.metric))}"
    sentence = _sentence(verdict, comparison)
    if not comparability.comparable:
        sentence += f", although {_obstacle(comparability)}"
    if verdict.verdict == "inconclusive" and verdict.more_repeats:
        sentence += f"; {to_settle(verdict)}"
    return sentence


def _obstacle(comparability: Comparability) -> str:
    """Why the sides cannot be compared, in a clause."""
    workload = [difference for difference in comparability.differences if difference.kind == "workload"]
    if not workload:
        return clean(comparability.reasons[0]) if comparability.reasons else "the sides did not do the same work"
    first = workload[0]
    more = f", and {len(workload) - 1} more" if len(workload) > 1 else ""
    return f"{clean(first.key)} differs ({cell(first.baseline)} against {cell(first.candidate)}{more})"


def _sentence(verdict: Verdict, comparison: Comparison) -> str:
    baseline, candidate = clean(comparison.baseline.label), clean(comparison.candidate.label)
    name, margin = words(verdict.metric), units.percent(verdict.margin)
    if verdict.verdict == "equivalent":
        return f"{candidate} and {baseline} are equivalent in {name}: {_measured(verdict)}, within the {margin} margin"
    if verdict.verdict == "inconclusive":
        leans = f", leaning {verdict.leaning}" if verdict.leaning else ""
        why = f", {clean(verdict.reason)}" if verdict.reason else ""
        return f"inconclusive: {candidate} against {baseline} in {name} {_measured(verdict)}{why}{leans}"
    if not verdict.ratio:
        return f"{candidate} is {verdict.verdict} than {baseline} in {name}, {change(verdict)}"
    said = f"{candidate} {_established(verdict, verdict.ratio, baseline)}, beyond the {_limit(verdict)}"
    return f"{said}, from one run each" if _says_nothing_of_runs(verdict, comparison) else said


def _limit(verdict: Verdict) -> str:
    """What the change exceeds."""
    if verdict.limit <= verdict.margin:
        return f"{units.percent(verdict.margin)} margin"
    return f"{units.difference(verdict.limit)} that the machine itself may account for"


def _says_nothing_of_runs(verdict: Verdict, comparison: Comparison) -> bool:
    """Whether repeats of one run stand for a side, and runs may differ by more. Of steps alone the interval says so."""
    single = comparison.baseline.runs == comparison.candidate.runs == 1
    return single and not verdict.paired and verdict.level == "repeat" and verdict.verdict in SPEEDS


def _measured(verdict: Verdict) -> str:
    """The change with its sign: "+1.2 % (95 % interval -0.3 to +2.7 %)"."""
    estimate, edges, unit = figures(verdict)
    return f"{estimate} {unit}{_between(edges, unit, verdict)}".rstrip()


def _established(verdict: Verdict, ratio: float, baseline: str) -> str:
    """The change without its sign, which the verb has: "is 3.1 % slower than base in step time (95 % ...)"."""
    name, word, ends = words(verdict.metric), verdict.verdict, width(verdict)
    if not large(ratio, ends):
        places = decimals(ratio - 1, ends)
        edges = [f"{edge * 100:.{places}f}" for edge in sorted(abs(end - 1) for end in ends or ())]
        size, between = f"{abs(ratio - 1) * 100:.{places}f} % {word}", _between(edges, "%", verdict)
        if word in SPEEDS:
            return f"is {size} than {baseline} in {name}{between}"
        return f"has {size} {name} than {baseline}{between}"
    inverse = word in SPEEDS and ratio < 1
    factors = sorted(1 / end if inverse else end for end in ends or () if end > 0)
    size = f"{units.digits(1 / ratio if inverse else ratio)} x"
    between = _between([units.digits(factor) for factor in factors], "x", verdict)
    if word in SPEEDS:
        return f"is {size} as {'fast' if word == 'faster' else 'slow'} as {baseline} in {name}{between}"
    return f"has {size} the {name} of {baseline}{between}"


def _between(edges: Sequence[str], unit: str, verdict: Verdict) -> str:
    """The interval in words. Steps of one process say nothing of other processes, and whoever reads it should know."""
    if len(edges) != 2:
        return ""
    over = ", from steps alone" if verdict.level == "step" else ""
    return f" (95 % interval {edges[0]} to {edges[1]} {unit}{over})"
