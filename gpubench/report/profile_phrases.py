"""A profile in plain text: the parts and sentences that the terminal and the page share.

Times are those of one step, as a mean over the window, where the trace has steps; else they are of all of it. `unit`
is what a step of the profiler is of the program: a step, an epoch or an evaluation.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpubench import units
from gpubench.report.plain import clean, words
from gpubench.trace.launches import SHORT_KERNEL
from gpubench.trace.profile import Compiled, Launches, Profile, Rank, Straggler

VIEWER = "https://ui.perfetto.dev"
PATH_PARTS = 5  # of the critical path that are named
DISTORTED = 0.3
"""From this overhead on the shares of a profile are no longer those of the program: not all of it slows down alike."""

CAUSES = {
    "recording": "waits of the recording itself",
    "queued": "queued, or work that was not recorded",
    "backlog": "work launched before the recording",
}
"""Of idle time, where the name alone says too little."""

BRINGS = {
    "shapes": "FLOP/s, traffic and bound of the operators",
    "stacks": "file and line of waits and copies",
    "steps": "time of a single step",
}
"""What a trace tells only if it was recorded with this."""
SWITCHES = ("record_shapes", "with_stack")  # arguments of torch.profiler.profile, and settings of a run


@dataclass(frozen=True)
class Part:
    """`time` is in nanoseconds of the whole window; `style` names the part's colour."""

    name: str
    style: str
    time: int


def parts(rank: Rank) -> list[Part]:
    """Where the window's time went; they sum to it. What took none is left out."""
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
    """A part or a phase as people write it."""
    return CAUSES.get(style) or words(style)


def kernel_name(signature: str) -> str:
    """A kernel's C++ signature without its return type and parameters: they tell kernels apart least."""
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
    """By how many to divide what is counted over the window."""
    return max(1, len(rank.steps))


def unit_of(command: str, settings: Mapping[str, Any]) -> str:
    """What a step of the profiler is in a run of this command. settings: by dot-key."""
    if command == "pipe-infer":
        return "evaluation"
    return "epoch" if settings.get("profiling.unit") == "epoch" else "step"


def whole(rank: Rank, unit: str = "step") -> str:
    """What shares are of."""
    return unit if rank.steps else "trace"


def per(rank: Rank, unit: str = "step") -> str:
    if not rank.steps:
        return "of the trace"
    return f"of an {unit}" if unit[0] in "aeiou" else f"of a {unit}"


def duration(rank: Rank, time: float) -> str:
    """A step's share of nanoseconds of the window; nothing for none."""
    return units.seconds(time / 1e9 / steps(rank)) if time else ""


def calls(rank: Rank, number: int) -> str:
    return units.digits(number / steps(rank)) if number else ""


def share(rank: Rank, time: int) -> str:
    return units.percent(time / rank.wall) if time and rank.wall else ""


def name(rank: Rank) -> str:
    return clean(rank.label) if rank.rank is None else f"rank {rank.rank}"


def window(rank: Rank, unit: str = "step") -> str:
    """What was recorded, in a clause: "6 steps of 178 ms on Tesla V100"."""
    length = units.seconds(rank.wall / 1e9 / steps(rank))
    said = f"{units.counted(len(rank.steps), unit)} of {length}" if rank.steps else length
    where = rank.device_name or ("the host alone" if rank.host_only else "")
    said = f"{said} on {clean(where)}" if where else said
    return said if rank.steps else f"{said}, no steps marked"


def about(profile: Profile, unit: str = "step") -> str:
    """Which ranks were recorded, and for how long."""
    first = profile.ranks[0]
    if len(profile.ranks) > 1:
        return f"{len(profile.ranks)} ranks; {name(first)} is the one shown below: {window(first, unit)}"
    label = clean(first.label)
    return (
        f"{label}: {window(first, unit)}"
        if first.rank is None
        else f"{label}, rank {first.rank}: {window(first, unit)}"
    )


def is_distorted(overhead: float | None) -> bool:
    return overhead is not None and overhead > DISTORTED


def caveat(rank: Rank, overhead: float | None, unit: str = "step") -> str:
    """What the times below are worth."""
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
    """How the host kept the device in work."""
    calling = duration(rank, found.host) or "0 s"
    said = [f"launches {per(rank, unit)}: {calls(rank, found.calls) or 0} in {calling} of the host"]
    said.append(
        f"work begins {_nanoseconds(found.delay_median)} after its call (median; p95 {_nanoseconds(found.delay_p95)})"
    )
    if found.calls:
        said.append(f"{units.percent(found.late / found.calls)} came late, with nothing queued")
    said.append(f"queue {units.digits(round(found.queue_mean, 2))} on average, {found.queue_longest} at most")
    if found.short:
        short = f"kernels shorter than {_nanoseconds(SHORT_KERNEL)}: {calls(rank, found.short)}"
        said.append(f"{short}, {duration(rank, found.short_total) or '0 s'} in all")
    if found.unlinked:
        said.append(f"{units.counted(found.unlinked, 'piece')} of work without a launch in the trace")
    return "; ".join(said)


def critical_path(rank: Rank) -> str:
    """The longest links of the chain, as shares of the window."""
    links = sorted(((time, name) for name, time in rank.critical_path.items() if time), reverse=True)
    said = [f"{words(name)} {share(rank, time)}" for time, name in links[:PATH_PARTS]]
    if rest := sum(time for time, _ in links[PATH_PARTS:]):
        said.append(f"others {share(rank, rest)}")
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
    """Of some operator: it takes shapes, and a device whose ceilings are published."""
    return any(operator.bound != "insufficient data" for operator in rank.operators)


def sentences(rank: Rank, unit: str = "step") -> list[str]:
    """What is said of a rank in a line each."""
    found = [
        launches(rank, rank.launches, unit) if rank.launches else "",
        critical_path(rank),
        compiled(rank.compiled) if rank.compiled else "",
        "" if bound_known(rank) else "what bounds the operators: insufficient data",
    ]
    return [sentence for sentence in found if sentence]


def doubts(profile: Profile) -> list[str]:
    """What a reader must know, each said once, with the ranks that it is true of where it is not all of them."""
    true_of: dict[str, list[str]] = {}
    for rank in profile.ranks:
        for note in rank.notes:
            true_of.setdefault(clean(note), []).append(name(rank))
    everywhere = len(profile.ranks)
    return [f"{', '.join(of)}: {note}" if len(of) < everywhere else note for note, of in true_of.items()]


def missing(profile: Profile, own: bool = False) -> list[str]:
    """What the traces could not tell, and how they would, a sentence each. own: of a run of this program."""
    absent = {what: option for rank in profile.ranks for what, option in rank.missing.items()}
    return [
        f"no {words(what)} in the trace, so no {BRINGS.get(what, 'more')}: record with {recorded_with(option, own)}"
        for what, option in absent.items()
    ]


def recorded_with(option: str, own: bool) -> str:
    """An option of the profiler as one gives it."""
    if option in SWITCHES:
        return f"--profiling.{option}=true" if own else f"torch.profiler.profile({option}=True)"
    return "torch.profiler.profile(schedule=...) and step()" if option == "schedule" else clean(option)


def perfetto(path: str) -> str:
    return f"open {clean(path)} at {VIEWER}"


def _nanoseconds(time: int) -> str:
    return units.seconds(time / 1e9)
