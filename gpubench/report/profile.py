"""Show a profile in the terminal and as JSON, alone or compared with another."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.compare.explanation import finding_changes, in_seconds
from gpubench.compare.result import Fate, FindingChange, WorkChange
from gpubench.findings import Finding, Findings
from gpubench.report import finding_phrases, sheets
from gpubench.report.finding_phrases import (
    bound_known,
    calls,
    duration,
    kernel_name,
    part_name,
    part_share,
    per,
    steps,
    time_parts,
)
from gpubench.report.sheets import Sheet, sheet
from gpubench.runs.directory import SCHEMA_VERSION
from gpubench.text import BAR, bar, clean, plain_table, say, say_unbroken, words
from gpubench.trace.host import folded
from gpubench.trace.profile import Copy, KernelChange, Module, Operator, Profile, Rank

ENOUGH = 0.5
"""The least fraction of the time in names that both profiles have: an optimised program mostly does the same work."""


def differences(before: Profile, after: Profile) -> list[str]:
    """Return clauses that say why two profiles cannot be compared; an empty list if they can."""
    ours, theirs = before.ranks[0], after.ranks[0]
    found = [
        _unless_equal("the devices differ", _device(ours), _device(theirs)),
        _unless_equal("the numbers of ranks differ", str(_ranks(before)), str(_ranks(after))),
    ]
    alike = common(ours, theirs)
    if alike is not None and alike < ENOUGH:
        found.append(f"only {units.percent(alike)} of the time is in kernels or operators that both have")
    return [clause for clause in found if clause]


def common(before: Rank, after: Rank) -> float | None:
    """Return the fraction of the time in names that both ranks have, as the mean of the two.

    It is that of kernels or of operators, whichever is larger, because a library may choose another kernel for the same
    operator. None if no times are known.
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


def _device(rank: Rank) -> str | None:
    return "the host alone" if rank.host_only else rank.device_name


def _ranks(profile: Profile) -> int:
    return profile.ranks[0].world_size or len(profile.ranks)


def _unless_equal(clause: str, before: str | None, after: str | None) -> str:
    """Return the clause with both values if they are known and differ; else an empty string."""
    if before is None or after is None or before == after:
        return ""
    return f"{clause}: {clean(before)} before, {clean(after)} after"


MODULES = 15
OPERATORS = 15
KERNELS = 10
PLACES = 10  # rows of copies, synchronisations and collectives
FOLDED = "A number in brackets counts equal layers, whose sum the row is; gpubench profile -v has a row for each."

Item = TypeVar("Item")


def tables(rank: Rank, *, unfolded: bool = False) -> list[Sheet]:
    """Return all tables that have rows. `unfolded` gives every module a row; otherwise equal layers share one."""
    made = [
        phases(rank), modules(rank, unfolded=unfolded), operators(rank), kernels(rank), copies(rank),
        synchronisations(rank), collectives(rank),
    ]  # fmt: skip
    return [one for one in made if one]


def ranks(profile: Profile, unit: str = "step") -> Sheet:
    """Return one row per rank, in shares of the rank's own wall time."""
    return sheet("Ranks", [_rank_row(rank, unit) for rank in profile.ranks])


def phases(rank: Rank) -> Sheet:
    rows = [
        {
            "phase": words(phase.name),
            "host": duration(rank, phase.host),
            "of host": part_share(rank, phase.host),
            "device": duration(rank, phase.device),
            "of device": part_share(rank, phase.device),
            "launches": calls(rank, phase.launches),
            "recompute": duration(rank, phase.recompute),
        }
        for phase in rank.phases
        if phase.host or phase.device
    ]
    return sheet("Phases", rows)


