"""Calls of nn.Modules, as traces show them: annotated by their path, or by the profiler's Python stacks."""

import re
from dataclasses import dataclass
from typing import Self

import numpy as np

from gpubench.trace.columns import MISSING, HostKind, Ids, Mask, Trace

_ANNOTATION = re.compile(r"module: (?P<name>\S*) \((?P<kind>[^()]*)\)$")
_FRAME = re.compile(r"nn\.Module: (?P<name>(?P<kind>.+?)(_\d+)?)$")


@dataclass(frozen=True)
class ModuleCalls:
    names: list[str]
    """Of modules: qualified paths as "layer1.0.conv1" if they were annotated, else the profiler's, as "Conv2d_3"."""
    kinds: list[str]
    """Their classes."""
    qualified: bool
    of: Ids
    """Beside `Trace.host`: the module that the slice is a call of, -1 for most."""

    @property
    def mask(self) -> Mask:
        return self.of >= 0

    @classmethod
    def of_trace(cls, trace: Trace) -> Self:
        """Annotations, "module: <path> (<class>)", go before the frames that with_stack records."""
        annotated = cls._matching(trace, _ANNOTATION, HostKind.ANNOTATION)
        return annotated if annotated.names else cls._matching(trace, _FRAME, HostKind.PYTHON)

    @classmethod
    def _matching(cls, trace: Trace, pattern: re.Pattern[str], kind: HostKind) -> Self:
        candidates = np.unique(trace.host.name[trace.host.kind == kind]).tolist()
        matches = [(name, match) for name in candidates if (match := pattern.match(trace.names[name]))]
        modules: dict[str, str] = {match["name"]: match["kind"] for _, match in matches}
        numbers = {name: number for number, name in enumerate(modules)}
        by_name = np.full(len(trace.names), MISSING, np.int32)
        for name, match in matches:
            by_name[name] = numbers[match["name"]]
        of = np.where(trace.host.kind == kind, by_name[trace.host.name], np.int32(MISSING))
        return cls(list(modules), list(modules.values()), pattern is _ANNOTATION, of)
