"""Histories written by hand, and of any shape."""

from typing import Any

from hypothesis import strategies as st

from gpubench.memory.allocation_log import Allocation, AllocationLog, AllocatorReading, Category, Phase, PhaseStart
from gpubench.memory.allocator import Rules, replay

MIB = 2**20
PHASES: tuple[Phase, ...] = ("data", "forward", "loss", "backward", "optimizer", "zero_grad")


class Script:
    """A history in the making: say which phase begins, what is held, and what is given back."""

    def __init__(self) -> None:
        self._allocations: list[Allocation] = []
        self._marks: list[PhaseStart] = []
        self._length = 0

    def phase(self, phase: Phase, step: int | None = None) -> None:
        self._marks.append(PhaseStart(self._length, phase, step))

    def hold(self, size: int, category: Category = "unknown", **told: str) -> Allocation:
        """told: module, operator, shape, where."""
        mark = self._marks[-1]
        made = Allocation(size, self._length, None, category, mark.phase, mark.step, **told)
        self._allocations.append(made)
        self._length += 1
        return made

    def release(self, *held: Allocation) -> None:
        for one in held:
            one.end = self._length
            self._length += 1

    def log(self, **parts: Any) -> AllocationLog:
        return AllocationLog(self._allocations, self._marks, self._length, **parts)


def adamw(elements: int, *, steps: int = 2, batches: int = 1, activations: int = 1000) -> AllocationLog:
    """Training in float32: gradients come in the backward pass and go in zero_grad, the state comes in step 0.

    Of `batches` micro-batches, each has `activations` bytes, half of them for its own backward pass a second time, and
    the logits of the last are held until the next step. The optimizer works in one tensor of all elements.
    """
    script = Script()
    script.phase("start")
    script.phase("model")
    script.hold(4 * elements, "parameters", module="layer")
    gradient: list[Allocation] = []
    logits: list[Allocation] = []
    for step in range(steps):
        for _ in range(batches):
            script.phase("data", step)
            inputs = script.hold(64, "inputs")
            script.phase("forward", step)
            kept = script.hold(activations, "activations", module="layer", operator="aten::addmm")
            script.release(*logits)
            logits = [script.hold(16, "activations", module="head")]
            script.phase("backward", step)
            scratch = script.hold(activations // 2, "temporaries", module="layer")
            gradient = gradient or [script.hold(4 * elements, "gradients", module="layer")]
            script.release(scratch, kept, inputs)
        script.phase("optimizer", step)
        if step == 0:
            for _ in range(2):
                script.hold(4 * elements, "optimizer_state", module="layer")
        script.release(script.hold(4 * elements, "temporaries"))
        script.phase("zero_grad", step)
        script.release(*gradient)
        gradient = []
    return script.log()


def with_readings(history: AllocationLog, rules: Rules, beyond: int = 0) -> AllocationLog:
    """As a device would have read it whose allocator follows `rules`, and holds `beyond` bytes of its own in a segment
    of their own. The history gets a mark at its end, where its last phase is read."""
    marks = [*history.marks, PhaseStart(history.length, "unknown")]
    closed = AllocationLog(history.allocations, marks, history.length)
    closed.readings = [
        AllocatorReading(
            at=one.at,
            allocated=one.allocated + beyond,
            reserved=one.reserved + beyond,
            peak_allocated=one.peak_allocated + beyond,
            peak_reserved=one.peak_reserved + beyond,
        )
        for one in replay(closed, rules).readings
    ]
    return closed


@st.composite
def histories(draw: st.DrawFn) -> AllocationLog:
    """Of a set-up and up to four steps, whose phases come in any order, zero_grad last; some without events, and some
    allocations without bytes."""
    script = Script()
    held: list[Allocation] = []
    script.phase("start")
    _happenings(draw, script, held)
    for step in range(draw(st.integers(0, 4))):
        for phase in [*draw(st.lists(st.sampled_from(PHASES), max_size=4)), PHASES[-1]]:
            script.phase(phase, step)
            _happenings(draw, script, held)
    script.hold(draw(st.integers(1, 10**9)), "workspaces")
    return script.log()


def _happenings(draw: st.DrawFn, script: Script, held: list[Allocation]) -> None:
    for _ in range(draw(st.integers(0, 5))):
        if draw(st.booleans()) and held:
            script.release(held.pop(draw(st.integers(0, len(held) - 1))))
        else:
            size = draw(st.sampled_from((0, 1, 512, 513, MIB, MIB + 1, 7 * MIB, 25 * MIB)))
            category: Category = draw(st.sampled_from(("parameters", "activations", "temporaries", "before")))
            held.append(script.hold(size, category, module=draw(st.sampled_from(("", "a", "a.b")))))
