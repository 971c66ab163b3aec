"""Runs the training worker in this process, repeat after repeat, as under torchrun."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from gpubench import events
from gpubench.channel import Activity
from gpubench.kinds.training.worker import rank as train_bench
from gpubench.ranks import Ranks
from gpubench.settings.schema import CompletedTrainSettings
from gpubench.worker.loop import Event
from gpubench.worker.process import Assignment

SMALL: dict[str, Any] = {
    "device": "cpu",
    "precision": "fp32",
    "model": {"name": "small_model:build"},
    "training": {"batch_size": 4, "steps": 4, "warmup_steps": 2},
    "data": {"workers": 0, "pin_memory": False},
    "performance": {"channels_last": False, "cpu_threads": 1},
    "distributed": {"backend": "gloo"},
    "logging": {"graph": False},
}


def small(**sections: Any) -> CompletedTrainSettings:
    """Settings of a run on a small model; `sections` are added to them."""
    changed = {
        name: SMALL[name] | section if isinstance(section, dict) and name in SMALL else section
        for name, section in sections.items()
    }
    return CompletedTrainSettings.model_validate(SMALL | changed)


def working(activity: Activity | None = None, repeats: int = 2, **sections: Any) -> Iterator[Event]:
    """The events of `repeats` repeats in this process, with the settings of `small(**sections)`."""
    job = events.Job(
        worker="gpubench.kinds.training.worker.rank",
        lighter="",
        settings=small(**sections).model_dump(mode="json"),
        repeats=list(range(repeats)),
        clock=(0.0, 0.0),
        machine="",
    )
    return train_bench.work(Assignment(job, Ranks(0, 0, 1, 1), None, activity or Activity(), lambda _: None))


@contextmanager
def as_in_a_fresh_process() -> Iterator[None]:
    """Keeps what a worker sets in its process from other tests, and what torch set in this one from the worker."""
    before = (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
    )
    gc.freeze()  # a worker collects garbage, and what this process has imported is none
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        forked.measure_reference_workload_briefly(patch.setattr)
        for name in train_bench.COMPILE_CACHES:
            patch.delenv(name, raising=False)
        yield
        for name in train_bench.COMPILE_CACHES:
            os.environ.pop(name, None)
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])
    torch.backends.cudnn.allow_tf32 = before[2]
    torch.backends.cudnn.benchmark = before[3]
