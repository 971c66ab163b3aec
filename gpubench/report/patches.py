"""A patch as blocks of a report: what it changes, what its runs show, how to apply it, and what it leaves undone."""

from collections.abc import Iterator
from pathlib import Path

from gpubench.patches.result import FILE, ProvedPatch, apply_by
from gpubench.report.document import Block, Command, Paragraph


def blocks(folder: Path, patch: ProvedPatch | None) -> Iterator[Block]:
    """Yields what a user has to know of a patch that is in a folder."""
    if patch is None:
        return
    if patch.changed:
        yield Command("patch", f"{folder / FILE}, {patch.where}; {patch.found}", "strong")
        if patch.has_effect:
            yield Command("apply it", apply_by(folder))
    yield Paragraph(patch.remarks, "warning", "patch: ")
    by_hand = [f"{key}: {sentence}" for key, sentence in patch.left.items()]
    yield Paragraph(by_hand, label="not in the patch: ", listed=True)
