"""Measures the inference of a program: the calls of its outermost modules.

A call is inference if its module is in evaluation mode or gradients are off, or if the program has made no optimizer.
It is a step, unless several modules take turns: then one turn of all of them is a step. What lies between two calls is
the wait for a DataLoader, or else the phase "other". Where the program trains between two calls, the time between them
belongs to no step.

The outermost modules are found by wrapping the call of every module. The wrapper is taken away while a module found is
called, so that torch.compile never compiles it, and for good after SEARCHED calls. Calls may come from several threads,
as those of a server with a thread for each request. One that begins while another one is measured is not a step: its
samples count in the step that ends next.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from types import FrameType
from typing import Any, Callable, Mapping

import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader, get_worker_info

from . import ADDRESS_VARIABLE, TREATMENTS_VARIABLE
from .cost import cost
from .hooks import DATA_WAIT, FORWARD, Probe
from .measured import MeasuredStep
from .modules import first_parameter, parameters_of
from .observed import autocast_of, device_of
from .timeline import LONGEST_PERIOD, LoopPart
from .treatments import compiled_graphs, is_compiling, stand_in, unwrapped

SEARCHED = 4 * LONGEST_PERIOD
"""Calls of inference after which a module that has not been called yet is not looked for."""
TRAINING_MODE = (
    "the model is in training mode while its inference is measured: dropout is active, and batch norm changes its "
    "statistics; call model.eval()"
)
RECORDS_GRADIENTS = (
    "gradients are on while inference is measured, so that activations are kept for a backward pass; call the model "
    "within torch.inference_mode()"
)


_CALL = {
    getattr(torch.nn.Module, name).__code__
    for name in ("_call_impl", "_wrapped_call_impl")
    if hasattr(torch.nn.Module, name)
}
"""What runs in every call of a module."""


class _Here(threading.local):
    """What a thread does."""

    calls = False
    """Whether it is in a call of an outermost module."""


def install(variables: Mapping[str, str]) -> None:
    """Installs the hooks and the treatments that the environment variables name."""
    CallProbe(variables[ADDRESS_VARIABLE], json.loads(variables.get(TREATMENTS_VARIABLE, "{}"))).install()


class CallProbe(Probe):
    """The measurement of this process, which becomes a rank of the run with its first call of inference."""

    def __init__(self, address: str, treatments: dict[str, Any]) -> None:
        super().__init__(address, treatments)
        self._trains = False
        """Whether the program has made an optimizer, so that calls in training mode with gradients are training."""
        self._calling = threading.Lock()
        """Held while a call of an outermost module is measured."""
        self._here = _Here()
        self._finding = threading.Lock()
        """Held while the class of an outermost module is wrapped."""
        self._beside = threading.Lock()
        """Held while the calls are counted that begin while another thread is in one that is measured."""
        self._overlapping = self._samples_beside = 0
        """The number of these calls, and the samples of those that have ended and count in no step yet."""
        self._first = 0
        """The identity of the module whose samples count."""
        self._calls = self._in_training_mode = self._with_gradients = 0
        self._interrupted = False
        """Whether the program has trained since the last call of inference."""
        self._searches = SEARCHED
        self._reported = 0
        """The number of modules that the host knows of."""

    def install(self) -> None:
        self._treatments.install()
        os.register_at_fork(after_in_child=self._begin_in_fork)
        self._look_at_code()
        stand_in(dataloader.DataLoader, "__init__", self._make_loader)
        stand_in(dataloader._BaseDataLoaderIter, "__next__", self._next_batch)
        stand_in(optimizers.Optimizer, "__init__", self._make_optimizer)
        stand_in(torch.nn.Module, "train", self._change_mode)
        stand_in(torch.autocast, "__enter__", self._enter_autocast)
        self._graphs_of_cuda.install()
        self._search()

    # What stands in for the functions of torch; `call` is the original.

    def _next_batch(self, call: Callable[..., Any], iterator: Any) -> Any:
        if not self._watches() or self._calling.locked() or DATA_WAIT in self._timeline.open:
            return call(iterator)
        self._forget_set_up()
        with self._timeline.phase(DATA_WAIT):
            batch = call(iterator)
        self._note_loader(iterator)
        return batch

    def _make_optimizer(self, call: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self._trains = True
        call(optimizer, *args, **kwargs)

    def _change_mode(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        changed = call(module, *args, **kwargs)
        if not module.training and not self._calling.locked():
            self._search()
        return changed

    def _find(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) in self._roots and not self._here.calls:  # another thread has found it since this call began
            return self._call_module(call, module, *args, **kwargs)
        if is_compiling() or self._over or self._calling.locked() or self._draws_now() or not _computes(module):
            return call(module, *args, **kwargs)
        if self._here.calls or (id(module) not in self._roots and _in_module()):  # the outer call began unseen
            return call(module, *args, **kwargs)
        self._places.model(self._found)
        with self._finding:  # the search ends last, so that a call in another thread finds one wrapper or the other
            self._roots[id(module)] = module
            if type(module) not in self._wrapped:
                inherits = type(module).__call__ is torch.nn.Module.__call__
                stand_in(type(module), "__call__", self._call_module, self._module_call if inherits else None)
                self._wrapped.add(type(module))
            self._end_search()
        return type(module).__call__(module, *args, **kwargs)

    def _call_module(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or self._over or self._draws_now() or id(module) not in self._roots:
            if self._forked and not is_compiling() and id(module) in self._roots and get_worker_info() is None:
                self._tell_of_fork()
            return call(module, *args, **kwargs)
        if self._here.calls:
            return call(module, *args, **kwargs)
        self._here.calls = True
        try:
            if not self._calling.acquire(blocking=False):
                return self._call_beside(call, module, args, kwargs)
            try:
                return self._call_measured(call, module, args, kwargs)
            finally:
                self._calling.release()
        finally:
            self._here.calls = False

    def _call_measured(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        self._end_search()
        if not self._infers(module):
            self._interrupted = True
            return call(module, *args, **kwargs)
        if self._thread != threading.get_ident():  # the waits of this thread are measured from now on
            self._timeline.leave_all_but(0)
            self._thread = threading.get_ident()
        timing = self._timeline.timing
        timing.expect(parameters_of(module))
        if self._interrupted and not self._captured:
            self._timeline.restart()
            self._interrupted = False
        part = self._timeline.part
        part.first = part.first or id(module)
        if part.first == id(module):
            self._first = self._first or id(module)
            part.forwarded += self._size(module, (args, kwargs)) + self._take_beside()
            self._given.model = self._given.model or type(unwrapped(module)).__name__
        with self._timeline.phase(FORWARD):
            result = self._treatments.call(call, module, args, kwargs)
            if device := device_of(result):
                timing.result(device)
        if self._captured:
            self._capture(self._captured, module)
        else:
            self._end_call(module)
        self._searches -= 1
        self._search()
        return result

    def _call_beside(self, call: Callable[..., Any], module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        """Calls a module while another thread is in a call that is measured."""
        result = call(module, *args, **kwargs)
        if self._infers(module):
            with self._beside:
                self._overlapping += 1
                self._samples_beside += self._size(module, (args, kwargs)) if id(module) == self._first else 0
        return result

    def _take_beside(self) -> int:
        with self._beside:
            samples, self._samples_beside = self._samples_beside, 0
        return samples

    _phase_of_replays = FORWARD

    def _replayed(self, module: Any) -> None:
        """Notes a call by a replay. A recording starts only while no search for modules is on, as after a call."""
        self._end_search()
        self._end_call(module)
        self._searches -= 1
        self._search()

    # What they share.

    def _begin_in_fork(self) -> None:
        super()._begin_in_fork()
        self._finding, self._beside = threading.Lock(), threading.Lock()  # another thread may have held them

    def _draws_now(self) -> bool:
        """Tells whether the calling thread waits for a DataLoader, whose samples may pass through modules."""
        return self._thread == threading.get_ident() and DATA_WAIT in self._timeline.open

    def _search(self) -> None:
        """Looks for outermost modules in the next calls, unless it already does or has done so long enough."""
        if self._module_call is None and self._searches > 0 and not self._over:
            self._begin_search()

    def _records(self) -> bool:
        return True

    def _infers(self, module: torch.nn.Module) -> bool:
        """Tells whether a call of the module now is inference."""
        return not self._trains or not torch.is_grad_enabled() or not unwrapped(module).training

    def _end_call(self, module: torch.nn.Module) -> None:
        """Ends a part of the loop with a call and, with the last one to measure, the program."""
        self._calls += 1
        self._in_training_mode += unwrapped(module).training
        self._with_gradients += torch.is_grad_enabled() and any(each.requires_grad for each in parameters_of(module))
        self._timeline.part.graphs = compiled_graphs()
        self._timeline.end_part(id(module))
        if len(self._roots) > self._reported:
            first = first_parameter(module)
            self._autocast = autocast_of(first) if first is not None else None
            self._treatments.apply_to(list(self._roots.values()), updated=False)
        with cost:
            self._advance()
        if self._host and len(self._roots) > self._reported:
            self._reported = len(self._roots)
            self._report_model(None)

    def _described(self, parts: list[LoopPart], number: int, time: int, *, held: bool = False) -> MeasuredStep:
        """Returns a step, whose samples are those of the module that is called first in a turn."""
        assert self._host
        return super()._described(parts, number, round(1e9 * self._host.unix(parts[0].began)), held=held)

    def _samples_of(self, parts: list[LoopPart]) -> int:
        if self._samples is not None:
            return self._samples
        return sum(part.forwarded for part in parts if part.optimizer == parts[0].optimizer)

    def _finish(self) -> None:
        if self._host:
            if 2 * self._in_training_mode > self._calls:
                self._host.warn(TRAINING_MODE)
            elif 2 * self._with_gradients > self._calls:
                self._host.warn(RECORDS_GRADIENTS)
            if self._overlapping:
                self._host.warn(
                    f"{self._overlapping} of {self._overlapping + self._calls} calls of the model began in another "
                    "thread while one was measured: their samples count, and the latency is that of the others"
                )
        super()._finish()


def _computes(module: torch.nn.Module) -> bool:
    """Tells whether a module can be the model, unlike a transform of images, a loss, or one in a loader's worker."""
    return get_worker_info() is None and first_parameter(module) is not None


def _in_module() -> bool:
    """Tells whether the calling thread is inside the call of a module."""
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if frame.f_code in _CALL:
            return True
        frame = frame.f_back
    return False
