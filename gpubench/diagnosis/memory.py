"""Rules about what memory costs in time."""

from collections.abc import Iterator
from typing import NamedTuple

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import NOTABLE, WORTH, WORTH_REASON, Answers
from gpubench.diagnosis.shapes import is_product
from gpubench.findings import Finding, severity
from gpubench.trace.attention import of_attention
from gpubench.trace.kernels import family, moves_memory
from gpubench.trace.launches import SHORT_KERNEL
from gpubench.trace.profile import Kernel, Rank

MEMORY_WORTH = 0.2  # some operator is always bound by memory: normalisation, activations, residuals
ROOM = 0.5  # of the GPU: what checkpointing drops may be as much as all that is held


def recompute(case: Case) -> Answers:
    spent = sum(phase.recompute for phase in case.rank.phases)
    cost = measures.share(case, spent)
    if cost < NOTABLE:
        return
    on, used = bool(case.setting("model.activation_checkpointing")), measures.memory_used(case)
    fits = used is None or used <= ROOM
    yield Finding(
        id="recompute",
        title="activations are computed twice",
        severity=severity(cost),
        evidence=[
            f"the backward pass repeats {phrases.a_step(case, spent)} of the forward pass",
            *(
                [f"the clean run held {units.percent(used)} of the GPU's memory at its peak"]
                if used is not None
                else []
            ),
        ],
        cause="activation checkpointing drops activations in the forward pass, and makes them again when needed",
        advice="keep activations where memory allows: checkpoint fewer blocks, or none"
        if fits
        else "checkpoint only as many blocks as the memory needs: model.activation_checkpointing=2 takes every second",
        fix=case.fix(model__activation_checkpointing=False) if on and fits else {},
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(NOTABLE)} of the step on: less is a fair price for the memory",
    )


def allocator(case: Case) -> Answers:
    cost = measures.idle(case, "allocator")
    if cost < WORTH:
        return
    off = bool(case.environment.get("variables.PYTORCH_NO_CUDA_MEMORY_CACHING"))
    yield Finding(
        id="allocator",
        title="the GPU waits while memory is taken from the driver and given back",
        severity=severity(cost),
        evidence=[
            f"the GPU is idle {phrases.a_step(case, case.rank.idle['allocator'])} under cudaMalloc and cudaFree, in "
            "steps that should find their memory ready",
            *(["the environment has PYTORCH_NO_CUDA_MEMORY_CACHING set"] if off else []),
        ],
        cause="PyTorch's caching allocator is switched off"
        if off
        else "the cache has no block that fits: sizes change from step to step, memory is short, or it was emptied",
        advice="unset PYTORCH_NO_CUDA_MEMORY_CACHING"
        if off
        else "leave out torch.cuda.empty_cache(), pad batches to few sizes, or set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        fix={} if off else case.fix(performance__expandable_segments=True),
        expected=measures.at_most(cost),
        threshold=WORTH_REASON,
    )


def memory_bound(case: Case) -> Answers:
    """Operators that move more bytes than they compute on, whatever part of the memory bandwidth they reach: attention
    in separate operators is left to its own rule."""
    found = _bounded(case)
    cost = measures.share(case, found.fusible + found.products)
    if cost < MEMORY_WORTH:
        return
    moving, attention, fusible, products = found
    yield Finding(
        id="memory-bound",
        title=f"memory bounds much of {phrases.whole(case)}, in operators that do little arithmetic for each byte",
        severity="high" if cost >= 2 * MEMORY_WORTH else "medium",
        evidence=[*_by_family(case, moving, attention, products), *_reached(case), *_longest(case, moving)],
        cause="each of these operators reads its inputs from memory and writes its output there, with too little "
        "arithmetic in between to keep the GPU busy",
        advice="; ".join(_advice(case, fusible, products)),
        fix=case.fix(performance__compile=True) if case.setting("performance.compile") is False else {},
        expected=measures.at_most(fused) if (fused := _fused(case, fusible)) >= WORTH else None,
        threshold=f"from {units.percent(MEMORY_WORTH)} of {phrases.whole(case)} on, as no program is without them; of "
        "kernels that follow one another with no matrix product between, fusing saves all but the longest at most",
    )


def of_the_headline(case: Case) -> str:
    """A clause where memory bounds much of the step; nothing otherwise."""
    found = _bounded(case)
    cost = measures.share(case, found.fusible + found.products)
    return f"; memory bounds {units.whole_percent(cost)} of {phrases.whole(case)}" if cost >= MEMORY_WORTH else ""


class _Bounded(NamedTuple):
    """Work that memory bounds, its times in nanoseconds."""

    moving: list[Kernel]
    attention: int
    """Of `moving`, what is part of attention in separate operators."""
    fusible: int
    """Of `moving`, what is not."""
    products: int


