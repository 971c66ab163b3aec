"""Shows the progress of a search: what is known of each setting, above the progress of the current run."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpubench import units
from gpubench.host.live import Drawing
from gpubench.text import plain_table
from gpubench.tuning.result import Tuning
from gpubench.tuning.search import Block, Estimate, Plan, Standing


class SearchDrawing:
    """Describes the current run as `inner` does, below the state of the search. See `host.live.Drawing`."""

    def __init__(self, inner: Drawing[Any]) -> None:
        self._inner = inner
        self.head = ""
        """The stage of the search and the runs of its current block, in words."""
        self._table: Sequence[tuple[str, ...]] = ()

    def show(self, tuning: Tuning, block: Block, plan: Plan, standing: Sequence[Standing]) -> None:
        """Sets the state of the search, at the start of a block."""
        first, last = plan.done + 1, plan.done + len(block.runs)
        self.head = f"{block.stage}: runs {first} to {last} of about {plan.total}. {block.why}"
        levels = {treatment.name: treatment.levels for treatment in tuning.treatments}
        self._table = [
            (said(levels[one.factor][one.level - 1]), gain(one.gain), one.excluded or ("kept so far" * one.kept))
            for one in standing
        ]

    def describe(self, progress: Any) -> str:
        return str(self._inner.describe(progress))

    def draw(self, experiment: str, progress: Any) -> RenderableType:
        table = plain_table()
        for name in ("setting", "gain so far", ""):
            table.add_column(name)
        for row in self._table:
            table.add_row(*map(Text, row))
        return Group(Text(self.head, style="bold"), table, self._inner.draw("", progress))


def said(changes: Mapping[str, Any]) -> str:
    """Returns changes as "data.workers=4 data.persistent_workers=true"."""
    values = {key: str(value).lower() if isinstance(value, bool) else value for key, value in changes.items()}
    return " ".join(f"{key}={value}" for key, value in values.items())


def gain(estimate: Estimate | None) -> str:
    """Returns a gain as "1.24 x [1.20, 1.28]"; "" without one."""
    return f"{estimate.ratio:.2f} x [{estimate.low:.2f}, {estimate.high:.2f}]" if estimate else ""


def length(plan: Plan, seconds_a_run: float | None) -> str:
    """Returns the size of a plan, as "about 45 runs, 12 min"."""
    time = f", about {units.seconds(plan.total * seconds_a_run)}" if seconds_a_run else ""
    return f"about {units.counted(plan.total, 'run')}{time}"
