"""Rules about activations at the peak of the memory, and the operators that hold them."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod

from gpubench import units
from gpubench.diagnosis.case import LEARNING, Answers, Estimated, FootprintCase, describe_holder, of_peak, severity
from gpubench.findings import Finding, Unanswered
from gpubench.hardware import AMPERE, capability
from gpubench.memory.footprint import OTHERS, Holder

LOGITS = 0.15
"""The threshold as a fraction of the peak. The loss in chunks needs no more compute, but has to be rewritten."""
MATRIX = 0.1
"""The threshold as a fraction of the peak. A fused kernel costs nothing and is faster, but below this there is more to
gain elsewhere."""
KEPT = 0.25
"""The threshold as a fraction of the peak. Keeping less costs time or accuracy, which a smaller saving is not worth."""
INPUTS = 0.1
"""The threshold as a fraction of the peak. A batch is small, unless several batches are held."""
OF_EVALUATION = 0.2
"""The threshold as a fraction of the peak. Evaluating without gradients costs nothing."""
EXAMPLES = 3
SEVERAL = 2  # pieces: layers have one each, and a classifier has a single one
FAMILIES = 2
EVIDENCE_MINIMUM = 0.05  # of the peak: the evidence leaves out smaller families of modules
WIDE = ("fp32", "tf32")

_REASON = of_peak(KEPT, "keeping less costs time or accuracy")

_LOSS = re.compile(r"aten::_?(log_softmax|nll_loss|cross_entropy)")
_SHAPE = re.compile(r"\w+\[(?P<sizes>\d{1,18}(, ?\d{1,18})*)\]")


def logits(case: FootprintCase) -> list[Holder]:
    """Returns what a cross entropy holds.

    These are its own results, and tensors over the same classes with at least as many rows.
    """
    found = case.holders("activations", "temporaries")
    table = _table(found)
    return [one for one in found if _LOSS.match(one.operator) or (table and _over(_shape(one), *table))]


def large_logits(case: FootprintCase) -> Answers:
    yield from _unanswered(case, "logits", LOGITS)
    found = logits(case) if case.in_passes else []
    size = sum(one.size for one in found)
    if not found or case.share(size) < LOGITS:
        return
    table = _table(found)
    tokens = f"{table[0]:,} tokens x a vocabulary of {table[1]:,}: " if table else ""
    yield case.estimated(
        Finding(
            id="logits",
            title="the loss holds the logits of the whole vocabulary for each token",
            severity=severity(case.share(size)),
            evidence=[
                f"cross entropy and its inputs hold {case.format_size(size)} {case.at_peak}",
                f"{tokens}up to {units.size(max(one.size / one.count for one in found))} each time",
                *(describe_holder(one) for one in found[:EXAMPLES]),
            ],
            cause="logits, their logarithms and the gradients of both each have the size tokens x vocabulary",
            advice="compute the loss in chunks of tokens, each with its own backward pass to the hidden states; or use "
            "a fused linear cross entropy, which does this in one kernel",
            threshold=of_peak(LOGITS, "the loss has to be rewritten"),
        ),
        freed=size,
    )


def attention_matrix(case: FootprintCase) -> Answers:
    if of_softmax := _softmax_without_shapes(case):
        yield of_softmax
        return
    unanswered = _unanswered(case, "attention-matrix", MATRIX)
    yield from unanswered
    if not unanswered and _lacks_shapes(case, MATRIX):
        yield Unanswered("attention-matrix", "the shapes of tensors, which files do not contain", "")
    activations = case.holders("activations") if case.in_passes else []
    lengths = {_square(one) for one in activations if _is_softmax(one)}
    found = [one for one in activations if (length := _square(one)) and length in lengths]
    size, longest = sum(one.size for one in found), max(lengths, default=0)
    if not found or case.share(size) < MATRIX:
        return
    yield case.estimated(
        Finding(
            id="attention-matrix",
            title="attention stores a weight for each pair of tokens",
            severity=severity(case.share(size)),
            evidence=[
                f"matrices of up to {longest:,} x {longest:,} tokens hold {case.format_size(size)} {case.at_peak}",
                *(describe_holder(one) for one in found[:EXAMPLES]),
            ],
            cause="attention is computed by separate operators, each of which keeps its matrix"
            + " for the backward pass" * case.trains,
            advice="use torch.nn.functional.scaled_dot_product_attention, which recomputes them block by block; in "
            'transformers, attn_implementation="sdpa"',
            threshold=of_peak(MATRIX, "there is more to gain elsewhere"),
        ),
        freed=size,
    )


def _softmax_without_shapes(case: FootprintCase) -> Estimated | None:
    """Finds what softmax holds in a file without shapes, which would show whether it is attention's."""
    if any(one.shape for one in case.footprint.holders):
        return None
    found = [one for one in case.holders("activations", "temporaries") if _is_softmax(one)] if case.in_passes else []
    size, pieces = sum(one.size for one in found), sum(one.count for one in found)
    if pieces < SEVERAL or case.share(size) < MATRIX:
        return None
    return case.estimated(
        Finding(
            id="attention-matrix",
            title="softmax keeps much memory, as attention in separate operators does",
            severity=severity(case.share(size)),
            evidence=[
                f"what softmax makes holds {case.format_size(size)} {case.at_peak}",
                *(describe_holder(one) for one in found[:EXAMPLES]),
            ],
            cause="attention in separate operators stores a weight for each pair of tokens, in several copies",
            advice="if it is attention's, use torch.nn.functional.scaled_dot_product_attention, which recomputes the "
            'weights block by block; in transformers, attn_implementation="sdpa"',
            threshold=of_peak(MATRIX, "there is more to gain elsewhere"),
        ),
        freed=size,
    )


