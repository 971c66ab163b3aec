"""The rule about attention computed by separate operators."""

from gpubench import units
from gpubench.diagnosis import code
from gpubench.diagnosis.case import MEDIUM, Answers, ProfileCase, at_place, severity
from gpubench.findings import Finding, Unanswered
from gpubench.hardware import find_accelerator
from gpubench.trace.attention import EFFICIENT, FLASH
from gpubench.trace.operators import peak_of
from gpubench.trace.profile import Attention, RankProfile

EXAMPLES = 3  # sets of sizes in the evidence
HEADLINE_MINIMUM = 0.5  # of the computing time: the headline does not name less
EVIDENCE_MINIMUM = 0.01  # of the time in such attention: the evidence leaves out what takes less
LEAST_OF_PRODUCTS = 0.5
"""The least part of the arithmetic that a fused kernel still does: a causal mask makes half of it unnecessary."""
SCORES_ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}  # bytes


def unfused_attention(case: ProfileCase) -> Answers:
    """Finds attention whose scores go through memory; a fused kernel keeps them on the chip."""
    found = case.rank.attention
    spent = sum(one.total for one in found)
    cost = case.share(spent)
    if cost < MEDIUM:
        return
    fallback = sum(one.total for one in found if one.fallback) >= spent / 2
    saving = case.share(spent - sum(_fused(case.rank, one) for one in found))
    yield Finding(
        id="unfused-attention",
        title=_title(found, fallback),
        severity=severity(cost),
        evidence=_evidence(case, found, spent),
        cause=_cause(case, found, fallback),
        advice=_advice(case.rank, found, fallback),
        place="model",
        fix=case.fix(performance__sdpa="fused") if fallback and case.setting("performance.sdpa") == "math" else {},
        expected=case.less_work(saving),
        threshold=f"at least {units.percent(MEDIUM)} of {case.window()}; a fused kernel still does the matrix "
        "products, or half of them under a causal mask: if the device's peak is known, the expected saving leaves out "
        "their time at that peak",
    )
    needs = case.option("stacks")
    if needs and not code.calls(case, "softmax") and all(one.where is None for one in found):
        yield Unanswered("unfused-attention", "file and line of the softmax", needs)


def is_restricted(rank: RankProfile) -> bool:
    """Tells whether the program seems to forbid fused kernels: it used none although its inputs suit one."""
    fallbacks = [one for one in rank.attention if one.fallback and one.queries is not None]
    obstacles = list(dict.fromkeys(obstacle for one in fallbacks for obstacle in one.obstacles))
    return bool(fallbacks) and (not obstacles or bool(_unexplained(obstacles)))


def _title(found: list[Attention], fallback: bool) -> str:
    if fallback:
        return "attention runs in the math backend of scaled_dot_product_attention, not in a fused kernel"
    made = "runs" if any(one.queries for one in found) else "seems to run"
    return f"attention {made} as separate operators: matrix product, softmax, matrix product"


def share_of_computing(case: ProfileCase) -> float:
    """Returns the share of such attention in the computing time of the GPU, or in that of operators on a CPU."""
    rank = case.rank
    whole = rank.device.compute if rank.device else sum(one.host for one in rank.operators)
    return min(1.0, sum(one.total for one in rank.attention) / whole) if whole > 0 else 0.0


def _evidence(case: ProfileCase, found: list[Attention], spent: int) -> list[str]:
    computing = "the time that the GPU computes" if case.rank.device else "the time in operators"
    parts = {
        "matrix products": sum(one.products for one in found),
        "softmax": sum(one.softmax for one in found),
        "scaling, masks, dropout and conversions between them": sum(one.elementwise for one in found),
    }
    least = EVIDENCE_MINIMUM * spent
    listed = ", ".join(f"{name} {units.percent(time / spent)}" for name, time in parts.items() if time >= least)
    evidence = [
        f"it takes {case.time_per_step(spent)}, {units.percent(share_of_computing(case))} of {computing}: {listed}",
        *(_sizes(case, one) for one in found[:EXAMPLES] if one.queries is not None and one.total >= least),
    ]
    evidence += code.call_evidence(code.calls(case, "softmax"))
    if backward := sum(one.backward for one in found):
        evidence.append(f"{units.percent(backward / spent)} of it in the backward pass")
    if unsure := sum(one.total for one in found if one.queries is None):
        why = (
            "as no shapes were recorded; record_shapes=True gives the sizes and makes it certain"
            if case.option("shapes")
            else "as its launches, and so its shapes, are not in the trace"
        )
        evidence.append(
            f"{units.percent(unsure / spent)} of it is inferred from the order of the work alone (a softmax between "
            f"two matrix products), {why}"
        )
    return evidence


