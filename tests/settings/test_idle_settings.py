"""Every setting that a command accepts is read by what the command runs, or refused because it would have no effect."""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli import complaint
from running import SMALL, Finished, gpubench

from gpubench.host.recorder import say_idle
from gpubench.registry import PROGRAM, PROGRAM_MEMORY
from gpubench.settings.commands import COMMANDS
from gpubench.settings.defaults import complete
from gpubench.settings.field import Section, fields, is_section, setting
from gpubench.settings.loading import VS, Configuration, complete_all, idle, load
from gpubench.settings.programs import from_outside
from gpubench.settings.schema import TrainSettings

CommandLine = Callable[..., Finished]
OTHER: dict[str, Any] = {
    "performance.compile_mode": "max-autotune",
    "data.prefetch": 7,
    "training.momentum": 0.5,
    "distributed.sync_gradients": "each",
    "distributed.bucket_mb": 7.0,
    "logging.wandb_project": "mine",
    "logging.wandb_mode": "offline",
    "measurement.max_repeats": 7,
    "profiling.keep_compile": True,
    "memory.explain": True,
    "model.step_ms": 7.0,
    "pipeline.in_flight": 7,
}
"""A value that is not the default, of each setting that depends on others."""
CONDITIONAL = [
    (command, key, other, value)
    for command, cls in COMMANDS.items()
    for key, field in fields(cls).items()
    if key not in cls.FIXED
    for other, values in (setting(field).idle_with or {}).items()
    for value in values
    if other in fields(cls)
]
FIXED = [(command, key, value) for command, cls in COMMANDS.items() for key, value in cls.FIXED.items()]


@pytest.mark.parametrize(("command", "key", "other", "value"), CONDITIONAL)
def test_a_setting_is_known_to_be_idle_beside_every_value_that_it_is_declared_to_be_idle_with(
    command: str, key: str, other: str, value: Any
) -> None:
    cls = COMMANDS[command]
    given = {"profiling.enabled": False} if key.startswith("profiling.") and "profile" not in command else {}
    world = {"distributed.world_size": 2} if other == "distributed.strategy" else {}
    loaded = load(cls, None, {key: OTHER[key], other: value} | given | world)
    assert key in idle(loaded)
    assert key not in idle(Configuration(loaded.settings, {})), "a default is no word of the user"


@pytest.mark.parametrize(("command", "key", "value"), FIXED)
def test_a_setting_of_which_a_command_has_one_value_is_idle_with_the_other(command: str, key: str, value: bool) -> None:
    assert key in idle(load(COMMANDS[command], None, {key: not value}))
    assert key not in idle(load(COMMANDS[command], None, {key: value}))


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        (
            "train-bench --training.momentum=0.5",
            "training.momentum=0.5 has no effect: training.optimizer is adamw",
            "cha",
        ),
        ("train-bench --data.prefetch=4", "data.prefetch=4 has no effect: data.workers is 0", "change data.workers"),
        ("train-bench --batch-size 1,2 --logging.wandb_mode=offline", "no effect: logging.wandb is false", "leave it"),
        ("train-bench --vs training.momentum=0.5", "training.momentum=0.5 has no effect", "leave it out"),
        ("profile --performance.compile_mode=max-autotune", "performance.compile is false", "performance.compile"),
        ("profile --measurement.max_repeats=9 -- python -m x", "measurement.target_precision is not set", "change"),
        ("memory --measurement.measure_peak", "measure_peak=true has no effect: memory has only false", "leave it out"),
        ("pipe-infer --unet tiny --step-ms 3", "model.step_ms=3.0 has no effect: model.unet is tiny", "model.unet"),
        ("train-bench --repeats 5 --target-precision 1%", "measurement.repeats=5 has no effect with", "max_repeats"),
        ("pipe-infer --in-flight 3", "pipeline.in_flight=3 has no effect: distributed.world_size is 1", "change"),
    ],
)
def test_an_option_without_an_effect_is_refused(command_line: CommandLine, words: str, said: str, hint: str) -> None:
    command, *rest = words.split()
    device = [] if "--" in rest else ["--device=cpu"]
    error, advised = complaint(command_line(command, *device, *rest))
    assert said in error
    assert hint in advised


