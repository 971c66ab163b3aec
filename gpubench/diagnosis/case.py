"""The input of a diagnostic rule, and helpers that name the fix it proposes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpubench import findings
from gpubench.metrics import Metric
from gpubench.trace.profile import Profile, Rank


@dataclass(frozen=True)
class Case:
    profile: Profile
    settings: Mapping[str, Any] | None = None
    """The settings of the run that was profiled, by dot-key; None for a trace from elsewhere."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """The metrics of the clean run: only these are quoted as times."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The run's environment.json, by dot-key."""
    overhead: float | None = None
    """Time of a recorded step divided by that of a clean one, less 1; None if no clean step does the same work."""

    @property
    def rank(self) -> Rank:
        """The lowest rank, for rules that look at one rank."""
        return self.profile.ranks[0]

    def fix(self, **overrides: Any) -> dict[str, Any]:
        """Return `overrides` as a fix in dot-keys; see `findings.fix`."""
        return findings.fix(self.settings, **overrides)

    def setting(self, key: str) -> Any:
        """Return a setting; None if it is unknown or the command has no such setting."""
        return None if self.settings is None else self.settings.get(key)


def compiling(case: Case) -> dict[str, Any]:
    """Return the next compile setting to try. CUDA graphs do not work with gradient accumulation."""
    graphs = case.rank.device is not None and (case.setting("training.grad_accumulation") or 1) == 1
    if case.setting("performance.compile") is False:
        if graphs:
            return case.fix(performance__compile=True, performance__compile_mode="reduce-overhead")
        return case.fix(performance__compile=True)
    if graphs and case.setting("performance.compile_mode") == "default":
        return case.fix(performance__compile_mode="reduce-overhead")
    return {}


def larger_batch(case: Case, factor: int) -> dict[str, Any]:
    """Return the fix for a larger batch; a pipeline's micro-batch is at most the number of samples."""
    if batch := case.setting("training.batch_size"):
        return case.fix(training__batch_size=factor * batch)
    micro, samples = case.setting("work.micro_batch"), case.setting("work.samples")
    if micro and samples and factor * micro <= samples:
        return case.fix(work__micro_batch=factor * micro)
    return {}
