"""Finds generators of random numbers that are in the same state in several workers, in several passes or in each batch.

Their numbers are then the same, so that augmentation makes fewer different samples than it seems to. PyTorch seeds the
generators of torch, random and NumPy in each worker; those that a dataset holds, or that are variables of its module,
it cannot know. A generator is no fault that gets a seed of its own for each sample, or from which a stream draws once,
before its first sample, as for an order of files that all workers have to agree on.
"""

from __future__ import annotations

import hashlib
import inspect
import random
import sys
from array import array
from collections import Counter
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch.utils.data import IterableDataset

from .attributes import attributes
from .stages import names_in

MOST_DEPTH, MOST_LISTED = 10, 64
MOST_PARTS = 10_000
"""The objects that are looked at."""
DECIDED = 3
"""The batches of a pass after which it is known of each generator whether it is in the same state in each."""
WORDS = 624
"""The words that a Mersenne Twister makes at a time."""
MOST_TWISTS = 10_000
"""How often it makes them while it is followed from one of its states to another."""


class RandomStates:
    """The states of the generators that a dataset can draw from, at the start of a pass in this process."""

    def __init__(self, dataset: Any) -> None:
        self._generators = dict(_generators(dataset))
        self._at_first = {name: _state_of(each) for name, each in self._generators.items()}
        self._last = dict(self._at_first)
        self._draw: List[str] = []
        """The generators that go on from their first states, once this is known."""
        self._again: Dict[str, Tuple[Any, ...]] = {}
        """The generators that were drawn from in the first batch, with their states after it, as far as each batch
        since has left them in the same one."""
        self._stream = isinstance(dataset, IterableDataset)
        self._batches = 0
        self._told: set[str] = set()
        self._repeats_knowingly = _knows_passes(dataset)
        """Whether the program tells the dataset which pass begins, which it does not for passes of the probe."""

    def after_batch(self) -> Dict[str, Any]:
        """Returns what `same_numbers` reads of the record of a batch that was made now; {} after the first ones."""
        self._batches += 1
        if self._batches > DECIDED:
            return {}
        found: Dict[str, Any] = {"repeats_knowingly": self._repeats_knowingly}
        if self._batches < DECIDED:
            found["drew"] = self._drew()
        if self._batches > 1:
            found["same_in_batches"] = self._same_again()
        return found

    def _drew(self) -> Dict[str, str]:
        """Returns the first states, as digests, of the generators from which samples draw numbers, each once."""
        now = {name: _state_of(each) for name, each in self._generators.items()}
        changed = [name for name, state in now.items() if state and state != self._last[name]]
        if self._batches == 1:
            self._draw = [name for name in changed if _follows(self._at_first[name], now[name])]
            self._again = {name: now[name] for name in changed if _is_drawn(now[name])}
        found = [] if self._stream and self._batches == 1 else [name for name in self._draw if name in changed]
        self._last = now
        new = [name for name in found if name not in self._told]
        self._told.update(new)
        return {name: hashlib.sha256(repr(self._at_first[name]).encode()).hexdigest()[:16] for name in new}

    def _same_again(self) -> List[str]:
        """Returns the generators that are given the same state in each batch, and are drawn from after that.

        Only the last batch decides. A generator from which only the first one draws is in the same state after each
        one too, so that it is moved on before the last.
        """
        self._again = {name: state for name, state in self._again.items() if self._is_in(name, state)}
        if self._batches == DECIDED:
            return list(self._again)
        for name in self._again:
            _move_on(self._generators[name])
        self._again = {name: state for name, state in self._again.items() if not self._is_in(name, state)}
        return []

    def _is_in(self, name: str, state: Tuple[Any, ...]) -> bool:
        return _state_of(self._generators[name]) == state


def _generators(dataset: Any) -> Iterator[Tuple[str, Any]]:
    """Yields the generators of Python, PyTorch and NumPy, and those that the dataset holds or its code names."""
    yield "random", random
    yield "torch", torch.default_generator
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "numpy.random", numpy.random
    for path, each in _parts(dataset):
        if _is_generator(each):
            yield path, each


def _parts(dataset: Any) -> Iterator[Tuple[str, Any]]:
    """Yields what a dataset holds, and what its code uses by name, with what it is called."""
    seen: set[int] = set()
    level: List[Tuple[str, Any]] = [(type(dataset).__name__, dataset)]
    for _ in range(MOST_DEPTH):
        deeper: List[Tuple[str, Any]] = []
        for path, holder in level:
            if id(holder) in seen or len(seen) >= MOST_PARTS:
                continue
            seen.add(id(holder))
            for name, each in _held(path, holder):
                yield name, each
                if isinstance(each, (list, tuple, dict)):
                    deeper += [(name, each)] * (len(each) <= MOST_LISTED)
                elif not isinstance(each, (type, ModuleType, torch.Tensor)):
                    deeper.append((name, each))
        level = deeper


