"""The rule about models that compute in float64."""

import re

from gpubench import units
from gpubench.diagnosis import code
from gpubench.diagnosis.case import Answers, ProfileCase, severity, shortened
from gpubench.diagnosis.fp32_products import PRODUCTS_WORTH
from gpubench.diagnosis.matrix_products import is_product
from gpubench.findings import Finding, Saving
from gpubench.trace.profile import Kernel, Operator, short_shapes

DOUBLE = "float64"
DOUBLE_PRODUCT = re.compile(r"(?<![a-z0-9])dgemm|f64f64_f64|convolve_dgemm")
"""Names of the kernels of cuBLAS, CUTLASS and cuDNN that multiply float64."""
HALF_RATE = re.compile(r"\b(P100|V100|A100|A30|H100|H200|GH200|MI\d{2,3}\w*)\b")
"""GPUs that compute float64 at half the rate of float32. Others have a 32nd or a 64th of it (data sheets)."""
HALF = 0.5
"""The part of the time that float32 takes at least: it has half the bytes, and vector units hold twice the numbers."""


def double_precision(case: ProfileCase) -> Answers:
    """Finds products in float64, and all else that is computed in it."""
    operators = [one for one in case.rank.operators if one.dtype == DOUBLE and case.spent(one) > 0]
    products = [one for one in operators if is_product(one.name)]
    kernels = [] if products or case.on_cpu else [one for one in case.rank.kernels if DOUBLE_PRODUCT.search(one.name)]
    of_products = sum(case.spent(one) for one in products) + sum(one.total for one in kernels)
    whole = max(of_products, sum(case.spent(one) for one in operators))
    if case.share(of_products) < PRODUCTS_WORTH:
        return
    saving = _saving(case, whole)
    longest = sorted(products, key=lambda one: case.spent(one), reverse=True)[:2]
    yield Finding(
        id="float64",
        title="the model computes in float64",
        severity=severity(saving.estimate),
        evidence=[
            f"operators on float64 take {case.time_per_step(whole)}, of which matrix products and convolutions "
            f"{case.time_per_step(of_products)}",
            *(_operator(case, one) for one in longest),
            *(_kernel(case, one) for one in kernels[:2]),
            *code.call_evidence(code.calls(case, "float64")),
        ],
        cause="parameters or inputs are float64: NumPy makes arrays of that type, which torch.from_numpy keeps, and "
        "a model computes in it after double() or torch.set_default_dtype(torch.float64)",
        advice="compute in float32, if the result needs no more than 7 digits: model.float(), and inputs with .float()",
        place="model",
        expected=saving,
        threshold=f"at least {units.percent(PRODUCTS_WORTH)} of {case.window()} in products of float64, as another "
        "precision changes every number of a run. In float32 they take half the time on a CPU and on GPUs for data "
        "centres, and a 32nd or less on others",
    )


def _saving(case: ProfileCase, spent: int) -> Saving:
    cost = min(1.0, case.share(spent))
    if case.on_cpu:
        return Saving(cost * HALF)
    return case.less_work(cost * HALF if HALF_RATE.search(case.rank.device_name or "") else cost)


def _operator(case: ProfileCase, one: Operator) -> str:
    shapes = f" {short_shapes(one.shapes)}" * bool(one.shapes)
    return f"{one.name}{shapes}: {case.calls_per_step(one.calls)}, {case.time_per_step(case.spent(one))}"


def _kernel(case: ProfileCase, one: Kernel) -> str:
    return f"{shortened(one.name)}: {case.calls_per_step(one.calls)}, {case.time_per_step(one.total)}"
