"""Rules about the optimizer: fusing its operations, and dropping gradients instead of zeroing them."""

from gpubench import units
from gpubench.diagnosis.case import NOTABLE, Answers, ProfileCase, at_most, severity
from gpubench.findings import Finding

LOOPING = 100
"""The optimizer counts as a loop from so many launches of one step on. A fused launch covers up to 320 blocks
of 65,536 elements (PyTorch, MultiTensorApply.cuh), so that a hundred of them would update 2 billion parameters."""

SAVED = 0.9
"""Upper limit of what fusing saves of a looping optimizer's time on a CPU: 87 % and 88 % of AdamW's time were saved on
two models. Fusing replaces a dozen passes and their calls by one pass."""

ZEROED_TRAFFIC = 4  # accesses: writing zeros, and later reading them, reading the new gradient and writing the sum


def unfused_optimizer(case: ProfileCase) -> Answers:
    cost = case.phase_share("optimizer")
    if cost < NOTABLE or _fused(case):
        return
    rank, impl = case.rank, case.setting("training.optimizer_impl")
    each = rank.optimizer_kernels / rank.optimizer_steps if rank.optimizer_steps else None
    if impl is None and (rank.device is None or each is None or each < LOOPING):
        return
    what = "operators" if rank.device is None else "launches"
    yield Finding(
        id="unfused-optimizer",
        title="the optimizer is not fused",
        severity=severity(cost),
        evidence=[
            *_time(case, cost),
            *([f"one optimizer step consists of {units.digits(each)} {what}"] if each is not None else []),
            *([f"training.optimizer_impl is {impl}{_meaning(case, impl)}"] if impl is not None else []),
        ],
        cause="each operation of the update reads and writes every parameter and its state again",
        advice="use torch.optim's fused=True, which does the whole update in one pass over the parameters"
        if impl is not None
        else "use an optimizer that does the whole update in one pass, such as those of torch.optim with fused=True",
        fix=case.fix(training__optimizer_impl="fused"),
        expected=at_most(cost * SAVED if rank.device is None else cost),
        threshold=f"at least {units.percent(NOTABLE)} of {case.window()} in the optimizer, as training needs one; "
        "one pass "
        + (
            f"remains: on a CPU fusing saved up to {units.percent(SAVED)} of the time"
            if rank.device is None
            else "remains, and the trace does not show how long that takes"
        ),
    )


def zeroed_gradients(case: ProfileCase) -> Answers:
    rank = case.rank
    if rank.zeroed_gradients < case.steps:
        return
    spent, idle = rank.zeroing, rank.zeroing_idle
    cost = case.share(ZEROED_TRAFFIC * spent + idle)
    yield Finding(
        id="zeroed-gradients",
        title="gradients are filled with zeros instead of being dropped",
        severity=severity(cost),
        evidence=[
            f"{case.calls_per_step(rank.zeroed_gradients)} a gradient is filled with zeros"
            + (f"; filling takes {case.time_per_step(spent)}" if spent else ""),
            *([f"the GPU is idle {case.time_per_step(idle)} while zero_grad launches that"] if idle else []),
        ],
        cause="zero_grad(set_to_none=False) writes them all, and the backward pass reads them again to add to them",
        advice="use optimizer.zero_grad(set_to_none=True), the default since PyTorch 2.0",
        expected=at_most(cost) if spent or idle else None,
        threshold=f"at least one gradient {case.per_step()}: dropping them costs nothing",
    )


def _fused(case: ProfileCase) -> bool:
    """Tells whether the optimizer is fused, by its operators or else by its settings: "auto" fuses on a GPU only."""
    if any(one.name.startswith("aten::_fused_") for one in case.rank.operators):
        return True
    impl = case.setting("training.optimizer_impl")
    return impl == "fused" or (impl == "auto" and not case.on_cpu)


def _meaning(case: ProfileCase, impl: str) -> str:
    return ", which is a loop on a CPU" if impl == "auto" and case.on_cpu else ""


def _time(case: ProfileCase, cost: float) -> list[str]:
    clean = case.metrics.get("phase_optimizer")
    if clean is not None:
        spent = units.seconds(clean.estimate)
        said = f"the optimizer takes {spent} of a step without the profiler ({units.percent(cost)})"
        recorded = next((one for one in case.rank.phases if one.name == "optimizer"), None)
        computing = case.share(case.spent(recorded)) if recorded else cost
        if 2 * computing >= cost:
            return [said]
        if case.on_cpu:
            return [f"{said}, and {units.percent(computing)} of the recorded ones"]
        return [f"{said}; its kernels take {units.percent(computing)} of the recorded ones, the rest is launching them"]
    return [f"the optimizer takes {units.percent(cost)} of {case.window()}"]