def modules(rank: Rank, *, unfolded: bool = False) -> Sheet:
    layers = [(module, 1) for module in rank.modules] if unfolded else folded(rank.modules)
    found, rest = _top(layers, MODULES, lambda layer: layer[0].own, rank)
    rows = [
        {
            "module": _module_name(module, equal),
            "own time": duration(rank, module.own),
            "share": part_share(rank, module.own),
            "class": module.kind,
            "forward": duration(rank, module.forward),
            "backward": duration(rank, module.backward),
            "recompute": duration(rank, module.recompute),
            "host": duration(rank, module.host),
            "calls": calls(rank, module.calls),
        }
        for module, equal in found
    ]
    note = FOLDED if len(layers) < len(rank.modules) else ""
    return sheet("Modules, by time outside their submodules", rows, rest, note, [module.own for module, _ in found])


def operators(rank: Rank) -> Sheet:
    found, rest = _top(rank.operators, OPERATORS, lambda one: _work(rank, one), rank)
    rows = [operator_row(rank, one) for one in found]
    if not bound_known(rank):
        for row in rows:
            row["bound"] = ""
    return sheet("Operators", rows, rest, sizes=[_work(rank, one) for one in found])


def kernels(rank: Rank) -> Sheet:
    found, rest = _top(rank.kernels, KERNELS, lambda one: one.total, rank)
    rows = [
        {
            "kernel": kernel_name(one.name),
            "time": duration(rank, one.total),
            "share": part_share(rank, one.total),
            "calls": calls(rank, one.calls),
            "median": units.seconds(one.median / 1e9),
            "longest": units.seconds(one.longest / 1e9),
            "kind": one.kind,
            "launched by": one.operator,
        }
        for one in found
    ]
    return sheet("Kernels", rows, rest, sizes=[one.total for one in found])


def copies(rank: Rank) -> Sheet:
    found, rest = _top(rank.copies, PLACES, lambda copy: copy.device + copy.host, rank)
    rows = [
        {
            "copy": _copy_kind(copy),
            "host": duration(rank, copy.host),
            "device": duration(rank, copy.device),
            "calls": calls(rank, copy.calls),
            "size": units.size(copy.bytes / steps(rank)) if copy.bytes else "",
            "in phase": words(copy.phase),
            "where": copy.where or "",
            "example": copy.example,
        }
        for copy in found
    ]
    return sheet("Copies", rows, rest)


def synchronisations(rank: Rank) -> Sheet:
    found, rest = _top(rank.synchronisations, PLACES, lambda one: max(one.blocked, one.idle), rank)
    rows = [
        {
            "wait asked by": one.operator or one.call,
            "host waits": duration(rank, one.blocked),
            "where": one.where or "",
            "device idle": duration(rank, one.idle),
            "calls": calls(rank, one.calls),
            "in phase": words(one.phase),
            "in call": one.call if one.operator else "",
        }
        for one in found
    ]
    return sheet("Waits of the host for the device", rows, rest)


def collectives(rank: Rank) -> Sheet:
    found, rest = _top(rank.collectives, PLACES, lambda one: one.total, rank)
    rows = [
        {
            "kind": words(one.kind or ""),
            "collective": one.name,
            "time": duration(rank, one.total),
            "exposed": duration(rank, one.exposed),
            "calls": calls(rank, one.calls),
            "size": units.size(one.bytes / steps(rank)) if one.bytes else "",
        }
        for one in found
    ]
    return sheet("Collectives", rows, rest)


def _top(items: Sequence[Item], limit: int, time: Callable[[Item], int], rank: Rank) -> tuple[list[Item], str]:
    """Return the items with the most time, and a line that counts the others."""
    ordered = sorted(items, key=time, reverse=True)
    others = ordered[limit:]
    spent = duration(rank, sum(map(time, others)))
    said = f"{units.counted(len(others), 'other')}{f', {spent} in all' if spent else ''}" if others else ""
    return ordered[:limit], said


def _module_name(module: Module, equal: int) -> str:
    name = module.path or "(the whole model)"
    return f"{name} ({equal})" if equal > 1 else name


