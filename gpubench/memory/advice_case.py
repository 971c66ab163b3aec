"""What advice is given on: a footprint, and the settings of the run that it is of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gpubench import findings, units
from gpubench.findings import Finding, Severity, Unanswered
from gpubench.hardware import ACCELERATORS, Accelerator, find_accelerator
from gpubench.memory.footprint import Footprint, Holder, Peak, Source
from gpubench.memory.history import PLACES, Phase

PASSES = ("forward", "loss", "backward")
"""In which activations are needed."""

_PHASES: dict[Source, str] = {
    "snapshot": 'torch.cuda.memory._record_memory_history(stacks="python")',
    "trace": 'torch.profiler.record_function("forward"), and so for each phase',
}
_OPERATORS: dict[Source, str] = {"snapshot": 'torch.cuda.memory._record_memory_history(stacks="all")'}


class Advice(NamedTuple):
    freed: int
    """Bytes of the peak that following it gives back, at the most."""
    finding: Finding


Answers = Iterator[Advice | Unanswered]


@dataclass(frozen=True)
class Case:
    footprint: Footprint
    settings: Mapping[str, Any] | None
    """By dot-key; None for somebody else's program, of which no setting is known."""

    @property
    def peak(self) -> Peak:
        return self.footprint.peak

    @property
    def in_passes(self) -> bool:
        return self.peak.phase in PASSES

    @property
    def accelerator(self) -> Accelerator | None:
        """The device, if it is in the hardware table, by either of its names."""
        name = self.footprint.device or ""
        return next((one for one in ACCELERATORS if one.key == name), None) or find_accelerator(name)

    @property
    def where(self) -> str:
        return place(self.peak.phase)

    def setting(self, key: str) -> Any:
        """None where it is not known, or the command has no such setting."""
        return None if self.settings is None else self.settings.get(key)

    def held(self, category: str) -> int:
        """Bytes at the peak."""
        return self.peak.amounts.get(category, 0)

    def holders(self, *categories: str) -> list[Holder]:
        """Those at the peak that are told of, the largest first."""
        return [one for one in self.footprint.holders if one.category in categories]

    def share(self, size: int) -> float:
        """Of the peak's total."""
        return size / self.peak.level.total if self.peak.level.total > 0 else 0.0

    def told(self, size: int) -> str:
        """ "3.07 GiB (12.7 %)"."""
        return f"{units.size(size)} ({units.percent(self.share(size))})"

    def severity(self, size: int) -> Severity:
        return findings.severity(self.share(size))

    def fix(self, **overrides: Any) -> dict[str, Any]:
        """As `findings.fix` has it."""
        return findings.fix(self.settings, **overrides)

    def sharding(self) -> dict[str, Any]:
        """What spreads parameters, gradients and optimizer state over the ranks, where each has all of them."""
        several = (self.setting("distributed.world_size") or 1) > 1
        return self.fix(distributed__strategy="fsdp2") if several else {}


def place(phase: Phase) -> str:
    return PLACES[phase].format("") or "in a phase that nothing tells"


def lacking_phases(case: Case) -> tuple[str, str]:
    """What an answer is missing where nothing tells the phase of the peak, and what would bring it."""
    return "the phase of the peak", _PHASES.get(case.footprint.source, "")


def lacking_operators(case: Case) -> tuple[str, str]:
    return "the operators that asked for memory", _OPERATORS.get(case.footprint.source, "")


def told_of(holder: Holder) -> str:
    """ "aten::tanh float32[16, 1024, 3072] in transformer.h.0.mlp.act: 192 MiB"."""
    words = [holder.operator, holder.shape]
    words += [f"in {holder.module}"] if holder.module else []
    words += [f"at {holder.where}"] if holder.where else []
    name = " ".join(filter(None, words))
    pieces = f" in {holder.count:,} pieces" if holder.count > 1 else ""
    return f"{name or 'unnamed'}: {units.size(holder.size)}{pieces}"


def threshold(share: float, why: str) -> str:
    """From which part of the peak on a rule speaks, and why from there."""
    return f"from {units.percent(share)} of the peak on, as {why}"
