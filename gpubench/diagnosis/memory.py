"""Rules about what memory costs in time."""

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import NOTABLE, WORTH, WORTH_REASON, Answers
from gpubench.findings import Finding, Unanswered, severity
from gpubench.trace.launches import SHORT_KERNEL
from gpubench.trace.profile import Operator

MEMORY_WORTH = 0.2  # some operator is always bound by memory: normalisation, activations, residuals
MOSTLY = 0.5
"""Of an operator's time: where its traffic needs less than half of it at full speed, something else takes most."""
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
    rank = case.rank
    bound = [one for one in rank.operators if moves_bytes(one)]
    cost = measures.share(case, sum(one.device for one in bound))
    needs = measures.option(case, "shapes")
    if rank.device is not None and needs:
        yield Unanswered("memory-bound", "shapes of the operators, from which their traffic follows", needs)
    if rank.device is None or cost < MEMORY_WORTH or case.setting("performance.compile") or rank.compiled:
        return
    bound.sort(key=lambda one: one.device, reverse=True)
    yield Finding(
        id="memory-bound",
        title="operators wait for the GPU's memory, not for its arithmetic",
        severity="medium" if cost >= 2 * MEMORY_WORTH else "low",
        evidence=[f"operators bound by memory take {units.percent(cost)} of {phrases.whole(case)}"]
        + [
            f"{one.name}{f' {one.shapes}' if one.shapes else ''}: {phrases.a_step(case, one.device)}"
            + (f", at {units.percent(one.of_ceiling)} of the memory's speed" if one.of_ceiling is not None else "")
            for one in bound[:3]
        ],
        cause="each of these operators reads its inputs from memory and writes its output there, one after the other",
        advice="torch.compile fuses neighbours into one kernel that keeps what is between them in registers; a smaller "
        "type halves the traffic",
        fix=case.fix(performance__compile=True) if case.setting("performance.compile") is False else {},
        threshold=f"from {units.percent(MEMORY_WORTH)} of the step on, as some operator is always bound by memory, of "
        f"those at {units.percent(MOSTLY)} of its speed and more: others spend most of their time on something else; "
        "what fusing saves does not follow from the trace",
    )


def moves_bytes(operator: Operator) -> bool:
    """Whether most of its time goes to the traffic it cannot do without; not where its kernels are short, since so
    little traffic is a cache's, and their fixed cost is another rule's."""
    if operator.bound != "memory" or operator.of_ceiling is None or operator.of_ceiling < MOSTLY:
        return False
    return operator.device > 0 and operator.device >= SHORT_KERNEL * operator.kernels
