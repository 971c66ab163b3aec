"""Which operators are matrix products, and the rule about their shapes."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpubench import units
from gpubench.diagnosis.case import MEDIUM, WORTH, Answers, ProfileCase, severity
from gpubench.diagnosis.fp32_products import better_precision
from gpubench.findings import Finding, Unanswered
from gpubench.trace.attention import is_attention_product
from gpubench.trace.profile import Operator, short_shapes

MULTIPLES = {"float16": 8, "bfloat16": 8, "float32": 4}
"""Elements in 16 bytes, by type. The tensor cores' fast kernels need rows aligned to 16 bytes (NVIDIA, Matrix
Multiplication Background User's Guide); fp32 counts where it is read as TF32. On AMD's GPUs 16 bytes is the widest load
of a thread (CDNA 3 ISA, global_load_dwordx4); AMD publishes no rule for the shapes of products."""
BETTER = 64  # elements: multiples of it fill whole tiles of the fast kernels (same guide)

PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1, "aten::matmul": 0}
"""The index of the left matrix among the inputs, by operator; the right matrix follows it."""

CONVOLUTIONS = frozenset({"aten::convolution", "aten::_convolution", "aten::cudnn_convolution", "aten::conv2d"})
CONVOLUTION = re.compile(r"conv(olution|_|\d)")
"""The names of all operators that convolve, as aten::convolution_backward and aten::_slow_conv2d_forward."""
EVIDENCE_MINIMUM = 0.02  # of the time in odd products: the evidence leaves out products that take less
FEW_CHANNELS = 4  # of an image or a depthwise filter: padding them by hand is pointless
_PADDING = {
    "sequence length": "pad the sequence {to}, with the padding masked",
    "features": "pad the layer's features (vocabulary, classes or hidden size) {to}",
    "head size": "choose another head size: {to}",
    "channels": "pad the channels {to}",
}


class Odd(NamedTuple):
    """A size that is not a multiple of what the data type needs."""

    what: str
    """The name of the dimension with this size, such as "features"."""
    letter: str
    """The letter of the size in [M, K] x [K, N]; empty for a convolution."""
    size: int

    def __str__(self) -> str:
        return f"{self.what} {self.letter} = {self.size}" if self.letter else f"{self.what} {self.size}"


def is_product(name: str) -> bool:
    return name in PRODUCTS or bool(CONVOLUTION.search(name))


def rows(operator: Operator) -> int | None:
    """Returns the smaller of M and K in a product [M, K] x [K, N] of two matrices; None for anything else.

    The samples of a batch are the rows M of the products that read the weights, and K of those that make their
    gradients.
    """
    shapes = _shapes(operator)[PRODUCTS[operator.name] :] if operator.name in ("aten::mm", "aten::addmm") else []
    if len(shapes) < 2 or any(len(shape) != 2 for shape in shapes[:2]):
        return None
    return min(shapes[0])


def is_odd(case: ProfileCase, operator: Operator) -> bool:
    """Tells whether the operator is a product or convolution with rows that are not aligned to 16 bytes."""
    return operator.name in PRODUCTS.keys() | CONVOLUTIONS and bool(_odd(case, operator))


def odd_shapes(case: ProfileCase) -> Answers:
    """Finds products whose rows are not aligned to 16 bytes, whether arithmetic or memory limits them."""
    rank = case.rank
    if rank.device is None or (better_precision(case) is None and not case.on_amd):  # no known matrix units
        return
    products = [one for one in rank.operators if one.name in PRODUCTS.keys() | CONVOLUTIONS and one.device > 0]
    needs = case.option("shapes")
    if products and needs:
        yield Unanswered("odd-shapes", "shapes of the matrix products", needs)
    odd = [one for one in products if is_odd(case, one)]
    spent = sum(one.device for one in odd)
    cost = case.share(spent)
    saving = _saving(case, products, odd)
    if cost < MEDIUM or (saving is not None and saving < WORTH):
        return
    shown = [one for one in odd if one.device >= EVIDENCE_MINIMUM * spent]
    matrix_units = "the matrix cores" if case.on_amd else "the tensor cores"
    yield Finding(
        id="odd-shapes",
        title=f"matrix products have shapes that {matrix_units} cannot process at full speed",
        severity=severity(saving) if saving is not None else "medium" if cost >= 2 * MEDIUM else "low",
        evidence=[_describe_product(case, one) for one in shown[:3]],
        cause=_cause(case),
        advice="; ".join(_advice(case, shown)),
        expected=None if saving is None else case.less_work(saving),
        threshold=f"at least {units.percent(MEDIUM)} of {case.window()} in such products; padding them changes the "
        "model or its batches. Compute-bound products can become as fast as the best of the others, or reach the "
        "device's peak if all are odd; memory-bound products can reach the memory bandwidth",
    )


def _saving(case: ProfileCase, products: Sequence[Operator], odd: Sequence[Operator]) -> float | None:
    """Returns the most that padding saves, as a fraction of the step; None if a ceiling is unknown."""
    reached = max((one.of_ceiling or 0.0 for one in products if _suits(case, one)), default=0.0) or 1.0
    gains = 0.0
    for one in odd:
        if one.of_ceiling is None:
            return None
        gains += one.device * max(0.0, 1 - one.of_ceiling / (1.0 if one.bound == "memory" else reached))
    return case.share(round(gains))


def _describe_product(case: ProfileCase, one: Operator) -> str:
    odd = _odd(case, one)
    return (
        f"{one.name} {short_shapes(one.shapes)} ({one.dtype}): {case.calls_per_step(one.calls)}, "
        f"{case.time_per_step(one.device)}; {' and '.join(map(str, odd))} "
        f"{'is not a multiple' if len(odd) == 1 else 'are not multiples'} of {_multiple(case, one)}"
    )


def _cause(case: ProfileCase) -> str:
    if case.on_amd:
        return (
            "a thread cannot load 16 bytes at once from the addresses at which rows begin; AMD publishes no rule for "
            "such shapes, so that their cost is unknown"
        )
    return "the fast kernels need rows that begin at multiples of 16 bytes, and these do not"


def _advice(case: ProfileCase, odd: Sequence[Operator]) -> Iterator[str]:
    """Yields, for each kind of odd size, the sizes to which the largest one has to be padded."""
    sizes: dict[str, tuple[int, int]] = {}
    for operator in odd:
        for one in _odd(case, operator):
            sizes.setdefault(one.what, (one.size, _multiple(case, operator) or 1))
    if any(is_attention_product(one, case.rank) for one in odd):
        yield "use scaled_dot_product_attention: the fused attention kernels take any length"
    for what, (size, multiple) in sizes.items():
        to = f"from {size} to {_up(size, multiple)}, or to {_up(size, BETTER)}, a multiple of {BETTER}"
        yield _PADDING.get(what, "pad the {what} {to}").format(what=what, to=to)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _suits(case: ProfileCase, operator: Operator) -> bool:
    return operator.bound == "compute" and _multiple(case, operator) is not None and not _odd(case, operator)


def _multiple(case: ProfileCase, operator: Operator) -> int | None:
    in_full = operator.dtype == "float32" and case.setting("precision") != "tf32"
    return None if in_full else MULTIPLES.get(operator.dtype)


def _odd(case: ProfileCase, operator: Operator) -> list[Odd]:
    """Returns the odd sizes: channels of a convolution, or row lengths of a product's matrices."""
    multiple = _multiple(case, operator)
    if multiple is None:
        return []
    shapes = _shapes(operator)
    if operator.name in CONVOLUTIONS:
        channels = [size for size in shapes[1][:2] if size > FEW_CHANNELS] if len(shapes) > 1 else []
        return sorted({Odd("channels", "", size) for size in channels if size % multiple})
    rows = _rows(shapes[PRODUCTS[operator.name] :][:2], multiple)
    found = {
        size: Odd(_what(case, operator, letter, size), letter, size)
        for letter, size in rows
        if size % multiple and size > 1
    }
    return [found[size] for size in sorted(found)]