def _unanswered(case: FootprintCase, rule: str, share: float) -> list[Unanswered]:
    """Returns what a rule lacks to judge the activations; nothing if they are too small to matter."""
    if case.peak.phase == "unknown":
        return [case.unknown_phase(rule)]
    held = case.held("activations") + case.held("temporaries")
    named = any("::" in one.operator for one in case.holders("activations", "temporaries"))
    return [case.unknown_operators(rule)] if case.in_passes and case.share(held) >= share and not named else []


def _lacks_shapes(case: FootprintCase, share: float) -> bool:
    """Tells whether attention seems to hold much, and no shape shows how much."""
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
    """Returns rows and classes of a cross entropy; None if it is over pixels or its shapes are unknown."""
    shapes = (_shape(one) for one in holders if _LOSS.match(one.operator))
    return next(((shape[0], shape[1]) for shape in shapes if len(shape) == 2), None)


def _over(shape: tuple[int, ...], rows: int, classes: int) -> bool:
    """Tells whether a shape has so many classes, and at least so many rows."""
    return len(shape) >= 2 and shape[-1] == classes and prod(shape) >= rows * classes


def _square(holder: Holder) -> int:
    """Returns T for a shape [..., T, T] of three or more dimensions, else 0: weights can be square with two."""
    shape = _shape(holder)
    return shape[-1] if len(shape) > 2 and shape[-1] == shape[-2] else 0


def _shape(holder: Holder) -> tuple[int, ...]:
    found = _SHAPE.fullmatch(holder.shape)
    return tuple(int(size) for size in found["sizes"].split(",")) if found else ()


