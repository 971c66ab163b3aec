"""Phases that annotations of torch.profiler.record_function tell, in a memory snapshot."""

import re
from collections.abc import Sequence

from gpubench.memory.history import Phase
from gpubench.memory.snapshot_format import Annotation

_NAMES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"optimizer\.step#|optim(izer)?(_?step)?$")),
    ("zero_grad", re.compile(r"optimizer\.zero_grad#|zero_grad$")),
    ("data", re.compile(r"enumerate\(dataloader\)|data(_?wait|_?load(er|ing))?$")),
    ("forward", re.compile(r"(forward|fwd)(_pass)?$")),
    ("loss", re.compile(r"loss$")),
    ("backward", re.compile(r"(backward|bwd)(_pass)?$")),
)
"""PyTorch's own annotations, and users' usual ones, in lower case."""


def announced(times: Sequence[int], annotations: Sequence[Annotation]) -> list[Phase | None]:
    """The phase that each of `times`, which ascend, is in: that of the innermost annotation around it that tells one.

    At the microsecond in which an annotation begins or ends it is taken to be open.
    """
    borders = sorted(
        ((one.time_us, one.stage == "END", phase) for one in annotations if (phase := _phase(one.name))),
        key=lambda border: border[:2],
    )
    found: list[Phase | None] = []
    open_: list[Phase] = []
    coming = 0
    for time in times:
        while coming < len(borders) and borders[coming][:2] <= (time, False):
            _, ends, phase = borders[coming]
            coming += 1
            if not ends:
                open_.append(phase)
            elif phase in open_:
                del open_[len(open_) - 1 - open_[::-1].index(phase)]
        found.append(open_[-1] if open_ else None)
    return found


def _phase(name: str) -> Phase | None:
    bare = name.strip("#. ").lower()
    return next((phase for phase, pattern in _NAMES if pattern.match(bare)), None)
