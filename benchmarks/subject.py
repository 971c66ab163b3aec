"""The training that every program in `overhead.py` runs, and the stopwatch that times all in the same way.

Each contender is a fresh process that gets the `Subject` in its environment. It trains the same network with the same
AdamW on the same four random batches, and writes the speed that it reports to `claim.json`; the stopwatch writes
`stopwatch.json` beside it.
"""

import atexit
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

VARIABLE = "OVERHEAD_SUBJECT"
CLAIM = "claim.json"
STOPWATCH = "stopwatch.json"
BATCHES = 4  # as many as gpubench keeps on the device
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Subject:
    """What is trained, for how long, and the folder for the results."""

    model: str
    image_size: int
    batch_size: int
    device: str
    warmup: int
    """The number of steps before the measured ones."""
    steps: int
    """The number of measured steps."""
    folder: str

    @classmethod
    def from_environment(cls) -> Self:
        return cls(**json.loads(os.environ[VARIABLE]))

    def environment(self) -> dict[str, str]:
        """Return variables for a contender's process: threads as in gpubench's workers, one GPU, no network."""
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] if self.device == "cuda" else ""
        return {
            VARIABLE: json.dumps(asdict(self)),
            "CUDA_VISIBLE_DEVICES": gpu,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            # Freed memory stays with the process. Otherwise the top of its heap decides how much memory is returned and
            # faulted in again at each step: a tenth of the step, for resnet18 on a CPU.
            "MALLOC_TRIM_THRESHOLD_": str(2**30),
            "MALLOC_MMAP_THRESHOLD_": str(2**30),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }

    def inside(self, folder: Path) -> Self:
        folder.mkdir(parents=True)
        return replace(self, folder=str(folder))

    @property
    def total(self) -> int:
        return self.warmup + self.steps

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def claim(self, samples_per_second: float) -> None:
        (self.path / CLAIM).write_text(json.dumps(samples_per_second))


@dataclass(frozen=True)
class Work:
    """A subject, built on its device."""

    module: Any
    loss: Callable[[Any, Any], Any]
    batches: Sequence[Any]
    optimizer: Any


def settle(subject: Subject) -> None:
    """Set one thread and full float32, as gpubench does, for contenders that leave both to the user."""
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True


def build(subject: Subject) -> Work:
    """The network with its batches on the device, and the optimizer that gpubench would choose there."""
    import torch

    from gpubench.settings.sections import DataSettings, ModelSettings
    from gpubench.worker.models import build as workload_of

    settle(subject)
    workload = workload_of(ModelSettings(name=subject.model), DataSettings(image_size=subject.image_size), seed=0)
    assert workload.make_batch
    device = torch.device(subject.device)
    module = workload.module.to(device)
    batches = [_moved(workload.make_batch(subject.batch_size), device) for _ in range(BATCHES)]
    on_gpu = device.type == "cuda"
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0, foreach=False, fused=on_gpu)
    return Work(module, workload.loss, batches, optimizer)


def _moved(batch: Any, device: Any) -> Any:
    if isinstance(batch, dict):
        return {name: value.to(device) for name, value in batch.items()}
    return tuple(value.to(device) for value in batch)


def gpubench_model() -> tuple[Any, Any, Any]:
    """The subject for `gpubench train-bench --model subject:gpubench_model`."""
    from gpubench.settings.sections import DataSettings, ModelSettings
    from gpubench.worker.models import build as workload_of

    subject = Subject.from_environment()
    workload = workload_of(ModelSettings(name=subject.model), DataSettings(image_size=subject.image_size), seed=0)
    start_stopwatch(subject)
    return workload.module, workload.make_batch, workload.loss


def start_stopwatch(subject: Subject) -> None:
    """Record the time after each of the first `subject.total` optimizer steps of this process.

    It uses the hook that PyTorch calls after every optimizer's step, so that it needs nothing from the contender and
    costs all of them the same. On a CPU a time is the host's; on a GPU it is a CUDA event's, and nothing waits for it.
    The times, in seconds from the first one, are written when the process ends.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    on_gpu = subject.device == "cuda"
    marks: list[Any] = [torch.cuda.Event(enable_timing=True) if on_gpu else 0 for _ in range(subject.total)]
    taken = 0

    def note(*_: Any) -> None:
        nonlocal taken
        if taken == len(marks):
            return
        if on_gpu:
            marks[taken].record()
        else:
            marks[taken] = time.perf_counter_ns()
        taken += 1

    def write() -> None:
        if on_gpu:
            torch.cuda.synchronize()
            times = [marks[0].elapsed_time(mark) / 1e3 for mark in marks[:taken]]
        else:
            times = [(mark - marks[0]) / 1e9 for mark in marks[:taken]]
        (subject.path / STOPWATCH).write_text(json.dumps(times))

    register_optimizer_step_post_hook(note)
    atexit.register(write)
