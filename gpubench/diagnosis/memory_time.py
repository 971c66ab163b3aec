"""Rules about the time that memory costs."""

from collections.abc import Iterator
from typing import NamedTuple

from gpubench import units
from gpubench.diagnosis.case import NOTABLE, WORTH, Answers, ProfileCase, at_most, severity, shortened
from gpubench.diagnosis.matrix_products import is_product
from gpubench.findings import Finding, Saving
from gpubench.trace.attention import of_attention
from gpubench.trace.kernels import memory_family, moves_memory
from gpubench.trace.profile import SHORT_KERNEL, Kernel, RankProfile, Reservations, short_shapes

MEMORY_WORTH = 0.2  # of the step: every program has some memory-bound operators, such as normalisation
FITTING = 0.5  # of the GPU's memory: checkpointing may have dropped as much as all that is held
UNCACHED = 0.5
"""Calls of the driver per tensor that is made: with as many, nothing seems to be cached. With caching, a step whose
tensors have new sizes still takes most of them from blocks that are cached."""
MANY = 100
"""Calls that get memory, beyond those of a program that has just begun."""
EVIDENCE_MINIMUM = 0.001  # of the step: the evidence leaves out families that take less
SHORT_PART = 0.1  # of the memory-bound time: a smaller part in short kernels is not mentioned

_CACHING_OFF = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_FAMILIES = {
    "elementwise": "elementwise",
    "copy": "copies",
    "reduction": "reductions",
    "normalisation": "normalisation",
    "softmax": "softmax",
    "product": "matrix products and convolutions",
    "other": "others",
}
_BATCHING = "a larger batch reads the weights once for more rows, and weights of a smaller type need less traffic"


def recompute(case: ProfileCase) -> Answers:
    spent = sum(phase.recompute for phase in case.rank.phases)
    cost = case.share(spent)
    if cost < NOTABLE:
        return
    setting, used = case.setting("model.activation_checkpointing"), case.memory_used
    fits = used is None or used <= FITTING
    yield Finding(
        id="recompute",
        title="activations are computed twice",
        severity=severity(cost),
        evidence=[
            f"the backward pass repeats {case.time_per_step(spent)} of the forward pass",
            *(
                [f"the run without the profiler held {units.percent(used)} of the GPU's memory at its peak"]
                if used is not None
                else []
            ),
        ],
        cause="activation checkpointing drops activations in the forward pass, and recomputes them when needed",
        advice="keep activations where memory allows: checkpoint fewer blocks, or none"
        if fits
        else "checkpoint only as many blocks as the memory needs"
        + (": model.activation_checkpointing=2 takes every second" if setting else ", for example every second one"),
        place="model",
        fix=case.fix(model__activation_checkpointing=False) if setting and fits else {},
        expected=case.less_work(cost),
        threshold=f"at least {units.percent(NOTABLE)} of {case.window()}, as less is acceptable for the memory saved",
    )


def allocator(case: ProfileCase) -> Answers:
    cost = case.idle_share("allocator")
    if cost < WORTH:
        return
    found = case.rank.reservations
    off = [name for name in _CACHING_OFF if case.environment.get(f"variables.{name}")]
    cause, advice, grows = _why_reserved(case, found, off)
    called = (
        units.listed([f"{name} ({units.counted(count, 'time')})" for name, count in found.calls.items()][:4])
        if found
        else ""
    )
    yield Finding(
        id="allocator",
        title="the GPU waits for memory allocation by the driver",
        severity=severity(cost),
        evidence=[
            f"the GPU is idle {case.time_per_step(case.rank.idle['allocator'])} while the CPU is in calls of the "
            f"driver that allocate and free memory{f': {called}' if called else ''}",
            *(f"the environment has {name} set" for name in off),
        ],
        cause=cause,
        advice=advice,
        fix=case.fix(performance__expandable_segments=True) if grows else {},
        expected=None if _only_in_the_first_step(found) else at_most(cost),
        threshold=case.worth_reason,
    )


