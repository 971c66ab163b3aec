"""Rules about shapes that the hardware does not take at full speed."""

import re

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.arithmetic import better_precision
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import MARKED, Answers
from gpubench.findings import Finding, Unanswered
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
    odd = [one for one in products if _odd(case, one)]
    cost = measures.share(case, sum(one.device for one in odd))
    if cost < MARKED:
        return
    gains = [one.device * (1 - one.of_ceiling) for one in odd if one.of_ceiling is not None]
    saving = measures.share(case, round(sum(gains))) if len(gains) == len(odd) else None
    yield Finding(
        id="odd-shapes",
        title="matrix products have shapes that the tensor cores do not take at full speed",
        severity=measures.severity(saving),
        evidence=[
            f"{one.name} {one.shapes} ({one.dtype}): {phrases.times_a_step(case, one.calls)}, "
            f"{phrases.a_step(case, one.device)}; {' and '.join(map(str, _odd(case, one)))} is no multiple of "
            f"{_multiple(case, one)}"
            for one in odd[:3]
        ],
        cause="rows begin at addresses that the fast kernels cannot load from",
        advice="pad vocabulary, classes and hidden sizes to multiples of 8 (of 4 for TF32); 64 is better still",
        expected=None if saving is None else measures.at_most(saving),
        threshold=f"from {units.percent(MARKED)} of the step in such products; padding them changes the model",
    )


def _multiple(case: Case, operator: Operator) -> int | None:
    in_full = operator.dtype == "float32" and case.setting("precision") != "tf32"
    return None if in_full else MULTIPLES.get(operator.dtype)


def _odd(case: Case, operator: Operator) -> list[int]:
    """Row lengths of both factors, or a convolution's channels, that are no multiples of what the type asks."""
    multiple = _multiple(case, operator)
    shapes = [
        [int(size) for size in re.findall(r"\d+", shape)] for shape in re.findall(r"\[[\d, ]*\]", operator.shapes)
    ]
    if operator.name in CONVOLUTIONS:
        rows = [size for size in shapes[1][:2] if size > FEW_CHANNELS] if len(shapes) > 1 else []
    else:
        rows = [shape[-1] for shape in shapes[PRODUCTS[operator.name] :][:2] if shape]
    return [] if multiple is None else sorted({size for size in rows if size % multiple})
