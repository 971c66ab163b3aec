"""Rules about the optimizer step and the gradients it leaves behind."""

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import NOTABLE, Answers
from gpubench.findings import Finding

LOOPING = 100
"""Launches of one optimizer step from which on it is taken for a loop. A fused launch covers up to 320 blocks of 65,536
elements (PyTorch, MultiTensorApply.cuh), so that a hundred of them would update 2 billion parameters."""

ZEROED_TRAFFIC = 4  # writing zeros, and later reading them, the new gradient, and writing their sum

ZEROING = frozenset({"aten::zero_", "aten::_foreach_zero_", "aten::fill_"})


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
        severity=measures.severity(cost),
        evidence=[
            *_time(case, cost),
            *([f"one optimizer step is {units.digits(each)} {what}"] if each is not None else []),
            *([f"training.optimizer_impl is {impl}"] if impl is not None else []),
        ],
        cause="each operation reads and writes every parameter and its state anew",
        advice="torch.optim's fused=True does the whole update in one pass over the parameters",
        fix=measures.fix(case, training__optimizer_impl="fused"),
        expected=measures.at_most(cost),
        threshold=f"from {units.percent(NOTABLE)} of the step in the optimizer, as no step is without one",
    )


def zeroed_gradients(case: Case) -> Answers:
    rank = case.rank
    if rank.zeroed_gradients < measures.steps(case):
        return
    on_cpu = rank.device is None
    spent = sum(one.host if on_cpu else one.device for one in rank.operators if one.name in ZEROING)
    cost = measures.share(case, ZEROED_TRAFFIC * spent)
    yield Finding(
        id="zeroed-gradients",
        title="gradients are filled with zeros instead of dropped",
        severity=measures.severity(cost),
        evidence=[
            f"{phrases.times_a_step(case, rank.zeroed_gradients)} a gradient is filled with zeros"
            + (f"; filling takes {phrases.a_step(case, spent)}" if spent else "")
        ],
        cause="zero_grad(set_to_none=False) writes them all, and the backward pass reads them again to add to them",
        advice="optimizer.zero_grad(set_to_none=True), the default since PyTorch 2.0",
        expected=measures.at_most(cost) if spent else None,
        threshold="from one gradient in every step on: dropping them costs nothing",
    )


def _fused(case: Case) -> bool:
    """By the operator in the trace, else by the settings: auto is fused on a GPU, a loop on a CPU."""
    if any(one.name.startswith("aten::_fused_") for one in case.rank.operators):
        return True
    impl = case.setting("training.optimizer_impl")
    return impl == "fused" or (impl == "auto" and case.rank.device is not None)


def _time(case: Case, cost: float) -> list[str]:
    clean = case.metrics.get("phase_optimizer")
    if clean is not None:
        return [f"the optimizer takes {units.seconds(clean.estimate)} of a clean step ({units.percent(cost)})"]
    return [f"the optimizer takes {units.percent(cost)} of the step"]
