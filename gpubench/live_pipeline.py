"""How the progress of a pipeline looks while it goes on: a row for each rank, or a plain line."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.live import hardware
from gpubench.pipe_progress import PipeProgress, RankProgress
from gpubench.timeline import PARTS

SHARES = {"compute": "compute", "recv_wait": "receive", "send_wait": "send", "idle": "idle"}


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
    return Group(Text(experiment, style="bold"), head, _ranks(progress))


def _ranks(progress: PipeProgress) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rank", justify="right", no_wrap=True)
    for name in ("steps", "sample", "step", "step time"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in PARTS:
        table.add_column(SHARES[part], justify="right", no_wrap=True)
    table.add_column("doing")  # the one that gives way on a narrow terminal
    for rank, state in enumerate(progress.states):
        times = state.times
        shares = [f"{times.share(part):.0%}" if times else "" for part in PARTS]
        table.add_row(str(rank), *_cells(state), *shares, _words(state.doing))
    return table


def _cells(state: RankProgress) -> list[str]:
    span = f"{state.evaluations[0]}-{state.evaluations[1] - 1}" if state.evaluations else ""
    sample, step = ("" if number is None else str(number) for number in (state.sample, state.step))
    return [span, sample, step, "" if state.evaluation is None else units.seconds(state.evaluation)]


def _where(state: RankProgress) -> str:
    """ "sample 3 step 17", or what it does where it has none in hand."""
    if state.sample is None:
        return _words(state.doing)
    return f"sample {state.sample}" + (f" step {state.step}" if state.step is not None else "")


def _words(doing: str) -> str:
    return doing.replace("_", " ")
