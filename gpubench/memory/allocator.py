"""A model of PyTorch's caching allocator, and of the memory that libraries use outside it. All sizes are in bytes.

The model follows c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp of PyTorch 2.13, the native backend
with its default settings; docstrings name the functions there in parentheses. It has blocks of memory, pools of free
blocks, and segments that the pools get from the driver. It does not include the settings max_split_size_mb,
garbage_collection_threshold and roundup_power2_divisions, private pools (CUDA graphs, MemPool), and memory that a
second stream still uses when it is freed: freed memory is available at once.

Outside the allocator are the workspaces of cuBLAS and the CUDA context. cuBLAS has a workspace for each handle on each
stream, and keeps it until the end of the process. Each thread has its own handle: the thread of the forward pass, and
the thread in which autograd runs the backward pass. From PyTorch 2.15 on, each product allocates and frees a workspace.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpubench.hardware import find_by_key
from gpubench.memory.history import Counts, History, Mark, Reading

MIB = 2**20

HANDLES = 2
"""The number of cuBLAS handles of a training step on one stream; a forward pass alone needs one.

A snapshot of a training step on a Hopper shows two blocks of 33,554,432 bytes, and one of a forward pass shows one.
"""

CONTEXT = 512 * MIB
"""The assumed memory of a process outside the allocator. It depends on the GPU, the driver and the loaded kernels.

Users have reported 287 MB after one kernel (PyTorch pull request 86509), about 400 MB (PyTorch issue 109888), and 426
MiB for the context alone on an RTX 6000 Ada with PyTorch 2.10 and CUDA 13 (unsloth-zoo pull request 1053). All of these
are with lazy loading; the kernels of a training step need more.
"""

_OLDER = 2 * 4096 * 1024 + 8 * 16 * 1024
_HOPPER = 32 * MIB
_HOPPER_AND_LATER = (9, 10, 12)  # major versions
_HIPBLASLT = 76 * MIB

_CAPABILITIES: dict[tuple[int, int], tuple[str, ...]] = {
    (7, 0): ("v100-32gb", "v100-16gb", "v100-pcie-32gb", "v100-pcie-16gb", "v100s"),
    (7, 5): ("t4", "quadro-rtx-6000", "titan-rtx", "rtx-2080-ti"),
    (8, 0): ("a100-80gb", "a100-40gb", "a100-pcie-80gb", "a100-pcie-40gb", "a800-80gb", "a800-pcie-80gb", "a30"),
    (8, 6): ("a40", "a16", "a10", "a10g", "a2", "rtx-a6000", "rtx-a5000"),
    (8, 9): ("l40s", "l40", "l4", "rtx-6000-ada", "rtx-4000-ada"),
    (9, 0): (
        "gh200-144gb",
        "gh200",
        "h200",
        "h200-nvl",
        "h100",
        "h100-pcie",
        "h100-nvl",
        "h800",
        "h800-pcie",
        "h20",
        "h20-3e",
    ),
    (10, 0): ("b200", "gb200"),
    (10, 3): ("b300", "gb300"),
    (12, 0): ("rtx-pro-6000", "rtx-pro-6000-max-q", "rtx-pro-6000-server"),
}
_CAPABILITY = {key: capability for capability, keys in _CAPABILITIES.items() for key in keys}
_GEFORCE = {"rtx-30": (8, 6), "rtx-40": (8, 9), "rtx-50": (12, 0)}  # by the first characters of the key


def capability(key: str) -> tuple[int, int] | None:
    """Returns the compute capability of an accelerator in `hardware`, such as (8, 0); None for AMD's accelerators.

    Source: NVIDIA, "CUDA GPU Compute Capability". Raises DeviceError if no accelerator is called `key`.
    """
    listed = find_by_key(key).key
    return _CAPABILITY.get(listed) or _GEFORCE.get(listed[: len("rtx-30")])


def blas_workspace(capability: tuple[int, int] | None) -> int:
    """Returns the size of cuBLAS's workspace for one handle on one stream; a capability of None stands for AMD.

    It is 32 MiB from Hopper on. Before Hopper it is two times 4096 KiB and eight times 16 KiB, which is 8,519,680
    bytes. cuBLASLt shares it. Source: aten/src/ATen/cuda/CublasHandlePool.cpp of PyTorch 2.13, parseChosenWorkspaceSize
    and unified_cublas_and_lt_workspaces. Before pull requests 175344 and 175879 of early 2026, Blackwell had the older
    size, and cuBLASLt a workspace of 1 MiB of its own. The environment variable CUBLAS_WORKSPACE_CONFIG, which changes
    the size, is not considered.

    On AMD hipBLASLt uses 76 MiB (parseCUDABlasLtWorkspaceSize). A product that rocBLAS computes needs another one
    of 32 MiB, or of 128 MiB on an MI300 and later, which is not included.
    """
    if capability is None:
        return _HIPBLASLT
    return _HOPPER if capability[0] in _HOPPER_AND_LATER else _OLDER


_ADDRESS_SPACE = 1 << 60
"""The size of an expandable segment. A real one has 9/8 of the device's memory, and is followed by another if full."""


