"""Decisions on edits that nobody has measured."""

from typing import Any

import msgspec

from gpubench.compare.decision import Decision, Version

BASE = Version(label="HEAD", command="python train.py", ref="HEAD", commit="abcdef0123456", subject="first", edit="")
EDITED = Version(
    label="working tree",
    command="python train.py",
    ref=None,
    commit="abcdef0123456",
    subject="first",
    edit="0123456789ab",
)
KEPT = Decision(
    decision="keep",
    answer="keep: 10.0 % faster [+9.0 %, +11.0 %], the same work, loss unharmed",
    aim="throughput",
    metric="throughput",
    unit="samples/s",
    margin=0.005,
    gain=1.1,
    interval=(1.09, 1.11),
    rounds=3,
    spread=0.004,
    baseline=10.0,
    candidate=11.0,
    ending="decided",
    work="same",
    loss="unharmed",
    loss_reason="its losses are those of the baseline in all 60 steps, up to rounding",
    base=BASE,
    edited=EDITED,
    runs=[("results/program/a", "results/program/b")],
    values=[(10.0, 11.0)] * 3,
    started="2026-11-24T10:00:00.000Z",
    seconds=30.0,
)


def decided(decision: str, **changes: Any) -> Decision:
    """Returns the decision with another answer."""
    return msgspec.structs.replace(KEPT, decision=decision, answer=f"{decision}: ...", **changes)
