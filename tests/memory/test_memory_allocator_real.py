"""The caching allocator against PyTorch's own: block by block in a recording, and number by number on a device."""

import pickle
import subprocess
import sys
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest
import torch
from traces_made import PUBLIC

from gpubench.memory.allocator import CachingAllocator, Rules
from gpubench.releases import Release, installed

MIB = 2**20
SNAPSHOT = PUBLIC / "snapshot_magma27_small.pickle"


class Plainly(pickle.Unpickler):
    """Loads what is made of lists, dicts, strings and numbers only."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"{module}.{name}")


@dataclass
class Recorded:
    """A real snapshot, and what must have been held before its first event."""

    segments: list[dict[str, Any]]
    events: list[dict[str, Any]]
    before: dict[int, int]
    """Sizes that were asked for, by address."""


def recorded() -> Recorded:
    with SNAPSHOT.open("rb") as file:
        snapshot = Plainly(file).load()
    (events,) = snapshot["device_traces"]
    held = {
        block["address"]: block["requested_size"]
        for segment in snapshot["segments"]
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    for event in reversed(events):
        if event["action"] == "free_completed":
            held[event["addr"]] = event["size"]
        elif event["action"] == "alloc":
            del held[event["addr"]]
    return Recorded(snapshot["segments"], events, held)


class Mirror:
    """An allocator brought to the state from which a recording goes on, and its addresses in those of the recording."""

    def __init__(self, recording: Recorded) -> None:
        self.allocator = CachingAllocator(Rules())
        self._theirs: list[int] = [segment["address"] for segment in recording.segments]
        whole = [self._hold(segment["total_size"], segment) for segment in recording.segments]
        self._ours = [handles[0] for handles in whole]
        self.handles: dict[int, int] = {}
        gaps: list[int] = []
        for segment, handles in zip(recording.segments, whole, strict=True):
            for handle in handles:
                self.allocator.free(handle)
            gaps += self._carve(segment, recording.before)
        for handle in gaps:
            self.allocator.free(handle)

    def theirs(self, handle: int) -> int:
        segment = bisect_right(self._ours, handle) - 1
        return self._theirs[segment] + handle - self._ours[segment]

    def _hold(self, size: int, segment: dict[str, Any]) -> list[int]:
        """All of a stretch, in parts that belong into such a segment."""
        small = segment["segment_type"] == "small"
        parts = [*[MIB] * (size // MIB), size % MIB] if small else [size]
        return [self.allocator.allocate(part) for part in parts if part]

    def _carve(self, segment: dict[str, Any], held: dict[int, int]) -> list[int]:
        """Hold what was held in the only segment that is free; the gaps between come back as handles."""
        gaps: list[int] = []
        at, end = segment["address"], segment["address"] + segment["total_size"]
        for address in sorted(one for one in held if at <= one < end):
            gaps += self._hold(address - at, segment)
            before = self.allocator.allocated
            self.handles[address] = self.allocator.allocate(held[address])
            assert self.theirs(self.handles[address]) == address
            at = address + self.allocator.allocated - before
        return gaps + self._hold(end - at, segment)


@pytest.mark.skipif(not SNAPSHOT.is_file(), reason="the public snapshot is not here")
def test_each_block_of_a_real_run_lies_where_pytorch_put_it() -> None:
    """1,721 allocations in a cache of 216 segments: each time in the same segment and at the same place in it, and no
    segment more than PyTorch took."""
    recording = recorded()
    mirror = Mirror(recording)
    allocator = mirror.allocator
    total = sum(segment["total_size"] for segment in recording.segments)
    wrong, made = [], 0
    for event in recording.events:
        if event["action"] == "alloc":
            made += 1
            handle = allocator.allocate(event["size"])
            if mirror.theirs(handle) != event["addr"]:
                wrong.append((made, event["size"]))
            mirror.handles[event["addr"]] = handle
            assert allocator.reserved == total
        elif event["action"] == "free_completed":
            allocator.free(mirror.handles.pop(event["addr"]))
    assert (made, wrong) == (1721, [])
    assert allocator.reserved == total == 14_180_941_824
    assert allocator.allocated == sum(segment["active_size"] for segment in recording.segments)
    assert allocator.requested == sum(segment["requested_size"] for segment in recording.segments)


@pytest.mark.skipif(not SNAPSHOT.is_file(), reason="the public snapshot is not here")
def test_the_segments_of_a_real_run_are_of_the_sizes_that_the_rules_give() -> None:
    rules = Rules()
    for segment in recorded().segments:
        size = segment["total_size"]
        asked = MIB if segment["segment_type"] == "small" else 2 * MIB if size == rules.large_segment else size
        assert rules.segment(asked) == size


LIVE = """
import random, torch
random.seed(1)
torch.cuda.init()
held = []
for number in range(3000):
    if held and random.random() < 0.48:
        place = random.randrange(len(held))
        torch.cuda.caching_allocator_delete(held.pop(place))
        print(place, 0, end=" ")
    else:
        size = int(2 ** random.uniform(5, 26))
        held.append(torch.cuda.caching_allocator_alloc(size, 0, 0))
        print(-1, size, end=" ")
    print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
"""


OLDEST_FIRST = Release(2, 13)
"""The release from which on the oldest segment decides between free blocks of one size, and not a driver's address."""


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("expandable", [False, True])
def test_the_device_counts_the_same(expandable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", f"expandable_segments:{expandable}")
    done = subprocess.run([sys.executable, "-c", LIVE], capture_output=True, text=True, check=True)
    allocator = CachingAllocator(Rules(expandable=expandable))
    exact = expandable or installed() >= OLDEST_FIRST
    held: list[int] = []
    for line in done.stdout.splitlines():
        place, size, allocated, reserved = map(int, line.split())
        if place < 0:
            held.append(allocator.allocate(size))
        else:
            allocator.free(held.pop(place))
        assert allocator.allocated == allocated
        assert allocator.reserved == (reserved if exact else pytest.approx(reserved, rel=0.01))
