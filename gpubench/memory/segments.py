"""Blocks of memory, the free ones of them in pools, and the segments that the pools get from the driver.

As c10/cuda/CUDACachingAllocator.cpp has them; the names of its functions stand beside ours. Sizes and addresses are
bytes. Nothing is used by a second stream, so what is given back is free at once.
"""

from bisect import bisect_left, insort

_ADDRESS_SPACE = 1 << 60
"""Of an expandable segment. The real one has 9/8 of the device, and goes on in another where that is full."""


class Driver:
    """What the device gives: memory up to `capacity` bytes, without end where that is None, and addresses.

    Addresses only rise, and are never given twice. Those of the real driver need not rise, so that of two free blocks
    of one size in two segments the lower one may be the other.
    """

    def __init__(self, capacity: int | None) -> None:
        self.taken = 0
        self._capacity = capacity
        self._next = 1 << 21

    def take(self, size: int) -> bool:
        """Whether there was that much left; if so it is taken."""
        if self._capacity is not None and self.taken + size > self._capacity:
            return False
        self.taken += size
        return True

    def give_back(self, size: int) -> None:
        self.taken -= size

    def addresses(self, size: int) -> int:
        """The first of so many."""
        first = self._next
        self._next += size
        return first


class Block:
    """A stretch of a segment between two neighbours (Block); without memory behind it where it is not `mapped`."""

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
        self.before, self.after = before, after
        if before:
            before.after = self
        if after:
            after.before = self


class Pool:
    """The free blocks of one stream and one class of sizes (BlockPool), in segments that are asked for one by one.

    A block is split where that leaves `least_rest` bytes or more.
    """

    def __init__(self, driver: Driver, least_rest: int) -> None:
        self._driver = driver
        self._least_rest = least_rest
        self._free: dict[int, Block] = {}
        self._order: list[tuple[int, int]] = []
        """Size and address of the free blocks, sorted."""

    @property
    def largest(self) -> int:
        """Bytes of the largest free block; 0 without any."""
        return self._order[-1][0] if self._order else 0

    def take(self, size: int) -> Block | None:
        """The smallest free block of `size` bytes or more, and of those the lowest (get_free_block); None where there
        is none."""
        place = self._place(size)
        return None if place is None else self._pop(place)

    def grow(self, size: int, segment: int) -> Block | None:
        """A block of `size` bytes or more from a new segment of `segment` bytes (alloc_block); None where the driver
        has too little."""
        if not self._driver.take(segment):
            return None
        return Block(self, self._driver.addresses(segment), segment)

    def hold(self, block: Block, size: int) -> None:
        """Give out the first `size` bytes of a block that was taken, or all of it (should_split, alloc_found_block)."""
        block.held = True
        if block.size - size >= self._least_rest:
            rest = Block(self, block.address + size, block.size - size)
            rest.put_between(block, block.after)
            block.size = size
            self._add(rest)

    def release(self, block: Block) -> None:
        """Make it free again, as one with the free ones around it (free_block)."""
        block.held = False
        self._merge(block)
        self._add(block)

    def give_back(self) -> None:
        """Return the segments that are wholly free to the driver (release_blocks)."""
        for block in list(self._free.values()):
            if not block.before and not block.after:
                self._remove(block)
                self._driver.give_back(block.size)

    def _place(self, size: int) -> int | None:
        """In the order, of the block that fits best."""
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
        """Take up the neighbours that are not held either (try_merge_blocks)."""
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
    """A pool that has one segment, of addresses without memory at first, and maps pages into it (ExpandableSegment)."""

    def __init__(self, driver: Driver, least_rest: int, page: int) -> None:
        super().__init__(driver, least_rest)
        self._page = page
        self._base = driver.addresses(_ADDRESS_SPACE)
        self._unmapped: dict[int, Block] = {}
        self._add(Block(self, self._base, _ADDRESS_SPACE, mapped=False))

    def _place(self, size: int) -> int | None:
        """A block that the segment can still grow behind counts with what it can grow to."""
        place = super()._place(size)
        if place is None:
            return None
        while place + 1 < len(self._order) and self._extent(place + 1) < self._extent(place):
            place += 1
        return place

    def _extent(self, place: int) -> int:
        block = self._free[self._order[place][1]]
        return block.size + (block.after.size if block.after and not block.after.mapped else 0)

    def grow(self, size: int, segment: int) -> Block | None:
        """As in a pool of segments, from the lowest addresses that are long enough (try_allocate_expandable_block).

        Pages that were mapped before the driver had too little stay, and are free.
        """
        block = self._stretch(size)
        if not block.mapped and not self._map(block, size):
            return None
        while block.size < size:
            following = block.after
            if following is None or not self._map(following, size - block.size):
                return None
            block = following
        self._remove(block)
        return block

    def _stretch(self, size: int) -> Block:
        """The first of neighbours that are free or not mapped, `size` bytes in all (find_expandable_block)."""
        unmapped = (block for _, block in sorted(self._unmapped.items()))
        starts = (block.before if block.before and not block.before.held else block for block in unmapped)
        return next(start for start in starts if _is_room(start, size))

    def _map(self, block: Block, size: int) -> bool:
        """Put pages behind the first `size` bytes of a block, or behind all of it (map_block); False where the driver
        has too few."""
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
        """Return the pages that are wholly free to the driver (unmap_block)."""
        for block in list(self._free.values()):
            skipped = -(block.address - self._base) % self._page
            whole = (block.size - skipped) // self._page * self._page
            if whole > 0:
                self._unmap(block, skipped, whole)

    def _unmap(self, block: Block, skipped: int, whole: int) -> None:
        """Leave free blocks on both sides where that is not the whole of it."""
        self._remove(block)
        behind = block.size - skipped - whole
        if skipped:
            first = Block(self, block.address, skipped)
            first.put_between(block.before, block)
            self._add(first)
        if behind:
            last = Block(self, block.address + skipped + whole, behind)
            last.put_between(block, block.after)
            self._add(last)
        block.address, block.size, block.mapped = block.address + skipped, whole, False
        self.release(block)
        self._driver.give_back(whole)

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


def _is_room(start: Block, size: int) -> bool:
    length = 0
    block: Block | None = start
    while block and not block.held and length < size:
        length += block.size
        block = block.after
    return length >= size
