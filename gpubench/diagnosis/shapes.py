"""Rules about shapes that the hardware does not take at full speed."""

import re

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.arithmetic import better_precision
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import Answers
from gpubench.findings import MARKED, Finding, Unanswered, severity
from gpubench.trace.profile import Operator

MULTIPLES = {"float16": 8, "bfloat16": 8, "float32": 4}
"""Elements in 16 bytes, to which rows must be aligned for the tensor cores' fast kernels (NVIDIA, Matrix
Multiplication Background User's Guide), by type; fp32 counts where it is read as TF32."""

PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1, "aten::matmul": 0}
"""By operator, which input is the left matrix; the right one follows it."""

CONVOLUTIONS = frozenset({"aten::convolution", "aten::_convolution", "aten::cudnn_convolution", "aten::conv2d"})
FEW_CHANNELS = 4  # of an image, or of a depthwise filter: nothing to be padded by hand


def odd_shapes(case: Case) -> Answers:
    """Products whose rows do not begin at multiples of 16 bytes."""
    rank = case.rank
    if rank.device is None or better_precision(case) is None:  # no tensor cores, or none that are known of
        return
    products = [one for one in rank.operators if one.name in PRODUCTS.keys() | CONVOLUTIONS and one.device > 0]
    needs = measures.option(case, "shapes")
    if products and needs:
        yield Unanswered("odd-shapes", "shapes of the matrix products", needs)
    odd = [one for one in products if _odd(case, one) and one.bound != "memory"]  # padding adds to the traffic
    cost = measures.share(case, sum(one.device for one in odd))
    if cost < MARKED:
        return
    reached = max((one.of_ceiling or 0.0 for one in products if _suits(case, one)), default=0.0) or 1.0
    gains = [one.device * max(0.0, 1 - one.of_ceiling / reached) for one in odd if one.of_ceiling is not None]
    saving = measures.share(case, round(sum(gains))) if len(gains) == len(odd) else None
    yield Finding(
        id="odd-shapes",
        title="matrix products have shapes that the tensor cores do not take at full speed",
        severity=severity(saving),
        evidence=[
            f"{one.name} {one.shapes} ({one.dtype}): {phrases.times_a_step(case, one.calls)}, "
            f"{phrases.a_step(case, one.device)}; {' and '.join(map(str, _odd(case, one)))} is no multiple of "
            f"{_multiple(case, one)}"
            for one in odd[:3]
        ],
        cause="rows begin at addresses that the fast kernels cannot load from",
        advice="pad vocabulary, classes and hidden sizes to multiples of 8 (of 4 for TF32); 64 is better still",
        expected=None if saving is None else measures.at_most(saving),
        threshold=f"from {units.percent(MARKED)} of the step in such products; padding them changes the model. They "
        "can become as fast as the best of the others is, or the device's peak where all are odd",
    )


def _suits(case: Case, operator: Operator) -> bool:
    return operator.bound == "compute" and _multiple(case, operator) is not None and not _odd(case, operator)


def _multiple(case: Case, operator: Operator) -> int | None:
    in_full = operator.dtype == "float32" and case.setting("precision") != "tf32"
    return None if in_full else MULTIPLES.get(operator.dtype)


def _odd(case: Case, operator: Operator) -> list[int]:
    """Sizes that are no multiples of what the type asks: channels of a convolution, or rows of a product's matrices."""
    multiple = _multiple(case, operator)
    if multiple is None:
        return []
    shapes = [
        [int(size) for size in re.findall(r"\d+", shape)] for shape in re.findall(r"\[[\d, ]*\]", operator.shapes)
    ]
    if operator.name in CONVOLUTIONS:
        rows = [size for size in shapes[1][:2] if size > FEW_CHANNELS] if len(shapes) > 1 else []
    else:
        rows = _rows(shapes[PRODUCTS[operator.name] :][:2], multiple)
    return sorted({size for size in rows if size % multiple})


def _rows(factors: list[list[int]], multiple: int) -> list[int]:
    """Lengths of rows that are certain: the result's. A factor may be transposed, which shapes do not tell: then it is
    the other size that counts, and so both have to be odd."""
    if len(factors) < 2 or any(len(factor) < 2 for factor in factors):
        return []
    odd = [size for *_, high, wide in factors if high % multiple and wide % multiple for size in (high, wide)]
    return [factors[1][-1], *odd]
