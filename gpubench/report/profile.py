"""The report of a profile, alone or compared with another: where the time went, and the findings.

Times are per step, as a mean over the window, if the trace has steps; otherwise they are of the whole trace. `unit` is
what a step of the profiler is in the program: a step, an epoch or an evaluation.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from gpubench import units
from gpubench.compare.causes import finding_changes as changes_between
from gpubench.compare.causes import in_seconds
from gpubench.compare.result import Fate, FindingChange, WorkChange
from gpubench.findings import DISTORTED, Findings
from gpubench.registry import RunKind
from gpubench.report import bar_charts, findings, perfetto, timelines
from gpubench.report.document import (
    EVERYWHERE,
    UNASKED,
    Block,
    Breakdown,
    Command,
    Document,
    Figure,
    Heading,
    Medium,
    Paragraph,
    Part,
    Table,
    raised,
    table,
)
from gpubench.report.profile_tables import (
    PLAIN,
    Arrangement,
    bound_known,
    calls,
    duration,
    largest,
    part_name,
    part_share,
    ranks,
    steps,
    tables,
)
from gpubench.runs.directory import SCHEMA_VERSION
from gpubench.text import words
from gpubench.trace.families import kernel_name
from gpubench.trace.profile import (
    ON_HOST,
    SHORT_KERNEL,
    STANDARD_INPUT_LABEL,
    Compiled,
    KernelChange,
    Launches,
    Profile,
    RankProfile,
    Straggler,
)

PATH_PARTS = 5  # parts of the critical path that are named
LEAST_DRAWN = 0.02  # of a step: a terminal leaves out smaller parts without -v

BRINGS = {
    "shapes": "FLOP/s, traffic and bound of the operators",
    "stacks": "file and line of waits and copies",
    "steps": "time of a single step",
}
"""What each option of the recording adds to a trace."""


@dataclass(frozen=True)
class TimePart:
    """A part of the window. `time` is in nanoseconds of the whole window; `style` names the part's colour."""

    name: str
    style: str
    time: int


def time_parts(rank: RankProfile) -> list[TimePart]:
    """Returns the parts of the window, which add up to it; parts of no time are left out."""
    device = rank.device
    if device is None:
        found = [TimePart(timelines.style_words(name), name, time) for name, time in rank.host.items()]
    else:
        found = [
            TimePart("compute", "compute", device.compute),
            TimePart("exposed communication", "communication", device.exposed_communication),
            TimePart("exposed copies", "copies", device.exposed_copies),
            *(TimePart(f"idle, {timelines.style_words(cause)}", cause, time) for cause, time in rank.idle.items()),
        ]
    return [part for part in found if part.time]


def unit_of(kind: RunKind, settings: Mapping[str, Any]) -> str:
    """Returns what a step of the profiler is in a run of this kind; `settings` are by dot-key."""
    return "epoch" if settings.get("profiling.unit") == "epoch" else kind.unit


def whole(rank: RankProfile, unit: str = "step") -> str:
    """Returns what shares refer to."""
    return unit if rank.steps else "trace"


def per(rank: RankProfile, unit: str = "step") -> str:
    if not rank.steps:
        return "of the trace"
    return f"of an {unit}" if unit[0] in "aeiou" else f"of a {unit}"


def window(rank: RankProfile, unit: str = "step") -> str:
    """Returns what was recorded, as "6 steps of 178 ms on Tesla V100"."""
    length = units.seconds(rank.wall / 1e9 / steps(rank))
    said = f"{units.counted(len(rank.steps), unit)} of {length}" if rank.steps else length
    where = rank.device_name or ("the CPU alone" if rank.host_only else "")
    said = f"{said} on {where}" if where else said
    return said if rank.steps else f"{said}, no steps marked"


