"""What fills the memory of two runs, on the page: both peaks as bars, split by category, above the tables."""

from typing import Any

from markupsafe import Markup

from gpubench import units
from gpubench.comparison.result import Memory
from gpubench.memory.footprint import Amounts
from gpubench.report import comparing_memory, lanes, svg, wording
from gpubench.report.figures import NAMES, Figure
from gpubench.report.footprint_page import hue
from gpubench.report.footprint_phrases import category, ordered
from gpubench.report.scales import Scale, measure, ticks


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
    totals = [side.level.total for _, side in comparing_memory.sides(memory)]
    if max(totals) <= 0:
        return None
    held: list[Amounts] = [
        {one.category: one.baseline for one in memory.categories},
        {one.category: one.candidate for one in memory.categories},
    ]
    x, measured = Scale(0, max(totals), 0, 100), measure("B", max(totals))
    bottom = lanes.TOP + lanes.PITCH * len(held)
    parts = [
        svg.bottom_axis([(x(t.value), t) for t in ticks(0, x.high, 5, measured)], bottom, lanes.TOP, measured.name)
    ]
    told = []
    for row, (name, amounts, total) in enumerate(zip(NAMES, held, totals, strict=True)):
        y, start = lanes.TOP + lanes.PITCH * row + lanes.NAME, 0
        told.append(f"{name} {units.size(total)}")
        parts.append(svg.text(0, y, told[-1], "lane-name"))
        for kind, size in ordered(amounts):
            hint = f"{category(kind)} {units.size(size)}"
            parts.append(svg.bar(x(start), x(start + size), y + 5, lanes.THICKNESS, hue(kind), hint))
            start += size
    return svg.drawing("peak of both sides by category", "; ".join(told), bottom + svg.FOOT, parts)
