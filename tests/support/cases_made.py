"""Cases with nothing wrong, to make one thing wrong in: a window of ten steps, each of 100 ms."""

from collections.abc import Mapping
from typing import Any

from gpubench.diagnosis.case import ProfileCase
from gpubench.diagnosis.rules import diagnose
from gpubench.findings import Finding
from gpubench.kinds.pipeline.settings import CompletedPipeSettings, PipeSettings
from gpubench.metrics import DEFINITIONS, Metric
from gpubench.settings.keys import flatten
from gpubench.settings.loading import validate
from gpubench.settings.schema import RunSettings, TrainSettings
from gpubench.trace.profile import (
    CAUSES,
    HOST_PARTS,
    Copy,
    CopyKind,
    Kernel,
    Launches,
    Operator,
    Profile,
    Python,
    PythonStretch,
    RankProfile,
    StepPhase,
    Straggler,
    Synchronisation,
    WallBreakdown,
)

STEPS = 10
WALL = 1_000_000_000
PERCENT = WALL // 100
"""Nanoseconds: a hundredth of the window."""

H100 = "NVIDIA H100 80GB HBM3"
V100 = "Tesla V100-SXM2-16GB"


COMPLETED_PIPELINE: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "verify": True,
    "sampling.steps": 4,
    "sampling.guidance_scale": 7.5,
    "work.samples": 8,
    "performance.cpu_threads": 1,
    "performance.deterministic": True,
    "distributed.backend": "gloo",
}


def completed_pipeline(given: Mapping[str, Any]) -> CompletedPipeSettings:
    """Settings of a pipeline by dot-key, and small values for those that the model and the device decide."""
    return validate(CompletedPipeSettings, COMPLETED_PIPELINE | dict(given), {})


def gpu(**parts: Any) -> RankProfile:
    """A rank whose GPU computes whatever is left by `idle` (by cause), `exposed_communication` and `exposed_copies`."""
    given = dict.fromkeys(CAUSES, 0) | parts.pop("idle", {})
    exposed, copies = parts.pop("exposed_communication", 0), parts.pop("exposed_copies", 0)
    communication, idle = parts.pop("communication", exposed), sum(given.values())
    device = WallBreakdown(
        wall=WALL,
        compute=WALL - idle - exposed - copies,
        exposed_communication=exposed,
        exposed_copies=copies,
        idle=idle,
        communication=communication,
        copies=copies,
        hidden_communication=communication - exposed,
    )
    return rank(**{"device_name": H100, "device": device, "idle": given, "host_only": False} | parts)


def cpu(**parts: Any) -> RankProfile:
    """A rank whose main thread is in operators whenever it is not in a part of `host`."""
    host = dict.fromkeys(HOST_PARTS, 0) | parts.pop("host", {})
    host["operators"] = WALL - sum(host.values())
    return rank(**{"host": host} | parts)


def rank(**parts: Any) -> RankProfile:
    usual: dict[str, Any] = {
        "label": "rank0.pt.trace.json", "rank": 0, "device_name": None, "host_only": True, "start": 0, "wall": WALL,
        "step_numbers": list(range(STEPS)), "device": None, "idle": {}, "host": {}, "critical_path": {}, "steps": [],
        "phases": [], "modules": [], "operators": [], "kernels": [], "launches": None, "copies": [],
        "synchronisations": [], "collectives": [], "compiled": None, "threads": 1, "zeroed_gradients": 0,
        "optimizer_kernels": 0, "optimizer_steps": STEPS, "timeline": None, "missing": {}, "notes": [],
        "python": python(),
    }  # fmt: skip
    return RankProfile(**usual | parts)


def case(*ranks: RankProfile, stragglers: list[Straggler] | None = None, **known: Any) -> ProfileCase:
    """`known`: settings, metrics (estimates by name) and environment; without settings, a trace from elsewhere."""
    metrics = {name: metric(name, estimate) for name, estimate in known.pop("metrics", {}).items()}
    return ProfileCase(Profile(list(ranks), stragglers or []), metrics=metrics, **known)