def about(profile: Profile, unit: str = "step") -> str:
    """Returns a sentence on the ranks that were recorded, and for how long."""
    first = profile.ranks[0]
    if len(profile.ranks) > 1:
        return f"{_given(profile)}, of which {part_name(first)} is shown below: {window(first, unit)}"
    label = first.label
    if first.rank is None:
        return f"{label}: {window(first, unit)}"
    others = f" of {first.world_size}" if (first.world_size or 0) > 1 else ""
    return f"{label}, rank {first.rank}{others}: {window(first, unit)}"


def _given(profile: Profile) -> str:
    """Returns how many of the job's ranks are traced, such as "2 of 128 ranks"."""
    traced, world = len(profile.ranks), profile.ranks[0].world_size or 0
    return f"{traced} of {world} ranks" if world > traced else units.counted(traced, "rank")


def is_distorted(overhead: float | None) -> bool:
    return overhead is not None and overhead > DISTORTED


def caveat(rank: RankProfile, overhead: float | None, unit: str = "step") -> str:
    """Returns a caveat on the times, such as the cost of recording."""
    said = "times are of the profiled run"
    if len(rank.steps) > 1:
        said += f", mean over its {len(rank.steps)} {unit}s"
    if overhead is None:
        return f"{said}: they show proportions, not speed"
    if overhead <= 0:
        return f"{said}; it took no longer than one without the profiler"
    said += f"; the profiled {unit} took {units.times(overhead)} as long as one without the profiler"
    if is_distorted(overhead):
        return f"{said}: shares below are distorted; times without the profiler are in the metrics"
    return f"{said}: its times show proportions, not speed"


def _distortion(overhead: float | None) -> str:
    return f"recording made a step take {units.times(overhead or 0)} as long: shares below are distorted"


def launches(rank: RankProfile, found: Launches, unit: str = "step") -> str:
    """Describes the launches: their number, delays and queue."""
    calling = duration(rank, found.host) or "0 s"
    said = [f"launches {per(rank, unit)}: {calls(rank, found.calls) or 0} in {calling} of the CPU"]
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


def critical_path(rank: RankProfile) -> str:
    """Returns the longest parts of the critical path, as shares of the window."""
    links = sorted(((time, name) for name, time in rank.critical_path.items() if time), reverse=True)
    said = [f"{words(name)} {part_share(rank, time)}" for time, name in links[:PATH_PARTS]]
    if rest := sum(time for time, _ in links[PATH_PARTS:]):
        said.append(f"others {part_share(rank, rest)}")
    return f"critical path: {', '.join(said)}" if said else ""


def straggler(found: Straggler) -> str:
    last = "last" if found.whole else "last of the ranks that were given"
    return (
        f"rank {found.rank} reached {found.waited_for} of {units.counted(found.of, 'collective')} {last}, "
        f"and was {_nanoseconds(found.late)} behind the first on average"
    )


def compiled(found: Compiled) -> str:
    said = f"compiled: {units.counted(found.regions, 'region')}, {units.counted(found.graph_breaks, 'graph break')}"
    if found.compilations:
        said += f", {units.counted(found.compilations, 'compilation')} in the window: {_nanoseconds(found.compiling)}"
    return said


def sentences(rank: RankProfile, unit: str = "step") -> list[str]:
    found = [
        launches(rank, rank.launches, unit) if rank.launches else "",
        critical_path(rank),
        compiled(rank.compiled) if rank.compiled else "",
        "" if bound_known(rank) else "bound of the operators: insufficient data",
    ]
    return [sentence for sentence in found if sentence]


def notes(profile: Profile) -> list[str]:
    """Returns all notes, each once; a note that is not about all ranks names its ranks."""
    true_of: dict[str, list[str]] = {}
    for rank in profile.ranks:
        for note in rank.notes:
            true_of.setdefault(note, []).append(part_name(rank))
    everywhere = len(profile.ranks)
    return [f"{', '.join(of)}: {note}" if len(of) < everywhere else note for note, of in true_of.items()]


