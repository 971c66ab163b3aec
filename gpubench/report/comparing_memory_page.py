"""The page's section on memory of a comparison: both peaks as bars, split by category, above the tables."""

from typing import Any

from markupsafe import Markup

from gpubench import units
from gpubench.compare.result import Memory
from gpubench.memory.footprint import Amounts
from gpubench.report import comparison, lanes, wording
from gpubench.report.figures import NAMES, Figure
from gpubench.report.footprint import category, ordered
from gpubench.report.footprint_page import hue, stack


def section(memory: Memory) -> dict[str, Any]:
    """Return the variables of templates/compare.html."""
    drawing = bars(memory)
    anywhere: Amounts = {one.category: max(one.baseline, one.candidate) for one in memory.categories}
    return {
        "sentence": wording.opening(comparison.sentence(memory)),
        "peaks": [wording.opening(comparison.peak(side)) for _, side in comparison.sides(memory)],
        "bars": Figure("The peak of both", drawing) if drawing else None,
        "legend": [(hue(name), category(name)) for name, _ in ordered(anywhere)],
        "sheets": comparison.tables(memory),
    }


def bars(memory: Memory) -> Markup | None:
    """Return bars of the peaks of A and B; None if neither holds anything."""
    held: list[Amounts] = [
        {one.category: one.baseline for one in memory.categories},
        {one.category: one.candidate for one in memory.categories},
    ]
    totals = [side.level.total for _, side in comparison.sides(memory)]
    stacks = [
        stack(f"{name} {units.size(total)}", amounts) for name, total, amounts in zip(NAMES, totals, held, strict=True)
    ]
    return lanes.stacked("peak of both sides by category", "; ".join(one.name for one in stacks), stacks, "B", "held")