def test_an_option_that_has_an_effect_in_one_of_two_runs_is_taken() -> None:
    given = {"training.momentum": "0.5", "device": "cpu", "model": "resnet-tiny"}
    base = load(TrainSettings, None, given)
    first, second = complete_all([base, base.with_overrides({"training.optimizer": "sgd"}, VS)], complete)
    assert (list(idle(first)), list(idle(second))) == (["training.momentum"], [])


def test_what_a_file_sets_without_an_effect_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.yaml").write_text("device: cpu\ntraining: {momentum: 0.5}\nlogging: {wandb_mode: online}")
    (run,) = complete_all([load(TrainSettings, str(tmp_path / "mine.yaml"))], complete)
    with caplog.at_level(logging.WARNING):
        say_idle(run)
    (said,) = caplog.messages
    assert said == f"training.momentum, from {tmp_path / 'mine.yaml'}, has no effect: training.optimizer is adamw"


READER = """
import atexit, os
from pathlib import Path
from gpubench.settings.field import Section

seen, plain = set(), Section.__getattribute__

def reading(self, name):
    if name in type(self).model_fields:
        seen.add(f"{type(self).__name__.partition('[')[0]} {name}")
    return plain(self, name)

Section.__getattribute__ = reading
atexit.register(lambda: Path(os.environ["READ"], str(os.getpid())).write_text("\\n".join(seen)))
"""
STEPS = ("--steps=5", "--training.warmup_steps=1", "--repeats=1")
SCHEDULE = ("--profiling.wait=0", "--profiling.repeat=0")
BRIEF = {  # profile runs what train-bench does, and the probe gets the settings of a program as they are
    "train-bench": (*SMALL, *STEPS, *SCHEDULE),
    "memory": (*SMALL, "--steps=2"),
    "pipe-infer": (
        "--unet=dummy",
        "--step-ms=1",
        "--steps=8",
        "--samples=2",
        "--repeats=1",
        "--world-size=2",
        *SCHEDULE,
    ),
}
ELSEWHERE = {
    "data.pin_memory": "of a GPU",
    "sampling.guidance_scale": "the dummy has no guidance",
    "memory.spare": "of the search for a batch size",
}
"""Settings that these runs do not come to."""


def leaves(cls: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each setting with the text that READER keeps of it."""
    for name, field in cls.model_fields.items():
        if is_section(field):
            yield from leaves(field.annotation, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            yield prefix + name, f"{cls.__name__.partition('[')[0]} {name}"


@pytest.mark.stress
@pytest.mark.parametrize("command", BRIEF)
def test_what_a_command_accepts_is_read_in_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(READER)
    (read := tmp_path / "read").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setenv("READ", str(read))
    done = gpubench(command, *BRIEF[command], "--device=cpu", results=tmp_path / "results")
    assert done.code == 0, done.stderr
    seen = {line for file in read.iterdir() for line in file.read_text().splitlines()}
    cls = COMMANDS[command]
    idle_here = {key for key, field in fields(cls).items() if setting(field).idle_with}
    unread = {key for key, text in leaves(cls) if key in fields(cls) and text not in seen}
    assert unread - idle_here - cls.FIXED.keys() - ELSEWHERE.keys() == set()


@pytest.mark.parametrize("command", [PROGRAM, PROGRAM_MEMORY])
def test_what_is_changed_in_a_program_is_what_the_probe_knows_how_to_change(command: str) -> None:
    """What it finds no use for is reported by the run itself, as not applied."""
    treatments = {key for key, field in fields(COMMANDS[command]).items() if setting(field).from_outside}
    assert treatments <= from_outside().keys()
