"""Counts the samples of a program that draws from no DataLoader: those that its outermost modules are given.

The samples of a call are the entries of a dimension of its first tensor: the first one, or the second one if a layer in
the module that takes sequences first, or the loss, shows that it is the second one that counts samples. What a call is
given counts once, where the program

- computes with gradients from an earlier call, as the steps of a solver do
- gives the same tensor again before a backward pass, or with other parameters
- gives what a module has returned, as the critic is given what the generator has made
- differentiates by the input alone, as an attack does

and where calls of different sizes precede a backward pass, those as large as its loss count, which the choice of an
action is not. `doubt` says what remains uncertain.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any, Callable, Mapping
from weakref import ref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import PackedSequence

from .device import keeps_storages
from .modules import first_parameter, parameters_of
from .observed import first_tensor, is_vector
from .timeline import LoopPart
from .treatments import unwrapped

MOST_NODES = 64
"""The nodes of a loss's graph in which its rows are looked for."""
MOST_LOOKS = 32
"""The backward passes whose losses are looked at, where the calls before them are all of one size."""
ALIKE = 3
"""The backward passes in a row whose loss has the same number of rows, after which these count as samples."""
DOUBTFUL = 0.1
"""What is uncertain is said if it is so in at least this share of the updates."""
LAYERS = (torch.nn.RNNBase, torch.nn.RNNCellBase, torch.nn.MultiheadAttention, torch.nn.Transformer)
"""The layers that tell which dimension of their input counts samples."""
COLOURS = (1, 3, 4)
"""The first dimensions of a picture."""
LATEST, MOST_CALLS = 64, 1024
"""The calls among which the same tensor is looked for, and those that are kept until a backward pass follows."""
MOST_MADE = 8
"""The number of results that are known as such."""
KEEPS_STORAGES = keeps_storages()
"""Whether a weak reference of Python to a storage lasts as long as the storage."""


@dataclass(eq=False)
class ModuleCall:
    """What a module is given in a call."""

    samples: int
    tensor: ref[torch.Tensor] | None
    version: int | None
    """The version of the module's first parameter, which changes when it does; None for a call in an inner loop."""


@dataclass
class Given:
    """What an outermost module is given from one update to the next."""

    samples: int = 0
    """Those of the calls that a backward pass has followed."""
    largest: int = 0
    """The samples of the largest one of them."""
    calls: list[ModuleCall] = field(default_factory=list)
    """Those that no backward pass has followed yet."""
    counted: list[ModuleCall] = field(default_factory=list)
    """The latest of those that one has followed."""
    shape: tuple[int, ...] = ()
    """The shape of the first tensor of the last call that counts."""

    def count(self, call: ModuleCall) -> None:
        self.samples += call.samples
        self.largest = max(self.largest, call.samples)
        self.counted.append(call)
        del self.counted[:-LATEST]


@dataclass
class RowsOfLoss:
    """The losses of a module that have fewer rows than it is given entries."""

    rows: int
    entries: int
    """Those before the first one of these losses."""
    alike: int = 1
    """The losses in a row with as many rows."""
    same: bool = True
    """Whether as many entries came before each of them."""

    def decide(self, entries: int) -> bool:
        """Notes one more of these losses, and tells whether its rows are samples from now on."""
        self.alike += 1
        self.same = self.same and entries == self.entries
        if self.alike == ALIKE and self.same and entries % self.rows:
            self.alike = 0  # they are some of the entries, such as those of a mask that is always the same
        return self.alike == ALIKE

    def of(self, entries: int) -> int:
        """Returns the rows of a loss after so many entries."""
        return entries * self.rows // self.entries if self.same else self.rows


