"""Rules about what a model needs besides activations at the peak of the memory: parameters, gradients, optimizer state,
and memory that libraries and the allocator hold."""

from gpubench import units
from gpubench.diagnosis.case import Answers, Estimated, FootprintCase, describe_holder, of_peak, phase_name, severity
from gpubench.findings import Finding, Saving, Unanswered
from gpubench.hardware import AMPERE, HOPPER, capability
from gpubench.memory.libraries import HANDLES, blas_workspace

UNUSED = 0.05
"""The threshold as a fraction of the peak. The allocator always has unused memory, because it reserves in pieces."""
WORKSPACES = 0.05
"""The threshold as a fraction of the peak. Smaller workspaces may slow matrix products, so a small saving is not worth
it."""

FOREACH = 0.05
"""The threshold as a fraction of the peak. Fusing costs nothing and is faster, but the rounding of segments hides
a smaller saving."""
STATE = 0.3
"""The threshold as a fraction of the peak. Of what a model trained with Adam in float32 needs for itself, half is
optimizer state. A smaller fraction means many activations, which are easier to reduce."""
GRADIENTS = 0.2
"""The threshold as a fraction of the peak. Of what a model trained with Adam in float32 needs for itself, a quarter is
gradients. This fraction means that there are few activations."""
PARAMETERS = 0.3
"""The threshold as a fraction of the peak, more than the quarter that parameters take of what Adam in float32 needs."""
GROWTH = 2
"""The number of steps in a row that must keep memory: a single one may have filled a cache."""
SOON = 10_000
"""Growth that would double the peak within this number of steps is reported; slower growth is not."""
EXAMPLES = 2

SMALL = 8 * 16 * 1024
"""The bytes of a workspace under CUBLAS_WORKSPACE_CONFIG=:16:8, eight pieces of 16 KiB: the smaller one of the two
settings that torch.use_deterministic_algorithms accepts."""


def out_of_memory(case: FootprintCase) -> Answers:
    """Finds a request that failed, and says what was held and what would have made it fit."""
    short = case.footprint.out_of_memory
    if short is None:
        return
    level = short.level
    unused = 0 if level.reserved is None else level.reserved - level.allocated
    asked = " ".join(filter(None, [short.operator and f"by {short.operator}", short.where and f"at {short.where}"]))
    left = "" if short.left is None else f", and the driver had {units.size(short.left)} left"
    free = "" if short.largest_free is None else f", the largest piece {units.size(short.largest_free)}"
    missing = short.requested - (short.left or 0)
    in_pieces = unused >= missing
    other = f"{units.size(missing)} less in use would have made it fit (-v names what held most)"
    found = Finding(
        id="out-of-memory",
        title=f"a request of {units.size(short.requested)} failed",
        severity="high",
        evidence=[
            f"{units.size(short.requested)} were requested{asked and f' {asked}'}{left}; {units.size(level.allocated)} "
            f"were in use, and the allocator held {units.size(unused)} unused{free}",
            *(describe_holder(one) for one in short.holders),
        ],
        cause="what the allocator holds unused would suffice, but it is in pieces"
        if in_pieces
        else f"{units.size(missing)} are missing",
        advice="set PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before PyTorch 2.10), so that "
        f"unused memory is in one piece; or {other}"
        if in_pieces
        else f"{other}; a smaller batch makes activations smaller, and several GPUs share parameters and their states",
        threshold="any request that failed",
    )
    yield Estimated(found, 1.0)  # before what merely holds much


def fragmentation(case: FootprintCase) -> Answers:
    size, level = case.held("fragmentation"), case.peak.level
    if level.reserved is None or case.share(size) < UNUSED:
        return
    if case.setting("performance.expandable_segments") is True:
        return
    yield case.estimated(
        Finding(
            id="fragmentation",
            title="the allocator holds memory that no tensor uses",
            severity=severity(case.share(size)),
            evidence=[
                f"of {units.size(level.reserved)} from the driver {units.size(level.allocated)} are in use "
                f"{case.at_peak}; {case.format_size(size)} are unused",
            ],
            cause="memory comes in segments of fixed sizes, and what is free in one does not fit the next request",
            advice="set PYTORCH_ALLOC_CONF=expandable_segments:True (PYTORCH_CUDA_ALLOC_CONF before PyTorch 2.10), so "
            "that segments grow instead of new ones being added",
            fix=case.fix(performance__expandable_segments=True),
            threshold=of_peak(UNUSED, "segments always have unused parts"),
        ),
        freed=size,
    )


