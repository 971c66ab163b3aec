"""Rules about shapes that the hardware does not take at full speed."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from gpubench import units
from gpubench.diagnosis import measures, phrases
from gpubench.diagnosis.arithmetic import better_precision
from gpubench.diagnosis.case import Case
from gpubench.diagnosis.measures import WORTH, Answers
from gpubench.findings import MARKED, Finding, Unanswered, severity
from gpubench.trace.attention import is_attention_product
from gpubench.trace.profile import Operator

MULTIPLES = {"float16": 8, "bfloat16": 8, "float32": 4}
"""Elements in 16 bytes, to which rows must be aligned for the tensor cores' fast kernels (NVIDIA, Matrix
Multiplication Background User's Guide), by type; fp32 counts where it is read as TF32. On AMD's GPUs 16 bytes is the
widest load of a thread (CDNA 3 ISA, global_load_dwordx4); AMD publishes no rule for the shapes of products."""
BETTER = 64  # elements, with which whole tiles of the fast kernels are filled: the same guide

PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1, "aten::matmul": 0}
"""By operator, which input is the left matrix; the right one follows it."""

CONVOLUTIONS = frozenset({"aten::convolution", "aten::_convolution", "aten::cudnn_convolution", "aten::conv2d"})
TOLD = 0.02  # of the time in such products: what takes less is left out of the evidence
FEW_CHANNELS = 4  # of an image, or of a depthwise filter: nothing to be padded by hand


class Odd(NamedTuple):
    """A size that is no multiple of what the type asks for."""

    what: str
    """Of what it is the size, as "features"."""
    letter: str
    """Its place in [M, K] x [K, N]; empty for a convolution."""
    size: int

    def __str__(self) -> str:
        return f"{self.what} {self.letter} = {self.size}" if self.letter else f"{self.what} {self.size}"


def is_product(name: str) -> bool:
    return name in PRODUCTS or "convolution" in name or name in CONVOLUTIONS


def odd_shapes(case: Case) -> Answers:
    """Products whose rows do not begin at multiples of 16 bytes, whether arithmetic bounds them or memory."""
    rank = case.rank
    if rank.device is None or (better_precision(case) is None and not phrases.on_amd(case)):  # no such units are known
        return
    products = [one for one in rank.operators if one.name in PRODUCTS.keys() | CONVOLUTIONS and one.device > 0]
    needs = measures.option(case, "shapes")
    if products and needs:
        yield Unanswered("odd-shapes", "shapes of the matrix products", needs)
    odd = [one for one in products if _odd(case, one)]
    spent = sum(one.device for one in odd)
    cost = measures.share(case, spent)
    saving = _saving(case, products, odd)
    if cost < MARKED or (saving is not None and saving < WORTH):
        return
    told = [one for one in odd if one.device >= TOLD * spent]
    yield Finding(
        id="odd-shapes",
        title=f"matrix products have shapes that {phrases.matrix_units(case)} do not take at full speed",
        severity=severity(saving) if saving is not None else "medium" if cost >= 2 * MARKED else "low",
        evidence=[_said(case, one) for one in told[:3]],
        cause=_cause(case),
        advice="; ".join(_advice(case, told)),
        expected=None if saving is None else measures.at_most(saving),
        threshold=f"from {units.percent(MARKED)} of the step in such products; padding them changes the model or its "
        "batches. Those that arithmetic bounds can become as fast as the best of the others is, or as the device's "
        "peak where all are odd; those that memory bounds, as its bandwidth allows",
    )


def _saving(case: Case, products: Sequence[Operator], odd: Sequence[Operator]) -> float | None:
    """What padding saves at most, as a fraction of the step; None where a ceiling is not known."""
    reached = max((one.of_ceiling or 0.0 for one in products if _suits(case, one)), default=0.0) or 1.0
    gains = 0.0
    for one in odd:
        if one.of_ceiling is None:
            return None
        gains += one.device * max(0.0, 1 - one.of_ceiling / (1.0 if one.bound == "memory" else reached))
    return measures.share(case, round(gains))


def _said(case: Case, one: Operator) -> str:
    odd = _odd(case, one)
    return (
        f"{one.name} {one.shapes} ({one.dtype}): {phrases.times_a_step(case, one.calls)}, "
        f"{phrases.a_step(case, one.device)}; {' and '.join(map(str, odd))} "
        f"{'is' if len(odd) == 1 else 'are'} no multiple of {_multiple(case, one)}"
    )


def _cause(case: Case) -> str:
    if phrases.on_amd(case):
        return (
            "rows begin at addresses from which a thread cannot load 16 bytes at once; AMD publishes no rule for such "
            "shapes, and what they cost here is not known beyond the share"
        )
    return "their rows do not begin at multiples of 16 bytes, as the fast kernels need"


def _advice(case: Case, odd: Sequence[Operator]) -> Iterator[str]:
    """For each kind of size that is odd, to what the largest one has to be padded."""
    sizes: dict[str, tuple[int, int]] = {}
    for operator in odd:
        for one in _odd(case, operator):
            sizes.setdefault(one.what, (one.size, _multiple(case, operator) or 1))
    if any(is_attention_product(one, case.rank) for one in odd):
        yield "the fused kernels of attention take any length (scaled_dot_product_attention)"
    for what, (size, multiple) in sizes.items():
        to = f"from {size} to {_up(size, multiple)}, or to {_up(size, BETTER)}, a multiple of {BETTER}"
        yield _PADDING.get(what, "pad the {what} {to}").format(what=what, to=to)


_PADDING = {
    "sequence length": "pad the sequence {to}, with the padding masked",
    "features": "pad the layer's features (vocabulary, classes or hidden size) {to}",
    "head size": "choose another head size: {to}",
    "channels": "pad the channels {to}",
}


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _suits(case: Case, operator: Operator) -> bool:
    return operator.bound == "compute" and _multiple(case, operator) is not None and not _odd(case, operator)


def _multiple(case: Case, operator: Operator) -> int | None:
    in_full = operator.dtype == "float32" and case.setting("precision") != "tf32"
    return None if in_full else MULTIPLES.get(operator.dtype)


def _odd(case: Case, operator: Operator) -> list[Odd]:
    """Sizes that are no multiples of what the type asks: channels of a convolution, or rows of a product's matrices."""
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
    """Lengths of rows that are certain: the result's. A factor may be transposed, which shapes do not tell: then it is
    the other size that counts, and so both have to be odd."""
    if len(factors) < 2 or any(len(factor) < 2 for factor in factors):
        return []
    named = [("M", factors[0][-2]), ("K", factors[0][-1])], [("K", factors[1][-2]), ("N", factors[1][-1])]
    odd = [one for sizes in named if all(size % multiple for _, size in sizes) for one in sizes]
    return [*odd, ("N", factors[1][-1])]


def _what(case: Case, operator: Operator, letter: str, size: int) -> str:
    """Of what an operator's size is the size, as far as the trace tells."""
    if size in _lengths(case):
        return "sequence length"
    if is_attention_product(operator, case.rank):
        return "head size"
    if operator.name in ("aten::mm", "aten::addmm"):
        return "rows" if letter == "M" else "features"
    return {"M": "rows", "K": "inner size", "N": "columns"}[letter]


def _lengths(case: Case) -> set[int | None]:
    """Of sequences: what attention is computed over, fused or not."""
    fused = [_shapes(one) for one in case.rank.operators if "scaled_dot_product" in one.name]
    known = {shape[-2] for shapes in fused for shape in shapes[:2] if len(shape) == 4}
    return known | {size for one in case.rank.attention for size in (one.queries, one.keys)}