def _sizes(case: ProfileCase, one: Attention) -> str:
    head = f", head size {one.head_size}" if one.head_size else ""
    dtype = f", {one.dtype}" if one.dtype else ""
    sizes = f"{one.groups} (batch x heads) x {one.queries} queries x {one.keys} keys{head}{dtype}"
    itemsize = SCORES_ITEMSIZE.get(one.dtype)
    scores = f"; the scores of each are {units.size(_scores(one) * itemsize)}" if itemsize else ""
    times = case.calls_per_step(one.calls + one.backward_calls)
    inside = f" in module {one.module}" * bool(one.module)
    return f"{sizes}{inside}{at_place(one.where)}: {times}, {case.time_per_step(one.total)}{scores}"


def _scores(one: Attention) -> int:
    return (one.groups or 0) * (one.queries or 0) * (one.keys or 0)


def _cause(case: ProfileCase, found: list[Attention], fallback: bool) -> str:
    why = "the scores of all queries with all keys are written to memory and read again by each of these operators"
    if not fallback:
        return why
    if case.setting("performance.sdpa") == "math":
        return (
            "the program seems to allow scaled_dot_product_attention no fused kernel, by torch.nn.attention."
            f"sdpa_kernel or torch.backends.cuda.enable_*_sdp; {why}"
        )
    obstacles = list(dict.fromkeys(obstacle for one in found if one.fallback for obstacle in one.obstacles))
    if not obstacles:
        return f"scaled_dot_product_attention fell back to separate operators, and the trace does not show why; {why}"
    return "; ".join([*obstacles, *_unexplained(obstacles), why])


def _unexplained(obstacles: list[str]) -> list[str]:
    """Names the fused kernel whose obstacle is unknown, if only the obstacles of the other are known."""
    fused = [kernel for kernel in (FLASH, EFFICIENT) if any(one.startswith(kernel) for one in obstacles)]
    if len(fused) != 1 or any(not one.startswith((FLASH, EFFICIENT)) for one in obstacles):
        return []
    other = EFFICIENT if fused == [FLASH] else FLASH
    return [f"the trace does not show why {other} was not used"]


def _advice(rank: RankProfile, found: list[Attention], fallback: bool) -> str:
    if rank.device is None:
        needs = "on a CPU the fused kernel takes no dropout, and masks of 2 or 4 dimensions"
    else:
        needs = (
            "flash attention takes float16 and bfloat16, head sizes up to 256 and no mask other than is_causal; "
            "memory-efficient attention also takes float32 and attn_mask, with head sizes that are multiples of 8 "
            "(of 4 in float32)"
        )
    if fallback:
        return (
            f"remove what prevents the fused kernels: {needs}. Under torch.nn.attention.sdpa_kernel("
            "[SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]), PyTorch raises an error if no fused kernel "
            "fits, with the reasons as warnings"
        )
    odd = {size for one in found for size in (one.queries, one.keys) if size and size % 8}
    any_length = "; lengths need no padding" if odd else ""
    return (
        'use torch.nn.functional.scaled_dot_product_attention, for a transformers model attn_implementation="sdpa" (or '
        '"flash_attention_2"), for nn.MultiheadAttention need_weights=False; pass position biases as attn_mask: '
        f"{needs}{any_length}"
    )


def _fused(rank: RankProfile, one: Attention) -> int:
    """Returns the nanoseconds that any kernel needs at the device's peak; 0 if the peak is unknown.

    A kernel needs LEAST_OF_PRODUCTS of the products, of which there are two forward and four backward.
    """
    peak = peak_of(find_accelerator(rank.device_name or ""), one.dtype, ())
    if peak is None or not one.head_size:
        return 0
    products = 2 * one.calls + 4 * one.backward_calls
    flops = LEAST_OF_PRODUCTS * products * 2 * _scores(one) * one.head_size
    return min(one.total, round(flops / peak * 1e9))


def attention_clause(case: ProfileCase) -> str:
    """Returns a clause for the headline if such attention is most of the computing; else ""."""
    part = share_of_computing(case)
    if part < HEADLINE_MINIMUM or case.share(sum(one.total for one in case.rank.attention)) < MEDIUM:
        return ""
    how = "in the math backend" if all(one.fallback for one in case.rank.attention) else "in separate operators"
    return f"; attention {how} is {units.whole_percent(part)} of what it computes"