def _why_reserved(case: ProfileCase, found: Reservations | None, off: list[str]) -> tuple[str, str, bool]:
    """Returns cause and advice, and whether segments that grow may help."""
    if off:
        return "PyTorch's caching allocator is switched off", f"unset {' and '.join(off)}", False
    if found is not None and _is_uncached(found):
        return (
            f"the driver is called for nearly every tensor ({found.given:,} calls that get memory, {found.tensors:,} "
            "tensors): PyTorch's caching allocator seems to be switched off, or its cache is emptied all the time",
            f"unset {_CACHING_OFF[case.on_amd]}, and remove torch.cuda.empty_cache()",
            False,
        )
    if found is not None and 2 * found.page_locked > found.host:
        return (
            "most of these calls get or free page-locked CPU memory",
            "reuse page-locked tensors instead of calling pin_memory() for new sizes",
            False,
        )
    if _only_in_the_first_step(found):
        return (
            "only the first recorded step calls the driver for memory: later steps use what is cached by then",
            "record after a few steps that are not recorded, and judge those: the cost does not repeat",
            False,
        )
    grows = found is None or not found.maps
    expandable = ", or set PYTORCH_ALLOC_CONF=expandable_segments:True" if grows else ""
    if found is not None and len(found.by_step) > 1 and len(set(found.by_step)) == 1:
        return (
            "every step calls the driver as often as the others, so that what one step frees is not kept for the "
            "next: the cache is emptied in the loop, or memory is short",
            f"remove torch.cuda.empty_cache() from the loop, or use less memory{expandable}",
            grows,
        )
    if len(case.rank.step_numbers) > 1:
        return (
            "no cached block fits: sizes change from step to step, memory is short, or the cache was emptied",
            f"remove torch.cuda.empty_cache(), or pad batches to few sizes{expandable}",
            grows,
        )
    return (
        "memory that is used for the first time has to come from the driver, as does what no cached block fits; "
        f"{case.window()} alone does not show which",
        "if the program had just begun, record after a few steps; if not, remove torch.cuda.empty_cache(), or use few "
        "sizes",
        False,
    )


def _is_uncached(found: Reservations) -> bool:
    """Tells whether nearly every tensor gets its memory from the driver, and gives it back.

    A program that has just begun also gets memory for most tensors, but keeps it.
    """
    repeated = found.given >= MANY or (len(found.by_step) > 1 and all(found.by_step))
    return repeated and found.given >= UNCACHED * found.tensors > 0 and found.freed >= UNCACHED * found.given


def _only_in_the_first_step(found: Reservations | None) -> bool:
    return found is not None and len(found.by_step) > 1 and not any(found.by_step[1:])


def memory_bound(case: ProfileCase) -> Answers:
    """Finds operators that memory traffic limits, whatever part of the bandwidth they reach.

    Attention in separate operators is left to `unfused_attention`.
    """
    found = _bounded(case)
    cost = case.share(found.fusible + found.products)
    if cost < MEMORY_WORTH:
        return
    moving, attention, fusible, products = found
    yield Finding(
        id="memory-bound",
        title=f"much of {case.window()} is memory-bound",
        severity="high" if cost >= 2 * MEMORY_WORTH else "medium",
        evidence=[*_by_family(case, moving, attention, products), *_reached(case), *_longest(case, moving)],
        cause="each of these operators reads its inputs from memory and writes its output there, with too little "
        "arithmetic to keep the GPU busy",
        advice="; ".join(_advice(case, fusible, products)),
        fix=case.fix(performance__compile=True) if case.setting("performance.compile") is False else {},
        expected=fused if (fused := _fused(case, fusible)).estimate >= WORTH else None,
        threshold=f"at least {units.percent(MEMORY_WORTH)} of {case.window()}, as every program has some; where "
        "kernels follow one another without a matrix product between them, fusing saves at most all but the longest",
    )


def memory_bound_clause(case: ProfileCase) -> str:
    """Returns a clause for the headline if much of the step is memory-bound; else ""."""
    found = _bounded(case)
    cost = case.share(found.fusible + found.products)
    return f"; {units.whole_percent(cost)} of {case.window()} is memory-bound" if cost >= MEMORY_WORTH else ""


class _Bounded(NamedTuple):
    """Memory-bound work, with times in nanoseconds."""

    moving: list[Kernel]
    attention: int
    """The part of `moving` in attention that is made of separate operators."""
    fusible: int
    """The rest of `moving`."""
    products: int


