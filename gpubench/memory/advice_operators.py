"""Rules about operators that keep more than their result needs: cross entropy, and attention written out."""

import re
from collections.abc import Sequence
from math import prod

from gpubench import units
from gpubench.findings import Finding, Unanswered
from gpubench.memory.advice_case import Advice, Answers, Case, lacking_operators, lacking_phases, threshold, told_of
from gpubench.memory.footprint import Holder

LOGITS = 0.15
"""Of the peak: chunks cost no more compute, but the loss has to be written anew."""
MATRIX = 0.1
"""Of the peak: to call a fused kernel costs nothing, and is faster, but below there is more to gain elsewhere."""
EXAMPLES = 3

_LOSS = re.compile(r"aten::_?(log_softmax|nll_loss|cross_entropy)")
_SHAPE = re.compile(r"\w+\[(?P<sizes>[\d, ]+)\]")


def logits(case: Case) -> list[Holder]:
    """What a cross entropy holds: its own results, and others over the same classes of as many rows or more."""
    found = case.holders("activations", "temporaries")
    table = _table(found)
    return [one for one in found if _LOSS.match(one.operator) or (table and _over(_shape(one), *table))]


def large_logits(case: Case) -> Answers:
    if missing := _lacking(case, LOGITS):
        yield Unanswered("logits", *missing)
    found = logits(case) if case.in_passes else []
    size = sum(one.size for one in found)
    if not found or case.share(size) < LOGITS:
        return
    table = _table(found)
    tokens = f"{table[0]:,} tokens x a vocabulary of {table[1]:,}: " if table else ""
    yield Advice(
        size,
        Finding(
            id="logits",
            title="the loss holds a row of the whole vocabulary for each token",
            severity=case.severity(size),
            evidence=[
                f"cross entropy and what goes into it hold {case.told(size)} at the peak {case.where}",
                f"{tokens}up to {units.size(max(one.size / one.count for one in found))} each time",
                *(told_of(one) for one in found[:EXAMPLES]),
            ],
            cause="logits, their logarithms and the gradients of both are each as large as tokens times vocabulary",
            advice="compute the loss in chunks of tokens, each with its own backward pass to the hidden states; or a "
            "fused linear cross entropy, which does so in one kernel",
            threshold=threshold(LOGITS, "the loss has to be written anew"),
        ),
    )


def attention_matrix(case: Case) -> Answers:
    if missing := _lacking(case, MATRIX):
        yield Unanswered("attention-matrix", *missing)
    elif _lacks_shapes(case, MATRIX):
        yield Unanswered("attention-matrix", "the shapes of tensors, which files do not tell", "")
    activations = case.holders("activations") if case.in_passes else []
    lengths = {_square(one) for one in activations if _is_softmax(one)}
    found = [one for one in activations if (length := _square(one)) and length in lengths]
    size, longest = sum(one.size for one in found), max(lengths, default=0)
    if not found or case.share(size) < MATRIX:
        return
    yield Advice(
        size,
        Finding(
            id="attention-matrix",
            title="attention writes out a weight for each pair of tokens",
            severity=case.severity(size),
            evidence=[
                f"matrices of up to {longest:,} x {longest:,} tokens hold {case.told(size)} at the peak {case.where}",
                *(told_of(one) for one in found[:EXAMPLES]),
            ],
            cause="attention is computed by separate operators, each of which keeps its matrix for the backward pass",
            advice="torch.nn.functional.scaled_dot_product_attention, which computes them again piece by piece; in "
            'transformers, attn_implementation="sdpa"',
            threshold=threshold(MATRIX, "less is to be gained below"),
        ),
    )


def _lacking(case: Case, share: float) -> tuple[str, str] | None:
    """What a rule would need to know of the activations; None if it lacks nothing, or they are too few to matter."""
    held = case.held("activations") + case.held("temporaries")
    if case.peak.phase == "unknown":
        return lacking_phases(case)
    named = any(one.operator for one in case.holders("activations", "temporaries"))
    return lacking_operators(case) if case.in_passes and case.share(held) >= share and not named else None


def _lacks_shapes(case: Case, share: float) -> bool:
    activations = case.holders("activations")
    return (
        case.in_passes
        and case.share(case.held("activations")) >= share
        and any(_is_softmax(one) for one in activations)
        and not any(one.shape for one in activations)
    )


def _is_softmax(holder: Holder) -> bool:
    return "softmax" in holder.operator and "log_softmax" not in holder.operator


def _table(holders: Sequence[Holder]) -> tuple[int, int] | None:
    """Rows and classes of a cross entropy over them; None of one over pixels, or where shapes are not known."""
    shapes = (_shape(one) for one in holders if _LOSS.match(one.operator))
    return next(((shape[0], shape[1]) for shape in shapes if len(shape) == 2), None)


def _over(shape: tuple[int, ...], rows: int, classes: int) -> bool:
    """Whether a shape is of that many classes, and of as many rows or more."""
    return len(shape) >= 2 and shape[-1] == classes and prod(shape) >= rows * classes


def _square(holder: Holder) -> int:
    """T of a shape [..., T, T] of at least three dimensions; 0 of any other. Two are a weight's as well."""
    shape = _shape(holder)
    return shape[-1] if len(shape) > 2 and shape[-1] == shape[-2] else 0


def _shape(holder: Holder) -> tuple[int, ...]:
    found = _SHAPE.fullmatch(holder.shape)
    return tuple(int(size) for size in found["sizes"].split(",")) if found else ()