def missing(profile: Profile, own: bool = False) -> list[str]:
    """Returns what the traces lack, and how to record it; `own` if they are of a run that gpubench can repeat."""
    absent = {
        what: findings.recorded_with(option, own) for rank in profile.ranks for what, option in rank.missing.items()
    }
    return [
        f"no {words(what)} in the trace, so no {BRINGS.get(what, 'more')}: record with {option}"
        for what, option in absent.items()
    ]


def _nanoseconds(time: int) -> str:
    return units.seconds(time / 1e9)


ENOUGH = 0.5
"""The least fraction of the time in names that both profiles have: optimising a program leaves most of its work."""


def differences(before: Profile, after: Profile) -> list[str]:
    """Returns clauses that say why two profiles cannot be compared; none if they can."""
    ours, theirs = before.ranks[0], after.ranks[0]
    found = [
        _unless_equal("the devices differ", _device(ours), _device(theirs)),
        _unless_equal("the numbers of ranks differ", str(_ranks(before)), str(_ranks(after))),
    ]
    alike = common(ours, theirs)
    if alike is not None and alike < ENOUGH:
        found.append(f"only {units.percent(alike)} of the time is in kernels or operators that both have")
    return [clause for clause in found if clause]


def common(before: RankProfile, after: RankProfile) -> float | None:
    """Returns the fraction of the time in names that both ranks have, as the mean of the two ranks.

    It is that of kernels or that of operators, whichever is larger, because a library may choose another kernel for the
    same operator. None if no times are known.
    """
    on_host = before.host_only or after.host_only
    kernels = _shared(*((((one.name, one.total) for one in rank.kernels)) for rank in (before, after)))
    operators = _shared(
        *(((one.name, one.host if on_host else one.device) for one in rank.operators) for rank in (before, after))
    )
    return max((share for share in (kernels, operators) if share is not None), default=None)


def _shared(before: Iterable[tuple[str, int]], after: Iterable[tuple[str, int]]) -> float | None:
    ours, theirs = _by_name(before), _by_name(after)
    wholes = ours.total(), theirs.total()
    if not all(wholes):
        return None
    names = ours.keys() & theirs.keys()
    return (
        sum(sum(side[name] for name in names) / whole for side, whole in zip((ours, theirs), wholes, strict=True)) / 2
    )


