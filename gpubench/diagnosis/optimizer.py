"""Rules about the optimizer step and the gradients it leaves behind."""

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import NOTABLE, Answers
from gpubench.findings import Finding, severity

LOOPING = 100
"""Launches of one optimizer step from which on it is taken for a loop. A fused launch covers up to 320 blocks of 65,536
elements (PyTorch, MultiTensorApply.cuh), so that a hundred of them would update 2 billion parameters."""

SAVED = 0.9
"""Of a looping optimizer's time on a CPU: 87 % and 88 % of AdamW's were saved on two models. Its dozen passes, and
their calls, outweigh by so much the one that remains."""
_ONE_PASS = "remains, and how long that takes does not follow from the trace"

ZEROED_TRAFFIC = 4  # writing zeros, and later reading them, the new gradient, and writing their sum


def unfused_optimizer(case: Case) -> Answers:
    cost = measures.phase_share(case, "optimizer")
    if cost < NOTABLE or _fused(case):
        return
    rank, impl = case.rank, case.setting("training.optimizer_impl")
    each = rank.optimizer_kernels / rank.optimizer_steps if rank.optimizer_steps else None
    if impl is None and (rank.device is None or each is None or each < LOOPING):
        return
    what = "operators" if rank.device is None else "launches"
    yield Finding(
        id="unfused-optimizer",
        title="the optimizer visits parameters one operation at a time",
        severity=severity(cost),
        evidence=[
            *_time(case, cost),
            *([f"one optimizer step is {units.digits(each)} {what}"] if each is not None else []),
            *([f"training.optimizer_impl is {impl}{_meaning(case, impl)}"] if impl is not None else []),
        ],
        cause="each operation reads and writes every parameter and its state anew",
        advice="torch.optim's fused=True does the whole update in one pass over the parameters",
        fix=case.fix(training__optimizer_impl="fused"),
        expected=measures.at_most(cost * SAVED if rank.device is None else cost),
        threshold=f"from {units.percent(NOTABLE)} of the step in the optimizer, as no step is without one; one pass "
        + (
            f"remains: on a CPU fusing has saved up to {units.percent(SAVED)} of it"
            if rank.device is None
            else _ONE_PASS
        ),
    )


def zeroed_gradients(case: Case) -> Answers:
    rank = case.rank
    if rank.zeroed_gradients < measures.steps(case):
        return
    spent, idle = rank.zeroing, rank.zeroing_idle
    cost = measures.share(case, ZEROED_TRAFFIC * spent + idle)
    yield Finding(
        id="zeroed-gradients",
        title="gradients are filled with zeros instead of dropped",
        severity=severity(cost),
        evidence=[
            f"{phrases.times_a_step(case, rank.zeroed_gradients)} a gradient is filled with zeros"
            + (f"; filling takes {phrases.a_step(case, spent)}" if spent else ""),
            *([f"the GPU is idle {phrases.a_step(case, idle)} while zero_grad launches that"] if idle else []),
        ],
        cause="zero_grad(set_to_none=False) writes them all, and the backward pass reads them again to add to them",
        advice="optimizer.zero_grad(set_to_none=True), the default since PyTorch 2.0",
        expected=measures.at_most(cost) if spent or idle else None,
        threshold="from one gradient in every step on: dropping them costs nothing",
    )


def _fused(case: Case) -> bool:
    """By the operator in the trace, else by the settings: auto is fused on a GPU, a loop on a CPU."""
    if any(one.name.startswith("aten::_fused_") for one in case.rank.operators):
        return True
    impl = case.setting("training.optimizer_impl")
    return impl == "fused" or (impl == "auto" and case.rank.device is not None)


def _meaning(case: Case, impl: str) -> str:
    return ", which is a loop on a CPU" if impl == "auto" and case.rank.device is None else ""


def _time(case: Case, cost: float) -> list[str]:
    clean = case.metrics.get("phase_optimizer")
    if clean is not None:
        return [f"the optimizer takes {units.seconds(clean.estimate)} of a clean step ({units.percent(cost)})"]
    return [f"the optimizer takes {units.percent(cost)} of {phrases.whole(case)}"]
