"""Footprints with realistic values: of a model of 3.4 G parameters trained with AdamW, predicted, measured and read."""

from typing import Any

import msgspec

from gpubench.findings import Finding, Findings, Saving, Unanswered
from gpubench.memory.allocation_log import Phase
from gpubench.memory.footprint import (
    Amounts,
    Correction,
    Footprint,
    FootprintPeak,
    Holder,
    Level,
    MemoryTimeline,
    ModuleFootprint,
    PhaseFootprint,
    Stage,
    TimelineMark,
)

MIB = 2**20
GIB = 2**30
PARAMETERS = 13_000 * MIB
CONTEXT = 512 * MIB
ROUNDING = 131 * MIB
POINTS = 10  # of the timeline a phase


def row(found: Footprint, stage: str, phase: str) -> PhaseFootprint:
    """The only one of that phase."""
    (only,) = [one for one in found.phases if (one.stage, one.phase) == (stage, phase)]
    return only


def predicted(**changes: Any) -> Footprint:
    """Of AdamW's foreach step in an H200: two steps, the peak in the first of them."""
    peak = _amounts(gradients=PARAMETERS, optimizer_state=2 * PARAMETERS, temporaries=PARAMETERS, activations=41 * MIB)
    late = _amounts(optimizer_state=2 * PARAMETERS, activations=7_000 * MIB, gradients=PARAMETERS)
    found = [
        phase("setup", "model", _amounts()),
        phase("setup", "data", _amounts(inputs=2 * MIB)),
        phase("first", "forward", _amounts(inputs=2 * MIB, activations=9_000 * MIB)),
        phase("first", "backward", _amounts(inputs=2 * MIB, activations=7_000 * MIB, gradients=6_000 * MIB)),
        phase("first", "optimizer", peak),
        phase("first", "zero_grad", _amounts(optimizer_state=2 * PARAMETERS)),
        phase("steady", "forward", _amounts(optimizer_state=2 * PARAMETERS, activations=9_000 * MIB)),
        phase("steady", "backward", late),
        phase("steady", "optimizer", peak),
        phase("steady", "zero_grad", _amounts(optimizer_state=2 * PARAMETERS)),
    ]
    made = Footprint(
        source="predicted",
        device="h200",
        capacity=141 * GIB,
        phases=found,
        peak=peak_of(found, "first", "optimizer"),
        modules=_modules(),
        holders=_holders(),
        corrections=[
            Correction("block_rounding", "the allocator rounds each request up to 512 bytes", ROUNDING),
            Correction("autocast", "CUDA's op lists differ from the CPU's", None),
            Correction(
                "foreach_temporaries", "AdamW runs foreach on CUDA: one more copy of the parameters", PARAMETERS
            ),
            Correction(
                "dropout", "CUDA keeps a mask of bytes where the CPU keeps noise of the input's type", -640 * MIB
            ),
        ],
        timeline=timeline(found),
        notes=["attention was traced as CUDA's flash kernels run it"],
    )
    return msgspec.structs.replace(made, **changes)