def _bounded(case: Case) -> _Bounded:
    rank = case.rank
    if rank.device is None or measures.recorded_eagerly(case):
        return _Bounded([], 0, 0, 0)
    moving = [one for one in rank.kernels if one.kind in ("compute", "copy") and moves_memory(one.name, one.operator)]
    attention = sum(one.softmax + one.elementwise for one in rank.attention)
    fusible = max(0, sum(kernel.total for kernel in moving) - attention)
    thin = [one for one in rank.operators if is_product(one.name) and one.bound == "memory"]
    return _Bounded(moving, attention, fusible, sum(one.device for one in thin if not of_attention(one, rank)))


def _fused(case: Case, moving: int) -> float:
    """What fusing saves at the most, as a fraction of the step, of `moving` nanoseconds that only move memory."""
    return measures.share(case, min(moving, case.rank.fusible))


def _by_family(case: Case, moving: list[Kernel], attention: int, products: int) -> list[str]:
    total: dict[str, int] = {}
    for kernel in moving:
        known = family(kernel.name)
        total[known] = total.get(known, 0) + kernel.total
    parts = sorted([*total.items(), ("product", products)], key=lambda part: part[1], reverse=True)
    shares = {name: measures.share(case, time) for name, time in parts}
    listed = ", ".join(f"{_FAMILIES[name]} {units.percent(share)}" for name, share in shares.items() if share >= TOLD)
    spent = sum(total.values()) + products - attention
    said = [f"{phrases.a_step(case, spent)} in memory-bound work: {listed}"]
    if attention:
        said = [f"{said[0]}; of that, {units.percent(measures.share(case, attention))} in attention is left out"]
    short = sum(kernel.total for kernel in moving if kernel.total < SHORT_KERNEL * kernel.calls)
    if short >= SHORT_PART * sum(total.values()):
        said.append(
            f"{phrases.a_step(case, short)} of that in kernels under {units.seconds(SHORT_KERNEL / 1e9)}, which their "
            "fixed cost limits rather than the bandwidth; fusing saves that too"
        )
    return said


_FAMILIES = {
    "elementwise": "elementwise",
    "copy": "copies",
    "reduction": "reductions",
    "normalisation": "normalisation",
    "softmax": "softmax",
    "product": "matrix products and convolutions",
    "other": "others",
}
TOLD = 0.001  # of the step: families that take less are not listed
SHORT_PART = 0.1  # of the time, from which on it is worth a line


def _reached(case: Case) -> list[str]:
    """Of the memory bandwidth, weighted by time."""
    known = [
        one
        for one in case.rank.operators
        if one.bound == "memory" and one.flops is None and one.of_ceiling and not of_attention(one, case.rank)
    ]
    spent = sum(one.device for one in known)
    if not spent:
        lacking = "shapes" if measures.option(case, "shapes") else "the memory bandwidth of the device"
        return [f"judged by the names of the kernels: without {lacking} it is not known what bandwidth they reach"]
    reached = sum(one.device * (one.of_ceiling or 0.0) for one in known) / spent
    return [
        f"those whose traffic follows from their shapes, {phrases.a_step(case, spent)}, reach {units.percent(reached)} "
        "of the memory bandwidth on average"
    ]


def _longest(case: Case, moving: list[Kernel]) -> list[str]:
    """The operators that take most, attention's left out; kernels, where no operator is known to launch any."""
    names = {kernel.operator for kernel in moving}
    found = [
        one
        for one in case.rank.operators
        if one.name in names and one.device > 0 and one.bound != "compute" and not is_product(one.name)
    ]
    shown = [one for one in found if not of_attention(one, case.rank)][:3]
    if not shown:
        return [f"{phrases.shortened(one.name)}: {phrases.a_step(case, one.total)}" for one in moving[:3]]
    return [
        f"{one.name}{f' {one.shapes}' if one.shapes else ''}: {phrases.a_step(case, one.device)}"
        + (f", at {units.percent(one.of_ceiling)} of the memory bandwidth" if one.of_ceiling is not None else "")
        for one in shown
    ]


def _advice(case: Case, fusible: int, products: int) -> Iterator[str]:
    """What helps the larger part first; nothing about what is next to nothing."""
    about = [(fusible, _fusing(case.rank)), (products, _BATCHING)]
    for time, said in sorted(about, reverse=True):
        if measures.share(case, time) >= NOTABLE:
            yield said


_BATCHING = "a larger batch reads the weights once for more rows, and weights of a smaller type are less to read"


def _fusing(rank: Rank) -> str:
    """Of operators that are not products."""
    if rank.compiled:
        return "bring what runs outside of the compiled regions into these, where torch.compile fuses it"
    said = (
        "torch.compile fuses neighbouring operators into one kernel that keeps what passes between them in registers; "
        "a smaller type halves the traffic"
    )
    if {"aten::pow", "aten::mean", "aten::rsqrt"} <= {one.name for one in rank.operators}:
        return f"{said}; torch.nn.functional.rms_norm does all of an RMSNorm, which is made of single operators here"
    return said
