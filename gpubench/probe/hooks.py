"""Installs the probe in a process that has imported torch, and measures its training loop.

The process becomes a rank of the run with the first update of an optimizer. Until then, and in processes that never
train, such as torchrun and the workers of a DataLoader, the probe only sets marks. The outermost modules are looked for
in the step after the first one of an optimizer, so that a model is usually compiled before any of its classes is
changed.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
from inspect import unwrap
from multiprocessing.util import Finalize
from types import CodeType, FunctionType
from typing import Any, Callable, Mapping
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader

from . import ADDRESS_VARIABLE, TREATMENTS_VARIABLE, treatments
from .facts import facts, peak_memory
from .host import Host
from .recording import Recording, is_profiled
from .timeline import EVALUATION, OTHER, Part, Timeline

DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER = "data_wait", "forward", "backward", "optimizer"
LONGEST_SETUP = 4096
"""Marks without an update after which what they measure counts as set-up and not as the first step."""


def install(variables: Mapping[str, str]) -> None:
    """Installs the hooks and the treatments that the environment variables name."""
    Probe(variables[ADDRESS_VARIABLE], json.loads(variables.get(TREATMENTS_VARIABLE, "{}"))).install()


class Probe:
    """The measurement of this process. Its hooks do nothing outside of the thread that trains."""

    def __init__(self, address: str, treatments: dict[str, Any]) -> None:
        """`treatments` are values by dot-key."""
        self._address = address
        self._treatments = treatments
        self._facts: dict[str, Any] = {}
        """How the first DataLoader runs, by the dot-keys of the treatments."""
        self._timeline = Timeline()
        self._thread = 0
        self._over = False
        self._roots: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()
        """The outermost modules that are called in training, by identity."""
        self._models: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()
        """What they wrap, or themselves: a wrapper can be left in training mode while its model is evaluated."""
        self._optimizers: WeakSet[Any] = WeakSet()
        """The optimizers whose modules have been looked for."""
        self._updating: dict[int, int] = {}
        """The phases that were open when the update of an optimizer began, by the identity of the optimizer."""
        self._wrapped: set[type] = set()
        """The classes of modules whose calls are wrapped."""
        self._module_call: Any = None
        """The original `torch.nn.Module.__call__` while the outermost modules are looked for."""
        self._scaled: dict[int, tuple[ref[torch.Tensor], torch.Tensor]] = {}
        """The losses that a gradient scaler has scaled: the result and the loss, by the identity of the result."""
        self._training_loaders: set[int] = set()
        """The identities of the samplers of the loaders that training draws from."""
        self._updates = 0
        self._draws = False
        self._sample_shape = ""
        self._host: Host | None = None
        self._repeat = self._sent = 0
        self._recording: Recording | None = None
        self._recorded = 0
        """The number of complete steps that the recording knows of."""
        self._profiler_reported = False
        self._warmup = 0
        self._wanted: int | None = None
        self._time = 0.0

    def install(self) -> None:
        treatments.install(self._treatments)
        os.register_at_fork(after_in_child=self._begin_in_fork)
        _wrap(dataloader._BaseDataLoaderIter, "__next__", self._next_batch)
        _wrap(torch.autograd, "backward", self._backward)
        _wrap(optimizers.Optimizer, "zero_grad", self._zero_gradients)
        scaler = getattr(torch.amp, "GradScaler", None) or torch.cuda.amp.GradScaler
        _wrap(scaler, "scale", self._scale)
        _wrap(scaler, "step", self._scaler_step)
        optimizers.register_optimizer_step_pre_hook(self._before_update)
        optimizers.register_optimizer_step_post_hook(self._after_update)

    # What stands in for the functions of torch; `call` is the original.

    def _next_batch(self, call: Callable[..., Any], iterator: Any) -> Any:
        if not self._watches() or self._timeline.is_in(DATA_WAIT):
            return call(iterator)
        loader, evaluates = id(iterator._index_sampler), self._evaluates()
        if evaluates and loader not in self._training_loaders:
            return call(iterator)
        self._forget_set_up()
        if evaluates:  # a Trainer may draw the next batches before it leaves the evaluation mode
            self._timeline.suppose_training()
        with self._timeline.phase(DATA_WAIT):
            batch = call(iterator)
        self._facts = self._facts or treatments.of_loader(iterator)
        if size := self._size(batch):
            self._draws = True
            self._timeline.part.drawn += size
        self._timeline.part.loaders.add(loader)
        return batch

    def _call_module(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_compiling() or id(module) not in self._roots or not self._watches():
            return call(module, *args, **kwargs)
        # A forward pass in the backward pass computes activations again that a checkpoint has not kept.
        if self._timeline.is_in(FORWARD) or self._timeline.is_in(BACKWARD):
            return call(module, *args, **kwargs)
        evaluates = self._evaluates()
        self._timeline.decide(training=not evaluates)
        if evaluates or not torch.is_grad_enabled():
            return call(module, *args, **kwargs)
        part = self._timeline.part
        self._training_loaders |= part.loaders
        part.first = part.first or id(module)
        if part.first == id(module):  # others get the same samples, as an actor and its critic do
            part.forwarded += self._size((args, kwargs))
        with self._timeline.phase(FORWARD):
            return call(module, *args, **kwargs)

    def _backward(self, call: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._watches() or self._timeline.is_in(BACKWARD):
            return call(tensors, *args, **kwargs)
        self._forget_set_up()
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)  # an iterator works only once
        for loss in tensors:
            self._keep_loss(loss)
        with self._timeline.phase(BACKWARD):
            return call(tensors, *args, **kwargs)

    def _zero_gradients(self, call: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._watches() or self._timeline.is_in(OPTIMIZER):
            return call(optimizer, *args, **kwargs)
        self._forget_set_up()
        with self._timeline.phase(OPTIMIZER):
            return call(optimizer, *args, **kwargs)

    def _scale(self, call: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = call(scaler, outputs)
        if type(outputs) is torch.Tensor and scaled is not outputs and self._watches():
            self._scaled[id(scaled)] = ref(scaled), outputs.detach()
        return scaled

    def _scaler_step(self, call: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._watches() or not scaler.is_enabled():
            return call(scaler, optimizer, *args, **kwargs)
        updates = self._updates
        with self._timeline.phase(OPTIMIZER):
            found = call(scaler, optimizer, *args, **kwargs)
        if self._updates == updates:  # the gradients have infinities, so that the optimizer was not called
            self._end_part(optimizer, skipped=True)
        return found

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._host and not self._watches() and not _is_compiling():
            self._thread, self._timeline = threading.get_ident(), Timeline()
        if not self._watches():
            return
        if (left_open := self._updating.get(id(optimizer))) is not None:  # its last update has raised an error
            self._timeline.leave_all_but(left_open)
        self._updating[id(optimizer)] = self._timeline.depth
        self._timeline.enter(OPTIMIZER)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._watches():
            self._updating.pop(id(optimizer), None)
            self._timeline.leave()
            self._timeline.part.infinities = getattr(optimizer, "found_inf", None)
            self._updates += 1
            self._end_part(optimizer)

    # What they share.

    def _watches(self) -> bool:
        """Returns whether the calling thread is the one to measure: the one that trains, or else the first one seen."""
        if _is_compiling() or self._over:
            return False
        here = threading.get_ident()
        self._thread = self._thread or here
        return self._thread == here

    def _begin_in_fork(self) -> None:
        """Measures a forked process on its own. That of a rank, such as a worker of a DataLoader, is not measured."""
        if self._host:
            self._over = True
            self._host.close()  # otherwise the host would not learn that the rank has ended
        else:
            self._thread, self._timeline = 0, Timeline()

    def _forget_set_up(self) -> None:
        """Forgets what came long before the first update, or all the time in a process that never updates."""
        if not self._host and len(self._timeline.part.marks) > LONGEST_SETUP:
            self._timeline = Timeline()

    def _evaluates(self) -> bool:
        """Returns whether the outermost modules are in evaluation mode, and gives that time its own phase."""
        models = [model for each in self._models.valuerefs() if (model := each()) is not None]
        evaluates = bool(models) and not any(model.training for model in models)
        self._timeline.rebase(EVALUATION if evaluates else OTHER)
        return evaluates

    def _size(self, batch: Any) -> int:
        """Returns the number of samples in a batch: the first dimension of its first tensor; 0 without a tensor."""
        try:
            tensor = _first_tensor(batch)
            if tensor is None or not tensor.dim():
                return 0
            size = int(tensor.size(0))
            self._sample_shape = self._sample_shape or " x ".join(map(str, tensor.shape[1:]))
        except Exception:  # the batch is the program's own class, or a tensor without a shape, as a nested one
            return 0
        return size

    def _keep_loss(self, loss: Any) -> None:
        result, unscaled = self._scaled.pop(id(loss), (None, None))
        if result and result() is loss:
            loss = unscaled
        if type(loss) is torch.Tensor and loss.numel() == 1:
            loss = loss.detach()
            self._timeline.part.losses.append((loss, loss._version))

    def _end_part(self, optimizer: Any, *, skipped: bool = False) -> None:
        """Ends a part of the loop and, with the last one to measure, the program."""
        self._scaled.clear()
        self._timeline.end_part(id(optimizer), skipped=skipped)
        self._look_for_modules(optimizer)
        if self._host is None:
            self._join()
        if self._host and (self._timeline.ended <= self._warmup or self._host.due()):
            self._send_steps()
        if self._recording:
            self._record(self._recording, self._timeline.complete)
        if self._wanted and self._timeline.complete >= self._wanted:
            self._finish()
            raise SystemExit(0)

    def _record(self, recording: Recording, complete: int) -> None:
        """Starts the recording with the first complete step, and advances it with every further one."""
        if complete and not self._recorded:
            recording.start(list(self._roots.values()))
            self._wanted = complete + recording.steps  # on all ranks, so that they end together
        elif complete > self._recorded:
            recording.advance()
        self._recorded = complete

    # The outermost modules.

    def _look_for_modules(self, optimizer: Any) -> None:
        """Looks for the outermost modules after the first update of an optimizer, in the next part of the loop.

        After that part it wraps the calls of their classes. Hooks on the modules would be copied and saved with them,
        and global hooks make compiled modules warn.
        """
        if self._module_call:
            torch.nn.Module.__call__ = self._module_call  # type: ignore[method-assign]
            self._module_call = None
            for cls in {type(root) for root in self._roots.values()} - self._wrapped:
                _wrap(cls, "__call__", self._call_module)
                self._wrapped.add(cls)
            treatments.compile_modules(self._treatments, list(self._roots.values()))
            self._report_model(optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            treatments.apply_again(self._treatments)
            self._module_call = torch.nn.Module.__call__
            _wrap(torch.nn.Module, "__call__", self._find)

    def _find(self, call: Callable[..., Any], module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not _is_compiling() and self._watches() and module.training and torch.is_grad_enabled():
            inner = self._timeline.is_in(FORWARD) or self._timeline.is_in(BACKWARD)
            if not inner and any(parameter.requires_grad for parameter in module.parameters()):
                self._roots[id(module)] = module
                model = _unwrapped(module)
                self._models[id(model)] = model
        return self._call_module(call, module, *args, **kwargs)

    # What the host is told.

    def _join(self) -> None:
        """Makes this process a rank of the run. Without a host the program runs on, unmeasured."""
        _keep_from_compilation()
        try:
            self._host = host = Host(self._address, *_place(), _open_store)
        except (OSError, ValueError, KeyError):
            self._over = True
            return
        settings, (self._repeat, *_) = host.job["settings"], host.job["repeats"]
        steps, self._warmup = settings["training"]["steps"], settings["training"]["warmup_steps"]
        self._wanted = None if steps == "all" else steps + self._warmup
        self._time = host.unix(self._timeline.began)
        atexit.register(self._leave)
        Finalize(None, self._leave, exitpriority=0)  # processes that multiprocessing forks run no exit handlers
        if host.rank == 0:
            host.put("environmentcaptured", environment=facts())
        profiling = settings["profiling"]
        if self._repeat == host.job["profiled"]:
            self._recording = Recording(profiling, host, self._repeat)
        if self._wanted:
            host.put("planned", repeat=self._repeat, steps=self._wanted)
        host.flush()

    def _report_model(self, optimizer: Any) -> None:
        if self._host:
            found = {id(each): each for root in self._roots.values() for each in root.parameters()}
            parameters = [each for each in found.values() if not is_lazy(each)]
            self._host.put(
                "modelbuilt",
                repeat=self._repeat,
                parameters=sum(each.numel() for each in parameters),
                trainable_parameters=sum(each.numel() for each in parameters if each.requires_grad),
                sample_shape=self._sample_shape,
                tokens_per_sample=None,
                seconds=None,
                device=next((each.device.type for each in parameters), None),
                settings=self._facts | treatments.of_process(list(self._roots.values()), optimizer),
            )

    def _send_steps(self, *, ended: bool = False) -> None:
        """Sends the steps that the device has finished; `ended` after the last one."""
        assert self._host
        if not self._profiler_reported and not self._recording and is_profiled():
            self._profiler_reported = True
            self._host.warn("the program runs a profiler of its own, which slows it down")
        steps = [self._step(parts) for parts in self._timeline.steps(ended=ended)]
        if steps:
            self._host.put("stepsmeasured", steps=steps)
        self._host.flush()

    def _step(self, parts: list[Part]) -> dict[str, Any]:
        """Returns a step as the fields of `gpubench.events.Step`."""
        assert self._host
        phases, loss, skipped = self._timeline.measure(parts)
        total = sum(phases.values())
        step = {
            "repeat": self._repeat,
            "rank": self._host.rank,
            "epoch": 0,
            "step": self._sent,
            "time": self._time,
            "total": total,
            "phases": phases,
            "host": (parts[-1].marks[-1][1].ns - parts[0].marks[0][1].ns) / 1e9,
            "samples": sum(part.drawn if self._draws else part.forwarded for part in parts),
            "loss": loss,
            "starved": parts[0].device_idle,
            "skipped": skipped,
        }
        self._sent += 1
        self._time += total
        return step

    def _finish(self) -> None:
        """Sends what is left and leaves the run. It waits for the device, whose last step has been issued."""
        self._over = True
        wall = self._timeline.end()
        self._send_steps(ended=True)
        assert self._host
        if self._recording:
            self._recording.close()
        self._host.put("repeatdone", repeat=self._repeat, wall=wall, **peak_memory())
        self._host.put("done")
        self._host.flush()

    def _leave(self) -> None:
        """Leaves the run at the end of a program that ends before all steps were measured."""
        if not self._over:
            self._finish()


def _place() -> tuple[int, int]:
    """Returns (rank, world size) of this process: of the process group, or according to torchrun's variables."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _open_store() -> Any:
    """Returns the store of the process group, through which its ranks have found each other."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside of DistributedDataParallel, torch.compile and the like, or the module itself."""
    wrapped = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
    return _unwrapped(wrapped) if isinstance(wrapped, torch.nn.Module) else module


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replaces a function of a module or a class by `around`, which gets the original as its first argument."""
    call = getattr(owner, name)

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(call, *args, **kwargs)

    setattr(owner, name, wrapper)


def _keep_from_compilation() -> None:
    """Keeps torch.compile from compiling the functions of the probe when a compiled function calls them.

    Between two graphs of a function, torch.compile compiles every Python function that is called.
    """
    package = __name__.rpartition(".")[0]
    if "torch._dynamo" not in sys.modules:  # every optimizer imports it
        return
    try:
        from torch._dynamo.eval_frame import skip_code
    except ImportError:  # another release of PyTorch
        return

    package = __package__ or ""
    found = [
        value for name in list(sys.modules) if name.startswith(package) for value in vars(sys.modules[name]).values()
    ]
    while found:
        each = found.pop()
        if isinstance(each, CodeType):
            skip_code(each)
            found += each.co_consts
        elif isinstance(each, (staticmethod, property)):
            found.append(each.fget if isinstance(each, property) else each.__func__)
        elif isinstance(each, (FunctionType, type)) and each.__module__.startswith(package):
            found += vars(each).values() if isinstance(each, type) else [unwrap(each).__code__]


_is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._dynamo.is_compiling


def _first_tensor(batch: Any, depth: int = 3) -> torch.Tensor | None:
    """Returns the first tensor in nested sequences and mappings, or None."""
    if isinstance(batch, torch.Tensor):
        return batch
    if not depth:
        return None
    if not isinstance(batch, (tuple, list)):
        values = getattr(batch, "values", None)
        batch = tuple(values()) if callable(values) else ()
    for part in batch:
        if (found := _first_tensor(part, depth - 1)) is not None:
            return found
    return None
