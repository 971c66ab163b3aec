"""What a run of the loader alone does, in one line."""

from collections.abc import Mapping
from typing import Any

from gpubench import units
from gpubench.runs import headlines
from gpubench.runs.steps import StepSamples

model = headlines.model


def describe(
    settings: Mapping[str, Any], workload: Mapping[str, Any], *, ranks: int = 1, samples: StepSamples | None = None
) -> str:
    """Returns what was drawn, such as "data of python train.py, 32 samples a batch, 2 workers"."""
    number = samples.usual if samples else workload.get("samples_per_step")
    batch = f", {units.counted(number, 'sample')} a batch" if number else ""
    workers = workload.get("workers")
    by = f", {units.counted(workers, 'worker')}" if workers else ", no workers" if workers == 0 else ""
    return f"data of {settings['program.command']}{batch}{by}"