def _held(path: str, holder: Any) -> List[Tuple[str, Any]]:
    if isinstance(holder, (list, tuple)):
        return [(path, each) for each in holder[:MOST_LISTED]]
    if isinstance(holder, dict):
        return [(path, each) for each in holder.values()]
    held = [(f"{path}.{name}", each) for name, each in attributes(holder).items()]
    function = getattr(holder, "__func__", getattr(holder, "func", holder))
    if isinstance(function, FunctionType):
        held += [(function.__name__, function)] * (function is not holder)
        return held + _named_by(function)
    for cls in type(holder).__mro__:
        if cls.__module__.partition(".")[0] not in ("builtins", "torch"):
            for value in list(vars(cls).values()):
                value = getattr(value, "__func__", value)
                if isinstance(value, FunctionType):
                    held += _named_by(value)
    return held


def _named_by(function: FunctionType) -> List[Tuple[str, Any]]:
    """Returns what a function uses by names of its module, or of the function around it: generators and functions."""
    function = inspect.unwrap(function)
    code = function.__code__
    found: Dict[str, Any] = {name: function.__globals__.get(name) for name in names_in(code)}
    for name, cell in zip(code.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # an empty cell
            found[name] = cell.cell_contents
    return [
        (name, each)
        for name, each in found.items()
        if _is_generator(each) or (isinstance(each, FunctionType) and each.__module__ == function.__module__)
    ]


def _is_generator(found: Any) -> bool:
    if isinstance(found, (random.Random, torch.Generator)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(found, (numpy.random.Generator, numpy.random.RandomState))


def _knows_passes(dataset: Any) -> bool:
    return hasattr(dataset, "set_epoch") or any(hasattr(each, "set_epoch") for _, each in _parts(dataset))


def _state_of(generator: Any) -> Tuple[Any, ...]:
    """Returns the seed or the stream of a generator, if it has one, and where in it the generator is: for a Mersenne
    Twister "twister", its words and its place in them. Returns () if that cannot be read."""
    with suppress(Exception):
        if isinstance(generator, torch.Generator):
            return ("stream", generator.initial_seed(), generator.get_state().numpy().tobytes())
        if hasattr(generator, "bit_generator") and not isinstance(generator, ModuleType):
            state = generator.bit_generator.state
            inner = state["state"]
            if "pos" in inner:
                return ("twister", array("I", inner["key"].tolist()).tobytes(), inner["pos"])
            stream = inner.get("inc", inner.get("key"))
            return ("stream", repr(stream), repr(state))
        if hasattr(generator, "getstate"):
            _, words, gauss = generator.getstate()
            return ("twister", array("I", words[:WORDS]).tobytes(), words[WORDS], gauss)
        _, key, *rest = generator.get_state()
        return ("twister", array("I", key.tolist()).tobytes(), *rest)
    return ()


def _is_drawn(state: Tuple[Any, ...]) -> bool:
    """Tells whether numbers were drawn from a generator since its seed; also for one of which that is unknown."""
    if state[0] == "twister":
        return bool(state[2] != WORDS)
    if isinstance(state[1], int):
        return bool(state[2] != _state_of(torch.Generator().manual_seed(state[1]))[2])
    return True


def _move_on(generator: Any) -> None:
    """Draws so many numbers from a generator that its state has nothing of its last seed."""
    with suppress(Exception):
        if isinstance(generator, torch.Generator):
            torch.rand(2 * WORDS, generator=generator)
        elif hasattr(generator, "getrandbits"):
            generator.getrandbits(64 * WORDS)
        else:
            generator.bytes(8 * WORDS)


def _follows(first: Tuple[Any, ...], later: Tuple[Any, ...]) -> bool:
    """Tells whether a generator comes from its first state to a later one by drawing, and not by another seed."""
    if not first or not later:
        return False
    if first[0] == "stream":
        return bool(first[1] == later[1])
    words, wanted = array("I", first[1]), tuple(array("I", later[1]))
    twister = random.Random()
    twister.setstate((3, (*words, WORDS), None))
    now = tuple(words)
    for _ in range(MOST_TWISTS):
        if now == wanted:
            return True
        twister.getrandbits(32 * WORDS)  # the words after all of these
        now = twister.getstate()[1][:WORDS]
    return False


def same_numbers(records: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Returns the fields of `gpubench.loader_record.SameNumbers` by the records of all batches."""
    used: Dict[str, Dict[int, List[str]]] = {}
    for record in records:
        for name, state in record.get("drew", {}).items():
            used.setdefault(name, {}).setdefault(record["worker"], []).append(state)
    knowingly = any(record.get("repeats_knowingly") for record in records)
    found: List[Dict[str, Any]] = []
    again = {(name, record["worker"]) for record in records for name in record.get("same_in_batches", ())}
    workers = Counter(name for name, _ in sorted(again))
    found += [{"generator": name, "where": "batches", "number": number} for name, number in workers.items()]
    for name, by_worker in used.items():
        firsts = [states[0] for states in by_worker.values()]
        most = max(firsts.count(state) for state in firsts)
        if most > 1:
            found.append({"generator": name, "where": "workers", "number": most})
        passes = max(states.count(state) for states in by_worker.values() for state in states)
        if passes > 1 and not knowingly:
            found.append({"generator": name, "where": "passes", "number": passes})
    return found
