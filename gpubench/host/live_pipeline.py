"""The live view of a pipeline: a table with a row for each rank, or one plain line."""

from collections.abc import Sequence

from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.host.live import hardware, head
from gpubench.host.pipeline_recorder import PipeProgress, RankProgress
from gpubench.runs.stages import PARTS
from gpubench.text import Fitting, plain_table

EVERYTHING = ("rank", "sample", "evaluation", "evaluation time", *map(units.words, PARTS), "doing")
LAYOUTS = (  # from the widest table to the narrowest
    (EVERYTHING, None),
    (EVERYTHING, 12),
    (("rank", "sample", "evaluation", "doing"), 15),
)


def describe(progress: PipeProgress) -> str:
    """Returns the state of a run as one line of plain text."""
    parts = [progress.place]
    if not any(state.spans for state in progress.states):
        return "  ".join([*parts, units.words(progress.doing)])
    parts.append(f"samples {progress.finished}/{progress.total or '?'}")
    if progress.finished == progress.total:  # the baselines or the verification run
        busy = [state.doing for state in progress.states if not state.doing.startswith("waiting")]
        return "  ".join([*parts, units.words(busy[0] if busy else progress.doing)])
    parts += [f"rank {rank} {_where(state)}" for rank, state in enumerate(progress.states)]
    return "  ".join(parts)


def draw(experiment: str, progress: PipeProgress) -> RenderableType:
    """Returns the state of a run as a table with a row for each rank."""
    table = head(progress.place)
    table.add_row("samples", f"{progress.finished} of {progress.total or '?'}")
    for name, text in hardware(progress.telemetry):
        table.add_row(name, text)
    return Group(Text(experiment, style="bold"), table, Fitting(_ranks(progress, *layout) for layout in LAYOUTS))


def _ranks(progress: PipeProgress, columns: Sequence[str], words: int | None) -> Table:
    """Builds the table of the ranks. `words` is the largest width of the column "doing", in characters."""
    table = plain_table()
    for name in columns:
        is_words = name == "doing"
        justify: JustifyMethod = "left" if is_words else "right"
        heading = name.replace(" ", "\n")
        table.add_column(heading, justify=justify, no_wrap=not is_words, max_width=words if is_words else None)
    for rank, state in enumerate(progress.states):
        cells = _cells(state) | {"rank": str(rank), "doing": units.words(state.doing)}
        table.add_row(*(cells[name] for name in columns))
    return table


def _cells(state: RankProgress) -> dict[str, str]:
    own = f"{state.evaluations[0]}-{state.evaluations[1] - 1}" if state.evaluations else ""
    sample, step = ("" if number is None else str(number) for number in (state.sample, state.step))
    taken = "" if state.evaluation is None else units.seconds(state.evaluation)
    times = state.times
    shares = {units.words(part): units.whole_percent(times.share(part)) if times else "" for part in PARTS}
    return {"sample": sample, "evaluation": " of ".join(filter(None, (step, own))), "evaluation time": taken} | shares


def _where(state: RankProgress) -> str:
    """Returns "sample 3 evaluation 17", or what the rank does if it works on no sample."""
    if state.sample is None:
        return units.words(state.doing)
    return f"sample {state.sample}" + (f" evaluation {state.step}" if state.step is not None else "")