def metric(name: str, estimate: float) -> Metric:
    definition = DEFINITIONS[name]
    return Metric(name, definition.unit, definition.better, estimate, None, 30, None, [estimate], None)


def training(**changed: Any) -> dict[str, Any]:
    """Settings of train-bench by dot-key, with those of `changed` set, written data__workers."""
    return _settings(TrainSettings(), changed)


def piping(**changed: Any) -> dict[str, Any]:
    return _settings(PipeSettings(), {"work__samples": 8} | changed)


def _settings(usual: RunSettings, changed: Mapping[str, Any]) -> dict[str, Any]:
    known = flatten(usual.model_dump())
    keys = {name.replace("__", "."): value for name, value in changed.items()}
    assert keys.keys() <= known.keys(), "a rule must not live by a setting that there is not"
    return known | keys


def copy(kind: CopyKind, **parts: Any) -> Copy:
    usual: dict[str, Any] = {
        "pinned": None, "calls": STEPS, "host": 0, "device": 0, "bytes": None, "phase": "host_to_device",
        "example": "aten::copy_", "where": None,
    }  # fmt: skip
    return Copy(kind=kind, **usual | parts)


def wait(operator: str, **parts: Any) -> Synchronisation:
    usual: dict[str, Any] = {
        "call": "cudaStreamSynchronize", "where": None, "calls": STEPS, "blocked": 0, "idle": 0, "phase": "other",
    }  # fmt: skip
    return Synchronisation(operator=operator, **usual | parts)


def kernel(name: str, total: int, **parts: Any) -> Kernel:
    usual: dict[str, Any] = {
        "kind": "compute", "calls": STEPS, "shortest": 0, "median": 0, "longest": 0, "operator": "",
    }  # fmt: skip
    return Kernel(name=name, total=total, **usual | parts)


def operator(name: str, device: int, **parts: Any) -> Operator:
    usual: dict[str, Any] = {
        "shapes": "", "dtype": "", "calls": STEPS, "host": 0, "kernels": STEPS, "flops": None, "bytes": None,
        "bound": "insufficient data", "of_ceiling": None,
    }  # fmt: skip
    return Operator(name=name, device=device, **usual | parts)


def phase(name: str, **parts: int) -> StepPhase:
    return StepPhase(name, **{"host": 0, "device": 0, "launches": 0, "recompute": 0} | parts)


def launches(**parts: Any) -> Launches:
    usual: dict[str, Any] = {
        "calls": 1000, "host": 0, "delay_median": 0, "delay_p95": 0, "late": 0, "queue_mean": 0.0, "queue_longest": 0,
        "short": 0, "short_total": 0, "unlinked": 0, "unlinked_total": 0,
    }  # fmt: skip
    return Launches(**usual | parts)


def python(*longest: PythonStretch, **parts: int) -> Python:
    usual = {"total": 0, "stretches": 0, "median": 0, "half": 0, "operators": 1, "operator_median": 0}
    return Python(longest=list(longest), **usual | parts)


def stretch(total: int, **parts: Any) -> PythonStretch:
    """One in each step, unless `count` says otherwise."""
    count = parts.get("count", STEPS)
    usual: dict[str, Any] = {
        "length": total // count, "count": count, "phase": "forward", "module": "", "after": "", "where": None,
    }  # fmt: skip
    return PythonStretch(total=total, **usual | parts)


def ids(case: ProfileCase) -> list[str]:
    return [finding.id for finding in diagnose(case).findings]


def only(case: ProfileCase) -> Finding:
    """The finding of a case with one thing wrong."""
    findings = diagnose(case).findings
    assert len(findings) == 1, [finding.id for finding in findings]
    return findings[0]


def saving(finding: Finding) -> float:
    assert finding.expected is not None
    return finding.expected.estimate