def _bounded(case: ProfileCase) -> _Bounded:
    rank = case.rank
    if rank.device is None or case.recorded_eagerly:
        return _Bounded([], 0, 0, 0)
    moving = [one for one in rank.kernels if moves_memory(one.kind, one.name, one.operator)]
    attention = sum(one.softmax + one.elementwise for one in rank.attention)
    fusible = max(0, sum(kernel.total for kernel in moving) - attention)
    thin = [one for one in rank.operators if is_product(one.name) and one.bound == "memory"]
    return _Bounded(moving, attention, fusible, sum(one.device for one in thin if not of_attention(one, rank)))


def _fused(case: ProfileCase, moving: int) -> Saving:
    """Returns an upper limit for what fusing saves of `moving` nanoseconds."""
    return case.less_work(case.share(min(moving, case.rank.fusible)))


def _by_family(case: ProfileCase, moving: list[Kernel], attention: int, products: int) -> list[str]:
    total: dict[str, int] = {}
    for kernel in moving:
        known = memory_family(kernel)
        total[known] = total.get(known, 0) + kernel.total
    parts = sorted([*total.items(), ("product", products)], key=lambda part: part[1], reverse=True)
    shown = [(name, share) for name, time in parts if (share := case.share(time)) >= EVIDENCE_MINIMUM]
    listed = ", ".join(f"{_FAMILIES[name]} {units.percent(share)}" for name, share in shown)
    spent = sum(total.values()) + products - attention
    without = f"; that leaves out {units.percent(case.share(attention))} in attention" if attention else ""
    evidence = [f"{case.time_per_step(spent)} in memory-bound work: {listed}{without}"]
    short = sum(kernel.total for kernel in moving if kernel.total < SHORT_KERNEL * kernel.calls)
    if short >= SHORT_PART * sum(total.values()):
        evidence.append(
            f"{case.time_per_step(short)} of that in kernels under {units.seconds(SHORT_KERNEL / 1e9)}, which their "
            "fixed cost limits rather than the bandwidth; fusing saves that too"
        )
    return evidence


def _reached(case: ProfileCase) -> list[str]:
    """Returns the mean fraction of the memory bandwidth that is reached, weighted by time, as evidence."""
    known = [
        one
        for one in case.rank.operators
        if one.bound == "memory" and one.flops is None and one.of_ceiling and not of_attention(one, case.rank)
    ]
    spent = sum(one.device for one in known)
    if not spent:
        lacking = "shapes" if case.option("shapes") else "the memory bandwidth of the device"
        return [f"judged by the names of the kernels: without {lacking}, the bandwidth that they reach is unknown"]
    reached = sum(one.device * (one.of_ceiling or 0.0) for one in known) / spent
    return [
        f"those whose traffic follows from their shapes, {case.time_per_step(spent)}, reach {units.percent(reached)} "
        "of the memory bandwidth on average"
    ]


def _longest(case: ProfileCase, moving: list[Kernel]) -> list[str]:
    """Lists the operators that take most, without attention; kernels if no operator is known to launch them."""
    names = {kernel.operator for kernel in moving}
    found = [
        one
        for one in case.rank.operators
        if one.name in names and one.device > 0 and one.bound != "compute" and not is_product(one.name)
    ]
    shown = [one for one in found if not of_attention(one, case.rank)][:3]
    if not shown:
        return [f"{shortened(one.name)}: {case.time_per_step(one.total)}" for one in moving[:3]]
    return [
        f"{one.name}{f' {short_shapes(one.shapes)}' if one.shapes else ''}: {case.time_per_step(one.device)}"
        + (f", at {units.percent(one.of_ceiling)} of the memory bandwidth" if one.of_ceiling is not None else "")
        for one in shown
    ]


def _advice(case: ProfileCase, fusible: int, products: int) -> Iterator[str]:
    """Yields advice for the larger part first, and none for a part below NOTABLE."""
    about = [(fusible, _fusing(case.rank)), (products, _BATCHING)]
    for time, advice in sorted(about, reverse=True):
        if case.share(time) >= NOTABLE:
            yield advice


def _fusing(rank: RankProfile) -> str:
    """Returns advice for operators that are not products."""
    if rank.compiled:
        return "move operators into the compiled regions, where torch.compile fuses them"
    advice = (
        "use torch.compile, which fuses neighbouring operators into one kernel and keeps intermediate results in "
        "registers; a smaller type halves the traffic"
    )
    if {"aten::pow", "aten::mean", "aten::rsqrt"} <= {one.name for one in rank.operators}:
        return f"{advice}; replace the RMSNorm made of single operators by torch.nn.functional.rms_norm"
    return advice