def workspaces(case: FootprintCase) -> Answers:
    size = case.held("workspaces")
    if case.share(size) < WORKSPACES or _is_amd(case):
        return
    # AMPERE is the last generation with small workspaces, HOPPER the first one with large ones.
    usual, blas = HANDLES * blas_workspace(AMPERE), HANDLES * blas_workspace(HOPPER)
    config, rest = (":4096:2:16:8", usual) if size > usual else (":16:8", HANDLES * SMALL)
    advice = f"set CUBLAS_WORKSPACE_CONFIG={config} in the environment, which leaves {units.size(rest)} for cuBLAS"
    if size > blas:
        advice += "; torch.backends.cudnn.benchmark=False keeps cuDNN from trying algorithms with large workspaces"
    yield case.estimated(
        Finding(
            id="workspaces",
            title="library workspaces take much memory",
            severity=severity(case.share(size)),
            evidence=[
                f"workspaces hold {case.format_size(size)} {case.at_peak}",
                *([f"cuBLAS takes at most {units.size(blas)} of it"] if size > blas else []),
            ],
            cause="cuBLAS takes a workspace for each thread that computes products, and keeps it"
            + ("; other libraries, such as cuDNN for convolutions, take the rest" if size > blas else ""),
            advice=f"{advice}; products may be slower with less",
            threshold=of_peak(WORKSPACES, "products may be slower with less"),
        ),
        freed=max(size - rest, 0),
    )


def _is_amd(case: FootprintCase) -> bool:
    """Tells whether the device is AMD's, whose libraries do not read cuBLAS's setting."""
    known = case.accelerator
    return known is not None and capability(known.key) is None


def foreach_temporaries(case: FootprintCase) -> Answers:
    temporaries = case.holders("temporaries") if case.peak.phase == "optimizer" else []
    found = [one for one in temporaries if one.operator.startswith("aten::_foreach")]
    size, unnamed = sum(one.size for one in found), sum(one.size for one in temporaries if not one.operator)
    if case.peak.phase == "unknown":
        yield case.unknown_phase("foreach-temporaries")
    elif case.share(unnamed) >= FOREACH:
        yield case.unknown_operators("foreach-temporaries")
    if case.share(size) < FOREACH:
        return
    elsewhere, next_ = _elsewhere(case)
    freed = min(size, case.peak.level.allocated - elsewhere)
    yield case.estimated(
        Finding(
            id="foreach-temporaries",
            title="the optimizer step makes temporaries for all parameters at once",
            severity=severity(case.share(freed)),
            evidence=[
                f"temporaries of foreach operators hold {case.format_size(size)} at the peak in the optimizer step",
                *(describe_holder(one) for one in found[:EXAMPLES]),
                *([f"without them the peak would be {next_}, {units.size(elsewhere)}"] if freed < size else []),
            ],
            cause="foreach runs each operation of the update on all parameters before the next, and keeps its results",
            advice="use torch.optim's fused=True, which does the whole update in one kernel, without temporaries",
            place="optimizer",
            fix=case.fix(training__optimizer_impl="fused"),
            expected=Saving(case.share(freed)),
            threshold=of_peak(FOREACH, "fusing costs nothing"),
        ),
        freed=freed,
    )


def optimizer_state(case: FootprintCase) -> Answers:
    yield from _lost(case, "optimizer-state", STATE)
    size, fix = case.held("optimizer_state"), case.sharding_fix()
    if case.share(size) < STATE:
        return
    optimizer = case.setting("training.optimizer")
    if optimizer == "sgd":
        smaller = "use SGD with momentum 0, which keeps no state"
    else:
        smaller = (
            "use a smaller optimizer: SGD with momentum keeps half of Adam's state; 8-bit optimizers, such as those of "
            "bitsandbytes or torchao, keep about a quarter of float32; Adafactor a row and a column for each matrix"
        )
    yield case.estimated(
        Finding(
            id="optimizer-state",
            title="optimizer state takes a large part of the memory",
            severity=severity(case.share(size)),
            evidence=[
                f"optimizer state holds {case.format_size(size)} {case.at_peak}",
                *([f"training.optimizer is {optimizer}"] if optimizer else []),
                *_ratio(case, size),
                *_ranks(case, fix),
            ],
            cause="Adam keeps two averages for each parameter, SGD with momentum one, from the first step on",
            advice=f"{'use FSDP2, which shards it over the ranks; ' if fix else ''}{smaller}",
            place="optimizer",
            fix=fix,
            threshold=of_peak(STATE, "another optimizer needs new validation"),
        ),
        freed=_spread(case, size) if fix else size // 2,
    )


