"""How the progress of a memory run looks."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gpubench.live import hardware
from gpubench.memory_recording import MemoryProgress


def describe(progress: MemoryProgress) -> str:
    """In one plain line."""
    doing = progress.doing.replace("_", " ")
    return doing if progress.step is None else f"step {progress.step + 1}/{progress.steps}  {doing}"


def draw(experiment: str, progress: MemoryProgress) -> RenderableType:
    """As a table."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_row("now", describe(progress))
    for name, text in hardware(progress.telemetry):
        table.add_row(name, text)
    return Group(Text(experiment, style="bold"), table)
