"""Shows the progress of a search: what is known of each setting, above the progress of the current run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from gpubench import units
from gpubench.gain import Gain
from gpubench.host.live import Drawing
from gpubench.text import plain_table
from gpubench.tuning.conclusion import NextRuns, Plan, Standing
from gpubench.tuning.result import Tuning

BAR_WIDTH = 40  # characters
NOTABLE = 0.02  # the smallest change of the peak memory that is shown

PATCHING = "the settings are written into the program, and the patched program is run beside that as it was"


class SearchDrawing:
    """Describes the current run as `inner` does, with the state of the search. See `host.live.Drawing`."""

    def __init__(self, inner: Drawing[Any]) -> None:
        self._inner = inner
        self._stage = "first look"
        self._why = ""
        self._runs = range(1, 3)
        """The numbers of the runs of the current block; the first look has two."""
        self._total = 2
        self._of = ""
        self._begun = 0
        self._progress: Any = None
        self._table: Sequence[tuple[str, ...]] = ()

    def show(self, tuning: Tuning, block: NextRuns, plan: Plan, standing: Sequence[Standing]) -> str:
        """Sets the state of the search at the start of a block, and returns it as one line."""
        self._stage, self._why, self._begun, self._progress = block.stage, block.why, 0, None
        self._runs = range(plan.done + 1, plan.done + 1 + len(block.runs))
        self._total = max(plan.total, self._runs[-1])
        self._of = f" of about {self._total}"
        self._table = [
            (
                said(tuning.of_level(one.factor, one.level)),
                gain(one.gain) if made else "",  # what is not measured has only an expectation
                memory(tuning, one.factor, one.level),
                one.excluded or ("kept so far" * (one.kept and made)),
            )
            for one in standing
            for made in (tuning.has_run(one.factor, one.level),)
        ]
        first, last = self._runs[0], self._runs[-1]
        numbers = f"run {first}" if first == last else f"runs {first} to {last}"
        return f"{self._stage}, {numbers}{self._of}: {self._why}"

    def show_patch(self) -> None:
        """Sets the state after the search, in which the patched program is run beside that as it was."""
        self._stage, self._why, self._runs = "patch", PATCHING, range(0)

    def describe(self, progress: Any) -> str:
        return f"{self._place(progress)}  {self._inner.describe(progress)}"

    def draw(self, experiment: str, progress: Any) -> RenderableType:
        table = plain_table()
        for name in ("setting", "gain so far", "memory", ""):
            table.add_column(name)
        for row in self._table:
            table.add_row(*map(Text, row))
        head = Text(self._place(progress), style="bold")
        if not self._runs:
            return Group(head, Text(self._why, style="dim"), table, self._inner.draw("", progress))
        number = self._runs[max(0, min(self._begun, len(self._runs)) - 1)]
        bar = ProgressBar(total=self._total, completed=number - 1, width=BAR_WIDTH)
        return Group(head, bar, Text(), Text(self._why, style="dim"), table, self._inner.draw("", progress))

    def _place(self, progress: Any) -> str:
        """Returns the stage and the number of the run, which is the next one if `progress` is a new one.

        The runs of a patch have no number, because their own progress says which repeat of which version it is.
        """
        if not self._runs:
            return self._stage
        if progress is not self._progress:
            self._progress = progress
            self._begun += 1
        number = self._runs[min(self._begun, len(self._runs)) - 1]
        return f"{self._stage}, run {number}{self._of}"


def said(changes: Mapping[str, Any]) -> str:
    """Returns changes as "data.workers=4 data.persistent_workers=true"."""
    values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in changes.items()}
    return " ".join(f"{key}={value}" for key, value in values.items())


def gain(estimate: Gain | None) -> str:
    """Returns a gain as "1.24 x [1.20, 1.28]"; "" without one."""
    return str(estimate) if estimate else ""


def memory(tuning: Tuning, name: str, level: int) -> str:
    """Returns how a level alone changes the peak memory, as "-12 %"; "" if that is little or unknown."""
    peak, before = tuning.peak(tuning.alone(name, level)), tuning.peak((0,) * len(tuning.treatments))
    change = peak / before - 1 if peak and before else 0.0
    return units.signed_percent(change, 0) if abs(change) >= NOTABLE else ""


def length(plan: Plan | None, seconds_a_run: float | None) -> str:
    """Returns the size of a plan, as "about 45 runs, about 12 min"; None if the limit leaves no run."""
    if plan is None:
        a_run = f"; a run takes {units.about(seconds_a_run)}" if seconds_a_run else ""
        return f"but what is left of the limit is too little for a search{a_run}"
    time = f", about {units.about(plan.total * seconds_a_run)}" if seconds_a_run else ""
    return f"about {units.counted(plan.total, 'run')}{time}"
