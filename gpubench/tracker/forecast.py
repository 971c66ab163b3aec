"""What predictions are made for: a footprint, what advice would save, the largest batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gpubench.channel import Activity
from gpubench.configuration import apply_overrides
from gpubench.dotkeys import flatten
from gpubench.errors import GpubenchError
from gpubench.findings import Finding, Findings
from gpubench.memory.advice import advise, with_prediction
from gpubench.memory.batch_sizes import MOST, BatchSizes, fit, largest, overrides, search
from gpubench.memory.footprint import Correction, Footprint
from gpubench.memory.lifetimes import classify
from gpubench.memory.predicting import Target, predicted
from gpubench.settings import MemorySettings
from gpubench.tracker.as_cuda import RULES
from gpubench.tracker.prediction import predict, samples

LEAST = 0.005
"""Of the memory: a fix that is predicted to save less is not proposed."""
SETTLED = 3
"""Steps until the allocator has what it needs: in the second, blocks of the first are still cut up anew."""


@dataclass(frozen=True)
class Forecast:
    settings: MemorySettings
    target: Target
    activity: Activity

    def footprint(self) -> Footprint:
        """The table, with the corrections in it and what each adds, where that was asked for."""
        whole, applied = self._run(self.settings.memory.steps)
        corrections = [Correction(rule.name, rule.reason, None) for rule in RULES if rule.name in applied]
        if self.settings.memory.explain:
            corrections = [msgspec.structs.replace(one, size=self._adds(one.name, whole)) for one in corrections]
        return msgspec.structs.replace(whole, corrections=[*corrections, *whole.corrections])

    def advice(self, found: Footprint) -> Findings:
        """For `found`, measured or predicted; what a fix saves is the difference of two predictions."""
        advised = advise(found, flatten(self.settings.model_dump(mode="json")))
        if not any(finding.fix for finding in advised.findings):
            return advised
        predicted_already = found.source == "predicted" and self.settings.memory.steps >= SETTLED
        before = found if predicted_already else self._run(SETTLED)[0]
        findings = [self._predicted(finding, before) for finding in advised.findings]
        return msgspec.structs.replace(advised, findings=[finding for finding in findings if finding])

    def batch_sizes(self) -> BatchSizes:
        """Which batches fit into the target, what is to be spare left free."""
        memory = self.settings.memory
        limit = int(self.target.capacity * (1 - memory.spare))

        def total(batch_size: int) -> int:
            self.activity.doing = f"predicting a batch of {batch_size}"
            return self.with_batch_size(batch_size)._run(SETTLED)[0].most

        points = search(limit, total, samples(self.settings) or MOST)
        return BatchSizes(
            capacity=self.target.capacity,
            spare=memory.spare,
            limit=limit,
            points=points,
            line=fit(points),
            largest=largest(points, limit),
        )

    def with_batch_size(self, batch_size: int) -> "Forecast":
        return self.with_settings(overrides(batch_size, flatten(self.settings.model_dump(mode="json"))))

    def with_settings(self, changes: Mapping[str, Any]) -> "Forecast":
        return replace(self, settings=apply_overrides(self.settings, dict(changes)))

    def _run(self, steps: int, without: Sequence[str] = ()) -> tuple[Footprint, Mapping[str, int]]:
        found = predict(self.settings, self.target, self.activity, steps, without)
        classify(found.history)
        expandable = self.settings.performance.expandable_segments
        notes = ["torch.compile is left out: it fuses operators, and so keeps less"]
        notes = notes if self.settings.performance.compile else []
        return predicted(found.history, self.target, expandable=expandable, notes=notes), found.applied

    def _adds(self, rule: str, whole: Footprint) -> int:
        self.activity.doing = f"predicting without {rule}"
        without, _ = self._run(self.settings.memory.steps, (rule,))
        return whole.peak.level.allocated - without.peak.level.allocated

    def _predicted(self, finding: Finding, before: Footprint) -> Finding | None:
        """With what its fix saves; None where that is next to nothing."""
        if not finding.fix:
            return finding
        try:
            after, _ = self.with_settings(finding.fix)._run(SETTLED)
        except GpubenchError as error:  # a model without blocks has none to checkpoint
            return msgspec.structs.replace(finding, fix={}, evidence=[*finding.evidence, f"not here: {error.message}"])
        return with_prediction(finding, before, after) if after.most < before.most * (1 - LEAST) else None