def _work(rank: Rank, operator: Operator) -> int:
    """Return the nanoseconds that rank the operator: device time, or host time where the host alone is recorded."""
    return operator.host if rank.host_only else operator.device


def operator_row(rank: Rank, operator: Operator) -> dict[str, str]:
    """Return the cells of an operator by column; cells with unknown values are empty."""
    elsewhere = rank.host_only and bool(
        rank.work_missing or rank.unread
    )  # a device did the work, but it is not recorded
    seconds = 0.0 if elsewhere else _work(rank, operator) / 1e9
    return {
        "operator": operator.name,
        "host" if rank.host_only else "device": duration(rank, _work(rank, operator)),
        "shapes": operator.shapes,
        "host": duration(rank, operator.host),
        "share": part_share(rank, _work(rank, operator)),
        "calls": calls(rank, operator.calls),
        "bound": operator.bound,
        "of ceiling": "" if operator.of_ceiling is None else units.percent(operator.of_ceiling),
        "FLOP/s": units.count(operator.flops / seconds) if operator.flops and seconds else "",
        "bytes/s": units.count(operator.bytes / seconds) if operator.bytes and seconds else "",
        "of type": operator.dtype,
    }


def _copy_kind(copy: Copy) -> str:
    memory = {None: "", True: ", pinned", False: ", pageable"}[copy.pinned]
    return f"{words(copy.kind)}{memory}"


def _rank_row(rank: Rank, unit: str) -> dict[str, str]:
    row = {"rank": part_name(rank), unit if rank.steps else "window": duration(rank, rank.wall)}
    if rank.device is None:
        return row | {words(part): part_share(rank, time) for part, time in rank.host.items()}
    idle, cause = max(((time, cause) for cause, time in rank.idle.items()), default=(0, ""))
    return row | {
        "compute": part_share(rank, rank.device.compute),
        "communication": part_share(rank, rank.device.exposed_communication),
        "copies": part_share(rank, rank.device.exposed_copies),
        "idle": part_share(rank, rank.device.idle),
        "mostly idle for": f"{words(cause)} {units.percent(idle / rank.device.idle)}" if idle else "",
    }


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
    """Say why no change is reported."""
    return f"not compared: {'; '.join(unlike)}"


def speed(before: Rank, after: Rank, alike: bool = True) -> str:
    """Return both lengths in a line, with their ratio if both sides have marked steps of the same work."""
    ours, theirs = (units.seconds(rank.wall / 1e9 / steps(rank)) for rank in (before, after))
    if not (before.steps and after.steps):
        said = f"the windows are {ours} and {theirs}"
        return f"{said}; without marked steps they need not be the same work" if alike else said
    said = f"a profiled step took {ours} before and {theirs} after"
    return f"{said}: {_change(before.wall / steps(before), after.wall / steps(after))}" if alike else said


def change_tables(before: Rank, after: Rank, changes: Sequence[KernelChange], alike: bool = True) -> list[Sheet]:
    """Return where the time went, and for the same work also what changed."""
    found = [part_changes(before, after, alike)]
    if alike:
        found.append(work_changes("kernel", [in_seconds(change) for change in changes]))
    return [one for one in found if one]


def part_changes(before: Rank, after: Rank, alike: bool = True) -> Sheet:
    """Return every part of the time before and after, with the whole as the last row."""
    ours, theirs = _times(before), _times(after)
    rows = [
        _row(name, ours.get(name, 0.0), theirs.get(name, 0.0))
        for name in sorted({*ours, *theirs}, key=[*ours, *theirs].index)
    ]
    rows.append(_row("all of it", before.wall / steps(before), after.wall / steps(after)))
    if not alike:
        rows = [{name: row[name] for name in ("part", "before", "after")} for row in rows]
    return sheet(f"Where the time {per(after)} went", rows)


