"""Rules about what grows with the model: parameters, gradients, and the optimizer's state and temporaries."""

from gpubench import units
from gpubench.findings import Finding, Saving, Unanswered
from gpubench.memory.advice_case import (
    Advice,
    Answers,
    Case,
    lacking_operators,
    lacking_phases,
    place,
    threshold,
    told_of,
)

FOREACH = 0.05
"""Of the peak: fusing costs nothing, and is faster; less than that is lost among the rounding of segments."""
STATE = 0.3
"""Of the peak: what a model trained with Adam in float32 needs for itself is half state, and so is less of the whole
where there are many activations, which are easier to do without."""
GRADIENTS = 0.2
"""Of the peak: gradients are a quarter of what a model trained with Adam in float32 needs for itself, so that so many
of them mean few activations."""
PARAMETERS = 0.3
"""Of the peak: more than the quarter that they are of what a model trained with Adam in float32 needs for itself."""
EXAMPLES = 2


def foreach_temporaries(case: Case) -> Answers:
    temporaries = case.holders("temporaries") if case.peak.phase == "optimizer" else []
    found = [one for one in temporaries if one.operator.startswith("aten::_foreach")]
    size, unnamed = sum(one.size for one in found), sum(one.size for one in temporaries if not one.operator)
    if case.peak.phase == "unknown":
        yield Unanswered("foreach-temporaries", *lacking_phases(case))
    elif case.share(unnamed) >= FOREACH:
        yield Unanswered("foreach-temporaries", *lacking_operators(case))
    if case.share(size) < FOREACH:
        return
    elsewhere, next_ = _elsewhere(case)
    freed = min(size, case.peak.level.allocated - elsewhere)
    yield Advice(
        freed,
        Finding(
            id="foreach-temporaries",
            title="the optimizer step makes a temporary for every parameter at once",
            severity=case.severity(freed),
            evidence=[
                f"temporaries of foreach operators hold {case.told(size)} at the peak in the optimizer step",
                *(told_of(one) for one in found[:EXAMPLES]),
                *([f"without them the peak would be {next_}, {units.size(elsewhere)}"] if freed < size else []),
            ],
            cause="foreach runs each operation of the update on all parameters before the next, and keeps its results",
            advice="torch.optim's fused=True does the whole update in one kernel, without temporaries",
            fix=case.fix(training__optimizer_impl="fused"),
            expected=Saving(case.share(freed)),
            threshold=threshold(FOREACH, "fusing costs nothing"),
        ),
    )


def optimizer_state(case: Case) -> Answers:
    if missing := _lost(case, STATE):
        yield Unanswered("optimizer-state", *missing)
    size, fix = case.held("optimizer_state"), case.sharding()
    if case.share(size) < STATE:
        return
    optimizer = case.setting("training.optimizer")
    if optimizer == "sgd":
        smaller = "SGD with momentum 0 keeps none"
    else:
        smaller = (
            "SGD with momentum keeps half of Adam's; 8-bit optimizers, as bitsandbytes' or torchao's, about a quarter "
            "of what float32 takes; Adafactor a row and a column for each matrix"
        )
    yield Advice(
        _spread(case, size) if fix else size // 2,
        Finding(
            id="optimizer-state",
            title="a large part is the optimizer's state",
            severity=case.severity(size),
            evidence=[
                f"optimizer state holds {case.told(size)} at the peak {case.where}",
                *([f"training.optimizer is {optimizer}"] if optimizer else []),
                *_ratio(case, size),
                *_ranks(case, fix),
            ],
            cause="Adam keeps two averages for each parameter, SGD with momentum one, from the first step on",
            advice=f"{'FSDP2 shards it over the ranks; ' if fix else ''}{smaller}",
            fix=fix,
            threshold=threshold(STATE, "another optimizer has to prove itself anew"),
        ),
    )


def gradients(case: Case) -> Answers:
    if missing := _lost(case, GRADIENTS):
        yield Unanswered("gradients", *missing)
    size, fix = case.held("gradients"), case.sharding()
    if case.share(size) < GRADIENTS:
        return
    passes = case.setting("training.grad_accumulation")
    if fix:
        advice = "FSDP2 shards them over the ranks, as soon as they are reduced"
    elif case.peak.phase in ("forward", "loss") and (passes is None or passes == 1):
        advice = "optimizer.zero_grad(set_to_none=True) before the forward pass, unless gradients are accumulated"
    else:
        advice = (
            "an optimizer step for each parameter as soon as it has its gradient, which can then go "
            "(Tensor.register_post_accumulate_grad_hook); that rules out accumulation, and clipping by the whole norm"
        )
    yield Advice(
        _spread(case, size) if fix else size,
        Finding(
            id="gradients",
            title="gradients of all parameters are held at once",
            severity=case.severity(size),
            evidence=[
                f"gradients hold {case.told(size)} at the peak {case.where}",
                *([f"{passes} passes accumulate into them"] if passes and passes > 1 else []),
                *_ranks(case, fix),
            ],
            cause="the backward pass makes one for each parameter, and they stay until zero_grad",
            advice=advice,
            fix=fix,
            threshold=threshold(GRADIENTS, "where there are fewer, activations or state weigh more"),
        ),
    )


def parameters(case: Case) -> Answers:
    if missing := _lost(case, PARAMETERS):
        yield Unanswered("parameters", *missing)
    size, fix = case.held("parameters"), case.sharding()
    if case.share(size) < PARAMETERS:
        return
    yield Advice(
        _spread(case, size) if fix else size // 2,
        Finding(
            id="parameters",
            title="a large part is the parameters themselves",
            severity=case.severity(size),
            evidence=[
                f"parameters hold {case.told(size)} at the peak {case.where}",
                *(told_of(one) for one in case.holders("parameters")[:EXAMPLES]),
                *_ranks(case, fix),
            ],
            cause="they are held from the start to the end, in the type that they are trained in",
            advice=("FSDP2 shards them over the ranks; " if fix else "")
            + "parameters in bfloat16 take half, and gradients and state with them, but small updates then round to "
            "nothing; adapters such as LoRA train few of them",
            fix=fix,
            threshold=threshold(PARAMETERS, "a model trained with Adam has more in its other parts"),
        ),
    )


def _elsewhere(case: Case) -> tuple[int, str]:
    """Most that is allocated outside of the optimizer step, and where."""
    others = [one for one in case.footprint.phases if one.phase != "optimizer"]
    if not others:
        return 0, ""
    most = max(others, key=lambda one: one.level.allocated)
    return most.level.allocated, place(most.phase)


def _lost(case: Case, share: float) -> tuple[str, str] | None:
    """What is missing where so much was there before the recording that it may be what the rule looks for."""
    if case.share(case.held("before")) < share:
        return None
    entries = ", with a larger max_entries" if case.footprint.truncated else ""
    return "what was there before the first event", f"record from before the model is built{entries}"


def _ratio(case: Case, size: int) -> list[str]:
    held = case.held("parameters")
    return [f"that is {units.digits(size / held)} times the parameters"] if held else []


def _ranks(case: Case, fix: object) -> list[str]:
    return [f"each of {case.setting('distributed.world_size')} ranks has all of it"] if fix else []


def _spread(case: Case, size: int) -> int:
    ranks = int(case.setting("distributed.world_size"))
    return size - size // ranks
