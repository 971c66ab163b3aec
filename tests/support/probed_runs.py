"""Run directories of programs that the probe has measured in forks, one fork for each repeat."""

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
from probing import Measured, probed

from gpubench.events import ModelBuilt, RepeatDone, Step
from gpubench.runs.directory import ENVIRONMENT, SCHEMA_VERSION, STEPS, SUMMARY, RunWriter
from gpubench.runs.steps import Repeat
from gpubench.runs.summary import summarise

WARMUP, MEASURED = 3, 27


def measured(folder: Path, program: str) -> Measured:
    """Runs the text of a program with the probe in a fork of this process."""
    folder.mkdir(parents=True)

    def run() -> None:
        with redirect_stdout(io.StringIO()):
            exec(compile(program, "train.py", "exec"), {"__name__": "__main__"})

    return probed(folder, run, steps=MEASURED)


def written(results: Path, name: str, repeats: Sequence[Measured]) -> Path:
    """Writes the run directory of a program, as the host does it."""
    training = {"warmup_steps": WARMUP, "steps": MEASURED}
    config = json.dumps({"program": {"command": "python train.py"}, "training": training})
    writer = RunWriter(results, name, config, command="train-bench", argv=[], world_size=1, git=None)
    writer.replace(ENVIRONMENT, {"host": {"name": "here"}, "gpus": []})
    found = [_repeat(number, one) for number, one in enumerate(repeats)]
    for number, one in enumerate(repeats):
        for step in one.steps:
            writer.append(STEPS, _step(step, number))
    summary = summarise(found, None, "")
    writer.replace(SUMMARY, {"schema_version": SCHEMA_VERSION, **msgspec.to_builtins(summary)})
    built = found[0].built
    assert built
    samples = int(sorted(step["samples"] for step in repeats[0].steps)[len(repeats[0].steps) // 2])
    writer.update(
        repeats=len(repeats),
        workload={
            "parameters": built.parameters,
            "trainable_parameters": built.trainable_parameters,
            "sample_shape": built.sample_shape,
            "tokens_per_sample": None,
            "device": "cpu",
            "samples_per_step": samples,
        },
    )
    writer.finish("completed")
    return writer.path


def _step(sent: dict[str, Any], repeat: int) -> Step:
    return msgspec.convert(sent | {"repeat": repeat}, Step)


def _repeat(number: int, found: Measured) -> Repeat:
    repeat = Repeat(number, WARMUP)
    for step in found.steps:
        repeat.steps[0].append(_step(step, number))
    fields = {key: value for key, value in found.events["repeatdone"].items() if key != "event"}
    repeat.done[0] = msgspec.convert(fields | {"repeat": number}, RepeatDone)
    built = {key: value for key, value in found.events["modelbuilt"].items() if key != "event"}
    repeat.built = msgspec.convert(built | {"repeat": number}, ModelBuilt)
    return repeat
