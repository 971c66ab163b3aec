"""Rules about what the forward pass keeps for the backward pass, and what goes with the batch."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from gpubench import units
from gpubench.findings import Finding, Unanswered
from gpubench.hardware import AMPERE
from gpubench.memory.advice_case import Advice, Answers, Case, lacking_phases, threshold, told_of
from gpubench.memory.advice_operators import logits
from gpubench.memory.analysis import OTHERS
from gpubench.memory.footprint import Holder
from gpubench.memory.workspaces import capability

KEPT = 0.25
"""Of the peak: to keep less costs time or accuracy, which a smaller part is not worth."""
_REASON = threshold(KEPT, "keeping less costs something elsewhere")

INPUTS = 0.1
"""Of the peak: a batch is small beside what a model keeps of it, unless several are held."""
FAMILIES = 2
TOLD = 0.05  # of the peak: smaller ones are left to the table
EXAMPLES = 3
WIDE = ("fp32", "tf32")


def activations_kept(case: Case) -> Answers:
    loss = [one for one in logits(case) if one.category == "activations"]
    kept = case.held("activations") - sum(one.size for one in loss)
    if case.peak.phase == "unknown":
        yield Unanswered("activations-kept", *lacking_phases(case))
    if not case.in_passes or case.share(kept) < KEPT or case.setting("model.activation_checkpointing") is True:
        return
    yield Advice(
        kept,
        Finding(
            id="activations-kept",
            title="activations wait in memory for the backward pass",
            severity=case.severity(kept),
            evidence=[
                f"activations{' other than those of the loss' if loss else ''} hold {case.told(kept)} at the peak "
                f"{case.where}",
                *_blocks(case),
                *(told_of(one) for one in _unlike(one for one in case.holders("activations") if one not in loss)),
            ],
            cause="each operator keeps what its gradient needs until the backward pass has come to it",
            advice="activation checkpointing (torch.utils.checkpoint): keep each block's input alone, and compute the "
            "rest again in the backward pass; that is one more forward pass in a step that costs three, about a third "
            "more compute (Chen et al. 2016, arXiv:1604.06174). Where less has to be saved, checkpoint every second "
            "block (model.activation_checkpointing=2), or parts by name (layers.*.mlp)",
            fix=case.fix(model__activation_checkpointing=True),
            threshold=_REASON,
        ),
    )


def micro_batch(case: Case) -> Answers:
    held, batch = case.held("activations"), case.setting("training.batch_size")
    if case.peak.phase == "unknown":
        yield Unanswered("micro-batch", *lacking_phases(case))
    if not case.in_passes or case.share(held) < KEPT or batch == 1:
        return
    size, passes = held + case.held("temporaries"), case.setting("training.grad_accumulation") or 1
    halves = isinstance(batch, int) and batch % 2 == 0
    yield Advice(
        size // 2,
        Finding(
            id="micro-batch",
            title="all samples of a pass are in memory at once",
            severity=case.severity(size // 2),
            evidence=[
                f"activations hold {case.told(held)} at the peak {case.where}, and temporaries "
                f"{case.told(case.held('temporaries'))}: both grow with the batch",
                *([f"a batch has {units.counted(batch, 'sample')}"] if isinstance(batch, int) else []),
            ],
            cause="what is kept for the backward pass is kept for each sample of the batch",
            advice="half the batch in twice as many passes: the optimizer step sees the same samples; smaller kernels "
            "may use the device less well, and batch normalisation sees fewer samples at once",
            fix=case.fix(training__batch_size=batch // 2, training__grad_accumulation=2 * passes) if halves else {},
            threshold=_REASON,
        ),
    )


def wide_activations(case: Case) -> Answers:
    held, precision = case.held("activations"), case.setting("precision")
    if not case.in_passes or case.share(held) < KEPT or precision not in WIDE:
        return
    narrow = "bf16" if _has_bfloat16(case) else "amp"
    yield Advice(
        held // 2,
        Finding(
            id="wide-activations",
            title="activations are kept in four bytes",
            severity=case.severity(held // 2),
            evidence=[
                f"precision is {precision}, and activations hold {case.told(held)} at the peak {case.where}",
            ],
            cause="each operator's result has the type that it was computed in",
            advice="autocast computes matrix products and convolutions in two bytes, and what they keep takes half; "
            "sums and normalisations stay in float32",
            fix=case.fix(precision=narrow),
            threshold=_REASON,
        ),
    )


def inputs(case: Case) -> Answers:
    size = case.held("inputs")
    if case.share(size) < INPUTS:
        return
    batches = case.holders("inputs")
    yield Advice(
        size // 2,
        Finding(
            id="inputs",
            title="batches take up memory on the device",
            severity=case.severity(size // 2),
            evidence=[
                f"inputs hold {case.told(size)} at the peak {case.where}",
                *(told_of(one) for one in batches[:EXAMPLES]),
                *(
                    ["data.source=synthetic keeps up to 4 batches there"]
                    if case.setting("data.source") == "synthetic"
                    else []
                ),
            ],
            cause="batches are held there before they are needed, after they were, or in wider types than they need",
            advice="copy no more than one batch ahead, drop the last one before, and copy images as uint8, to be "
            "converted on the device",
            threshold=threshold(INPUTS, "a batch is small beside what a model keeps of it"),
        ),
    )


def _blocks(case: Case) -> list[str]:
    """What the members of a model's lists of modules hold, as those of transformer.h; the largest first."""
    blocks: Counter[str] = Counter()
    for one in case.footprint.modules:
        if one.path not in ("", OTHERS):
            blocks[_block(one.path)] += one.amounts.get("activations", 0)
    families: dict[str, Counter[str]] = defaultdict(Counter)
    for path, size in blocks.items():
        family, _, number = path.rpartition(".")
        families[family if number.isdigit() else path][path] = size
    largest = sorted(families.items(), key=lambda family: family[1].total(), reverse=True)
    told = [family for family in largest[:FAMILIES] if case.share(family[1].total()) >= TOLD]
    return [_family(case, name, members) for name, members in told]


def _unlike(holders: Iterable[Holder]) -> list[Holder]:
    """The largest of each operator, shape and place: a model's blocks repeat one another."""
    first: dict[tuple[str, str, str], Holder] = {}
    for one in holders:
        first.setdefault((one.operator, one.shape, one.where), one)
    return list(first.values())[:EXAMPLES]


def _family(case: Case, name: str, members: Counter[str]) -> str:
    if len(members) == 1:
        return f"{next(iter(members))} holds {case.told(members.total())}"
    ((most, size),) = members.most_common(1)
    of = f" of {name}" if name else ""
    return f"the {len(members)} members{of} hold {case.told(members.total())}, {most} most with {units.size(size)}"


def _block(path: str) -> str:
    """ "transformer.h.0" of "transformer.h.0.mlp.act"; the path itself where it has no number."""
    parts = path.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: numbered + 1])


def _has_bfloat16(case: Case) -> bool:
    """Of a device that is not known it is taken for granted."""
    known = case.accelerator
    version = capability(known.key) if known else None
    return version is None or version >= AMPERE
