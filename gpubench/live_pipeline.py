"""How the progress of a pipeline looks while it goes on: a row for each rank, or a plain line."""

from collections.abc import Sequence

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.live import Fitting, hardware
from gpubench.pipe_progress import PipeProgress, RankProgress
from gpubench.timeline import PARTS

SHARES = {"compute": "compute", "recv_wait": "receive", "send_wait": "send", "idle": "idle"}
EVERYTHING = ("rank", "steps", "sample", "step", "step time", *SHARES.values(), "doing")
LAYOUTS = (  # from the widest table to the narrowest
    (EVERYTHING, None),
    (EVERYTHING, 12),
    (("rank", "sample", "step", "doing"), 18),
)


def describe(progress: PipeProgress) -> str:
    """The state of a run in one plain line."""
    parts = [progress.place]
    if not any(state.spans for state in progress.states):
        return "  ".join([*parts, _words(progress.doing)])
    parts.append(f"samples {progress.finished}/{progress.total or '?'}")
    if progress.finished == progress.total:  # what is measured beside it, or compared with it
        busy = [state.doing for state in progress.states if not state.doing.startswith("waiting")]
        return "  ".join([*parts, _words(busy[0] if busy else progress.doing)])
    parts += [f"rank {rank} {_where(state)}" for rank, state in enumerate(progress.states)]
    return "  ".join(parts)


def draw(experiment: str, progress: PipeProgress) -> RenderableType:
    """The state of a run as a table."""
    head = Table.grid(padding=(0, 2))
    head.add_column(style="dim", no_wrap=True)
    head.add_column(no_wrap=True)
    head.add_row("now", progress.place)
    head.add_row("samples", f"{progress.finished} of {progress.total or '?'}")
    for name, text in hardware(progress.telemetry):
        head.add_row(name, text)
    return Group(Text(experiment, style="bold"), head, Fitting(*(_ranks(progress, *layout) for layout in LAYOUTS)))


def _ranks(progress: PipeProgress, columns: Sequence[str], words: int | None) -> Table:
    """`words` is the most characters in a line of what a rank is doing."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        is_words = name == "doing"
        justify: JustifyMethod = "left" if is_words else "right"
        table.add_column(name, justify=justify, no_wrap=not is_words, max_width=words if is_words else None)
    for rank, state in enumerate(progress.states):
        cells = _cells(state) | {"rank": str(rank), "doing": _words(state.doing)}
        table.add_row(*(cells[name] for name in columns))
    return table


def _cells(state: RankProgress) -> dict[str, str]:
    span = f"{state.evaluations[0]}-{state.evaluations[1] - 1}" if state.evaluations else ""
    sample, step = ("" if number is None else str(number) for number in (state.sample, state.step))
    taken = "" if state.evaluation is None else units.seconds(state.evaluation)
    shares = {SHARES[part]: f"{state.times.share(part):.0%}" if state.times else "" for part in PARTS}
    return {"steps": span, "sample": sample, "step": step, "step time": taken} | shares


def _where(state: RankProgress) -> str:
    """ "sample 3 step 17", or what it does where it has none in hand."""
    if state.sample is None:
        return _words(state.doing)
    return f"sample {state.sample}" + (f" step {state.step}" if state.step is not None else "")


def _words(doing: str) -> str:
    return doing.replace("_", " ")