def evaluation(case: FootprintCase) -> Answers:
    """Finds a peak in the evaluation, which needs nothing of what a backward pass needs."""
    size = case.held("activations") + case.held("temporaries")
    if case.peak.phase != "evaluation" or case.share(size) < OF_EVALUATION:
        return
    others = (one.level.allocated for one in case.footprint.phases if one.phase in LEARNING)
    training = max(others, default=0)
    yield case.estimated(
        Finding(
            id="evaluation-memory",
            title="the peak is in the evaluation",
            severity=severity(case.share(size)),
            evidence=[
                f"activations and temporaries hold {case.format_size(size)} {case.at_peak}",
                *([f"training needs up to {units.size(training)}"] if training else []),
            ],
            cause="an evaluation needs as much if it runs with gradients, which keeps every activation, or with larger "
            "batches than training",
            advice="evaluate under torch.no_grad() or torch.inference_mode(), and with smaller batches: its results do "
            "not depend on them",
            threshold=of_peak(OF_EVALUATION, "without gradients a forward pass holds few activations at a time"),
        ),
        freed=max(0, case.peak.level.allocated - training) if training else size,
    )


def activations_kept(case: FootprintCase) -> Answers:
    loss = [one for one in logits(case) if one.category == "activations"]
    kept = case.held("activations") - sum(one.size for one in loss)
    if case.peak.phase == "unknown":
        yield case.unknown_phase("activations-kept")
    if not case.in_passes or case.share(kept) < KEPT or case.setting("model.activation_checkpointing") is True:
        return
    yield case.estimated(
        Finding(
            id="activations-kept",
            title=f"activations are kept for {'the' if case.trains else 'a'} backward pass",
            severity=severity(case.share(kept)),
            evidence=[
                f"activations{' other than those of the loss' if loss else ''} hold {case.format_size(kept)} "
                f"{case.at_peak}",
                *_blocks(case),
                *(describe_holder(one) for one in _unlike(case.holders("activations"), loss)),
            ],
            cause="each operator keeps what its gradient needs until "
            + ("the backward pass reaches it" if case.trains else "a backward pass reaches it, which was not recorded"),
            advice=("" if case.trains else "in inference use torch.inference_mode(), which keeps none; in training ")
            + "use activation checkpointing (torch.utils.checkpoint): keep only each block's input, and recompute "
            "the rest in the backward pass; that adds one forward pass to a step that costs three, about a third more "
            "compute (Chen et al. 2016, arXiv:1604.06174). To save less, checkpoint every second block"
            + (
                " (model.activation_checkpointing=2), or parts by name (layers.*.mlp)"
                if case.setting("model.activation_checkpointing") is not None
                else ", or parts of each"
            ),
            place="model",
            fix=case.fix(model__activation_checkpointing=True),
            threshold=_REASON,
        ),
        freed=kept,
    )