def on_cpu(**changes: Any) -> Footprint:
    """Measured without an allocator that keeps memory back: all counts are one."""
    amounts: Amounts = {"parameters": 4 * MIB, "activations": 6 * MIB}
    found = [phase("first", "forward", amounts, counted=_alike(amounts))]
    made = Footprint(
        source="measured", device="cpu", capacity=None, phases=found, peak=peak_of(found, "first", "forward"),
        modules=[ModuleFootprint("", {"parameters": 4 * MIB})], holders=[], timeline=timeline(found),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def of_snapshot(**changes: Any) -> Footprint:
    """Without phases, its beginning lost."""
    amounts: Amounts = {"before": 9_000 * MIB, "unknown": 4_000 * MIB, "fragmentation": 800 * MIB}
    counted = Level(12_990 * MIB, 13_000 * MIB, 13_800 * MIB, 13_800 * MIB)
    found = [phase("steady", "unknown", amounts, counted=counted)]
    made = Footprint(
        source="snapshot", device=None, capacity=None, phases=found, peak=peak_of(found, "steady", "unknown"),
        modules=[], timeline=timeline(found), truncated=True, truncation_proven=True,
        holders=[
            Holder("before", "", "", "", "", 812, 9_000 * MIB),
            Holder("unknown", "", "aten::mm", "", "/home/someone/project/train.py:57", 3, 4_000 * MIB),
        ],
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def of_phases(known: Footprint, found: list[PhaseFootprint], stage: Stage, name: Phase, **changes: Any) -> Footprint:
    """The same program with other phases; the peak is in the one of them that is named, and the timeline is theirs."""
    made = msgspec.structs.replace(known, phases=found, peak=peak_of(found, stage, name), timeline=timeline(found))
    return msgspec.structs.replace(made, **changes)


def findings(**changes: Any) -> Findings:
    found = Findings(
        headline="AdamW's foreach temporaries add 12.7 GiB; fused would not",
        findings=[
            Finding(
                id="foreach-temporaries",
                title="the optimizer step holds a second copy of the parameters",
                severity="high",
                evidence=["temporaries of aten::_foreach_add hold 12.7 GiB at the peak"],
                cause="AdamW runs foreach, which makes a temporary for each parameter at once",
                advice="use the fused implementation",
                fix={"training.optimizer_impl": "fused"},
                expected=Saving(0.2),
                threshold="from 5 % of the peak on: less is within what a batch varies",
            )
        ],
        unanswered=[Unanswered("fragmentation", "reserved bytes", "")],
    )
    return msgspec.structs.replace(found, **changes)


def phase(
    stage: Stage, name: Phase, amounts: Amounts, end: Amounts | None = None, counted: Level | None = None
) -> PhaseFootprint:
    """At its end it holds no more temporaries, if nothing else is said."""
    left = {kind: size for kind, size in amounts.items() if kind != "temporaries"} if end is None else end
    return PhaseFootprint(stage, name, amounts, counted or level(amounts), left)


def level(amounts: Amounts) -> Level:
    """The counts that these amounts come to on a GPU, all tensors together being rounded up by ROUNDING."""
    total = sum(amounts.values())
    reserved = total - amounts.get("other", 0)
    allocated = reserved - amounts.get("fragmentation", 0)
    return Level(allocated - ROUNDING, allocated, reserved, total)


def peak_of(found: list[PhaseFootprint], stage: Stage, name: Phase) -> FootprintPeak:
    place = next(place for place, one in enumerate(found) if (one.stage, one.phase) == (stage, name))
    return FootprintPeak(stage, name, found[place].peak, found[place].level, _position(place))


def timeline(found: list[PhaseFootprint]) -> MemoryTimeline:
    """Each phase rises to its peak in POINTS points, and its last is its end."""
    names = list(dict.fromkeys(name for one in found for name in one.peak))
    amounts: dict[str, list[int]] = {name: [] for name in names}
    before: Amounts = {}
    for one in found:
        for name in names:
            low, high = before.get(name, 0), one.peak.get(name, 0)
            rise = [low + (high - low) * step // (POINTS - 2) for step in range(POINTS - 1)]
            amounts[name] += [*rise, one.end.get(name, 0)]
        before = one.end
    totals = [sum(column) for column in zip(*amounts.values(), strict=True)]
    others = amounts.get("other", [0] * len(totals))
    has_allocator = any(one.level.reserved is not None for one in found)
    reserved = [total - other for total, other in zip(totals, others, strict=True)] if has_allocator else None
    steps = {"setup": None, "first": 0, "steady": 1}
    marks = [TimelineMark(place * POINTS, one.phase, steps[one.stage]) for place, one in enumerate(found)]
    return MemoryTimeline(amounts, reserved, marks)


def _position(place: int) -> int:
    return place * POINTS + POINTS - 2


def _alike(amounts: Amounts) -> Level:
    total = sum(amounts.values())
    return Level(total, total, None, total)


def _amounts(**more: int) -> Amounts:
    return {"parameters": PARAMETERS, **more, "fragmentation": 700 * MIB, "other": CONTEXT}


def _modules() -> list[ModuleFootprint]:
    blocks = [
        ModuleFootprint(
            f"transformer.h.{number}.mlp",
            {"parameters": 400 * MIB - number, "gradients": 400 * MIB, "optimizer_state": 800 * MIB, "buffers": 512},
        )
        for number in range(12)
    ]
    return [
        *blocks,
        ModuleFootprint("(others)", {"parameters": 8_000 * MIB}),
        ModuleFootprint("", {"activations": MIB}),
    ]


def _holders() -> list[Holder]:
    kinds = ["optimizer_state", "parameters", "gradients", "temporaries"]
    named = [
        Holder(
            kinds[number % 4], f"transformer.h.{number}.mlp.c_fc", "aten::_foreach_add", "float32[8192, 2048]",
            "gpubench/training.py:88", 128 - number, (9_000 - 100 * number) * MIB,
        )
        for number in range(12)
    ]  # fmt: skip
    return [*named, Holder("", "", "", "", "", 1_077, 3_000 * MIB)]