def work_changes(of: str, changes: Sequence[WorkChange], others: int = 0) -> Sheet:
    """Return the work that changed most. `of` is "kernel" or "operator"; `others` counts changes not in `changes`."""
    rows = [
        {
            of: kernel_name(change.name),
            **_times_of(change.before, change.after),
            "calls": f"{units.digits(change.calls_before)} -> {units.digits(change.calls_after)}",
        }
        for change in changes[:CHANGES]
    ]
    rest = len(changes[CHANGES:]) + others
    return sheet(f"{of.capitalize()}s that changed most, a step", rows, units.counted(rest, "other") if rest else "")


def outcome(change: FindingChange, alike: bool = True) -> str:
    """Say what became of a finding: "gone", "new" and "still there" need two profiles of the same work."""
    # FindingChange.fate is the persisted name of the field.
    if change.fate and not alike:
        return APART[change.fate]
    return change.fate or ("there, not judged before" if change.candidate else "was there, not judged now")


def about(change: FindingChange) -> str:
    """Return a finding before and after, as "a title (high -> low), worth up to 12.3 % -> 2 %"."""
    said = f"{clean(change.title)} ({_pair(change.baseline, change.candidate)})"
    savings = _pair(_percent(change.baseline_saving), _percent(change.candidate_saving))
    return f"{said}, worth up to {savings} of the step" if savings else said


def _pair(before: str | None, after: str | None) -> str:
    """Return both values joined by an arrow, or the one that there is."""
    return " -> ".join(dict.fromkeys(word for word in (before, after) if word))


def _percent(saving: float | None) -> str | None:
    return None if saving is None else units.percent(saving)


def _times(rank: Rank) -> dict[str, float]:
    return {part.name: part.time / steps(rank) for part in time_parts(rank)}


def _row(name: str, before: float, after: float) -> dict[str, str]:
    """Return a row for two times in nanoseconds."""
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


SMALLEST_BAR = 8  # characters
SEVERITIES = {"high": "red", "medium": "yellow", "low": "cyan"}
OUTCOMES = {"confirmed": "green", "no effect": "yellow", "inconclusive": "yellow", "worse": "red", "failed": "magenta"}
CHANGE_STYLES = {"gone": "green", "still there": "yellow", "new": "red"}


def show(
    profile: Profile,
    findings: Findings,
    console: Console,
    trace: str | None = None,
    unit: str = "step",
    own: bool = False,
    *,
    unfolded: bool = False,
) -> None:
    """Print a profile with its findings: headline first, then details, then advice.

    `trace` is the trace file if it is not under its own name. `unit` is what a step of the profiler is. `own` says that
    the profile is of a run of this program, which can be told to record more. `unfolded` gives every module a row, also
    equal layers.
    """
    first = profile.ranks[0]
    say(console, clean(findings.headline), "bold")
    say(console, finding_phrases.about(profile, unit), "dim")
    loudness = "bold yellow" if finding_phrases.is_distorted(findings.overhead) else "dim"
    say(console, finding_phrases.caveat(first, findings.overhead, unit), loudness)
    if len(profile.ranks) > 1:
        sheets.show([ranks(profile, unit)], console)
        _say_all(console, map(finding_phrases.straggler, profile.stragglers))
    console.print()
    console.print(_parts(first, console.width, unit))
    sheets.show(tables(first, unfolded=unfolded), console)
    if sentences := finding_phrases.sentences(first, unit):
        console.print()
        _say_all(console, sentences)
    show_findings(findings, console, finding_phrases.whole(first, unit))
    _show_unknown(console, profile, own)
    say_unbroken(console, finding_phrases.perfetto(trace or first.label))


