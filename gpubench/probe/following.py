"""Follows the memory of a program from the import of torch on: who allocates what, and in which phase of a step."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import Counter
from json import dumps
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.data._utils import worker

from .allocations import Ledger, Unreadable, owners_in, tensors
from .attributes import attributes
from .device import UNANSWERED, about, keeps_storages
from .host import Host
from .modules import named_modules, own_buffers, own_parameters
from .timeline import EVALUATION, OTHER, period
from .treatments import unwrapped

MOST = 2_000_000
"""The number of allocations on a device after which no more are recorded, to limit the memory that they take here."""

_PHASES = {"data_wait": "data"}
"""The phases of memory that have another name on the timeline."""
BATCH, PREPARATION, REST = "after data", "after backward", "after update"
_THEN = {"data": BATCH, "forward": "loss", "backward": PREPARATION, EVALUATION: REST}
"""The phase after one of the timeline, until the next one begins."""
NAMES = {BATCH: "data", PREPARATION: "optimizer", REST: "unknown"}
"""The phases that have another name in the history: moving a batch, clipping gradients, and what follows an update."""
_UPDATING = ("optimizer", "zero_grad")
_TRAINING = ("data", "forward", "backward")
_LOADING = {name: name for name in ("data", BATCH, "zero_grad")}
_COMPUTING = {BATCH: "forward", PREPARATION: "forward", REST: "forward", "zero_grad": "zero_grad"}
"""The phases in which a program that calls no module has computed its loss, with the name of what it did."""


class Following(TorchDispatchMode):
    """The recording of this process. It sees what the thread that imports torch allocates, and its backward passes.

    A round is the time from one update to the next, by whichever optimizer.
    """

    def __init__(self, roots: Mapping[int, nn.Module]) -> None:
        """`roots` are the outermost modules that are called in training, by identity; they are added as they appear."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._roots = roots
        self._ledgers: dict[torch.device, Ledger] = {}
        self._running: list[str] = []
        """The paths of the modules that are running."""
        self._names: dict[int, str] = {}
        """The paths of the modules of the known roots, by identity."""
        self._known: set[int] = set()
        self._thread = threading.get_ident()
        self._phase = self._resumed = "start"
        self._round: int | None = None
        self._ended = self._forwarded = self._closed = self._compiles = self._evaluates = False
        self._optimizers: list[list[int]] = []
        """The optimizers that update in each round."""
        self._updates: Counter[int] = Counter()
        self._unreadable = ""

    @property
    def updates(self) -> int:
        """The number of updates that every optimizer so far has made."""
        return min(self._updates.values(), default=0)

    @property
    def training(self) -> bool:
        """Whether a forward or backward pass of training has begun."""
        return self._round is not None

    def install(self) -> None:
        """Begins the recording. torch.compile must be disabled: its functions refuse to run under a dispatch mode.

        Raises SystemExit where PyTorch makes a new Python object for a storage each time, which tells no end of it.
        """
        if not keeps_storages():
            raise SystemExit(
                f"gpubench memory needs PyTorch 2.2 or later for a program; this one has {torch.__version__}"
            )
        self._around(nn.Module, "__call__", self._call_module)
        nn.modules.module.register_module_forward_hook(self._after_module)
        self._around(torch.UntypedStorage, "resize_", self._resize)
        self._around(torch, "compile", self._compile)
        self._around(worker, "_worker_loop", self._load)
        if torch.distributed.is_available():
            reducer = torch.distributed.Reducer  # type: ignore[attr-defined]
            self._around(reducer, "__init__", self._make_buckets)
            self._around(reducer, "_rebuild_buckets", self._make_buckets)
        self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper such as DTensor, which dispatches again with the tensors inside
        result = func(*args, **(kwargs or {}))
        if not self._closed:
            try:
                for tensor in tensors(result):
                    if not isinstance(tensor, FakeTensor) and (ledger := self._ledger(tensor.device)):
                        ledger.see(tensor, func, _users_line)
            except Unreadable as kind:
                self._unreadable = str(kind)
            except Exception:  # a tensor without storage, such as one of functorch, or of a class of the program
                pass
        return result

    def enter(self, name: str) -> None:
        """Notes a phase of the timeline. OTHER stands for the time outside of all others."""
        before, phase = self._phase, _PHASES.get(name, name)
        if name == EVALUATION:
            self._evaluates = True
        elif name == OTHER:
            phase = self._resumed if before in _UPDATING else _THEN.get(before, before)
        elif phase in _UPDATING and before not in _UPDATING:
            self._resumed = before
        if phase in _TRAINING and self._ended:
            self._round, self._ended = (self._round or 0) + 1, False
        if phase in ("forward", "backward") and self._round is None:
            self._round = 0
            self._amend(_LOADING)
        if phase == "backward" and before != "backward" and not self._forwarded:
            self._amend(_COMPUTING)
        self._forwarded = phase == "forward" or (self._forwarded and phase not in ("data", "backward"))
        self._phase = phase
        for ledger in self._ledgers.values():
            ledger.enter(phase, self._round)

    def called(self, root: nn.Module, batch: Any) -> None:
        """Notes a call of one of the outermost modules."""
        if id(root) not in self._known:
            model = unwrapped(root)
            prefix = f"{type(model).__name__}." if self._names else ""
            self._known.add(id(root))
            self._names[id(root)] = prefix.rstrip(".")
            self._names.update((id(part), f"{prefix}{path}".rstrip(".")) for path, part in named_modules(model))
            for path, part in named_modules(model):
                self._claim(own_parameters(part), "parameters", f"{prefix}{path}".rstrip("."))
                self._claim(own_buffers(part), "buffers", f"{prefix}{path}".rstrip("."))
        self._each(lambda ledger: ledger.claim_inputs(batch))

    def untrained(self, root: nn.Module) -> None:
        """Notes an outermost module that is not trained, such as a teacher, or that is not yet known to be trained."""
        model = unwrapped(root)
        for path, part in named_modules(model):
            place = f"{type(model).__name__}.{path}".rstrip(".")
            self._claim(own_parameters(part), "parameters", place)
            self._claim(own_buffers(part), "buffers", place)

    def draws(self, dataset: Any) -> None:
        """Notes that a DataLoader draws from a dataset: the tensors that it holds are inputs."""
        if id(dataset) not in self._known:
            self._known.add(id(dataset))
            held = attributes(dataset)
            self._each(lambda ledger: ledger.claim_inputs(held))

    def updating(self, optimizer: Any) -> None:
        """Notes what an optimizer updates, before it does."""
        owners = self._owners(optimizer)
        self._each(lambda ledger: ledger.claim(owners, "parameters"))
        self._each(lambda ledger: ledger.claim_gradients_of(owners))

    def updated(self, optimizer: Any) -> None:
        """Notes an update, after which a new step may begin."""
        owners = self._owners(optimizer)
        self._each(lambda ledger: ledger.claim_state_of(optimizer, owners))
        if self._round is None:
            self._round = 0
        self._optimizers += [[] for _ in range(self._round + 1 - len(self._optimizers))]
        self._optimizers[self._round].append(id(optimizer))
        self._updates[id(optimizer)] += 1
        self._resumed, self._ended = REST, True

    def close(self) -> None:
        """Ends the recording."""
        if self._closed:
            return
        self._closed = True
        for ledger in self._ledgers.values():
            ledger.close()
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def send(self, host: Host, repeat: int, wanted: int) -> None:
        """Sends the history of the device with the largest peak: that of the CPU only if there is no other.

        `wanted` is the number of updates that were to be recorded.
        """
        self.close()
        used = {device: ledger.peak for device, ledger in self._ledgers.items() if ledger.peak}
        found = {device: peak for device, peak in used.items() if device.type != "cpu"} or used
        if not found:
            return
        device = max(found, key=lambda one: found[one])
        rounds = period(hash(tuple(each)) for each in self._optimizers)
        history = self._ledgers[device].document(rounds, NAMES)
        document = {**about(device), "history": history, "rank": host.rank}
        history["notes"] = list(self._notes(device, found, wanted))
        host.send_file("memoryrecorded", dumps(document, separators=(",", ":")).encode(), repeat=repeat)

    def _notes(self, device: torch.device, found: Mapping[torch.device, int], wanted: int) -> Iterator[str]:
        if self.updates < wanted:
            yield f"the program ended after {self.updates} of {wanted} optimizer steps"
        if not self._evaluates:
            seen = f"{self.updates} recorded optimizer steps"
            yield f"no evaluation was seen in the {seen}, so that its memory is unknown"
        if self._compiles:
            yield "torch.compile was off during the recording; compiled code fuses operators, and so needs less memory"
        for other, peak in found.items():
            if other != device:
                yield f"{other} was used too, with up to {peak / 2**20:,.1f} MiB"
        if self._unreadable:
            yield f"PyTorch does not show the memory of {self._unreadable}, which the program uses"
        for query, error in UNANSWERED.items():
            yield f"PyTorch could not tell {query}: {error}"
        if self._ledgers[device].count >= MOST:
            yield f"only the first {MOST:,} allocations were recorded"

    def _ledger(self, device: torch.device) -> Ledger | None:
        """Returns the ledger of a device, a new one for a new device; None for one without memory, or a full one."""
        if device.type == "meta":
            return None
        found = self._ledgers.get(device)
        if found is None:
            found = self._ledgers[device] = Ledger(device, self._running)
            if self._phase != "start":
                found.enter(self._phase, self._round)
        return found if found.count < MOST else None

    def _owners(self, optimizer: Any) -> dict[Any, str]:
        """Returns the paths of the modules of an optimizer's parameters, as those of the roots; "" if unknown."""
        paths: dict[Any, str] = {}
        for root in list(self._roots.values()):
            prefix = self._names.get(id(root), "")
            prefix = f"{prefix}." if prefix else ""
            paths.update((one, f"{prefix}{path}".rstrip(".")) for one, path in owners_in(unwrapped(root)).items())
        own = [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]
        return {one: paths.get(one, "") for one in own}

    def _claim(self, found: Any, category: str, path: str) -> None:
        claimed = list(found)
        self._each(lambda ledger: ledger.claim(claimed, category, path))

    def _each(self, action: Callable[[Ledger], object]) -> None:
        """Applies an action to every ledger, up to a tensor whose memory PyTorch does not show."""
        for ledger in list(self._ledgers.values()):
            try:
                action(ledger)
            except Unreadable as kind:
                self._unreadable = str(kind)
            except Exception:  # a tensor without storage, such as a lazy parameter
                pass

    def _amend(self, names: Mapping[str, str]) -> None:
        for ledger in self._ledgers.values():
            ledger.amend(names, self._round)

    # What stands in for the functions of torch; `call` is the original.

    def _around(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        call = getattr(owner, name)

        @functools.wraps(call)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(*args, **kwargs) if self._closed else around(call, *args, **kwargs)

        setattr(owner, name, wrapper)

    def _call_module(self, call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = self._names.get(id(module))
        if path is None or threading.get_ident() != self._thread:
            return call(module, *args, **kwargs)
        self._running.append(path)
        try:
            return call(module, *args, **kwargs)
        finally:
            self._running.pop()

    def _after_module(self, module: nn.Module, inputs: object, output: object) -> None:
        """Notes parameters that FSDP2 has gathered; this hook runs before the one that frees them again."""
        path = self._names.get(id(module))
        if path is not None and not self._closed:
            self._each(lambda ledger: ledger.claim_gathered(module, path))

    def _resize(self, call: Callable[..., Any], storage: Any, size: int) -> Any:
        """FSDP2 allocates by a `resize_` of storages, which dispatch modes do not see."""
        found = call(storage, size)
        for ledger in self._ledgers.values():
            ledger.resized(storage)
        return found

    def _load(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Leaves a worker process of a DataLoader alone."""
        self.close()
        return call(*args, **kwargs)

    def _make_buckets(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The buckets of DistributedDataParallel are copies of the gradients, or the gradients themselves."""
        counts = {device: ledger.count for device, ledger in self._ledgers.items()}
        found = call(*args, **kwargs)
        for device, ledger in self._ledgers.items():
            ledger.claim_since(counts.get(device, 0), "gradients")
        return found

    def _compile(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._compiles = True
        return call(*args, **kwargs)


_LIBRARIES = (os.path.dirname(torch.__file__), os.path.dirname(os.path.abspath(__file__)), os.path.dirname(os.__file__))


@functools.lru_cache(maxsize=None)
def _is_users(file: str) -> bool:
    return not (file.startswith(("<", *_LIBRARIES)) or "site-packages" in file or "dist-packages" in file)


def _users_line() -> str:
    """Returns the innermost line of the program's own code that is running, such as "gpt/train.py:54"."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
