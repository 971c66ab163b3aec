"""Finds generators of random numbers that are in the same state in several workers, or at the start of several passes.

Their numbers are then the same, so that augmentation makes fewer different samples than it seems to. PyTorch seeds the
generators of torch, random and NumPy in each worker; those that a dataset holds it cannot know.
"""

from __future__ import annotations

import hashlib
import random
import sys
from contextlib import suppress
from typing import Any, Dict, Iterator, List, Tuple

import torch

MOST_DEPTH, MOST_LISTED = 4, 64


class RandomStates:
    """The states of the generators that a dataset can draw from, at the start of a pass in this process."""

    def __init__(self, dataset: Any) -> None:
        self._generators = dict(_generators(dataset))
        self._at_first = {name: _state_of(each) for name, each in self._generators.items()}

    def drew(self) -> Dict[str, str]:
        """Returns the first states, as digests, of the generators from which numbers have been drawn since."""
        return {
            name: before
            for name, before in self._at_first.items()
            if before and _state_of(self._generators[name]) != before
        }


def _generators(dataset: Any) -> Iterator[Tuple[str, Any]]:
    yield "random", random
    yield "torch", torch.default_generator
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield "numpy.random", numpy.random
    seen: set[int] = set()
    level: List[Tuple[str, Any]] = [(type(dataset).__name__, dataset)]
    for _ in range(MOST_DEPTH):
        deeper: List[Tuple[str, Any]] = []
        for path, holder in level:
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            if isinstance(holder, (list, tuple)):
                held = [(path, each) for each in holder[:MOST_LISTED]]
            else:
                held = [(f"{path}.{name}", each) for name, each in list(getattr(holder, "__dict__", {}).items())]
            for name, each in held:
                if _is_generator(each):
                    yield name, each
                elif isinstance(each, (list, tuple)):
                    deeper += [(name, each)] * (len(each) <= MOST_LISTED)
                elif hasattr(each, "__dict__") and not isinstance(each, type):
                    deeper.append((name, each))
        level = deeper


def _is_generator(found: Any) -> bool:
    if isinstance(found, (random.Random, torch.Generator)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(found, (numpy.random.Generator, numpy.random.RandomState))


def _state_of(generator: Any) -> str:
    """Returns a digest of the state of a generator; empty if it cannot be read."""
    with suppress(Exception):
        if isinstance(generator, torch.Generator):
            state: Any = generator.get_state().numpy().tobytes()
        elif hasattr(generator, "bit_generator"):
            state = repr(generator.bit_generator.state)
        elif hasattr(generator, "getstate"):
            state = repr(generator.getstate())
        else:
            name, keys, *rest = generator.get_state()
            state = repr((name, bytes(keys), rest))
        return hashlib.sha256(state if isinstance(state, bytes) else state.encode()).hexdigest()[:16]
    return ""


def same_numbers(records: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Returns the fields of `gpubench.loader_record.SameNumbers` by the records of all batches."""
    first = [each for each in records if each.get("first")]
    used: Dict[str, Dict[int, List[str]]] = {}
    for record in records:
        for name, state in record.get("drew", {}).items():
            states = used.setdefault(name, {}).setdefault(record["worker"], [])
            if state not in states or record.get("first"):
                states.append(state)
    found = []
    for name, by_worker in used.items():
        firsts = [states[0] for states in by_worker.values()]
        most = max(firsts.count(state) for state in firsts)
        if len(firsts) > 1 and most > 1:
            found.append({"generator": name, "where": "workers", "number": most})
        passes = [_repeated(states) for states in by_worker.values()]
        if len(first) > len(by_worker) and max(passes) > 1:
            found.append({"generator": name, "where": "passes", "number": max(passes)})
    return found


def _repeated(states: List[str]) -> int:
    return max((states.count(state) for state in states), default=0)
