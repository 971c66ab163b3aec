"""What a run does, in one line, from its settings by dot-key and from the workload in its run.json."""

from collections.abc import Mapping
from typing import Any

from gpubench import units
from gpubench.runs.steps import StepSamples


def model(settings: Mapping[str, Any], workload: Mapping[str, Any]) -> str | None:
    """Returns the name of the model, or the command line of a program; None if it is unknown."""
    return settings.get("program.command") or settings.get("model.name")


def describe(
    settings: Mapping[str, Any], workload: Mapping[str, Any], *, ranks: int = 1, samples: StepSamples | None = None
) -> str:
    """Returns what a run of training or inference does, such as "resnet18, fp32, batch 16 x 2 ranks on cuda".

    `samples` are those of the measured steps of a program.
    """
    if "program.command" in settings:
        return program(settings, workload, ranks, samples)
    device = known(settings.get("device"))
    if settings.get("memory.predict") is True:
        named = settings.get("memory.device_model") or (device if device == "cpu" else "a GPU")
        device = f"{named}, predicted"
    return f"{training(settings, ranks)} on {device}"


def training(settings: Mapping[str, Any], ranks: int = 1) -> str:
    """Returns the headline of a training run, such as "resnet18, fp32, batch 16 x 2 ranks", or of inference."""
    return f"{model_in(settings)}, batch {known(settings.get('training.batch_size'))}{over(ranks)}"


def model_in(settings: Mapping[str, Any]) -> str:
    """Returns what is trained or run, such as "resnet18, fp32"."""
    name, precision = (known(settings.get(key)) for key in ("model.name", "precision"))
    return f"{_of_inference(settings)}{name}, {precision}"


def over(ranks: int) -> str:
    """Returns " x 2 ranks", or "" for one."""
    return f" x {ranks} ranks" if ranks > 1 else ""


def program(
    settings: Mapping[str, Any], workload: Mapping[str, Any], ranks: int = 1, samples: StepSamples | None = None
) -> str:
    """Returns the headline of a user's program, such as "python train.py, 32 samples a step x 2 ranks on cpu".

    What is unknown of it is left out. `samples` are those of its measured steps; if the usual number of them divided by
    the step time is not the throughput, their mean is given instead.
    """
    number, device = workload.get("samples_per_step"), workload.get("device")
    step = f", {units.counted(number, 'sample')} a step" if number and "memory.steps" not in settings else ""
    if samples and not samples.even:
        step = f", {samples.mean / ranks:.4g} samples a step on average"
    elif samples and samples.usual != (number or 0) * ranks:
        step = f", {samples.usual / ranks:.4g} samples a step"
    place = f" on {device}" if device else ""
    return f"{_of_inference(settings)}{settings['program.command']}{step}{over(ranks)}{place}"


def known(fact: Any) -> Any:
    """Returns the fact, or a question mark if it is unknown."""
    return "?" if fact is None else fact


def _of_inference(settings: Mapping[str, Any]) -> str:
    return "inference of " if settings.get("inference") else ""
