"""A pipeline in plain text: the sentences and cells that the terminal and the page share."""

from collections.abc import Mapping

from gpubench import units
from gpubench.diffusion.stages import Handover, Pipeline, Stage, Verification
from gpubench.events import Divergence
from gpubench.metrics import Metric
from gpubench.report.plain import clean

BASELINES = {
    "makespan": "this pipeline",
    "sequential_makespan": "one of these ranks alone",
    "replicas_makespan": "replicas, measured",
    "replicas_bound": "replicas, at best",
}
NOT_VERIFIED = "not verified: --verify compares every sample with single-process diffusers, bit by bit"


def evaluations(stage: Stage) -> str:
    """Which, and how many: "12-23 (12)"."""
    last = stage.end - 1
    return f"{stage.start if stage.start == last else f'{stage.start}-{last}'} ({stage.end - stage.start})"


def baselines(metrics: Mapping[str, Metric], ranks: int) -> list[tuple[str, str, str]]:
    """(who, makespan, how many times as fast the pipeline is) of the pipeline, and of what would do without one."""
    if ranks == 1:
        return []
    found = [(name, metrics[name].estimate) for name in BASELINES if name in metrics]
    makespan = dict(found).get("makespan")
    if not makespan:
        return []
    speedups = {name: "" if name == "makespan" else f"{units.digits(taken / makespan)} x" for name, taken in found}
    return [(BASELINES[name], units.seconds(taken), speedups[name]) for name, taken in found]


def handover_parts(handover: Handover) -> dict[str, float]:
    """Mean bytes by what they are; what is never sent is left out."""
    parts = {
        "latent": handover.latent,
        "scheduler state": handover.state,
        "generator": handover.generator,
        "header": handover.header,
    }
    return {name: size for name, size in parts.items() if size}


def handover(pipeline: Pipeline) -> str | None:
    """What travels, and how much of it; None where nothing did."""
    if pipeline.handover is None:
        return None
    parts = handover_parts(pipeline.handover)
    said = ", ".join(f"{units.size(size)} {name}" for name, size in parts.items())
    carried = f"; it carries {', '.join(map(clean, pipeline.carried))}" if pipeline.carried else ""
    return f"a hand-over is {units.size(sum(parts.values()))}: {said}{carried}"


def verification(found: Verification | None, threads: int | None) -> str:
    """`threads` as in `Pipeline`: how many the reference had as well."""
    if found is None:
        return NOT_VERIFIED
    said = f"bit-identical: {found.identical}/{found.samples}, beside {clean(found.reference)}"
    if threads is not None:
        said += f" with {units.counted(threads, 'thread')}"
    return said if found.divergence is None else f"{said}; {_divergence(found.divergence)}"


def _divergence(found: Divergence) -> str:
    said = f"sample {found.sample} differs by up to {found.largest_difference:.3g}"
    if found.step is None:
        return f"{said}, and did not when it was made again"
    said += f", first in evaluation {found.step} on rank {found.rank}"
    return said if found.step_difference is None else f"{said} by {found.step_difference:.3g}"