def _by_name(times: Iterable[tuple[str, int]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, time in times:
        found[name] += time
    return found


def _device(rank: RankProfile) -> str | None:
    return "the CPU alone" if rank.host_only else rank.device_name


def _ranks(profile: Profile) -> int:
    return profile.ranks[0].world_size or len(profile.ranks)


def _unless_equal(clause: str, before: str | None, after: str | None) -> str:
    """Returns the clause with both values if they are known and differ; else ""."""
    if before is None or after is None or before == after:
        return ""
    return f"{clause}: {before} before, {after} after"


CHANGES = 10  # rows of work that changed
APART: dict[Fate, str] = {"gone": "only before", "new": "only after", "still there": "in both"}
NANOSECONDS = 9  # decimals of a second, the resolution of traces


@dataclass(frozen=True)
class Against:
    """The profile to compare with, and the kernels that changed, largest change first."""

    profile: Profile
    findings: Findings
    changes: Sequence[KernelChange]


def reservation(unlike: Sequence[str]) -> str:
    """Returns why no change is reported."""
    return f"not compared: {'; '.join(unlike)}"


def speed(before: RankProfile, after: RankProfile, alike: bool = True) -> str:
    """Returns both lengths in a line, with their ratio if both sides have marked steps of the same work."""
    ours, theirs = (units.seconds(rank.wall / 1e9 / steps(rank)) for rank in (before, after))
    if not (before.steps and after.steps):
        said = f"the windows are {ours} and {theirs}"
        return f"{said}; without marked steps they need not be the same work" if alike else said
    said = f"a profiled step took {ours} before and {theirs} after"
    return f"{said}: {_change(before.wall / steps(before), after.wall / steps(after))}" if alike else said


def change_tables(
    before: RankProfile, after: RankProfile, changes: Sequence[KernelChange], alike: bool = True
) -> list[Table]:
    """Returns where the time went, and for the same work also what changed."""
    found = [part_changes(before, after, alike)]
    if alike:
        found.append(work_changes("kernel", [in_seconds(change) for change in changes]))
    return [one for one in found if one]


def part_changes(before: RankProfile, after: RankProfile, alike: bool = True) -> Table:
    """Returns every part of the time before and after, with the whole as the last row."""
    ours, theirs = _times(before), _times(after)
    rows = [
        _row(name, ours.get(name, 0.0), theirs.get(name, 0.0))
        for name in sorted({*ours, *theirs}, key=[*ours, *theirs].index)
    ]
    rows.append(_row("all of it", before.wall / steps(before), after.wall / steps(after)))
    if not alike:
        rows = [{name: row[name] for name in ("part", "before", "after")} for row in rows]
    return table(f"Where the time {per(after)} went", rows)


def work_changes(of: str, changes: Sequence[WorkChange], others: int = 0) -> Table:
    """Returns the work that changed most. `of` is "kernel" or "operator"; `others` counts changes not in `changes`."""
    rows = [
        {
            of: kernel_name(change.name),
            **_times_of(change.before, change.after),
            "calls": f"{units.digits(change.calls_before)} -> {units.digits(change.calls_after)}",
        }
        for change in changes[:CHANGES]
    ]
    rest = len(changes[CHANGES:]) + others
    title, others_left = f"{of.capitalize()}s that changed most, a step", units.counted(rest, "other") if rest else ""
    return table(title, rows, rest=others_left)


def outcome(change: FindingChange, alike: bool = True) -> str:
    """Returns what became of a finding: "gone", "new" and "still there" need two profiles of the same work."""
    # FindingChange.fate is the persisted name of the field.
    if change.fate and not alike:
        return APART[change.fate]
    return change.fate or ("there, not judged before" if change.candidate else "was there, not judged now")


def _change_of_finding(change: FindingChange) -> str:
    """Returns a finding before and after, as "a title (high -> low), worth up to 12.3 % -> 2 %"."""
    line = f"{change.title} ({_pair(change.baseline, change.candidate)})"
    savings = _pair(_percent(change.baseline_saving), _percent(change.candidate_saving))
    return f"{line}, worth up to {savings} of the step" if savings else line


def _pair(before: str | None, after: str | None) -> str:
    """Returns both values joined by an arrow, or the one that there is."""
    return " -> ".join(dict.fromkeys(word for word in (before, after) if word))


def _percent(saving: float | None) -> str | None:
    return None if saving is None else units.percent(saving)


def _times(rank: RankProfile) -> dict[str, float]:
    return {part.name: part.time / steps(rank) for part in time_parts(rank)}


def _row(name: str, before: float, after: float) -> dict[str, str]:
    """Returns a row for two times in nanoseconds."""
    return {"part": name, **_times_of(before / 1e9, after / 1e9)}


def _times_of(before: float, after: float) -> dict[str, str]:
    return {
        "before": units.seconds(before),
        "after": units.seconds(after),
        "change": units.signed_seconds(round(after - before, NANOSECONDS)),
        "of before": _change(before, after),
    }


def _change(before: float, after: float) -> str:
    return units.signed_percent(after / before - 1) if before else ""


def document(
    profile: Profile,
    found: Findings,
    trace: str | None = None,
    unit: str = "step",
    *,
    own: bool = False,
    arranged: Arrangement = PLAIN,
    against: Against | None = None,
) -> Document:
    """Returns the report of one program's traces.

    `trace` is the trace file if it is not under its own name. `unit` is what a step of the profiler is. `own` says that
    the profile is of a run of this program, which can be told to record more. `arranged` is how the tables are shown.
    `against` is the profile to compare with.
    """
    path = trace or profile.ranks[0].label
    made = blocks(profile, found, path, unit, own=own, arranged=arranged, compared=against is not None)
    headline = found.headline.rstrip(".")
    if against is not None:
        headline, changes = _against(profile, found, against)
        made = [*raised(changes), Heading("After"), *made]
    else:
        made = raised(made)
    return Document(headline, made, context="Profile of", path=path)


def blocks(
    profile: Profile,
    found: Findings,
    trace: str,
    unit: str = "step",
    *,
    own: bool = False,
    arranged: Arrangement = PLAIN,
    compared: bool = False,
    opener: str = "",
) -> list[Block]:
    """Returns what stands below the headline of a profile.

    With `compared` only a page shows its times, since other blocks show those that changed. `opener` is the address of
    a page that opens the trace.
    """
    first = profile.ranks[0]
    distorted = is_distorted(found.overhead)
    worth: list[Block] = [
        Paragraph(about(profile, unit), "quiet", on=UNASKED if own else EVERYWHERE),
        Paragraph(caveat(first, found.overhead, unit), "warning" if distorted else "quiet", on=UNASKED),
        Paragraph(_distortion(found.overhead) if distorted else "", "warning", "note: ", on=Medium.BRIEF),
    ]
    times = list(_where_time_went(profile, unit, arranged, own=own))
    return [
        *(_on_page(worth) if compared else worth),
        Paragraph([note for note in notes(profile) if not (own and _is_expected(note, first))], "warning", "note: "),
        *findings.blocks(found, whole(first, unit)),
        *(_on_page(times) if compared else times),
        Heading("The trace itself", 3, on=UNASKED, link="open it in Perfetto" if opener else "", target=opener),
        Paragraph(missing(profile, own), "missing", on=UNASKED),
        Paragraph(_more(found, own), "quiet", on=Medium.BRIEF),
        *([] if trace == STANDARD_INPUT_LABEL else [Command("open", trace, after=" at ", link=perfetto.VIEWER)]),
    ]


def _is_expected(note: str, rank: RankProfile) -> bool:
    """Tells whether a note only says that a run on a CPU left no work of a GPU in its trace."""
    return note.endswith(ON_HOST) and not rank.work_missing and not rank.unread


def _more(found: Findings, own: bool) -> str:
    """Returns what else the command can show and do."""
    said = "-v shows all evidence, and the time by phase, module and operator"
    untried = own and any(one.fix and one.measured is None for one in found.findings)
    return f"{said}; --verify measures what each setting saves" if untried else said


def _where_time_went(profile: Profile, unit: str, arranged: Arrangement, *, own: bool) -> Iterator[Block]:
    """Yields where the time went: by part, by rank, over a step, and by what was executed.

    `own` says that there are figures of steps without the profiler beside these.
    """
    first = profile.ranks[0]
    yield Heading("Where the time went", 3)
    yield from _partition(profile.ranks)
    parts, of = (
        [_part(first, part) for part in time_parts(first)],
        f"part {per(first, f'profiled {unit}' if own else unit)}",
    )
    yield Breakdown("", of, "time", parts, on=UNASKED)
    yield Breakdown("", of, "time", [part for part in parts if part.share >= LEAST_DRAWN], on=Medium.BRIEF)
    if len(profile.ranks) > 1:
        yield ranks(profile, unit)
        yield Paragraph([straggler(one) for one in profile.stragglers], listed=True)
    yield from _timeline(first, unit)
    bars = largest(first)
    for name, one in tables(first, arranged).items():
        if drawing := _largest(bars.get(name, [])):
            yield Figure(f"Largest {name.lower()}", drawing, shape="rows")
        yield one
    if said := sentences(first, unit):
        yield Heading("Launches and critical path", 3, on=UNASKED)
        yield Paragraph(said, listed=True, on=UNASKED)


def _largest(items: Sequence[tuple[str, float]]) -> Markup | None:
    """Draws a bar for each name; None if there are fewer than two of them."""
    named = [(name, seconds, "fill solid a") for name, seconds in items if seconds]
    return bar_charts.bars("where the time went", "s", named) if len(named) > 1 else None


def _on_page(blocks: Iterable[Block]) -> list[Block]:
    return [replace(block, on=block.on & Medium.PAGE) for block in blocks]


def to_document(profile: Profile, findings: Findings, against: Against | None = None) -> dict[str, Any]:
    """Returns the document for --json: profile.json and findings.json as they are, and what they are compared with."""
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "profile": profile, "findings": findings}
    if against:
        document["against"] = {
            "profile": against.profile,
            "findings": against.findings,
            "kernels": list(against.changes),
            "unlike": differences(against.profile, profile),
        }
    return document


def finding_changes(changes: Iterable[FindingChange], *, alike: bool = True) -> Iterator[Block]:
    """Yields one line per finding.

    `alike` says that both profiles are of the same work, so that a finding can be gone.
    """
    lines = [f"{outcome(one, alike)}: {_change_of_finding(one)}" for one in changes]
    yield Paragraph(lines, listed=True)


def _against(profile: Profile, found: Findings, against: Against) -> tuple[str, list[Block]]:
    """Returns how the time changed in a sentence, and the blocks about both profiles and their changes."""
    before, after = against.profile.ranks[0], profile.ranks[0]
    unlike = differences(against.profile, profile)
    alike = not unlike
    made: list[Block] = [Paragraph(reservation(unlike) if unlike else "", "warning")]
    for name, side, of in (("before", against.profile, against.findings), ("after", profile, found)):
        made += [Paragraph(f"{name}: {of.headline}"), Paragraph(about(side), "quiet")]
    made += change_tables(before, after, against.changes, alike)
    made += [Heading("Findings before and after", 3, on=EVERYWHERE)]
    made += finding_changes(changes_between(against.findings, found), alike=alike)
    return speed(before, after, alike), made


def _part(rank: RankProfile, part: "TimePart") -> Part:
    return Part(part.name, part.style, part.time / rank.wall, duration(rank, part.time), part_share(rank, part.time))


def _partition(ranks: Sequence[RankProfile]) -> Iterator[Block]:
    """Yields how each rank's time was spent as stacked bars, if any time was spent."""
    stacks = [
        timelines.NamedBar(part_name(rank), [_piece(rank, part) for part in time_parts(rank)])
        for rank in ranks
        if rank.wall > 0
    ]
    described = "; ".join(f"{stack.name} {piece.hint}" for stack in stacks for piece in stack.pieces)
    if len(stacks) == 1:
        stacks = [replace(stacks[0], name="")]
    drawing = timelines.stacked("Where the time went", described, stacks, "fraction", "of the wall time")
    if drawing:
        yield Figure("", drawing, shape="lanes")
    else:
        yield Paragraph("nothing was recorded", "missing", on=Medium.PAGE)


def _piece(rank: RankProfile, part: "TimePart") -> timelines.BarPiece:
    return timelines.BarPiece(f"{part.name} {part_share(rank, part.time)}", part.style, part.time / rank.wall)


def _timeline(rank: RankProfile, unit: str) -> Iterator[Block]:
    found = rank.timeline
    drawing = timelines.timeline(found, whole(rank, unit)) if found else None
    if found is None or drawing is None:
        return
    note = f"Too short to be drawn: {found.left_out:,} more." if found.left_out else ""
    title = f"{unit.capitalize()} {found.step}" if rank.steps else "The whole trace"
    yield Heading("Timeline", 3)
    yield Figure(title, drawing, note, "lanes", legends=timelines.legend(found.lanes))
