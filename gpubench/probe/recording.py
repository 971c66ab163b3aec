"""Records steps of the program with torch.profiler, samples its code in the steps after them, and sends both."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Callable

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule, tensorboard_trace_handler

from .host import Host
from .lines import CallLines
from .modules import named_modules
from .observed import SourcePlaces
from .quiet import ignored_warnings
from .sampling import StackSampler, of_workers
from .treatments import compiled_graphs, is_compiled, stand_in


class ProbeRecording:
    """The recording of one repeat of this process, from its first complete step on."""

    def __init__(
        self, settings: dict[str, Any], host: Host, repeat: int, sampler: StackSampler, lines: CallLines, sampled: int
    ) -> None:
        """`settings` are those of `gpubench.settings.sections.ProfilingSettings`.

        After the steps of torch.profiler, which would distort them, come one in which `lines` sees calls and as many
        as `sampled`, in which `sampler` samples.
        """
        self._traced = settings["wait"] + (settings["warmup"] + settings["active"]) * (settings["repeat"] + 1)
        """The number of steps that torch.profiler takes."""
        self.steps = self._traced + (1 + sampled) * bool(sampled)
        """The number of steps that the recording takes."""
        self._sampler = sampler
        self._lines = lines
        self._compiles = False
        self._taken = 0
        self._settings = settings
        self._host = host
        self._repeat = repeat
        inside = host.folder if os.access(host.folder, os.W_OK) else None
        self._folder = TemporaryDirectory(prefix="gpubench-", dir=inside)
        self._profile: profile | None = None
        self._paths: dict[int, str] = {}
        self._call_before: Any = None
        """The function that calls modules, while another one annotates the calls."""

    def start(self, roots: list[torch.nn.Module]) -> None:
        """Starts the profiler's schedule, unless this rank is not recorded, or the program runs a profiler of its own.

        The calls of the modules in `roots` are annotated, if they run uncompiled.
        """
        settings = self._settings
        self._compiles = any(map(is_compiled, roots)) or compiled_graphs() > 0
        if is_profiled():
            self._host.warn("the program runs a profiler of its own, so that it cannot be recorded")
            return
        if self._host.rank and not settings["all_ranks"]:
            return
        self._profile = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_initialized(),
            # torch's `wait` applies to each cycle, `skip_first` only to the start.
            schedule=schedule(
                skip_first=settings["wait"],
                wait=0,
                warmup=settings["warmup"],
                active=settings["active"],
                repeat=settings["repeat"] + 1,
            ),
            on_trace_ready=tensorboard_trace_handler(
                self._folder.name, worker_name=f"rank{self._host.rank}", use_gzip=settings["compress"]
            ),
            record_shapes=settings["record_shapes"],
            profile_memory=settings["profile_memory"],
            with_stack=settings["with_stack"],
        )
        if settings["modules"] and not any(map(is_compiled, roots)):
            for root in roots:
                for path, module in named_modules(root):
                    self._paths.setdefault(id(module), f"module: {path} ({type(module).__name__})")
            self._annotate()
        stand_in(profile, "start", self._notice)
        stand_in(torch.autograd.profiler.profile, "__enter__", self._notice)
        self._call(self._profile.start)

    def advance(self) -> None:
        """Advances by one step: the schedule of the profiler, or once it is complete the samples."""
        self._taken += 1
        if self._profile:
            self._call(self._profile.step)
        if self._taken == self._traced:
            self._end_trace()
            if self._taken < self.steps and not self._compiles:
                self._lines.start(self._sampler.thread, self._sampler.phase)
        elif self._taken > self._traced:
            self._lines.stop()
            self._sampler.start()

    def pause(self) -> None:
        """Ends the sampling thread until the next step, so that the process can be forked."""
        self._sampler.stop()

    def leave(self) -> None:
        """Ends all that observes the program's code."""
        self._sampler.stop()
        self._lines.stop()

    def _end_trace(self) -> None:
        if self._profile:
            self._call(self._profile.stop)
            self._profile = None
        if self._call_before is not None:
            torch.nn.Module.__call__ = self._call_before  # type: ignore[method-assign]
            self._call_before = None

    def close(self, places: SourcePlaces) -> None:
        """Stops the profiler and the samples, and sends the traces of the complete cycles, and the samples."""
        self.leave()
        self._end_trace()
        workers = of_workers(self._host.folder)
        self._host.put(
            "codesampled",
            repeat=self._repeat,
            main=self._sampler.samples.json(places),
            workers=workers.json(places),
            calls=self._lines.json(),
        )
        for path in sorted(Path(self._folder.name).iterdir()):
            self._host.send_file("tracerecorded", path.read_bytes(), repeat=self._repeat, name=path.name)
        self._folder.cleanup()

    def _annotate(self) -> None:
        """Annotates the calls of the known modules, by wrapping the call of every module."""
        call, paths = torch.nn.Module.__call__, self._paths
        self._call_before = call

        # With stacks, PyTorch takes the variable `self` of this function, and no other, for the module.
        @functools.wraps(call)
        def annotated(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            name = paths.get(id(self))
            if name is None:
                return call(self, *args, **kwargs)
            with record_function(name):
                return call(self, *args, **kwargs)

        torch.nn.Module.__call__ = annotated  # type: ignore[method-assign]

    def _notice(self, call: Callable[..., Any], started: Any) -> Any:
        """Says that the program starts a profiler of its own, which may end it; PyTorch runs one at a time."""
        if self._profile and started is not self._profile:
            self._host.warn(
                "the program starts a profiler of its own while it is recorded, which may end it with an error: "
                "PyTorch runs one at a time"
            )
            self._host.flush()
        return call(started)

    def _call(self, action: Callable[[], object]) -> None:
        """Calls a function of the profiler. If it fails, the program goes on unrecorded."""
        try:
            with ignored_warnings(".*Profiler"):  # on events that are in the files already
                action()
        except RuntimeError as error:
            self._host.warn(f"the program cannot be recorded: {error}")
            self._profile = None


def is_profiled() -> bool:
    """Tells whether a profiler records this thread."""
    return bool(torch._C._autograd._profiler_enabled())
