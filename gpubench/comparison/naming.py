"""What was run, in one line: of settings by dot-key, as the run itself and what compares it have them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpubench import units


def training(settings: Mapping[str, Any], ranks: int = 1) -> str:
    """ "resnet18, fp32, batch 16 x 2 ranks"."""
    model, precision, batch = (_known(settings.get(key)) for key in ("model.name", "precision", "training.batch_size"))
    return f"{model}, {precision}, batch {batch}" + (f" x {ranks} ranks" if ranks > 1 else "")


def pipeline(settings: Mapping[str, Any], model: str | Path | None, scheduler: str | None, ranks: int) -> str:
    """ "tiny, fp32, 50 steps of DDIMScheduler, 8 samples over 2 ranks on cpu". model, scheduler: as they were built."""
    keys = ("precision", "sampling.steps", "device")
    precision, steps, device = (_known(settings.get(key)) for key in keys)
    samples = settings.get("work.samples")
    many = units.counted(samples, "sample") if samples else "? samples"
    what = f"{_known(model)}, {precision}, {steps} steps of {_known(scheduler)}"
    return f"{what}, {many} over {units.counted(ranks, 'rank')} on {device}"


def _known(fact: Any) -> Any:
    return "?" if fact is None else fact
