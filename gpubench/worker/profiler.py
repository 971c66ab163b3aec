"""Runs torch.profiler around a loop: chooses the steps to record, annotates them, and sends the trace files."""

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from gpubench import events
from gpubench.channel import Activity
from gpubench.runs.directory import TRACE_FILES
from gpubench.settings.sections import ProfilingSettings
from gpubench.worker.timing import EXPOSED_COMMUNICATION, Clock, Mark, StepTimer

CHUNK = 4 * 2**20  # largest number of bytes of a trace file in one event


class Recording:
    """A context manager that records the loop inside it, and writes one trace file for each cycle of the schedule.

    The loop calls `step` between two steps.
    """

    def __init__(self, settings: ProfilingSettings, device: torch.device, rank: int, folder: Path) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self.unit = 1
        """The number of steps in one unit of the schedule."""
        self._folder = folder
        # CUPTI stays attached between the cycles, which is kineto's default. With TEARDOWN_CUPTI=1 a thread detaches it
        # at a CUDA call after each cycle, and the next cycle attaches it again (`CuptiActivityApi::teardownContext`
        # and `enableCuptiActivities` in pytorch/kineto at 114171d). With CUDA graphs that crashes before CUDA 12.6
        # (torch/profiler/profiler.py). No measured repeat follows in this process, so none runs with CUPTI attached.
        os.environ["TEARDOWN_CUPTI"] = "0"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler clears events")  # the events are in the files already
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # the user has set warmup to 0
            self._profile = profile(
                activities=activities,
                # torch's `wait` applies to each cycle, `skip_first` only to the start.
                schedule=schedule(
                    skip_first=settings.wait,
                    wait=0,
                    warmup=settings.warmup,
                    active=settings.active,
                    repeat=settings.repeat + 1,
                ),
                on_trace_ready=tensorboard_trace_handler(
                    str(folder), worker_name=f"rank{rank}", use_gzip=settings.compress
                ),
                record_shapes=settings.record_shapes,
                profile_memory=settings.profile_memory,
                with_stack=settings.with_stack,
            )

    def step(self, done: int) -> None:
        """Advances the profiler's schedule after `done` steps."""
        if done % self.unit:
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            self._profile.step()

    def files(self) -> list[Path]:
        return sorted(self._folder.glob(TRACE_FILES))

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)


class RecordedTimer(StepTimer[Mark]):
    """A StepTimer that also annotates the steps and phases in the trace."""

    def __init__(
        self,
        clock: Clock[Mark],
        activity: Activity,
        repeat: int,
        rank: int,
        recording: Recording,
    ) -> None:
        super().__init__(clock, activity, repeat, rank)
        self._recording = recording
        self._step = 0
        self._phase: AbstractContextManager[Any] | None = None

    def begin(self, step: int) -> None:
        self._leave()
        if step:
            self._recording.step(step)
        self._step = step
        super().begin(step)
        self._annotate(self._activity.doing)

    def enter(self, phase: str) -> None:
        super().enter(phase)
        # This phase begins on autograd's thread, which cannot end an annotation of this thread.
        if phase != EXPOSED_COMMUNICATION:
            self._leave()
            self._annotate(phase)

    def stop(self) -> None:
        self._leave()
        self._recording.step(self._step + 1)
        super().stop()

    def _annotate(self, phase: str) -> None:
        self._phase = record_function(phase)
        self._phase.__enter__()

    def _leave(self) -> None:
        if self._phase:
            self._phase.__exit__(None, None, None)
        self._phase = None


def annotate_modules(root: nn.Module) -> None:
    """Annotates every call of a module's forward in the trace as "module: <path> (<class>)"."""
    open_calls = threading.local()

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            call = record_function(name)
            call.__enter__()
            open_calls.__dict__.setdefault("stack", []).append(call)

        return hook

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        stack: list[Any] = open_calls.__dict__.get("stack", [])
        if stack:
            stack.pop().__exit__(None, None, None)

    for path, module in root.named_modules():
        module.register_forward_pre_hook(enter(f"module: {path} ({type(module).__name__})"))
        module.register_forward_hook(leave, always_call=True)


def recorded(files: Sequence[Path], rank: int, repeat: int) -> Iterator[events.TraceRecorded]:
    """Yields the contents of the files in parts of at most CHUNK bytes."""
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as file:
            while data := file.read(CHUNK):
                last = file.tell() == size
                yield events.TraceRecorded(rank=rank, repeat=repeat, name=path.name, data=data, last=last)