def show_against(
    before: Profile,
    after: Profile,
    changes: Sequence[KernelChange],
    findings_before: Findings,
    findings_after: Findings,
    console: Console,
) -> None:
    """Print how the time and the findings changed between two traces of one program."""
    ours, theirs = before.ranks[0], after.ranks[0]
    unlike = differences(before, after)
    say(console, speed(ours, theirs, not unlike), "bold")
    if unlike:
        say(console, reservation(unlike), "bold yellow")
    for name, profile, findings in (("before", before, findings_before), ("after", after, findings_after)):
        say(console, f"{name}: {clean(findings.headline)}")
        say(console, f"  {finding_phrases.about(profile)}", "dim")
    sheets.show(change_tables(ours, theirs, changes, not unlike), console)
    console.print()
    show_finding_changes(finding_changes(findings_before, findings_after), console, alike=not unlike)
    show_findings(findings_after, console, finding_phrases.whole(theirs))
    _show_unknown(console, after)


def show_finding_changes(changes: Iterable[FindingChange], console: Console, *, alike: bool = True) -> None:
    """Print one line per finding. `alike` says that both profiles are of the same work, so that a finding can be
    gone."""
    for change in changes:
        style = CHANGE_STYLES[change.fate] if change.fate and alike else ""
        say(console, f"{outcome(change, alike)}: {about(change)}", style)


def to_document(profile: Profile, findings: Findings, against: Against | None = None) -> dict[str, Any]:
    """Return the document for --json: profile.json and findings.json as they are, and what they are compared with."""
    document: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "profile": profile, "findings": findings}
    if against:
        document["against"] = {
            "profile": against.profile,
            "findings": against.findings,
            "kernels": list(against.changes),
            "unlike": differences(against.profile, profile),
        }
    return document


def _parts(rank: Rank, width: int, unit: str) -> Table:
    """Return a bar for each part of the window; figures only where the terminal is too narrow for bars."""
    parts = finding_phrases.time_parts(rank)
    cells = [
        (part.name, finding_phrases.part_share(rank, part.time), finding_phrases.duration(rank, part.time))
        for part in parts
    ]
    room = width - sum(max(len(cell) for cell in column) + 2 for column in zip(*cells, strict=True))
    table = plain_table()
    table.add_column(finding_phrases.per(rank, unit), no_wrap=True)
    if room >= SMALLEST_BAR:
        table.add_column("", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for part, (name, share, time) in zip(parts, cells, strict=True):
        bars = [bar(part.time / rank.wall, part.style, min(BAR, room))] if room >= SMALLEST_BAR else []
        table.add_row(Text(name), *bars, Text(share), Text(time))
    return table


def show_findings(findings: Findings, console: Console, whole: str) -> None:
    """Print findings, settings to keep, and rules that lack data. `whole` is what a saving is a fraction of."""
    for number, finding in enumerate(findings.findings, 1):
        console.print()
        console.print(_title(number, finding))
        console.print(_lines(finding, whole))
    if not findings.findings:
        say(console, f"no finding: {finding_phrases.NOTHING}")
    console.print()
    if findings.interrupted:
        say(console, finding_phrases.INTERRUPTED, "yellow")
    if together := finding_phrases.combination(findings, whole):
        say(console, together)
    if findings.keep:
        say_unbroken(console, f"keep: {finding_phrases.options(findings.keep)}", "bold")
    for missing, rules in finding_phrases.unanswered(findings):
        say(console, f"not judged, data missing ({missing}): {rules}", "dim")


def _title(number: int, finding: Finding) -> Text:
    severity = (f"  {finding.severity}", SEVERITIES[finding.severity])
    return Text.assemble((f"{number}. {clean(finding.title)}", "bold"), severity)


def _lines(finding: Finding, whole: str) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    previous = ""
    for what, sentence in finding_phrases.lines(finding, whole):
        style = OUTCOMES[finding.measured.outcome] if finding.measured and what == "measured" else ""
        grid.add_row(Text(f"   {what if what != previous else ''}", "dim"), Text(sentence, style))
        previous = what
    return grid


def _show_unknown(console: Console, profile: Profile, own: bool = False) -> None:
    for sentence in finding_phrases.missing(profile, own):
        say(console, sentence, "dim")
    for note in finding_phrases.doubts(profile):
        say(console, f"note: {note}", "yellow")


def _say_all(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        say(console, line)