def _shapes(operator: Operator) -> list[list[int]]:
    return [[int(size) for size in re.findall(r"\d+", shape)] for shape in re.findall(r"\[[\d, ]*\]", operator.shapes)]


def _rows(factors: Sequence[Sequence[int]], multiple: int) -> Iterable[tuple[str, int]]:
    """Returns the row lengths that are certainly used, as (letter, size).

    That of the result is certain. A factor may be transposed, which shapes do not show, so that its sizes count only if
    both are odd.
    """
    if len(factors) < 2 or any(len(factor) < 2 for factor in factors):
        return []
    named = [("M", factors[0][-2]), ("K", factors[0][-1])], [("K", factors[1][-2]), ("N", factors[1][-1])]
    odd = [one for sizes in named if all(size % multiple for _, size in sizes) for one in sizes]
    return [*odd, ("N", factors[1][-1])]


def _what(case: ProfileCase, operator: Operator, letter: str, size: int) -> str:
    """Names the dimension with this size, as far as the trace shows it."""
    if size in _lengths(case):
        return "sequence length"
    if is_attention_product(operator, case.rank):
        return "head size"
    if operator.name in ("aten::mm", "aten::addmm"):
        return "rows" if letter == "M" else "features"
    return {"M": "rows", "K": "inner size", "N": "columns"}[letter]


def _lengths(case: ProfileCase) -> set[int | None]:
    """Returns the sequence lengths over which attention is computed, fused or not."""
    fused = [_shapes(one) for one in case.rank.operators if "scaled_dot_product" in one.name]
    known = {shape[-2] for shapes in fused for shape in shapes[:2] if len(shape) == 4}
    return known | {size for one in case.rank.attention for size in (one.queries, one.keys)}
