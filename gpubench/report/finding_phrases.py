"""Sentences about profiles and findings, shared by the terminal and the page.

Times are per step, as a mean over the window, if the trace has steps; otherwise they are of the whole trace. `unit` is
what a step of the profiler is in the program: a step, an epoch or an evaluation.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpubench import units
from gpubench.findings import Cost, Finding, Findings, Saving, Trial
from gpubench.report.phrases import decimals
from gpubench.text import clean, words
from gpubench.trace.profile import Compiled, Launches, Profile, Rank, Straggler
from gpubench.trace.program import SHORT_KERNEL

VIEWER = "https://ui.perfetto.dev"
PATH_PARTS = 5  # parts of the critical path that are named
DISTORTED = 0.3
"""The overhead of recording beyond which shares are distorted, because not all of the program slows down equally."""

CAUSES = {
    "recording": "waits of the recording itself",
    "queued": "queued, or work that was not recorded",
    "backlog": "work launched before the recording",
}
"""Causes of idle time whose names need an explanation."""

BRINGS = {
    "shapes": "FLOP/s, traffic and bound of the operators",
    "stacks": "file and line of waits and copies",
    "steps": "time of a single step",
}
"""What each option of the recording adds to a trace."""
SWITCHES = ("record_shapes", "with_stack")  # arguments of torch.profiler.profile, and settings of a run


@dataclass(frozen=True)
class Part:
    """A part of the window. `time` is in nanoseconds of the whole window; `style` names the part's colour."""

    name: str
    style: str
    time: int


def time_parts(rank: Rank) -> list[Part]:
    """Return the parts of the window, which add up to it; parts of no time are left out."""
    device = rank.device
    if device is None:
        found = [Part(words(name), name, time) for name, time in rank.host.items()]
    else:
        found = [
            Part("compute", "compute", device.compute),
            Part("exposed communication", "communication", device.exposed_communication),
            Part("exposed copies", "copies", device.exposed_copies),
            *(Part(f"idle, {style_words(cause)}", cause, time) for cause, time in rank.idle.items()),
        ]
    return [part for part in found if part.time]


def style_words(style: str) -> str:
    """Return the display name of a part or phase."""
    return CAUSES.get(style) or words(style)


def kernel_name(signature: str) -> str:
    """Return a kernel's C++ signature without return type and parameters."""
    name = signature.removeprefix("void ")
    if not name.endswith(")"):
        return name
    depth = 0
    for place in reversed(range(len(name))):
        depth += {")": 1, "(": -1}.get(name[place], 0)
        if not depth:
            return name[:place] if place and name[place - 1] != " " else name
    return name


def steps(rank: Rank) -> int:
    """Return the divisor for what is counted over the window: the number of steps, or 1."""
    return max(1, len(rank.steps))


def unit_of(command: str, settings: Mapping[str, Any]) -> str:
    """Return what a step of the profiler is in a run of this command; `settings` are by dot-key."""
    if command == "pipe-infer":
        return "evaluation"
    return "epoch" if settings.get("profiling.unit") == "epoch" else "step"


def whole(rank: Rank, unit: str = "step") -> str:
    """Return what shares refer to."""
    return unit if rank.steps else "trace"


def per(rank: Rank, unit: str = "step") -> str:
    if not rank.steps:
        return "of the trace"
    return f"of an {unit}" if unit[0] in "aeiou" else f"of a {unit}"


def duration(rank: Rank, time: float) -> str:
    """Return nanoseconds of the window as a time per step; an empty string for 0."""
    return units.seconds(time / 1e9 / steps(rank)) if time else ""


def calls(rank: Rank, number: int) -> str:
    return units.digits(number / steps(rank)) if number else ""


def part_share(rank: Rank, time: int) -> str:
    return units.percent(time / rank.wall) if time and rank.wall else ""


def part_name(rank: Rank) -> str:
    return clean(rank.label) if rank.rank is None else f"rank {rank.rank}"


def window(rank: Rank, unit: str = "step") -> str:
    """Return what was recorded, as "6 steps of 178 ms on Tesla V100"."""
    length = units.seconds(rank.wall / 1e9 / steps(rank))
    said = f"{units.counted(len(rank.steps), unit)} of {length}" if rank.steps else length
    where = rank.device_name or ("the host alone" if rank.host_only else "")
    said = f"{said} on {clean(where)}" if where else said
    return said if rank.steps else f"{said}, no steps marked"