def micro_batch(case: FootprintCase) -> Answers:
    held, batch = case.held("activations"), case.setting("training.batch_size")
    if case.peak.phase == "unknown":
        yield case.unknown_phase("micro-batch")
    if not case.in_passes or case.share(held) < KEPT or batch == 1:
        return
    size, passes = held + case.held("temporaries"), case.setting("training.grad_accumulation") or 1
    halves = isinstance(batch, int) and batch % 2 == 0
    yield case.estimated(
        Finding(
            id="micro-batch",
            title="all samples of a pass are in memory at once",
            severity=severity(case.share(size // 2)),
            evidence=[
                f"activations hold {case.format_size(held)} {case.at_peak}, and temporaries "
                f"{case.format_size(case.held('temporaries'))}: both grow with the batch",
                *([f"a batch has {units.counted(batch, 'sample')}"] if isinstance(batch, int) else []),
            ],
            cause=f"the tensors {'kept for the backward pass' if case.trains else 'that a pass keeps'} grow with the "
            "number of samples",
            advice=f"halve the batch and{' ' if case.trains else ', in training, '}double the passes: the optimizer "
            "step sees the same samples; smaller kernels may use the device less well, and batch normalisation sees "
            "fewer samples at once",
            place="loader",
            fix=case.fix(training__batch_size=batch // 2, training__grad_accumulation=2 * passes) if halves else {},
            threshold=_REASON,
        ),
        freed=size // 2,
    )


def wide_activations(case: FootprintCase) -> Answers:
    held, precision = case.held("activations"), case.setting("precision")
    if not case.in_passes or case.share(held) < KEPT or precision not in WIDE:
        return
    narrow = "bf16" if _has_bfloat16(case) else "amp"
    yield case.estimated(
        Finding(
            id="wide-activations",
            title="activations are kept in 4-byte types",
            severity=severity(case.share(held // 2)),
            evidence=[
                f"precision is {precision}, and activations hold {case.format_size(held)} {case.at_peak}",
            ],
            cause="each operator's result has the type in which it was computed",
            advice="use autocast, which computes matrix products and convolutions in 2-byte types and halves what they "
            "keep; sums and normalisations stay in float32",
            place="model",
            fix=case.fix(precision=narrow),
            threshold=_REASON,
        ),
        freed=held // 2,
    )


def inputs(case: FootprintCase) -> Answers:
    size = case.held("inputs")
    if case.share(size) < INPUTS or case.footprint.device == "cpu":  # where the data set is, too
        return
    batches = case.holders("inputs")
    yield case.estimated(
        Finding(
            id="inputs",
            title="input batches take much memory on the device",
            severity=severity(case.share(size // 2)),
            evidence=[
                f"inputs hold {case.format_size(size)} {case.at_peak}",
                *(describe_holder(one) for one in batches[:EXAMPLES]),
                *(
                    ["data.source=synthetic keeps up to 4 batches on the device"]
                    if case.setting("data.source") == "synthetic"
                    else []
                ),
            ],
            cause="batches are on the device before or after they are needed, or in wider types than necessary",
            advice="copy at most one batch ahead, free the previous one first, and copy images as uint8, to be "
            "converted on the device",
            place="loader",
            threshold=of_peak(INPUTS, "a batch is small compared with activations"),
        ),
        freed=size // 2,
    )


def _blocks(case: FootprintCase) -> list[str]:
    """Describes what the members of module lists, such as transformer.h, hold; the largest list comes first."""
    blocks: Counter[str] = Counter()
    for one in case.footprint.modules:
        if one.path not in ("", OTHERS):
            blocks[_block(one.path)] += one.amounts.get("activations", 0)
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for path, size in blocks.items():
        family, _, number = path.rpartition(".")
        families[family if number.isdigit() else path][path] = size
    largest = sorted(families.items(), key=lambda family: family[1].total(), reverse=True)
    shown = [family for family in largest[:FAMILIES] if case.share(family[1].total()) >= EVIDENCE_MINIMUM]
    return [_family(case, name, members) for name, members in shown]


def _unlike(holders: Sequence[Holder], loss: Sequence[Holder]) -> list[Holder]:
    """Returns the largest holder of each operator, shape and place outside the loss, because blocks repeat."""
    first: dict[tuple[str, str, str], Holder] = {}
    for one in (holder for holder in holders if holder not in loss):
        first.setdefault((one.operator, one.shape, one.where), one)
    return list(first.values())[:EXAMPLES]


def _family(case: FootprintCase, name: str, members: Counter[str]) -> str:
    if len(members) == 1:
        return f"{next(iter(members))} holds {case.format_size(members.total())}"
    ((most, size),) = members.most_common(1)
    of = f" of {name}" if name else ""
    whole = case.format_size(members.total())
    return f"the {len(members)} members{of} hold {whole}, {most} most with {units.size(size)}"


def _block(path: str) -> str:
    """Returns "transformer.h.0" for "transformer.h.0.mlp.act", and a path without a number unchanged."""
    parts = path.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: numbered + 1])


def _has_bfloat16(case: FootprintCase) -> bool:
    """Tells whether the device computes in bfloat16, which is assumed of an unknown one."""
    known = case.accelerator
    version = capability(known.key) if known else None
    return version is None or version >= AMPERE
