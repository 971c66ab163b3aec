"""What would lower the peak: rules, each for one thing that fills the memory at the peak, and what they propose."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from gpubench import units
from gpubench.findings import Finding, Findings, Saving, Unanswered
from gpubench.memory.advice_activations import activations_kept, inputs, micro_batch, wide_activations
from gpubench.memory.advice_allocator import fragmentation, workspaces
from gpubench.memory.advice_case import Advice, Answers, Case
from gpubench.memory.advice_operators import attention_matrix, large_logits
from gpubench.memory.advice_state import foreach_temporaries, gradients, optimizer_state, parameters
from gpubench.memory.footprint import Footprint

Rule = Callable[[Case], Answers]

RULES: tuple[Rule, ...] = (
    activations_kept, micro_batch, wide_activations, large_logits, attention_matrix, foreach_temporaries,
    optimizer_state, gradients, parameters, inputs, fragmentation, workspaces,
)  # fmt: skip


def advise(footprint: Footprint, settings: Mapping[str, Any] | None) -> Findings:
    """What would lower the peak, that which frees most first; without a headline, which is the footprint's own.

    `settings` are the run's, by dot-key; None for somebody else's program, which gets words and no overrides. What a
    fix saves is left to `with_prediction`, but where it follows from the footprint. Two findings with one fix have it
    in the first of them.
    """
    case = Case(footprint, settings)
    answers = [answer for rule in RULES for answer in rule(case)]
    found = sorted((one for one in answers if isinstance(one, Advice)), key=lambda one: one.freed, reverse=True)
    return Findings(
        headline="",
        findings=list(_fixed_once(one.finding for one in found)),
        unanswered=[one for one in answers if isinstance(one, Unanswered)],
    )


def with_prediction(finding: Finding, before: Footprint, after: Footprint) -> Finding:
    """The finding with the saving that two predictions make of its fix: a fraction of what the device must have.

    It is negative where the fix takes more.
    """
    saved = 1 - after.most / before.most if before.most else 0.0
    sentence = f"predicted with the fix: {units.size(after.most)}; without: {units.size(before.most)}"
    return msgspec.structs.replace(finding, expected=Saving(saved), evidence=[*finding.evidence, sentence])


def _fixed_once(findings: Iterable[Finding]) -> Iterator[Finding]:
    fixes: list[dict[str, Any]] = []
    for finding in findings:
        yield msgspec.structs.replace(finding, fix={}) if finding.fix in fixes else finding
        fixes.append(finding.fix)