class Driver:
    """A device driver that provides up to `capacity` bytes of memory (None for no limit), and addresses.

    Addresses always increase, and are never reused. Those of a real driver need not increase, so that the real
    allocator may choose the other one of two free blocks of the same size.
    """

    def __init__(self, capacity: int | None) -> None:
        self.taken = 0
        self._capacity = capacity
        self._next = 1 << 21

    def take(self, size: int) -> bool:
        """Takes `size` bytes if they are available, and returns whether they were."""
        if self._capacity is not None and self.taken + size > self._capacity:
            return False
        self.taken += size
        return True

    def give_back(self, size: int) -> None:
        """Returns `size` bytes to the device."""
        self.taken -= size

    def addresses(self, size: int) -> int:
        """Returns the first of `size` new addresses."""
        first = self._next
        self._next += size
        return first


class Block:
    """A part of a segment between two neighbours (Block). It has addresses but no memory if it is not `mapped`."""

    __slots__ = ("address", "after", "before", "held", "mapped", "pool", "requested", "size")

    def __init__(self, pool: "Pool", address: int, size: int, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        self.requested = 0
        self.held = False
        self.before: Block | None = None
        self.after: Block | None = None

    def put_between(self, before: "Block | None", after: "Block | None") -> None:
        """Sets both neighbours, and this block as theirs."""
        self.before, self.after = before, after
        if before:
            before.after = self
        if after:
            after.before = self


class Pool:
    """The free blocks of one stream and one size class (BlockPool).

    A block is split if at least `least_rest` bytes remain.
    """

    def __init__(self, driver: Driver, least_rest: int) -> None:
        self._driver = driver
        self._least_rest = least_rest
        self._free: dict[int, Block] = {}
        self._order: list[tuple[int, int]] = []
        """The (size, address) of each free block, sorted."""

    @property
    def largest(self) -> int:
        """The size of the largest free block; 0 if there is none."""
        return self._order[-1][0] if self._order else 0

    def take(self, size: int) -> Block | None:
        """Removes and returns the smallest free block of at least `size` bytes (get_free_block).

        Of several blocks of this size, it is that with the lowest address. Returns None if there is none.
        """
        place = self._place(size)
        return None if place is None else self._pop(place)

    def grow(self, size: int, segment: int) -> Block | None:
        """Returns a block of at least `size` bytes from a new segment of `segment` bytes (alloc_block).

        Returns None if the driver has too little memory.
        """
        if not self._driver.take(segment):
            return None
        return Block(self, self._driver.addresses(segment), segment)

    def hold(self, block: Block, size: int) -> None:
        """Marks a block as used, and splits off what exceeds `size` bytes (should_split, alloc_found_block)."""
        block.held = True
        if block.size - size >= self._least_rest:
            rest = Block(self, block.address + size, block.size - size)
            rest.put_between(block, block.after)
            block.size = size
            self._add(rest)

    def release(self, block: Block) -> None:
        """Frees the block and merges it with free neighbours (free_block)."""
        block.held = False
        self._merge(block)
        self._add(block)

    def give_back(self) -> None:
        """Returns completely free segments to the driver (release_blocks)."""
        for block in list(self._free.values()):
            if not block.before and not block.after:
                self._remove(block)
                self._driver.give_back(block.size)

    def _place(self, size: int) -> int | None:
        """Returns the index of the best-fitting free block in the sorted list; None if none fits."""
        place = bisect_left(self._order, (size, 0))
        return place if place < len(self._order) else None

    def _pop(self, place: int) -> Block:
        return self._free.pop(self._order.pop(place)[1])

    def _add(self, block: Block) -> None:
        self._free[block.address] = block
        insort(self._order, (block.size, block.address))

    def _remove(self, block: Block) -> None:
        self._pop(bisect_left(self._order, (block.size, block.address)))

    def _merge(self, block: Block) -> None:
        """Merges the block with the neighbours that are free (try_merge_blocks)."""
        before, after = block.before, block.after
        if before and not before.held and before.mapped == block.mapped:
            self._remove(before)
            block.address = before.address
            block.size += before.size
            block.put_between(before.before, after)
        if after and not after.held and after.mapped == block.mapped:
            self._remove(after)
            block.size += after.size
            block.put_between(block.before, after.after)


class ExpandablePool(Pool):
    """A pool whose only segment has addresses without memory at first, and maps pages on demand (ExpandableSegment)."""

    def __init__(self, driver: Driver, least_rest: int, page: int) -> None:
        super().__init__(driver, least_rest)
        self._page = page
        self._base = driver.addresses(_ADDRESS_SPACE)
        self._unmapped: dict[int, Block] = {}
        self._add(Block(self, self._base, _ADDRESS_SPACE, mapped=False))

    def _place(self, size: int) -> int | None:
        """Returns the index of the best-fitting block, with the size to which it can grow; None if none fits."""
        place = super()._place(size)
        if place is None:
            return None
        while place + 1 < len(self._order) and self._extent(place + 1) < self._extent(place):
            place += 1
        return place

    def _extent(self, place: int) -> int:
        """Returns the size of a free block together with unmapped addresses behind it."""
        block = self._free[self._order[place][1]]
        return block.size + (block.after.size if block.after and not block.after.mapped else 0)

    def grow(self, size: int, segment: int) -> Block | None:
        """Returns a block of at least `size` bytes, for which pages are mapped (try_allocate_expandable_block).

        It has the lowest possible addresses. Returns None if the driver has too little memory; pages that were already
        mapped then stay mapped and free.
        """
        block = self._first_block_to_expand(size)
        if not block.mapped and not self._map(block, size):
            return None
        while block.size < size:
            following = block.after
            if following is None or not self._map(following, size - block.size):
                return None
            block = following
        self._remove(block)
        return block

    def _first_block_to_expand(self, size: int) -> Block:
        """Returns the first of adjacent free or unmapped blocks with `size` bytes in all (find_expandable_block)."""
        unmapped = (block for _, block in sorted(self._unmapped.items()))
        starts = (block.before if block.before and not block.before.held else block for block in unmapped)
        return next(start for start in starts if _is_large_enough(start, size))

    def _map(self, block: Block, size: int) -> bool:
        """Maps pages for the first `size` bytes of a block, or for all of it (map_block).

        Returns False if the driver has too little memory.
        """
        mapped = -(-min(size, block.size) // self._page) * self._page
        if not self._driver.take(mapped):
            return False
        self._remove(block)
        if mapped < block.size:
            rest = Block(self, block.address + mapped, block.size - mapped, mapped=False)
            rest.put_between(block, block.after)
            self._add(rest)
        block.mapped, block.size = True, mapped
        self.release(block)
        return True

    def give_back(self) -> None:
        """Returns completely free pages to the driver (unmap_block)."""
        for block in list(self._free.values()):
            skipped = -(block.address - self._base) % self._page
            unmapped = (block.size - skipped) // self._page * self._page
            if unmapped > 0:
                self._unmap(block, skipped, unmapped)

    def _unmap(self, block: Block, skipped: int, unmapped: int) -> None:
        """Unmaps `unmapped` bytes after the first `skipped` bytes; what remains on both sides stays free."""
        self._remove(block)
        behind = block.size - skipped - unmapped
        if skipped:
            first = Block(self, block.address, skipped)
            first.put_between(block.before, block)
            self._add(first)
        if behind:
            last = Block(self, block.address + skipped + unmapped, behind)
            last.put_between(block, block.after)
            self._add(last)
        block.address, block.size, block.mapped = block.address + skipped, unmapped, False
        self.release(block)
        self._driver.give_back(unmapped)

    def _add(self, block: Block) -> None:
        if block.mapped:
            super()._add(block)
        else:
            self._unmapped[block.address] = block

    def _remove(self, block: Block) -> None:
        if block.mapped:
            super()._remove(block)
        else:
            del self._unmapped[block.address]


def _is_large_enough(start: Block, size: int) -> bool:
    """Returns whether `start` and the free blocks behind it have `size` bytes together."""
    length = 0
    block: Block | None = start
    while block and not block.held and length < size:
        length += block.size
        block = block.after
    return length >= size


_MIB = 2**20


@dataclass(frozen=True)
class Rules:
    """The constants of the allocator, with their names in PyTorch, and two settings."""

    block: int = 512
    """kMinBlockSize: sizes of blocks are rounded up to a multiple of it."""
    small: int = _MIB
    """kSmallSize: allocations up to this size go to the small pool."""
    small_segment: int = 2 * _MIB
    """kSmallBuffer: the size of a segment of the small pool, or of a page if segments are expandable."""
    large_segment: int = 20 * _MIB
    """large_segment_size: the size of a segment of the large pool, or of a page if segments are expandable."""
    own_segment: int = 10 * _MIB
    """kMinLargeAlloc: from this size on, an allocation that needs a new segment gets one of its own size."""
    own_rounding: int = 2 * _MIB
    """kRoundLarge: the size of such a segment is rounded up to a multiple of it."""
    expandable: bool = False
    """Whether expandable_segments:True is set."""
    capacity: int | None = None
    """The memory that the driver can provide; None for no limit."""

    def rounded(self, size: int) -> int:
        """Returns the size of the block for `size` bytes (round_size)."""
        return -(-size // self.block) * self.block

    def segment(self, rounded: int) -> int:
        """Returns the size of a new segment for a block of `rounded` bytes (get_allocation_size)."""
        if rounded <= self.small:
            return self.small_segment
        if rounded < self.own_segment:
            return self.large_segment
        return -(-rounded // self.own_rounding) * self.own_rounding

    def least_rest(self, is_small: bool) -> int:
        """Returns the bytes that must remain for a block to be split (should_split)."""
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
        self._held: dict[int, Block] = {}
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
        """The bytes that have been requested and not freed."""
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

    def _grown(self, pool: Pool, rounded: int) -> Block | None:
        segment = self._rules.segment(rounded)
        block = pool.grow(rounded, segment)
        if block is None:
            self._retries += 1
            self.empty_cache()
            block = pool.grow(rounded, segment)
        return block

    def _pool(self, rounded: int, stream: int) -> Pool:
        """Returns the stream's pool for small or for large blocks (get_pool)."""
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
    """What the allocator does with a history.

    The arrays are int64, in bytes, with one element per position of the history: the value after the event at that
    position. If the capacity is too small, they end before the event that fails, and the readings end at the last mark
    before it.
    """

    requested: NDArray[np.int64]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    readings: list[Reading]
    """The readings of the device's allocator, one for each mark."""
    exhausted: int | None
    """The position of the event that fails; None if the capacity is large enough."""
    counts: Counts


def replay(history: History, rules: Rules) -> Replayed:
    """Replays the allocations and frees of a history with an empty allocator, on one stream."""
    allocator = CachingAllocator(rules)
    addresses = [0] * len(history.allocations)
    levels = array("q")
    exhausted = None
    for position, (index, begins) in enumerate(_events(history)):
        if begins:
            try:
                addresses[index] = allocator.allocate(history.allocations[index].size)
            except OutOfDeviceMemory:
                exhausted = position
                break
        elif index >= 0:
            allocator.free(addresses[index])
        levels.extend((allocator.requested, allocator.allocated, allocator.reserved))
    requested, allocated, reserved = np.array(levels, np.int64).reshape(-1, 3).T
    return Replayed(
        requested, allocated, reserved, _readings(history.marks, allocated, reserved), exhausted, allocator.counts
    )


def _events(history: History) -> list[tuple[int, bool]]:
    """Returns, for each position, the index of the allocation there (-1 if there is none) and whether it begins."""
    events = [(-1, False)] * history.length
    for index, allocation in enumerate(history.allocations):
        events[allocation.begin] = (index, True)
        if allocation.end is not None:
            events[allocation.end] = (index, False)
    return events


def _readings(marks: Sequence[Mark], allocated: NDArray[np.int64], reserved: NDArray[np.int64]) -> list[Reading]:
    """Returns the readings at the marks. A peak is that since the previous mark, including the memory at that mark."""
    tensors, driver = (np.concatenate(([0], counts)) for counts in (allocated, reserved))
    reached = [mark.at for mark in marks if mark.at <= len(allocated)]
    return [
        Reading(
            at, int(tensors[at]), int(driver[at]), int(tensors[start : at + 1].max()), int(driver[start : at + 1].max())
        )
        for start, at in pairwise([0, *reached])
    ]