def about(profile: Profile, unit: str = "step") -> str:
    """Say which ranks were recorded, and for how long."""
    first = profile.ranks[0]
    if len(profile.ranks) > 1:
        return f"{len(profile.ranks)} ranks, of which {part_name(first)} is shown below: {window(first, unit)}"
    label = clean(first.label)
    return (
        f"{label}: {window(first, unit)}"
        if first.rank is None
        else f"{label}, rank {first.rank}: {window(first, unit)}"
    )


def is_distorted(overhead: float | None) -> bool:
    return overhead is not None and overhead > DISTORTED


def caveat(rank: Rank, overhead: float | None, unit: str = "step") -> str:
    """Say how far the times below can be trusted."""
    said = "times are of the profiled run"
    if len(rank.steps) > 1:
        said += f", mean over its {len(rank.steps)} {unit}s"
    if overhead is None:
        return f"{said}: they tell shares, not speed"
    if overhead <= 0:
        return f"{said}; it took no longer than a clean one"
    slower = "{} longer than" if overhead < 1 else "{} as long as"
    said += f"; the profiled {unit} took {slower.format(units.difference(overhead))} a clean one"
    if is_distorted(overhead):
        return f"{said}: shares below are distorted; times of the clean run are in the metrics"
    return f"{said}: its times tell shares, not speed"


def launches(rank: Rank, found: Launches, unit: str = "step") -> str:
    """Describe the launches: their number, delays and queue."""
    calling = duration(rank, found.host) or "0 s"
    said = [f"launches {per(rank, unit)}: {calls(rank, found.calls) or 0} in {calling} of the host"]
    said.append(
        f"work begins {_nanoseconds(found.delay_median)} after its call (median; p95 {_nanoseconds(found.delay_p95)})"
    )
    if found.calls:
        said.append(f"{units.percent(found.late / found.calls)} were late, with nothing queued")
    said.append(f"queue {units.digits(round(found.queue_mean, 2))} on average, {found.queue_longest} at most")
    if found.short:
        short = f"kernels shorter than {_nanoseconds(SHORT_KERNEL)}: {calls(rank, found.short)}"
        said.append(f"{short}, {duration(rank, found.short_total) or '0 s'} in all")
    if found.unlinked:
        said.append(f"{units.counted(found.unlinked, 'piece')} of work without a launch in the trace")
    return "; ".join(said)


def critical_path(rank: Rank) -> str:
    """Return the longest parts of the critical path, as shares of the window."""
    links = sorted(((time, name) for name, time in rank.critical_path.items() if time), reverse=True)
    said = [f"{words(name)} {part_share(rank, time)}" for time, name in links[:PATH_PARTS]]
    if rest := sum(time for time, _ in links[PATH_PARTS:]):
        said.append(f"others {part_share(rank, rest)}")
    return f"critical path: {', '.join(said)}" if said else ""


def straggler(found: Straggler) -> str:
    return (
        f"rank {found.rank} reached {found.waited_for} of {units.counted(found.of, 'collective')} last, "
        f"and was {_nanoseconds(found.late)} behind the first on average"
    )


def compiled(found: Compiled) -> str:
    said = f"compiled: {units.counted(found.regions, 'region')}, {units.counted(found.graph_breaks, 'graph break')}"
    if found.compilations:
        said += f", {units.counted(found.compilations, 'compilation')} in the window: {_nanoseconds(found.compiling)}"
    return said


def bound_known(rank: Rank) -> bool:
    """Say whether an operator's bound is known, which needs its shapes and the published peaks of the device."""
    return any(operator.bound != "insufficient data" for operator in rank.operators)


def sentences(rank: Rank, unit: str = "step") -> list[str]:
    """Return the lines about a rank."""
    found = [
        launches(rank, rank.launches, unit) if rank.launches else "",
        critical_path(rank),
        compiled(rank.compiled) if rank.compiled else "",
        "" if bound_known(rank) else "bound of the operators: insufficient data",
    ]
    return [sentence for sentence in found if sentence]


def doubts(profile: Profile) -> list[str]:
    """Return all notes, each once; a note that is not about all ranks names its ranks."""
    true_of: dict[str, list[str]] = {}
    for rank in profile.ranks:
        for note in rank.notes:
            true_of.setdefault(clean(note), []).append(part_name(rank))
    everywhere = len(profile.ranks)
    return [f"{', '.join(of)}: {note}" if len(of) < everywhere else note for note, of in true_of.items()]


def missing(profile: Profile, own: bool = False) -> list[str]:
    """Return sentences on what the traces lack, and how to record it. `own`: they are of a run of this program."""
    absent = {what: option for rank in profile.ranks for what, option in rank.missing.items()}
    return [
        f"no {words(what)} in the trace, so no {BRINGS.get(what, 'more')}: record with {recorded_with(option, own)}"
        for what, option in absent.items()
    ]


