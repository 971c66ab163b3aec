"""What a run of `pipe-infer` does, in one line, and which model it runs."""

from collections.abc import Mapping
from typing import Any

from gpubench import units
from gpubench.runs.headlines import known


def model(settings: Mapping[str, Any], workload: Mapping[str, Any]) -> str | None:
    """The name of the model that was built or, before it is, of the one to be built."""
    return workload.get("model") or settings.get("model.name") or settings.get("model.unet")


def describe(settings: Mapping[str, Any], workload: Mapping[str, Any], *, ranks: int = 1, **_: Any) -> str:
    """A line such as "tiny, fp32, 50 steps of DDIMScheduler, 8 samples over 2 ranks on cpu".

    The names are those in `workload` once the model is built, and before that those in `settings`.
    """
    scheduler = workload.get("scheduler") or settings.get("sampling.scheduler")
    precision, steps, device = (known(settings.get(key)) for key in ("precision", "sampling.steps", "device"))
    samples = settings.get("work.samples")
    many = units.counted(samples, "sample") if samples else "? samples"
    what = f"{known(model(settings, workload))}, {precision}, {steps} steps{f' of {scheduler}' if scheduler else ''}"
    return f"{what}, {many} over {units.counted(ranks, 'rank')} on {device}"
