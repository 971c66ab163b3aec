"""Shows the progress of a run: a table if stderr is a terminal, and otherwise plain lines."""

import time
from importlib import import_module
from statistics import fmean
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.host.recorder import Progress, Recorder
from gpubench.host.step_recorder import TrainProgress
from gpubench.metrics import place_of_phase
from gpubench.registry import RunKind
from gpubench.telemetry import TelemetrySample
from gpubench.text import BAR, Fitting, bar

REDRAW_SECONDS = 0.5  # seconds between two redraws; few, because the host shares the machine with the workers
LINE_SECONDS = 5.0  # seconds between two lines
SAME_LINE_SECONDS = 60.0  # seconds until a line is printed again although nothing has changed

P = TypeVar("P", bound=Progress, contravariant=True)


class Drawing(Protocol[P]):
    """Describes the progress of a command's runs. This module is the drawing of training runs."""

    def describe(self, progress: P) -> str:
        """The progress as one line of plain text."""

    def draw(self, experiment: str, progress: P) -> RenderableType: ...


class View(Protocol):
    """A context manager that shows the progress of a run each time it is called."""

    def __call__(self, recorder: Recorder[Any]) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Silence:
    """Shows nothing, for the option -q."""

    def __call__(self, recorder: Recorder[Any]) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class ProgressLines(Silence):
    """Prints a line every few seconds, for logs and pipes; one without news once a minute."""

    def __init__(self, console: Console, drawing: Drawing[Any]) -> None:
        self._console = console
        self._drawing = drawing
        self._printed = time.monotonic()
        self._line = ""

    def __call__(self, recorder: Recorder[Any]) -> None:
        since = time.monotonic() - self._printed
        if since < LINE_SECONDS:
            return
        line = self._drawing.describe(recorder.progress)
        if line == self._line and since < SAME_LINE_SECONDS:
            return
        self._printed, self._line = time.monotonic(), line
        self._console.print(line, soft_wrap=True, highlight=False)


class LiveTable(Silence):
    """Redraws a table in place. It is erased at the end of the run, so that only the report remains."""

    def __init__(self, console: Console, drawing: Drawing[Any]) -> None:
        self._drawing = drawing
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._drawn = 0.0

    def __call__(self, recorder: Recorder[Any]) -> None:
        now = time.monotonic()
        if now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        self._live.update(self._drawing.draw(recorder.settings.experiment, recorder.progress), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def describe(progress: TrainProgress) -> str:
    """The state of a run as one line of plain text."""
    head = progress.place
    if progress.step is None:
        return "  ".join([head, progress.doing.replace("_", " "), *left(progress)])
    step_time = _step_time(progress)
    parts = [head, f"step {_counted(progress, '/')}"]
    if progress.step.loss is not None:
        parts.append(f"loss {progress.step.loss:.4f}")
    return "  ".join([*parts, *_speed(progress), units.seconds(step_time), *left(progress)])


def draw(experiment: str, progress: TrainProgress) -> RenderableType:
    """The state of a run as a table. The bars are left out if the terminal is too narrow for them."""
    return Group(Text(experiment, style="bold"), Fitting(_table(progress, length) for length in (BAR, 0)))


def _table(progress: TrainProgress, length: int) -> Table:
    """`length` is that of the bars, in characters."""
    table = head(progress.place)
    if progress.step is None:
        table.add_row("", units.words(progress.doing))
        for line in left(progress):
            table.add_row("left", line.removesuffix(" left"))
        return table
    step, step_time = progress.step, _step_time(progress)
    table.add_row("step", f"{_counted(progress, ' of ')}   epoch {step.epoch}")
    if step.loss is not None:
        table.add_row("loss", f"{step.loss:.4f}")
    table.add_row("speed", "   ".join([*_speed(progress), f"{units.seconds(step_time)} a step"]))
    for name, share, seconds in _phases(progress):
        figures = f"{units.whole_percent(share):>5}  {units.seconds(seconds)}"
        table.add_row(units.words(name), bar(share, name, length).append(" " * bool(length) + figures))
    for name, text in hardware(progress.telemetry):
        table.add_row(name, text)
    remaining = [line.removesuffix(" left") for line in left(progress)]
    if progress.planned and step.step < progress.planned:
        own = units.about((progress.planned - step.step - 1) * step_time)
        remaining = [f"{own} in this repeat", *(f"{line} in all" for line in remaining)]
    if remaining:
        table.add_row("left", ", ".join(remaining))
    return table


def left(progress: Progress) -> list[str]:
    """The time left of all repeats and runs, as ["about 3 min left"].

    It is [] while the time is unknown, and once the estimate has passed.
    """
    remaining = 0.0 if progress.ends is None else progress.ends - time.monotonic()
    return [f"about {units.about(remaining)} left"] if remaining > 0 else []


def _counted(progress: TrainProgress, of: str) -> str:
    """The number of the step, and of how many; without that for one beyond these, as a program samples some."""
    assert progress.step is not None
    number = progress.step.step + 1
    return f"{number}" if progress.planned and number > progress.planned else f"{number}{of}{progress.planned or '?'}"


def head(now: str) -> Table:
    """A table of two columns with the first row of every view, to which a view adds its own rows."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("now", now)
    return table


def _step_time(progress: TrainProgress) -> float:
    return fmean(step.total for step in progress.steps)


def _speed(progress: TrainProgress) -> list[str]:
    """The samples per second of all ranks over the recent steps; empty if they are unknown."""
    samples = fmean(step.samples for step in progress.steps)
    return [units.rate(progress.ranks * samples / _step_time(progress), "samples/s")] if samples else []


def _phases(progress: TrainProgress) -> list[tuple[str, float, float]]:
    """The (name, share of the step, seconds) of each phase in the order of the result, means over recent steps."""
    recent = progress.steps
    total = _step_time(progress)
    names = sorted({name for step in recent for name in step.phases}, key=place_of_phase)
    means = {name: fmean(step.phases.get(name, 0.0) for step in recent) for name in names}
    return [(name, seconds / total, seconds) for name, seconds in means.items()]


def hardware(sample: TelemetrySample | None) -> list[tuple[str, str]]:
    """The (name, state) of each GPU and of the CPU; an empty list without a sample."""
    rows: list[tuple[str, str]] = []
    if sample is None:
        return rows
    for gpu in sample.gpus:
        parts = []
        if gpu.utilization is not None:
            parts.append(f"{units.whole_percent(gpu.utilization)} busy")
        if gpu.memory_used_bytes is not None:
            parts.append(units.size(gpu.memory_used_bytes))
        if gpu.power_w is not None:
            parts.append(f"{gpu.power_w:.0f} W")
        rows.append((f"GPU {gpu.index}", "   ".join(parts)))
    if sample.cpu and sample.cpu.load is not None:
        memory = sample.cpu.memory_rss_bytes
        used = f"   {units.size(memory)} in the workers" if memory else ""
        rows.append(("CPU", f"{units.whole_percent(sample.cpu.load)} busy{used}"))
    return rows


def drawing_of(kind: RunKind) -> Drawing[Any]:
    return cast("Drawing[Any]", import_module(kind.drawn_by))


def view_on(console: Console, drawing: Drawing[Any], *, quiet: bool) -> View:
    """Chooses the live view: a table on a terminal, lines in a pipe, nothing if `quiet`."""
    if quiet:
        return Silence()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveTable(console, drawing)
    return ProgressLines(console, drawing)
