"""What is told of a dataset and its batches."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from gpubench.probe.loader_facts import PAGE, objects_of

NUMBER = 20_000


class Holding(Dataset[Any]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __len__(self) -> int:
        return NUMBER


class Slotted(Dataset[Any]):
    __slots__ = ("names",)

    def __init__(self) -> None:
        self.names = names()


class Annotation:
    def __init__(self, number: int) -> None:
        self.label = f"label-{number:05}"


class Unreadable(list[Any]):
    def __len__(self) -> int:
        raise OSError


class Database(Mapping[str, Any]):
    """Reads each entry from a file."""

    def __getitem__(self, key: str) -> Any:
        raise AssertionError

    def __iter__(self) -> Any:
        raise AssertionError

    def __len__(self) -> int:
        return 10**9


def names(length: int = 40) -> list[str]:
    return [f"{number:0{length}}" for number in range(NUMBER)]


NAME = sys.getsizeof("0" * 40)


@pytest.mark.parametrize(
    ("made", "each"),
    [
        (lambda: Holding(names()), NAME),
        (lambda: Slotted(), NAME),
        (lambda: Subset(Holding(names()), range(5)), NAME),
        (lambda: Holding(dict.fromkeys(names())), NAME + sys.getsizeof(("", ""))),
        (lambda: Holding(np.array(names(), dtype=object)), NAME),
        (lambda: Holding([[name] for name in names()]), NAME + sys.getsizeof([""])),
        (lambda: Holding(names(length=5000)), PAGE),
        (lambda: Holding([np.zeros(10_000) for _ in range(NUMBER)]), PAGE),
    ],
    ids=["list", "slots", "subset", "mapping", "array of objects", "nested", "long texts", "arrays"],
)
def test_what_a_worker_copies_that_reads_all_objects(made: Callable[[], Any], each: int) -> None:
    found = objects_of(made())  # made here, as the process of all tests would hold it
    assert found["objects"] == NUMBER
    assert found["object_bytes"] == pytest.approx(NUMBER * each, rel=0.03)


def test_objects_with_attributes_are_copied_with_them() -> None:
    found = objects_of(Holding([Annotation(number) for number in range(NUMBER)]))
    assert found["object_bytes"] >= NUMBER * (sys.getsizeof("label-10000") + sys.getsizeof(Annotation(0)))


def test_what_many_entries_share_is_copied_once() -> None:
    assert objects_of(Holding(["cat", "dog"] * NUMBER))["object_bytes"] < 20_000


@pytest.mark.parametrize("held", [np.zeros(10**6), torch.zeros(10**6), "text" * 10**6, Database(), None])
def test_what_is_no_collection_of_objects_is_not_copied(held: Any) -> None:
    assert objects_of(Holding(held)) == {"objects": 0, "object_bytes": 0}


def test_a_collection_that_cannot_be_read_harms_nothing() -> None:
    assert objects_of(Holding(Unreadable("ab")))["objects"] == 0
