"""The rule about types of 16 bits that a CPU does not compute in, so that slow kernels convert each operand."""

from gpubench import units
from gpubench.diagnosis import code
from gpubench.diagnosis.case import Answers, Estimated, ProfileCase, severity
from gpubench.diagnosis.fp32_products import PRODUCTS_WORTH
from gpubench.diagnosis.matrix_products import is_product
from gpubench.findings import Finding
from gpubench.trace.profile import Operator, short_shapes

REDUCED = {"bfloat16": "bf16", "float16": "fp16"}
FALLBACK = "_slow_conv"
"""A part of the names of PyTorch's convolutions for what the library of the CPU (oneDNN) refuses."""


def slow_reduced_type(case: ProfileCase) -> Answers:
    """Finds matrix products and convolutions in a type that the CPU has no arithmetic for."""
    if not case.on_cpu:
        return
    operators = [one for one in case.rank.operators if one.dtype in REDUCED]
    slow = [one for one in operators if is_product(one.name) and _is_slow(case, one)]
    types = {one.dtype for one in slow}
    whole = sum(one.host for one in operators if one.dtype in types)
    of_products = sum(one.host for one in slow)
    if case.share(of_products) < PRODUCTS_WORTH:
        return
    named = units.listed(sorted(REDUCED[one] for one in types))
    cost = min(1.0, case.share(whole))
    yield Estimated(
        Finding(
            id="slow-reduced-type",
            title=f"the model computes in {named}, for which this CPU has only slow kernels",
            severity=severity(cost),
            evidence=[
                f"operators in {named} take {case.time_per_step(whole)}, of which matrix products and convolutions "
                f"{case.time_per_step(of_products)}",
                *(_describe(case, one) for one in sorted(slow, key=lambda one: one.host, reverse=True)[:2]),
                *code.call_evidence(code.calls(case, "autocast")),
            ],
            cause=_cause(case, types, named),
            advice="compute in fp32: without torch.autocast, or with model.float() where the parameters have that "
            "type; it changes the losses: compare them",
            fix=case.fix(precision="fp32"),
            threshold=f"at least {units.percent(PRODUCTS_WORTH)} of {case.window()} in such products, as another "
            "precision changes every number of a run. What fp32 saves depends on the shapes, so that no saving is "
            "estimated",
        ),
        cost,
    )


def _is_slow(case: ProfileCase, one: Operator) -> bool:
    return FALLBACK in one.name or case.cpu_computes_in(REDUCED[one.dtype]) is False


def _cause(case: ProfileCase, types: set[str], named: str) -> str:
    lacking = [one for one in types if case.cpu_computes_in(REDUCED[one]) is False]
    if lacking:
        return f"the CPU has no arithmetic in {named}: kernels convert each operand to fp32 and each result back"
    return f"PyTorch's fast library for CPUs (oneDNN) refuses {named} here, and a slow kernel takes its place"


def _describe(case: ProfileCase, one: Operator) -> str:
    shapes = f" {short_shapes(one.shapes)}" * bool(one.shapes)
    return f"{one.name}{shapes}: {case.calls_per_step(one.calls)}, {case.time_per_step(one.host)}"
