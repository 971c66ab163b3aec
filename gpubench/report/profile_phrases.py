"""A profile in plain text: the parts and sentences that the terminal and the page share.

Times are those of one step, as a mean over the window, where the trace has steps; else they are of all of it.
"""

from dataclasses import dataclass

from gpubench import units
from gpubench.report.phrases import clean
from gpubench.trace.launches import SHORT_KERNEL
from gpubench.trace.profile import Compiled, Launches, Profile, Rank, Straggler

VIEWER = "https://ui.perfetto.dev"
PATH_PARTS = 5  # of the critical path that are named


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
            *(Part(f"idle, {words(cause)}", cause, time) for cause, time in rank.idle.items()),
        ]
    return [part for part in found if part.time]


def words(name: str) -> str:
    return clean(name).replace("_", " ")


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


def per(rank: Rank) -> str:
    return "of a step" if rank.steps else "of the trace"


def duration(rank: Rank, time: float) -> str:
    """A step's share of nanoseconds of the window; nothing for none."""
    return units.seconds(time / 1e9 / steps(rank)) if time else ""


def calls(rank: Rank, number: int) -> str:
    return units.digits(number / steps(rank)) if number else ""


def share(rank: Rank, time: int) -> str:
    return units.percent(time / rank.wall) if time and rank.wall else ""


def name(rank: Rank) -> str:
    return clean(rank.label) if rank.rank is None else f"rank {rank.rank}"


def window(rank: Rank) -> str:
    """What was recorded, in a clause: "6 steps of 178 ms on Tesla V100"."""
    length = units.seconds(rank.wall / 1e9 / steps(rank))
    said = f"{units.counted(len(rank.steps), 'step')} of {length}" if rank.steps else f"{length}, no steps marked"
    where = rank.device_name or ("the host alone" if rank.host_only else "")
    return f"{said} on {clean(where)}" if where else said


def about(profile: Profile) -> str:
    """Which ranks were recorded, and for how long."""
    first = profile.ranks[0]
    if len(profile.ranks) > 1:
        return f"{len(profile.ranks)} ranks; {name(first)} is the one shown below: {window(first)}"
    label = clean(first.label)
    return f"{label}: {window(first)}" if first.rank is None else f"{label}, rank {first.rank}: {window(first)}"


def caveat(rank: Rank, overhead: float | None) -> str:
    """What the times below are worth."""
    said = "times are of the profiled run"
    if len(rank.steps) > 1:
        said += f", mean over its {len(rank.steps)} steps"
    if overhead is None:
        return f"{said}: they tell shares, not speed"
    if overhead <= 0:
        return f"{said}; it took no longer than a clean one"
    slower = f"the profiled step took {units.difference(overhead)} longer than a clean one"
    return f"{said}; {slower}: its times tell shares, not speed"


def launches(rank: Rank, found: Launches) -> str:
    """How the host kept the device in work."""
    said = [
        f"launches {per(rank)}: {calls(rank, found.calls) or 0} in {duration(rank, found.host) or '0 s'} of the host"
    ]
    said.append(
        f"work begins {_nanoseconds(found.delay_median)} after its call (median; p95 {_nanoseconds(found.delay_p95)})"
    )
    if found.calls:
        said.append(f"{units.percent(found.late / found.calls)} came late, with nothing queued")
    said.append(f"queue {units.digits(round(found.queue_mean, 2))} on average, {found.queue_longest} at most")
    if found.short:
        short = f"{calls(rank, found.short)} kernels are shorter than {_nanoseconds(SHORT_KERNEL)}"
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


def sentences(rank: Rank) -> list[str]:
    """What is said of a rank in a line each."""
    found = [
        launches(rank, rank.launches) if rank.launches else "",
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


def missing(profile: Profile) -> str:
    """What the traces could not tell, and the options that would."""
    absent = {what: option for rank in profile.ranks for what, option in rank.missing.items()}
    said = ", ".join(f"{words(what)} ({clean(option)})" for what, option in absent.items())
    return f"not in the trace: {said}" if said else ""


def perfetto(path: str) -> str:
    return f"open {clean(path)} at {VIEWER}"


def _nanoseconds(time: int) -> str:
    return units.seconds(time / 1e9)
