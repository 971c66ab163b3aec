"""A model of PyTorch's caching allocator. All sizes are in bytes.

The model follows c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13, the native backend
with its default settings; docstrings name the functions there in parentheses. It has blocks of memory, pools of free
blocks, and segments that the pools get from the driver. It does not include the settings max_split_size_mb,
garbage_collection_threshold and roundup_power2_divisions, private pools (CUDA graphs, MemPool), and memory that a
second stream still uses when it is freed: freed memory is available at once.
"""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpubench.memory.allocation_log import AllocationLog, AllocatorReading, Counts, readings_at
from gpubench.memory.segments import Driver, ExpandablePool, MemoryBlock, Pool
from gpubench.units import MIB


@dataclass(frozen=True)
class Rules:
    """The constants of the allocator, with their names in PyTorch, and two settings."""

    block: int = 512
    """kMinBlockSize: sizes of blocks are rounded up to a multiple of it."""
    small: int = MIB
    """kSmallSize: allocations up to this size go to the small pool."""
    small_segment: int = 2 * MIB
    """kSmallBuffer: the size of a segment of the small pool, or of a page if segments are expandable."""
    large_segment: int = 20 * MIB
    """large_segment_size: the size of a segment of the large pool, or of a page if segments are expandable."""
    own_segment: int = 10 * MIB
    """kMinLargeAlloc: from this size on, an allocation that needs a new segment gets one of its own size."""
    own_rounding: int = 2 * MIB
    """kRoundLarge: the size of such a segment is rounded up to a multiple of it."""
    expandable: bool = False
    """Whether expandable_segments:True is set."""
    capacity: int | None = None
    """The memory that the driver can provide; None for no limit."""

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
        """The bytes that must remain for a block to be split (should_split)."""
        return self.block if is_small or self.expandable else self.small + 1


class OutOfDeviceMemory(Exception):
    """The driver has too little memory, even after all completely free segments were returned. Sizes are in bytes."""

    def __init__(self, requested: int, allocated: int, reserved: int) -> None:
        super().__init__(
            f"{requested:,} bytes do not fit: {allocated:,} bytes are allocated and {reserved:,} bytes reserved"
        )
        self.requested = requested
        self.allocated = allocated
        self.reserved = reserved


class CachingAllocator:
    """A model of DeviceCachingAllocator for one device."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._driver = Driver(rules.capacity)
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._held: dict[int, MemoryBlock] = {}
        self._requested = self._allocated = 0
        self._allocations = self._frees = self._retries = self._ooms = 0

    @property
    def counts(self) -> Counts:
        """The counters allocation.all.allocated and .freed, num_alloc_retries and num_ooms of torch.cuda.memory_stats.

        The last two are None for a driver without a limit.
        """
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
        """The bytes that are requested and not freed."""
        return self._requested

    @property
    def allocated(self) -> int:
        """The size of all blocks in use."""
        return self._allocated

    @property
    def reserved(self) -> int:
        """The memory that the driver has provided."""
        return self._driver.taken

    def allocate(self, size: int, stream: int = 0) -> int:
        """Allocates `size` bytes (malloc) and returns their address; 0 bytes need no memory and have the address 0.

        Within a segment, distances between addresses are real. Raises OutOfDeviceMemory if the bytes do not fit into
        `Rules.capacity`.
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

    def free(self, address: int) -> None:
        """Frees the memory at an address that `allocate` returned. Raises KeyError if it is not allocated."""
        if not address:
            return
        block = self._held.pop(address)
        self._frees += 1
        self._requested -= block.requested
        self._allocated -= block.size
        block.pool.release(block)

    def empty_cache(self) -> None:
        """Returns completely free segments or pages to the driver (release_cached_blocks)."""
        for pool in self._pools.values():
            pool.give_back()

    def _grown(self, pool: Pool, rounded: int) -> MemoryBlock | None:
        segment = self._rules.segment(rounded)
        block = pool.grow(rounded, segment)
        if block is None:
            self._retries += 1
            self.empty_cache()
            block = pool.grow(rounded, segment)
        return block

    def _pool(self, rounded: int, stream: int) -> Pool:
        """The stream's pool for small or for large blocks (get_pool)."""
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
    """The state of the allocator after each event of a log.

    The arrays are int64, in bytes, with one element per position of the log: the value after the event at that
    position. If the capacity is too small, they end before the event that fails, and the readings end at the last mark
    before it.
    """

    requested: NDArray[np.int64]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    readings: list[AllocatorReading]
    """The readings of the device's allocator, one for each mark."""
    exhausted: int | None
    """The position of the event that fails; None if the capacity is large enough."""
    counts: Counts


def replay(log: AllocationLog, rules: Rules) -> Replayed:
    """Replays the allocations and frees of a log with an empty allocator, on one stream."""
    allocator = CachingAllocator(rules)
    addresses = [0] * len(log.allocations)
    levels = array("q")
    exhausted = None
    for position, (index, begins) in enumerate(_events(log)):
        if begins:
            try:
                addresses[index] = allocator.allocate(log.allocations[index].size)
            except OutOfDeviceMemory:
                exhausted = position
                break
        elif index >= 0:
            allocator.free(addresses[index])
        levels.extend((allocator.requested, allocator.allocated, allocator.reserved))
    requested, allocated, reserved = np.array(levels, np.int64).reshape(-1, 3).T
    readings = readings_at(
        (mark.at for mark in log.marks if mark.at <= len(allocated)),
        np.insert(allocated, 0, 0),
        np.insert(reserved, 0, 0),
    )
    return Replayed(requested, allocated, reserved, readings, exhausted, allocator.counts)


def _events(log: AllocationLog) -> list[tuple[int, bool]]:
    """For each position, the index of the allocation there (-1 if there is none) and whether it begins."""
    events = [(-1, False)] * log.length
    for index, allocation in enumerate(log.allocations):
        events[allocation.begin] = (index, True)
        if allocation.end is not None:
            events[allocation.end] = (index, False)
    return events