def gradients(case: FootprintCase) -> Answers:
    yield from _lost(case, "gradients", GRADIENTS)
    size, sharding = case.held("gradients"), case.sharding_fix()
    if case.share(size) < GRADIENTS:
        return
    passes, fix = case.setting("training.grad_accumulation"), sharding
    if case.setting("distributed.gradient_as_bucket_view") is False:
        fix = case.fix(distributed__gradient_as_bucket_view=True)
        advice = "let the gradients be views of the buckets of DistributedDataParallel, which are copies of them"
    elif fix:
        advice = "use FSDP2, which shards gradients over the ranks as soon as they are reduced"
    elif case.peak.phase in ("forward", "loss") and (passes is None or passes == 1):
        advice = "call optimizer.zero_grad(set_to_none=True) before the forward pass, unless gradients are accumulated"
    else:
        advice = (
            "update each parameter as soon as its gradient is complete, and free the gradient then "
            "(Tensor.register_post_accumulate_grad_hook); this excludes accumulation, and clipping by the total norm"
        )
    yield case.estimated(
        Finding(
            id="gradients",
            title="gradients of all parameters are held at once",
            severity=severity(case.share(size)),
            evidence=[
                f"gradients hold {case.format_size(size)} {case.at_peak}",
                *([f"{passes} passes accumulate into them"] if passes and passes > 1 else []),
                *_ranks(case, sharding),
            ],
            cause="the backward pass makes one gradient for each parameter, and they stay until zero_grad",
            advice=advice,
            place="optimizer",
            fix=fix,
            threshold=of_peak(GRADIENTS, "below that, activations or optimizer state take more"),
        ),
        freed=_spread(case, size) if sharding else size // 2 if fix else size,
    )


def parameters(case: FootprintCase) -> Answers:
    yield from _lost(case, "parameters", PARAMETERS)
    size, fix = case.held("parameters"), case.sharding_fix()
    if case.share(size) < PARAMETERS:
        return
    yield case.estimated(
        Finding(
            id="parameters",
            title="parameters take a large part of the memory",
            severity=severity(case.share(size)),
            evidence=[
                f"parameters hold {case.format_size(size)} {case.at_peak}",
                *(describe_holder(one) for one in case.holders("parameters")[:EXAMPLES]),
                *_ranks(case, fix),
            ],
            cause="they are held from the start to the end, in the type in which they are trained",
            advice=("use FSDP2, which shards them over the ranks; " if fix else "")
            + "keep parameters in bfloat16, which halves them with gradients and state, but rounds small updates to "
            "zero; or train adapters such as LoRA, which have few parameters",
            place="model",
            fix=fix,
            threshold=of_peak(PARAMETERS, "a model trained with Adam usually has more in other parts"),
        ),
        freed=_spread(case, size) if fix else size // 2,
    )


def growth(case: FootprintCase) -> Answers:
    kept = case.footprint.kept
    least = min(kept, default=0)
    if len(kept) < GROWTH or not least or least * SOON < case.whole:
        return
    room = (case.footprint.capacity or 0) - case.footprint.most
    yield case.estimated(
        Finding(
            id="growth",
            title="every step keeps memory",
            severity="high" if least * SOON / 10 >= case.whole else "medium",
            evidence=[
                f"each of {len(kept)} steps allocated {units.size(least)} or more that were still held two steps later",
                *([f"at that rate the memory is full after {room // least:,} more steps"] if room > 0 else []),
                *(describe_holder(one) for one in case.footprint.keepers),
            ],
            cause="something outside of the loop refers to tensors of every step, and with them often to their graph",
            advice="keep numbers, not tensors: loss.item() or loss.detach() where a list or a sum collects the loss",
            threshold=f"in each of at least {GROWTH} steps, so much that the peak doubles within {SOON:,} steps",
        ),
        freed=min(case.whole, least * SOON // 10),
    )


def _elsewhere(case: FootprintCase) -> tuple[int, str]:
    """Returns the largest allocated bytes outside the optimizer step, and their phase."""
    others = [one for one in case.footprint.phases if one.phase != "optimizer"]
    if not others:
        return 0, ""
    most = max(others, key=lambda one: one.level.allocated)
    return most.level.allocated, phase_name(most.phase)


def _lost(case: FootprintCase, rule: str, share: float) -> list[Unanswered]:
    """Returns the answer of a rule if memory from before the recording may hide what the rule looks for."""
    if case.share(case.held("before")) < share:
        return []
    entries = ", with a larger max_entries" if case.footprint.truncated else ""
    needs = f"record from before the model is built{entries}"
    return [Unanswered(rule, "what was allocated before the first event", needs)]


def _ratio(case: FootprintCase, size: int) -> list[str]:
    held = case.held("parameters")
    return [f"that is {units.digits(size / held)} times the parameters"] if held else []


def _ranks(case: FootprintCase, fix: object) -> list[str]:
    return [f"each of {case.setting('distributed.world_size')} ranks has all of it"] if fix else []


def _spread(case: FootprintCase, size: int) -> int:
    ranks = int(case.setting("distributed.world_size"))
    return size - size // ranks
