"""The live view of a memory run."""

from rich.console import Group, RenderableType
from rich.text import Text

from gpubench import units
from gpubench.host.live import hardware, head
from gpubench.host.memory_recorder import MemoryProgress


def describe(progress: MemoryProgress) -> str:
    """Returns the state of a run as one line of plain text."""
    doing = units.words(progress.doing)
    return doing if progress.step is None else f"step {progress.step + 1}/{progress.steps}  {doing}"


def draw(experiment: str, progress: MemoryProgress) -> RenderableType:
    """Returns the state of a run as a table."""
    table = head(describe(progress))
    for name, text in hardware(progress.telemetry):
        table.add_row(name, text)
    return Group(Text(experiment, style="bold"), table)
