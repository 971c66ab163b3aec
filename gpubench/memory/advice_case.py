"""The input of the memory rules: a footprint, and the settings of its run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpubench import findings, units
from gpubench.findings import Finding, Severity, Unanswered
from gpubench.hardware import ACCELERATORS, Accelerator, find_accelerator
from gpubench.memory.footprint import Footprint, Holder, Peak, Source
from gpubench.memory.history import PLACES, Phase

PASSES = ("forward", "loss", "backward")
"""Phases that need activations."""

_PHASES: dict[Source, str] = {
    "snapshot": 'torch.cuda.memory._record_memory_history(stacks="python")',
    "trace": 'torch.profiler.record_function("forward"), and so for each phase',
}
_OPERATORS: dict[Source, str] = {"snapshot": 'torch.cuda.memory._record_memory_history(stacks="all")'}


class Advice(NamedTuple):
    freed: int
    """Bytes of the peak that the advice frees, at most."""
    finding: Finding


Answers = Iterator[Advice | Unanswered]


@dataclass(frozen=True)
class Case:
    footprint: Footprint
    settings: Mapping[str, Any] | None
    """By dot-key; None for other programs, whose settings are unknown."""

    @property
    def peak(self) -> Peak:
        return self.footprint.peak

    @property
    def in_passes(self) -> bool:
        return self.peak.phase in PASSES

    @property
    def accelerator(self) -> Accelerator | None:
        """The device in the hardware table, found by key or name; None if it is not in there."""
        name = self.footprint.device or ""
        return next((one for one in ACCELERATORS if one.key == name), None) or find_accelerator(name)

    @property
    def where(self) -> str:
        return place(self.peak.phase)

    def setting(self, key: str) -> Any:
        """Return a setting; None if it is unknown or the command has no such setting."""
        return None if self.settings is None else self.settings.get(key)

    def held(self, category: str) -> int:
        """Return the bytes of a category at the peak."""
        return self.peak.amounts.get(category, 0)

    def holders(self, *categories: str) -> list[Holder]:
        """Return the recorded holders of these categories at the peak, largest first."""
        return [one for one in self.footprint.holders if one.category in categories]

    def share(self, size: int) -> float:
        """Return a size as a fraction of the peak's total."""
        return size / self.peak.level.total if self.peak.level.total > 0 else 0.0

    def told(self, size: int) -> str:
        """Return a size with its share of the peak, as "3.07 GiB (12.7 %)"."""
        return f"{units.size(size)} ({units.percent(self.share(size))})"

    def severity(self, size: int) -> Severity:
        return findings.severity(self.share(size))

    def fix(self, **overrides: Any) -> dict[str, Any]:
        """Return `overrides` as a fix in dot-keys; see `findings.fix`."""
        return findings.fix(self.settings, **overrides)

    def sharding(self) -> dict[str, Any]:
        """Return the fix that shards parameters, gradients and optimizer state, if each of several ranks has all."""
        several = (self.setting("distributed.world_size") or 1) > 1
        return self.fix(distributed__strategy="fsdp2") if several else {}


def place(phase: Phase) -> str:
    return PLACES[phase].format("") or "in an unknown phase"


def lacking_phases(case: Case) -> tuple[str, str]:
    """Return (what is missing, what records it) if the phase of the peak is unknown."""
    return "the phase of the peak", _PHASES.get(case.footprint.source, "")


def lacking_operators(case: Case) -> tuple[str, str]:
    return "the operators that asked for memory", _OPERATORS.get(case.footprint.source, "")


def told_of(holder: Holder) -> str:
    """Describe a holder, as "aten::tanh float32[16, 1024, 3072] in transformer.h.0.mlp.act: 192 MiB"."""
    words = [holder.operator, holder.shape]
    words += [f"in {holder.module}"] if holder.module else []
    words += [f"at {holder.where}"] if holder.where else []
    name = " ".join(filter(None, words))
    pieces = f" in {holder.count:,} pieces" if holder.count > 1 else ""
    return f"{name or 'unnamed'}: {units.size(holder.size)}{pieces}"


def threshold(share: float, why: str) -> str:
    """Return the threshold of a rule, a fraction of the peak, with the reason for it."""
    return f"at least {units.percent(share)} of the peak, as {why}"
