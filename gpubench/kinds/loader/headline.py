"""What a run of the loader alone does, in one line."""

import shlex
from collections.abc import Mapping
from typing import Any

from gpubench import units
from gpubench.runs import headlines
from gpubench.runs.steps import StepSamples

OWN_DATA = "gpubench.kinds.loader.worker.own_data"
"""What runs in the place of a program if only its data is given."""


def model(settings: Mapping[str, Any], workload: Mapping[str, Any]) -> str | None:
    """Returns the command line of the program, or what makes the data without one; None if it is unknown."""
    command = headlines.model(settings, workload)
    if command and OWN_DATA in command:
        return shlex.split(command)[-2]
    return command


def describe(
    settings: Mapping[str, Any], workload: Mapping[str, Any], *, ranks: int = 1, samples: StepSamples | None = None
) -> str:
    """Returns what was drawn, such as "data of python train.py, 32 samples a batch, 2 workers"."""
    number = samples.usual if samples else workload.get("samples_per_step")
    batch = f", {units.counted(number, 'sample')} a batch" if number else ""
    workers = workload.get("workers")
    by = f", {units.counted(workers, 'worker')}" if workers else ", no workers" if workers == 0 else ""
    return f"data of {headlines.known(model(settings, workload))}{batch}{by}"
