"""PyTorch's caching allocator as arithmetic: what it takes from the driver follows from what is asked of it, in order.

The rules are those of PyTorch 2.13, of the native backend with the settings it has by default:
c10/core/AllocatorConfig.h, c10/cuda/CUDACachingAllocator.cpp. Left out are the settings max_split_size_mb,
garbage_collection_threshold and roundup_power2_divisions, private pools (CUDA graphs, MemPool), and memory that a
second stream still uses when it is given back. All sizes are bytes.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpubench.memory.history import Counts, History, Mark, Reading
from gpubench.memory.segments import Block, Driver, ExpandablePool, Pool

_MIB = 2**20


@dataclass(frozen=True)
class Rules:
    """The constants beside the names that they have in PyTorch, and two settings."""

    block: int = 512
    """kMinBlockSize: every size is rounded up to a multiple of it."""
    small: int = _MIB
    """kSmallSize: what is not larger goes to the small pool."""
    small_segment: int = 2 * _MIB
    """kSmallBuffer: a segment of the small pool, or its page where segments are expandable."""
    large_segment: int = 20 * _MIB
    """large_segment_size: a segment of the large pool, or its page."""
    own_segment: int = 10 * _MIB
    """kMinLargeAlloc: from here on an allocation that fits nowhere gets a segment by its own size."""
    own_rounding: int = 2 * _MIB
    """kRoundLarge: that size is rounded up to a multiple of it."""
    expandable: bool = False
    """expandable_segments:True."""
    capacity: int | None = None
    """What the driver can give in all; None: more than is asked for."""

    def rounded(self, size: int) -> int:
        """The size of the block for `size` bytes (round_size)."""
        return -(-size // self.block) * self.block

    def segment(self, rounded: int) -> int:
        """The size of a new segment for a block of `rounded` bytes (get_allocation_size)."""
        if rounded <= self.small:
            return self.small_segment
        if rounded < self.own_segment:
            return self.large_segment
        return -(-rounded // self.own_rounding) * self.own_rounding

    def least_rest(self, is_small: bool) -> int:
        """What must remain of a block for it to be split (should_split)."""
        return self.block if is_small or self.expandable else self.small + 1


class OutOfDeviceMemory(Exception):
    """The driver has too little, also after all that is wholly free was given back to it. Sizes are bytes."""

    def __init__(self, asked: int, allocated: int, reserved: int) -> None:
        super().__init__(f"{asked:,} bytes do not fit beside {allocated:,} allocated, {reserved:,} reserved")
        self.asked = asked
        self.allocated = allocated
        self.reserved = reserved


class CachingAllocator:
    """DeviceCachingAllocator of one device."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._driver = Driver(rules.capacity)
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._held: dict[int, Block] = {}
        self._requested = self._allocated = 0
        self._allocations = self._frees = self._retries = self._ooms = 0

    @property
    def counts(self) -> Counts:
        """What torch.cuda.memory_stats calls allocation.all.allocated and .freed, num_alloc_retries and num_ooms; what
        runs short is not known of a driver without an end."""
        limited = self._rules.capacity is not None
        return Counts(
            allocations=self._allocations,
            frees=self._frees,
            retries=self._retries if limited else None,
            ooms=self._ooms if limited else None,
            largest_free=max((pool.largest for pool in self._pools.values()), default=0),
        )

    @property
    def requested(self) -> int:
        """What was asked for and not given back."""
        return self._requested

    @property
    def allocated(self) -> int:
        """The same in blocks."""
        return self._allocated

    @property
    def reserved(self) -> int:
        """What the driver has given."""
        return self._driver.taken

    def allocate(self, size: int, stream: int = 0) -> int:
        """A handle on `size` bytes (malloc): their address, or 0 for no bytes, which take nothing.

        Addresses are made up, but lie to each other as those of one segment do.

        Raises:
            OutOfDeviceMemory: they do not fit into `Rules.capacity`.
        """
        if not size:
            return 0
        rounded = self._rules.rounded(size)
        pool = self._pool(rounded, stream)
        block = pool.take(rounded) or self._grown(pool, rounded)
        if block is None:
            self._ooms += 1
            raise OutOfDeviceMemory(size, self._allocated, self.reserved)
        self._allocations += 1
        pool.hold(block, rounded)
        block.requested = size
        self._held[block.address] = block
        self._requested += size
        self._allocated += block.size
        return block.address

    def free(self, handle: int) -> None:
        """Give back what `allocate` gave.

        Raises:
            KeyError: it is not held.
        """
        if not handle:
            return
        block = self._held.pop(handle)
        self._frees += 1
        self._requested -= block.requested
        self._allocated -= block.size
        block.pool.release(block)

    def empty_cache(self) -> None:
        """Give the segments or pages that are wholly free back to the driver (release_cached_blocks)."""
        for pool in self._pools.values():
            pool.give_back()

    def _grown(self, pool: Pool, rounded: int) -> Block | None:
        segment = self._rules.segment(rounded)
        block = pool.grow(rounded, segment)
        if block is None:
            self._retries += 1
            self.empty_cache()
            block = pool.grow(rounded, segment)
        return block

    def _pool(self, rounded: int, stream: int) -> Pool:
        """Of each stream there is one for small blocks and one for large ones (get_pool)."""
        is_small = rounded <= self._rules.small
        pool = self._pools.get((stream, is_small))
        if pool is None:
            pool = self._pools[stream, is_small] = self._new_pool(is_small)
        return pool

    def _new_pool(self, is_small: bool) -> Pool:
        rules = self._rules
        rest = rules.least_rest(is_small)
        if rules.expandable:
            return ExpandablePool(self._driver, rest, rules.small_segment if is_small else rules.large_segment)
        return Pool(self._driver, rest)


