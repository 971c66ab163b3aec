"""What fills the memory of two runs, on the page: both peaks as bars, split by category, above the tables."""

from typing import Any

from markupsafe import Markup

from gpubench import units
from gpubench.comparison.result import Memory
from gpubench.memory.footprint import Amounts
from gpubench.report import comparing_memory, lanes, wording
from gpubench.report.figures import NAMES, Figure
from gpubench.report.footprint_page import hue, stack
from gpubench.report.footprint_phrases import category, ordered


def section(memory: Memory) -> dict[str, Any]:
    """What templates/compare.html shows."""
    drawing = bars(memory)
    anywhere: Amounts = {one.category: max(one.baseline, one.candidate) for one in memory.categories}
    return {
        "sentence": wording.opening(comparing_memory.sentence(memory)),
        "peaks": [wording.opening(comparing_memory.peak(side)) for _, side in comparing_memory.sides(memory)],
        "bars": Figure("The peak of both", drawing) if drawing else None,
        "legend": [(hue(name), category(name)) for name, _ in ordered(anywhere)],
        "sheets": comparing_memory.tables(memory),
    }


def bars(memory: Memory) -> Markup | None:
    """The peak of A above that of B; None where neither holds anything."""
    held: list[Amounts] = [
        {one.category: one.baseline for one in memory.categories},
        {one.category: one.candidate for one in memory.categories},
    ]
    totals = [side.level.total for _, side in comparing_memory.sides(memory)]
    stacks = [
        stack(f"{name} {units.size(total)}", amounts) for name, total, amounts in zip(NAMES, totals, held, strict=True)
    ]
    return lanes.stacked("peak of both sides by category", "; ".join(one.name for one in stacks), stacks, "B", "held")
