"""The segments of a device's memory, and the free blocks in them, as PyTorch's caching allocator keeps them."""

from bisect import bisect_left, insort

_ADDRESS_SPACE = 1 << 60
"""The size of an expandable segment. A real one has 9/8 of the device's memory, and is followed by another if full."""


class Driver:
    """A device driver that provides up to `capacity` bytes of memory (None for no limit), and addresses.

    Addresses always increase, and are never reused, so that the lowest address of some is in the oldest segment. Those
    of a real driver may decrease, as on an H100: the allocator of PyTorch before 2.13, which goes by the address alone,
    then chooses another one of the free blocks of a size.
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
        self.taken -= size

    def addresses(self, size: int) -> int:
        """Reserves `size` new addresses and returns the first."""
        first = self._next
        self._next += size
        return first


class MemoryBlock:
    """A part of a segment between two neighbours (Block). It has addresses but no memory if it is not `mapped`."""

    __slots__ = ("address", "after", "before", "held", "mapped", "pool", "requested", "size")

    def __init__(self, pool: "Pool", address: int, size: int, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        self.requested = 0
        self.held = False
        self.before: MemoryBlock | None = None
        self.after: MemoryBlock | None = None

    def put_between(self, before: "MemoryBlock | None", after: "MemoryBlock | None") -> None:
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
        self._free: dict[int, MemoryBlock] = {}
        self._order: list[tuple[int, int]] = []
        """The (size, address) of each free block, sorted."""

    @property
    def largest(self) -> int:
        """The size of the largest free block; 0 if there is none."""
        return self._order[-1][0] if self._order else 0

    def take(self, size: int) -> MemoryBlock | None:
        """Removes and returns the smallest free block of at least `size` bytes (get_free_block).

        Of several blocks of this size, it is the one in the oldest segment, and there the one with the lowest address.
        Returns None if there is none.
        """
        place = self._place(size)
        return None if place is None else self._pop(place)

    def grow(self, size: int, segment: int) -> MemoryBlock | None:
        """Gets a block of at least `size` bytes from a new segment of `segment` bytes (alloc_block).

        Returns None if the driver has too little memory.
        """
        if not self._driver.take(segment):
            return None
        return MemoryBlock(self, self._driver.addresses(segment), segment)

    def hold(self, block: MemoryBlock, size: int) -> None:
        """Marks a block as used, and splits off what exceeds `size` bytes (should_split, alloc_found_block)."""
        block.held = True
        if block.size - size >= self._least_rest:
            rest = MemoryBlock(self, block.address + size, block.size - size)
            rest.put_between(block, block.after)
            block.size = size
            self._add(rest)

    def release(self, block: MemoryBlock) -> None:
        """Frees the block and merges it with free neighbours (free_block)."""
        block.held = False
        self._merge(block)
        self._add(block)

    def give_back(self) -> None:
        """Gives completely free segments back to the driver (release_blocks)."""
        for block in list(self._free.values()):
            if not block.before and not block.after:
                self._remove(block)
                self._driver.give_back(block.size)

    def _place(self, size: int) -> int | None:
        """Index of the best-fitting free block in the sorted list; None if none fits."""
        place = bisect_left(self._order, (size, 0))
        return place if place < len(self._order) else None

    def _pop(self, place: int) -> MemoryBlock:
        return self._free.pop(self._order.pop(place)[1])

    def _add(self, block: MemoryBlock) -> None:
        self._free[block.address] = block
        insort(self._order, (block.size, block.address))

    def _remove(self, block: MemoryBlock) -> None:
        self._pop(bisect_left(self._order, (block.size, block.address)))

    def _merge(self, block: MemoryBlock) -> None:
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
        self._unmapped: dict[int, MemoryBlock] = {}
        self._add(MemoryBlock(self, self._base, _ADDRESS_SPACE, mapped=False))

    def _place(self, size: int) -> int | None:
        """Index of the block that fits best together with what it can grow by; None if none fits."""
        place = super()._place(size)
        if place is None:
            return None
        while place + 1 < len(self._order) and self._extent(place + 1) < self._extent(place):
            place += 1
        return place

    def _extent(self, place: int) -> int:
        """The size of a free block together with unmapped addresses behind it."""
        block = self._free[self._order[place][1]]
        return block.size + (block.after.size if block.after and not block.after.mapped else 0)

    def grow(self, size: int, segment: int) -> MemoryBlock | None:
        """Gets a block of at least `size` bytes, for which pages are mapped (try_allocate_expandable_block).

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

    def _first_block_to_expand(self, size: int) -> MemoryBlock:
        """The first of adjacent free or unmapped blocks with `size` bytes in all (find_expandable_block)."""
        unmapped = (block for _, block in sorted(self._unmapped.items()))
        starts = (block.before if block.before and not block.before.held else block for block in unmapped)
        return next(start for start in starts if _is_large_enough(start, size))

    def _map(self, block: MemoryBlock, size: int) -> bool:
        """Maps pages for the first `size` bytes of a block, or for all of it (map_block).

        Returns False if the driver has too little memory.
        """
        mapped = -(-min(size, block.size) // self._page) * self._page
        if not self._driver.take(mapped):
            return False
        self._remove(block)
        if mapped < block.size:
            rest = MemoryBlock(self, block.address + mapped, block.size - mapped, mapped=False)
            rest.put_between(block, block.after)
            self._add(rest)
        block.mapped, block.size = True, mapped
        self.release(block)
        return True

    def give_back(self) -> None:
        """Gives completely free pages back to the driver (unmap_block)."""
        for block in list(self._free.values()):
            skipped = -(block.address - self._base) % self._page
            unmapped = (block.size - skipped) // self._page * self._page
            if unmapped > 0:
                self._unmap(block, skipped, unmapped)

    def _unmap(self, block: MemoryBlock, skipped: int, unmapped: int) -> None:
        """Unmaps `unmapped` bytes after the first `skipped` bytes; what remains on both sides stays free."""
        self._remove(block)
        behind = block.size - skipped - unmapped
        if skipped:
            first = MemoryBlock(self, block.address, skipped)
            first.put_between(block.before, block)
            self._add(first)
        if behind:
            last = MemoryBlock(self, block.address + skipped + unmapped, behind)
            last.put_between(block, block.after)
            self._add(last)
        block.address, block.size, block.mapped = block.address + skipped, unmapped, False
        self.release(block)
        self._driver.give_back(unmapped)

    def _add(self, block: MemoryBlock) -> None:
        if block.mapped:
            super()._add(block)
        else:
            self._unmapped[block.address] = block

    def _remove(self, block: MemoryBlock) -> None:
        if block.mapped:
            super()._remove(block)
        else:
            del self._unmapped[block.address]


def _is_large_enough(start: MemoryBlock, size: int) -> bool:
    """Whether `start` and the free blocks behind it have `size` bytes together."""
    length = 0
    block: MemoryBlock | None = start
    while block and not block.held and length < size:
        length += block.size
        block = block.after
    return length >= size