@dataclass(frozen=True)
class Replayed:
    """A history as the allocator would have met it.

    The arrays are int64, in bytes, of as many elements as the history has positions: each the value after the event at
    that position. Where the capacity did not suffice they end before the event that it did not suffice for, and
    `exhausted` is its position; so do the readings, which stop at the last mark that was reached.
    """

    requested: NDArray[np.int64]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    readings: list[Reading]
    """As the device's allocator gives them: one for each mark."""
    exhausted: int | None
    counts: Counts


def replay(history: History, rules: Rules) -> Replayed:
    """Ask for what the history asked for, in its order and on one stream, of an allocator that holds nothing yet."""
    allocator = CachingAllocator(rules)
    handles = [0] * len(history.allocations)
    levels = array("q")
    exhausted = None
    for position, (index, begins) in enumerate(_events(history)):
        if begins:
            try:
                handles[index] = allocator.allocate(history.allocations[index].size)
            except OutOfDeviceMemory:
                exhausted = position
                break
        elif index >= 0:
            allocator.free(handles[index])
        levels.extend((allocator.requested, allocator.allocated, allocator.reserved))
    requested, allocated, reserved = np.array(levels, np.int64).reshape(-1, 3).T
    return Replayed(
        requested, allocated, reserved, _readings(history.marks, allocated, reserved), exhausted, allocator.counts
    )


def _events(history: History) -> list[tuple[int, bool]]:
    """Of each position the allocation that begins or ends there; -1 where none does."""
    events = [(-1, False)] * history.length
    for index, allocation in enumerate(history.allocations):
        events[allocation.begin] = (index, True)
        if allocation.end is not None:
            events[allocation.end] = (index, False)
    return events


def _readings(marks: Sequence[Mark], allocated: NDArray[np.int64], reserved: NDArray[np.int64]) -> list[Reading]:
    """Peaks count from the mark before, with what was there at that mark."""
    ours, driver = (np.concatenate(([0], counts)) for counts in (allocated, reserved))
    reached = [mark.at for mark in marks if mark.at <= len(allocated)]
    return [
        Reading(at, int(ours[at]), int(driver[at]), int(ours[start : at + 1].max()), int(driver[start : at + 1].max()))
        for start, at in pairwise([0, *reached])
    ]
