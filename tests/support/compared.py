"""Comparisons made by hand, for those who render and gate them."""

from typing import Any

from gpubench.compare.result import (
    Bottleneck,
    Causes,
    Comparability,
    Comparison,
    Comparisons,
    Difference,
    Explanation,
    FindingChange,
    GateResult,
    Kind,
    PhaseChange,
    SideSummary,
    Verdict,
    Waterfall,
    WorkChange,
)


def verdict(metric: str = "step_time", **changes: Any) -> Verdict:
    """A step time that is 3.1 % slower, over five repeats a side."""
    known: dict[str, Any] = {
        "metric": metric,
        "unit": "s",
        "better": "lower",
        "verdict": "slower",
        "baseline": 0.1,
        "candidate": 0.1031,
        "ratio": 1.031,
        "interval": (1.026, 1.037),
        "margin": 0.005,
        "limit": 0.005,
        "noise_floor": 0.012,
        "resolvable": 0.009,
        "level": "repeat",
        "units": (5, 5),
        "effective_n": (35.0, 37.0),
        "method": "Welch's t over repeats",
    }
    return Verdict(**(known | changes))


def side(label: str, **changes: Any) -> SideSummary:
    known: dict[str, Any] = {
        "label": label,
        "paths": [f"results/{label}/1"],
        "command": "train-bench",
        "headline": "resnet18, fp32, batch 16 on cpu",
        "started": "2026-11-21T11:29:21.185Z",
        "runs": 1,
        "repeats": 5,
    }
    return SideSummary(**(known | changes))


def difference(key: str, baseline: Any, candidate: Any, kind: Kind = "treatment") -> Difference:
    return Difference(key, kind, baseline, candidate)


def waterfall(*changes: tuple[str, float]) -> Waterfall:
    """Of a step that took 100 ms."""
    phases = [
        PhaseChange(name, 0.05, 0.05 + change, change, (change - 1e-4, change + 1e-4)) for name, change in changes
    ]
    return Waterfall("step", 0.1, 0.1 + sum(change for _, change in changes), phases)


def causes(**changes: Any) -> Causes:
    """A data loader that was mended, and an update that was not."""
    known: dict[str, Any] = {
        "baseline": Bottleneck("GPU idle 43.5 %: 76.6 % of it waits for the data loader", "1", 6, 0.34),
        "candidate": Bottleneck("GPU busy 94 %: matrix products in fp32", "2", 6, -0.01),
        "findings": [
            FindingChange("data-loading", "the GPU waits for the data loader", "gone", "high", None, 0.333, None),
            FindingChange("optimizer", "one tensor at a time", "still there", "medium", "low", 0.05, 0.021),
            FindingChange("fp32-matmul", "matrix products in fp32", None, None, "high", None, None),
        ],
        "of": "kernel",
        "work": [WorkChange("gemm", 0.03, 0.018, 48.0, 48.0), WorkChange("add", 0.004, 0.0, 161.0, 0.0)],
        "others": 3,
        "obstacle": None,
    }
    return Causes(**(known | changes))


def comparison(*verdicts: Verdict, baseline: str = "base", candidate: str = "new", **changes: Any) -> Comparison:
    known: dict[str, Any] = {
        "baseline": side(baseline),
        "candidate": side(candidate),
        "comparability": Comparability(comparable=True, forced=False, reasons=[], differences=[]),
        "verdicts": list(verdicts),
        "explanation": Explanation(waterfall=None, ranks=[], clock=None, notes=[]),
        "warnings": [],
    }
    return Comparison(**(known | changes))


def withheld(*differences: Difference, forced: bool = False, reason: str = "the workloads differ") -> Comparability:
    return Comparability(comparable=False, forced=forced, reasons=[reason], differences=list(differences))


def comparisons(*each: Comparison, gate: list[GateResult] | None = None) -> Comparisons:
    return Comparisons(
        schema_version=2, confidence=0.95, margin=0.005, comparisons=list(each), gate=gate or [], left_out=[]
    )
