"""Overrides that several rules propose."""

from typing import Any

from gpubench.diagnosis.case import Case


def compiling(case: Case) -> dict[str, Any]:
    """The next thing to try that the run has not; CUDA graphs do not survive accumulation."""
    graphs = case.rank.device is not None and (case.setting("training.grad_accumulation") or 1) == 1
    if case.setting("performance.compile") is False:
        if graphs:
            return case.fix(performance__compile=True, performance__compile_mode="reduce-overhead")
        return case.fix(performance__compile=True)
    if graphs and case.setting("performance.compile_mode") == "default":
        return case.fix(performance__compile_mode="reduce-overhead")
    return {}


def larger_batch(case: Case, factor: int) -> dict[str, Any]:
    """Micro-batches of a pipeline grow no larger than the samples that there are."""
    if batch := case.setting("training.batch_size"):
        return case.fix(training__batch_size=factor * batch)
    micro, samples = case.setting("work.micro_batch"), case.setting("work.samples")
    if micro and samples and factor * micro <= samples:
        return case.fix(work__micro_batch=factor * micro)
    return {}