class GivenSamples:
    """The calls of the outermost modules of the thread that trains."""

    def __init__(self, roots: Mapping[int, torch.nn.Module]) -> None:
        """`roots` are the outermost modules that are called in training, by identity."""
        self._roots = roots
        self._given: dict[int, Given] = {}
        """What they are given in this part of the loop."""
        self._dimensions: dict[int, int] = {}
        """The dimension that counts the samples of each, as far as something shows it."""
        self._by_loss: set[int] = set()
        """Those for which the loss has shown it."""
        self._rows: dict[int, RowsOfLoss] = {}
        """Those of the modules whose losses have fewer rows than the modules have entries."""
        self._last: tuple[ref[torch.Tensor] | None, int] = None, 0
        """The tensor that was counted last, and the identity of the optimizer that has updated with it."""
        self._counting: Counter[int] = Counter()
        """The updates by the optimizer that had samples to count."""
        self._doubts: dict[str, tuple[int, str]] = {}
        """What is uncertain by the name of the reason: (number of times, the last one in words)."""
        self._made: dict[Any, Callable[[], Any]] = {}
        """Where the modules' last results are, by what identifies a storage."""
        self._looks = MOST_LOOKS
        self._latest: ModuleCall | None = None
        """The last call, if its samples are its own."""
        self.model = ""
        """The class of the module whose samples count."""
        self.by_rows = False
        """Whether they are the rows of its loss."""

    def size(self, root: torch.nn.Module, given: Any) -> int:
        """Returns the number of samples in a call of the module with the arguments and keyword arguments `given`.

        It is 1 for a vector of real numbers, such as one state of an environment, and 0 without a tensor.
        """
        dimension = self._dimensions.get(id(root), 0) if self._dimensions else 0
        try:
            args = given[0]
            if args and type(args[0]) is torch.Tensor and args[0].dim() > 1:  # as in nearly every call
                return int(args[0].shape[dimension])
            return _size(given, dimension)
        except Exception:  # what it is given is of the program's own class, or a tensor without a shape
            return 0

    def call(self, root: torch.nn.Module, given: Any) -> None:
        """Notes a call in training that no other outermost module makes."""
        mine = self._given.setdefault(id(root), Given())
        self._latest = None
        tensor, shape = _first(given)
        if (mine.calls and getattr(tensor, "grad_fn", None) is not None) or self.is_made(tensor):
            return
        version = getattr(first_parameter(root), "_version", 0)
        again = [each for each in mine.calls[-LATEST:] if each.tensor and each.tensor() is tensor]
        again += [each for each in mine.counted if each.tensor and each.tensor() is tensor and each.version != version]
        if tensor is not None and again:
            return
        self._latest = ModuleCall(self.size(root, given), ref(tensor) if tensor is not None else None, version)
        mine.calls.append(self._latest)
        mine.shape = shape
        if len(mine.calls) > MOST_CALLS:
            for each in mine.calls[:-LATEST]:
                mine.count(each)
            del mine.calls[:-LATEST]

    def note(self, root: int, call: ModuleCall, shape: tuple[int, ...]) -> None:
        """Notes the first call in a part, of the module with this identity and with a tensor that none has returned."""
        self._latest = call
        self._given[root] = Given(calls=[call], shape=shape)

    def fail(self, root: torch.nn.Module) -> None:
        """Notes that the last call of a module has raised an error."""
        mine = self._given.get(id(root))
        if mine and mine.calls and mine.calls[-1] is self._latest:
            mine.calls.pop()

    def returned(self, result: Any) -> None:
        """Notes what a call of an outermost module has returned."""
        try:
            if (tensor := first_tensor(result)) is not None:
                storage = tensor.untyped_storage()
                self._made.pop(storage._cdata, None)  # one that was freed may have had its place
                self._made[storage._cdata] = _reference(storage)
                if len(self._made) > MOST_MADE:
                    del self._made[next(iter(self._made))]
        except Exception:  # of the program's own class, or a tensor without a storage
            pass

    def layer(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes a call of a layer within that of an outermost module."""
        if not isinstance(module, LAYERS):
            return
        try:
            found = _sequences(module, args[0] if args else next(iter(kwargs.values()), None))
        except Exception:  # a tensor without a shape, as a nested one
            return
        for key, mine in self._given.items():
            if found and key not in self._by_loss and mine.calls and len(mine.shape) > 1:
                length, sequences = found
                if mine.shape[1] == sequences != mine.shape[0] and length in (None, mine.shape[0]):
                    self._settle_dimension(key, 1)
                elif mine.shape[0] == sequences != mine.shape[1]:
                    self._settle_dimension(key, 0)

    def settle(self, losses: list[Any]) -> None:
        """Notes a backward pass of the losses, by parameters, which the calls until now are for."""
        if not self._given:
            return
        calls = [(key, call) for key, mine in self._given.items() for call in mine.calls]
        if not calls:
            return
        sizes = {call.samples for _, call in calls}
        rows: set[int] = set()
        if len(sizes) > 1 or self._looks > 0:
            self._looks -= 1  # which `_compare` takes back where it leaves a doubt
            for loss in losses:
                rows.update(_rows(loss))
        for key, mine in self._given.items():
            if mine.calls:
                self._settle(key, mine, rows)

    def _settle(self, key: int, mine: Given, rows: set[int]) -> None:
        """Counts the calls of a module since the last backward pass, whose losses have these numbers of rows."""
        by_rows = self._by_rows(key, mine, rows)
        if not by_rows and len(mine.calls) == 1:
            self._compare(key, mine, rows)
        if len({call.samples for call in mine.calls}) > 1 and any(call.samples in rows for call in mine.calls):
            mine.calls = [call for call in mine.calls if call.samples in rows]
        if not by_rows and len(mine.calls) > 1:
            self._doubt("several", f"{self._name(key)} is given several batches before a backward pass, all added")
        for call in mine.calls:
            mine.count(call)
        mine.calls = []

    def _by_rows(self, key: int, mine: Given, rows: set[int]) -> bool:
        """Counts the rows of the loss if these are the samples, such as rays of many points, or graphs of many nodes.

        They are if a loss has fewer rows than the calls before it have entries, and as many each time, while the
        entries are a multiple of them or vary. Returns whether it has counted.
        """
        entries = sum(call.samples for call in mine.calls)
        seen = self._rows.get(key)
        if seen is None or seen.alike < ALIKE:
            found = max(rows, default=0)
            others = not any(not each.samples or _divides(each.samples, rows) for each in mine.calls)
            if not (len(rows) == 1 and 1 < found < entries and others):
                self._rows.pop(key, None)
                return False
            if seen is None or seen.rows != found:
                self._rows[key] = RowsOfLoss(found, entries)
                return False
            if not seen.decide(entries):
                return False
            self._doubts.clear()
        mine.samples += seen.of(entries) - entries
        return True

    def settle_inner(self, losses: list[Any]) -> None:
        """Notes that losses are differentiated so that the result can be too, as those of an inner loop are."""
        rows = set().union(*map(_rows, losses))
        for mine in self._given.values():
            inner = [call for call in mine.calls if call.samples in rows] or mine.calls[-1:]
            mine.calls = [call for call in mine.calls if call not in inner]
            for call in inner:
                call.version = None
                mine.count(call)

    def reject(self) -> None:
        """Notes that the calls since the last backward pass were differentiated by their inputs alone."""
        for mine in self._given.values():
            mine.calls = []

    @property
    def is_settled(self) -> bool:
        """Whether losses are not looked at any more where a module is called once before each of them."""
        return self._looks <= 0 and not self._given

    def update(self, part: LoopPart, optimizer: int, groups: Any) -> None:
        """Notes an update that ends a part, by an optimizer with this identity and groups of parameters, if it has any.

        The part gets its samples, unless no module was called that is known to be given any. They are those of the
        module that is called first, as the generator is before its critic, unless the optimizer updates another one
        that gets larger batches, as the critic does after an actor has chosen an action.
        """
        if not self._given:
            return
        self.settle([])
        given, self._given = self._given, {}
        if part.first not in given:
            return
        key = self._chosen(given, part.first, groups)
        mine = given[key]
        self.model = self.model or self._name(key)
        self.by_rows = key in self._rows and self._rows[key].alike >= ALIKE
        last = mine.counted[-1].tensor if mine.counted else None
        tensor, updated = self._last
        if last and tensor and last() is tensor() is not None and optimizer != updated:
            part.forwarded = 0  # an update of the actor with the batch of the critic
            return
        self._last = last, optimizer
        if mine.samples:
            self._counting[optimizer] += 1
        part.forwarded = mine.samples

    def is_made(self, tensor: torch.Tensor | None) -> bool:
        """Tells whether a module has returned a tensor, or one with the same storage, as far as it is known."""
        try:
            found = self._made.get(tensor.untyped_storage()._cdata) if tensor is not None else None
        except Exception:  # it has no storage
            return False
        return found is not None and found() is not None

    def doubt(self) -> str:
        """Returns why the number of samples is uncertain, as a sentence; empty if nothing shows that it is."""
        updates = sum(self._counting.values())
        number, said = max(self._doubts.values(), default=(0, ""))
        return said if number >= DOUBTFUL * updates else ""

    def _chosen(self, given: Mapping[int, Given], first: int, groups: Any) -> int:
        larger = [key for key, mine in given.items() if mine.largest > given[first].largest] if groups else []
        updated = {id(each) for group in groups for each in group["params"]} if larger and groups else set()
        for key in larger:
            root = self._roots.get(key)
            if root is not None and any(id(each) in updated for each in parameters_of(root)):
                return key
        return first

    def _compare(self, key: int, mine: Given, rows: set[int]) -> None:
        """Compares the rows of the losses of a module's only call with its samples: some should be these, or multiples.

        If they are not, but the entries of the second dimension of a batch of sequences are, these are samples.
        """
        call, shape = mine.calls[0], mine.shape
        if not rows or not call.samples:
            return
        if len(shape) == 3 and call.samples == shape[0] != shape[1] in rows and not _divides(shape[0], rows):
            self._settle_dimension(key, 1)
            self._by_loss.add(key)
        if not _divides(call.samples, rows):
            self._looks += 1
            self._doubt("loss", f"{self._name(key)} is given {call.samples:,} entries, but its loss has {max(rows):,}")

    def _settle_dimension(self, key: int, dimension: int) -> None:
        """Decides which dimension counts the samples of a module, those of its last call included."""
        mine = self._given[key]
        if mine.calls[-1].samples in mine.shape[:2]:
            self._dimensions[key] = dimension
            mine.calls[-1].samples = mine.shape[dimension]

    def _doubt(self, reason: str, said: str) -> None:
        self._doubts[reason] = self._doubts.get(reason, (0, ""))[0] + 1, said

    def _name(self, key: int) -> str:
        root = self._roots.get(key)
        return type(unwrapped(root)).__name__ if root is not None else "a module"


def _divides(samples: int, rows: set[int]) -> bool:
    return any(each % samples == 0 for each in rows)


def _reference(storage: torch.UntypedStorage) -> Callable[[], Any]:
    """Returns a weak reference to a storage: called, it returns None once the memory is freed.

    Where it can be one of Python's, it is: in some releases, such as 2.6, one of C++ keeps the storage's Python object,
    whose end tells `Ledger` that the memory is freed.
    """
    if KEEPS_STORAGES:
        return ref(storage)
    reference = StorageWeakRef(storage)
    return lambda: None if reference.expired() else reference


def _first(given: Any) -> tuple[torch.Tensor | None, tuple[int, ...]]:
    """Returns the first tensor of a call and its shape, which is () where it has none."""
    tensor = None
    try:
        tensor = first_tensor(given)
        return tensor, tuple(map(int, tensor.shape)) if tensor is not None else ()
    except Exception:  # what it is given is of the program's own class, or a tensor without a shape, as a nested one
        return tensor, ()


def _size(given: Any, dimension: int) -> int:
    if (listed := _listed(given)) is not None:
        return listed
    tensor = first_tensor(given)
    if tensor is None:
        return 0
    if is_vector(tensor):
        return min(1, tensor.size(0))
    return int(tensor.size(dimension if dimension < tensor.dim() else 0))


def _listed(given: tuple[tuple[Any, ...], Mapping[str, Any]]) -> int | None:
    """Returns the samples of a call whose first argument has one part for each; None if it does not.

    It is a list of pictures, or of other tensors where another argument lists as many, such as their targets, or a
    packed sequence.
    """
    args, kwargs = given
    first, *others = [*args, *kwargs.values()] or [None]
    if isinstance(first, PackedSequence):
        return int(first.batch_sizes[0])
    if not isinstance(first, (tuple, list)) or not first or not all(isinstance(each, torch.Tensor) for each in first):
        return None
    pictures = all(each.dim() == 3 and each.size(0) in COLOURS for each in first)
    targets = any(isinstance(each, (tuple, list)) and len(each) == len(first) for each in others)
    return len(first) if pictures or targets else None


def _sequences(layer: torch.nn.Module, given: Any) -> tuple[int | None, int] | None:
    """Returns (length of the sequences, None if unknown; number of them) that a layer is given; None if unknown."""
    if isinstance(given, PackedSequence):
        return None, int(given.batch_sizes[0])
    if not isinstance(given, torch.Tensor):
        return None
    if isinstance(layer, torch.nn.RNNCellBase):
        return (None, int(given.size(0))) if given.dim() == 2 else None
    if given.dim() != 3:
        return None
    length, sequences = given.shape[:2]
    return (sequences, length) if getattr(layer, "batch_first", False) else (length, sequences)


def _rows(loss: Any) -> set[int]:
    """Returns the first dimensions of what a loss is computed from, as far as operators make one number of it.

    They are in the metadata of its graph; the tensors themselves are not touched.
    """
    found: set[int] = set()
    waiting = [getattr(loss, "grad_fn", None)]
    for _ in range(MOST_NODES):
        if not waiting:
            break
        for node, number in getattr(waiting.pop(), "next_functions", ()):
            try:
                shape = node._input_metadata[number].shape
            except (AttributeError, IndexError, RuntimeError):  # a leaf, or a release of PyTorch without it
                continue
            if prod(shape) == 1:
                waiting.append(node)
            else:
                found.add(int(shape[0]))
    return found