def recorded_with(option: str, own: bool) -> str:
    """Return an option of the profiler as the user writes it."""
    if option in SWITCHES:
        return f"--profiling.{option}=true" if own else f"torch.profiler.profile({option}=True)"
    return "torch.profiler.profile(schedule=...) and step()" if option == "schedule" else clean(option)


def perfetto(path: str) -> str:
    return f"open {clean(path)} at {VIEWER}"


def _nanoseconds(time: int) -> str:
    return units.seconds(time / 1e9)


NUMBERS = ("active",)  # settings of the profiler that take numbers
WIDE = 2.0  # +-100 % of the step
NOTHING = "no rule found anything above its threshold"
INTERRUPTED = "verification was interrupted: what was not tried by then is only expected"


def options(fix: Mapping[str, Any]) -> str:
    """Return settings as command-line options: "--data.workers=4 --data.pin_memory=true"."""
    return " ".join(shlex.quote(clean(f"--{key}={_value(value)}")) for key, value in fix.items())


def lines(finding: Finding, whole: str = "step") -> list[tuple[str, str]]:
    """Return the lines below a finding's title, as (label, text). `whole` is what a saving is a fraction of."""
    said = [("evidence", line) for line in finding.evidence]
    said += [("cause", finding.cause), ("fix", finding.advice), ("set", options(finding.fix))]
    if finding.expected:
        said.append(("expected", f"saves up to {units.percent(finding.expected.estimate)} of the {whole}"))
    if finding.measured:
        said.append(("measured", measured(finding.measured, whole)))
    return [(what, clean(words)) for what, words in said if words]


def measured(trial: Trial, whole: str = "step") -> str:
    """Return the result of a trial, as "confirmed, -12.3 % [-14.1, -10.4] of the step's time"."""
    if trial.outcome == "inconclusive" and trial.saving and _is_wide(trial.saving):
        return f"{trial.outcome}: these repeats cannot tell; raise --repeats"
    said = f"{trial.outcome}, {_change(trial.saving, whole)}" if trial.saving else trial.outcome
    reason = clean(trial.reason) if trial.reason else cost(trial.cost) if trial.cost else ""
    return f"{said}: {reason}" if reason else said


def cost(found: Cost) -> str:
    """Return the cost in throughput, as "throughput -20.0 % [-21.4, -18.6]"."""
    if found.verdict == "equivalent":
        return "throughput unchanged"
    if found.verdict == "inconclusive":
        return "throughput: no difference established"
    return f"throughput {_signed(found.change, found.interval)}"


def combination(findings: Findings, whole: str = "step") -> str:
    """Return the effect of all confirmed fixes together; an empty string if they were not tried together."""
    found = findings.combination
    return f"together, {options(found.fix)}: {measured(found.measured, whole)}" if found else ""


def unanswered(findings: Findings) -> list[tuple[str, str]]:
    """Return (what is missing and the option that records it, the rules that need it)."""
    rules: dict[tuple[str, str], list[str]] = {}
    for one in findings.unanswered:
        rules.setdefault((clean(one.missing), clean(one.needs)), []).append(clean(one.id).replace("-", " "))
    return [
        (f"{missing} ({_asked(needs)})" if needs else missing, ", ".join(ids))
        for (missing, needs), ids in rules.items()
    ]


def _asked(needs: str) -> str:
    """Return what to ask for: settings of a run by their full names, options of the profiler by their own."""
    own = needs.startswith("profiling.")
    option = needs.removeprefix("profiling.")
    if option in SWITCHES:
        return recorded_with(option, own)
    if not own:
        return needs
    return f"--{needs}" if option in NUMBERS else f"--{needs}=true"


def _is_wide(saving: Saving) -> bool:
    """Say whether a saving's interval is wider than WIDE, and so says nothing."""
    return saving.low is not None and saving.high is not None and saving.high - saving.low > WIDE


def _change(saving: Saving, whole: str) -> str:
    """Return a saving as the change of the whole."""
    ends = None if saving.low is None or saving.high is None else (-saving.low, -saving.high)
    of = "peak" if whole == "peak" else "step's time"
    return f"{_signed(-saving.estimate, ends)} of the {of}"


def _signed(change: float, ends: tuple[float, float] | None) -> str:
    places = decimals(change, ends)
    interval = f" [{', '.join(_percents(end, places) for end in sorted(ends))}]" if ends else ""
    return f"{_percents(change, places)} %{interval}"


def _percents(change: float, places: int) -> str:
    return f"{round(change * 100, places) + 0.0:+.{places}f}"  # + 0.0: no negative zero


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
