from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal

import pytest
from allocators_made import Lines, Lists
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from gpubench.memory.allocation_log import Allocation, AllocationLog, AllocatorReading, Counts, PhaseStart
from gpubench.memory.allocator import CachingAllocator, OutOfDeviceMemory, Rules, replay

KIB, MIB = 2**10, 2**20

Request = tuple[Literal["allocate", "free", "empty"], int]
"""With the size, or with which of those held, modulo their number."""


def sizes() -> SearchStrategy[int]:
    """Of all classes, and around their borders."""
    borders = st.sampled_from((0, 512, 512 * KIB, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 26 * MIB))
    near = st.builds(lambda border, off: max(border + off, 0), borders, st.sampled_from((-MIB, -512, -1, 0, 1, 512)))
    return near | st.integers(0, 4 * KIB) | st.integers(0, 30 * MIB)


def requests() -> SearchStrategy[list[Request]]:
    what: SearchStrategy[Request] = st.one_of(
        st.tuples(st.just("allocate"), sizes()),
        st.tuples(st.just("allocate"), sizes()),
        st.tuples(st.just("free"), st.integers(0, 50)),
        st.tuples(st.just("empty"), st.just(0)),
    )
    return st.lists(what, min_size=20, max_size=80)


def reserved_for(*asked: int, rules: Rules | None = None) -> list[int]:
    """What each of these allocations, none of them given back, makes the allocator reserve, in MiB."""
    allocator = CachingAllocator(rules or Rules())
    found = [0]
    for size in asked:
        allocator.allocate(size)
        found.append(allocator.reserved)
    return [(after - before) // MIB for before, after in pairwise(found)]


def a_history(*allocations: tuple[int, int, int | None], marks: Sequence[int] = (0,)) -> AllocationLog:
    """Of sizes, begins and ends."""
    ends = [end for _, _, end in allocations if end is not None]
    length = max([begin for _, begin, _ in allocations] + ends, default=-1) + 1
    made = [Allocation(size, begin, end) for size, begin, end in allocations]
    return AllocationLog(made, [PhaseStart(at, "forward") for at in marks], length)


# --- Sizes of blocks and segments


@pytest.mark.parametrize(("size", "block"), [(1, 512), (512, 512), (513, 1024), (4, 512), (MIB, MIB)])
def test_a_block_is_a_multiple_of_512_bytes(size: int, block: int) -> None:
    allocator = CachingAllocator(Rules())
    allocator.allocate(size)
    assert (allocator.requested, allocator.allocated) == (size, block)


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2_097_152),
        (MIB, 2_097_152),
        (MIB + 1, 20_971_520),
        (10 * MIB - 512, 20_971_520),
        (10 * MIB - 1, 10 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (25 * MIB, 27_262_976),
        (100 * MIB, 104_857_600),
    ],
)
def test_a_first_allocation_brings_a_segment_of_its_class(size: int, segment: int) -> None:
    allocator = CachingAllocator(Rules())
    allocator.allocate(size)
    assert allocator.reserved == segment


def test_no_bytes_take_nothing() -> None:
    allocator = CachingAllocator(Rules(capacity=0))
    handle = allocator.allocate(0)
    allocator.free(handle)
    assert (allocator.requested, allocator.allocated, allocator.reserved) == (0, 0, 0)


def test_what_is_not_held_cannot_be_given_back() -> None:
    allocator = CachingAllocator(Rules())
    handle = allocator.allocate(1)
    allocator.free(handle)
    with pytest.raises(KeyError):
        allocator.free(handle)


# --- Splitting and merging


def test_a_segment_of_the_small_pool_is_filled_to_its_last_512_bytes() -> None:
    assert reserved_for(*[MIB, MIB - 512, 512, 1]) == [2, 0, 0, 2]


@pytest.mark.parametrize(("rest", "block"), [(MIB + 512, 19 * MIB - 512), (MIB, 20 * MIB), (512, 20 * MIB)])
def test_a_large_block_is_split_only_where_more_than_1_mib_remains(rest: int, block: int) -> None:
    allocator = CachingAllocator(Rules())
    whole = allocator.allocate(20 * MIB)
    allocator.free(whole)
    allocator.allocate(20 * MIB - rest)
    assert (allocator.requested, allocator.allocated, allocator.reserved) == (20 * MIB - rest, block, 20 * MIB)


def test_tensors_of_25_mib_lie_in_blocks_of_26() -> None:
    allocator = CachingAllocator(Rules())
    for _ in range(128):
        allocator.allocate(25 * MIB)
    assert (allocator.requested, allocator.allocated, allocator.reserved) == (3200 * MIB, 3328 * MIB, 3328 * MIB)


def test_a_segment_of_20_mib_is_shared_by_what_has_1_to_10() -> None:
    assert reserved_for(6 * MIB, 6 * MIB, 6 * MIB, 2 * MIB, 2 * MIB) == [20, 0, 0, 0, 20]


def test_small_and_large_blocks_share_nothing() -> None:
    assert reserved_for(2 * MIB, 512 * KIB) == [20, 2]


def test_streams_share_nothing() -> None:
    allocator = CachingAllocator(Rules())
    allocator.free(allocator.allocate(MIB, stream=0))
    allocator.allocate(MIB, stream=7)
    assert allocator.reserved == 4 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_neighbours_that_are_free_become_one(order: Sequence[int]) -> None:
    allocator = CachingAllocator(Rules())
    handles = [allocator.allocate(size * MIB) for size in (6, 6, 8)]
    for index in order:
        allocator.free(handles[index])
    allocator.allocate(20 * MIB)
    assert allocator.reserved == 20 * MIB


def test_what_lies_on_both_sides_of_a_held_block_does_not_become_one() -> None:
    allocator = CachingAllocator(Rules())
    handles = [allocator.allocate(size * MIB) for size in (6, 6, 8)]
    allocator.free(handles[0])
    allocator.free(handles[2])
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 40 * MIB


def test_segments_do_not_become_one() -> None:
    allocator = CachingAllocator(Rules())
    for handle in [allocator.allocate(12 * MIB) for _ in range(2)]:
        allocator.free(handle)
    allocator.allocate(24 * MIB)
    assert allocator.reserved == 48 * MIB


def test_the_smallest_that_fits_is_taken_and_of_those_the_lowest() -> None:
    allocator = CachingAllocator(Rules())
    handles = [allocator.allocate(size * MIB) for size in (40, 14, 12, 14)]
    for handle in reversed(handles):
        allocator.free(handle)
    assert [allocator.allocate(13 * MIB) for _ in range(3)] == [handles[1], handles[3], handles[0]]


@pytest.mark.parametrize("expandable", [False, True])
def test_of_holes_that_fit_equally_well_the_lowest_is_taken(expandable: bool) -> None:
    allocator = CachingAllocator(Rules(expandable=expandable))
    handles = [allocator.allocate(5 * MIB) for _ in range(8)]
    for place in (5, 3, 1):
        allocator.free(handles[place])
    assert [allocator.allocate(4 * MIB + 1) for _ in range(3)] == [handles[1], handles[3], handles[5]]


# --- Giving back


def test_an_emptied_cache_keeps_the_segments_that_are_in_use() -> None:
    allocator = CachingAllocator(Rules())
    kept, given = allocator.allocate(2 * MIB), [allocator.allocate(size) for size in (3 * MIB, 50 * MIB, 1)]
    for handle in given:
        allocator.free(handle)
    assert allocator.reserved == 72 * MIB
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved == 0


def test_where_the_device_is_full_cached_segments_are_given_back_first() -> None:
    allocator = CachingAllocator(Rules(capacity=64 * MIB))
    cached, kept = allocator.allocate(40 * MIB), allocator.allocate(20 * MIB)
    allocator.free(cached)
    allocator.allocate(44 * MIB)
    assert allocator.reserved == 64 * MIB
    allocator.free(kept)


def test_what_does_not_fit_is_told_with_what_is_there() -> None:
    allocator = CachingAllocator(Rules(capacity=64 * MIB))
    allocator.free(allocator.allocate(30 * MIB))
    allocator.allocate(3 * MIB)
    with pytest.raises(OutOfDeviceMemory) as told:
        allocator.allocate(46 * MIB)
    assert (told.value.requested, told.value.allocated, told.value.reserved) == (46 * MIB, 3 * MIB, 30 * MIB)
    assert str(told.value) == "48,234,496 bytes do not fit: 3,145,728 bytes are allocated and 31,457,280 bytes reserved"


def test_free_memory_in_a_segment_in_use_is_of_no_help() -> None:
    allocator = CachingAllocator(Rules(capacity=40 * MIB))
    whole = [allocator.allocate(9 * MIB) for _ in range(4)]
    for handle in whole[::2]:
        allocator.free(handle)
    with pytest.raises(OutOfDeviceMemory):
        allocator.allocate(12 * MIB)


# --- Segments that expand

EXPANDABLE = Rules(expandable=True)


def test_an_expandable_segment_grows_by_pages_of_2_and_20_mib() -> None:
    assert reserved_for(MIB, MIB, 1, rules=EXPANDABLE) == [2, 0, 2]
    assert reserved_for(2 * MIB, 25 * MIB, 13 * MIB, 1 * MIB + 1, rules=EXPANDABLE) == [20, 20, 0, 20]


def test_an_expandable_segment_is_split_to_512_bytes_also_in_the_large_pool() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    for _ in range(4):
        allocator.allocate(25 * MIB)
    assert (allocator.allocated, allocator.reserved) == (100 * MIB, 100 * MIB)


def test_what_is_given_back_becomes_one_across_pages() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    for handle in [allocator.allocate(25 * MIB) for _ in range(4)]:
        allocator.free(handle)
    allocator.allocate(100 * MIB)
    assert allocator.reserved == 100 * MIB


def test_the_free_end_of_an_expandable_segment_is_used_before_it_grows() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.allocate(12 * MIB)
    allocator.allocate(30 * MIB)  # 8 of the first page, 20 and 2 of two more
    assert allocator.reserved == 60 * MIB
    allocator.allocate(18 * MIB)
    assert allocator.reserved == 60 * MIB


def test_a_hole_is_taken_before_the_end_that_can_grow_even_if_the_end_fits_better() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first, _, _ = allocator.allocate(12 * MIB), allocator.allocate(2 * MIB), allocator.allocate(16 * MIB)
    allocator.free(first)  # a hole of 12 MiB, and an end of 10
    assert allocator.allocate(9 * MIB) == first


def test_pages_that_are_wholly_free_are_given_back_also_from_the_middle() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    handles = [allocator.allocate(15 * MIB) for _ in range(8)]  # six pages
    for handle in handles[1:7]:
        allocator.free(handle)  # from 15 MiB to 105: four whole pages
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    around = [allocator.allocate(5 * MIB) for _ in range(2)]
    assert around == [handles[0] + 100 * MIB, handles[0] + 15 * MIB]  # what can still grow is taken last
    assert allocator.allocate(80 * MIB) == handles[0] + 20 * MIB  # the pages, which are mapped again
    assert allocator.reserved == 120 * MIB


def test_a_block_reaches_from_a_free_one_over_lost_pages_into_the_next_free_one() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    handles = [allocator.allocate(15 * MIB) for _ in range(4)]  # three pages
    for handle in handles[1:3]:
        allocator.free(handle)  # from 15 MiB to 45
    allocator.empty_cache()
    assert allocator.reserved == 40 * MIB
    assert allocator.allocate(30 * MIB) == handles[1]
    assert (allocator.allocated, allocator.reserved) == (60 * MIB, 60 * MIB)


def test_pages_that_were_mapped_before_the_device_was_full_stay_and_are_free() -> None:
    """Two gaps of unmapped pages lie on the way; the device has enough for the first only."""
    allocator = CachingAllocator(Rules(expandable=True, capacity=100 * MIB))
    handles = [allocator.allocate(20 * MIB) for _ in range(5)]
    allocator.free(handles[1])
    allocator.empty_cache()
    with pytest.raises(OutOfDeviceMemory) as told:
        allocator.allocate(40 * MIB)
    assert told.value.reserved == 80 * MIB
    assert allocator.allocate(20 * MIB) == handles[1]
    assert allocator.reserved == 100 * MIB


def test_an_expandable_segment_that_is_full_gives_its_free_pages_back_and_grows_elsewhere() -> None:
    allocator = CachingAllocator(Rules(expandable=True, capacity=60 * MIB))
    handles = [allocator.allocate(20 * MIB) for _ in range(3)]
    allocator.free(handles[0])
    allocator.free(handles[2])
    assert allocator.allocate(40 * MIB) == handles[2]
    assert allocator.reserved == 60 * MIB


# --- Against the same rules written in another way, and against what must always hold


def both_do(asked: list[Request], allocator: CachingAllocator, other: Any) -> None:
    held: list[tuple[int, Any]] = []
    for what, number in asked:
        if what == "allocate" and number:
            held.append((allocator.allocate(number), other.allocate(number)))
        elif what == "free" and held:
            handle, block = held.pop(number % len(held))
            allocator.free(handle)
            other.free(block)
        elif what == "empty":
            allocator.empty_cache()
            other.empty()
        assert (allocator.allocated, allocator.reserved) == other.levels


@given(requests())
def test_segments_are_as_lists_of_blocks(asked: list[Request]) -> None:
    both_do(asked, CachingAllocator(Rules()), Lists())


@given(requests())
def test_an_expandable_segment_is_as_a_line_with_pages(asked: list[Request]) -> None:
    both_do(asked, CachingAllocator(EXPANDABLE), Lines())


@given(requests(), st.booleans(), st.none() | st.integers(0, 120))
def test_each_count_holds_the_one_before_and_all_of_it_comes_back(
    asked: list[Request], expandable: bool, capacity: int | None
) -> None:
    allocator = CachingAllocator(Rules(expandable=expandable, capacity=None if capacity is None else capacity * MIB))
    held: dict[int, int] = {}
    for what, number in asked:
        if what == "allocate" and number:
            with suppress(OutOfDeviceMemory):
                held[allocator.allocate(number)] = number
        elif what == "free" and held:
            handle = list(held)[number % len(held)]
            allocator.free(handle)
            del held[handle]
        elif what == "empty":
            allocator.empty_cache()
        assert allocator.requested == sum(held.values())
        assert allocator.requested <= allocator.allocated <= allocator.reserved
        assert capacity is None or allocator.reserved <= capacity * MIB
        spans = sorted((handle, handle + size) for handle, size in held.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for handle in held:
        allocator.free(handle)
    assert (allocator.requested, allocator.allocated) == (0, 0)
    allocator.empty_cache()
    assert allocator.reserved == 0


# --- Histories


def test_a_history_is_replayed_event_by_event() -> None:
    replayed = replay(a_history((3 * MIB, 0, 3), (700, 1, None), (20 * MIB, 2, 4), (18 * MIB, 5, None)), Rules())
    assert replayed.requested.tolist() == [3145728, 3146428, 24117948, 20972220, 700, 18875068]
    assert (replayed.allocated - replayed.requested).tolist() == [0, 324, 324, 324, 324, 324]
    assert (replayed.reserved // MIB).tolist() == [20, 22, 42, 42, 42, 42]
    assert {array.dtype.name for array in (replayed.requested, replayed.allocated, replayed.reserved)} == {"int64"}
    assert replayed.exhausted is None


def test_readings_are_of_the_mark_and_of_the_time_since_the_mark_before() -> None:
    allocations = ((MIB, 0, 1), (2 * MIB, 2, 4), (512, 3, None))
    readings = replay(a_history(*allocations, marks=(0, 2, 2, 4)), Rules()).readings
    assert readings == [
        AllocatorReading(0, 0, 0, 0, 0),
        AllocatorReading(2, 0, 2 * MIB, MIB, 2 * MIB),
        AllocatorReading(2, 0, 2 * MIB, 0, 2 * MIB),
        AllocatorReading(4, 2 * MIB + 512, 22 * MIB, 2 * MIB + 512, 22 * MIB),
    ]


def test_a_history_ends_where_the_device_is_full() -> None:
    history = a_history((30 * MIB, 0, 2), (30 * MIB, 1, None), (40 * MIB, 3, None), (1, 4, None), marks=(0, 2, 3, 4))
    replayed = replay(history, Rules(capacity=64 * MIB))
    assert replayed.exhausted == 3
    assert (replayed.allocated // MIB).tolist() == [30, 60, 30]
    assert (replayed.reserved // MIB).tolist() == [30, 60, 60]
    assert [reading.at for reading in replayed.readings] == [0, 2, 3]
    assert replay(history, Rules(capacity=72 * MIB)).exhausted is None


def test_a_replay_counts_as_pytorch_does() -> None:
    """A retry is an allocation for which the cache was given back to the driver, whether that sufficed or not."""
    history = a_history((30 * MIB, 0, 2), (30 * MIB, 1, None), (40 * MIB, 3, None), (0, 4, 5))
    assert replay(history, Rules()).counts == Counts(3, 1, None, None, largest_free=30 * MIB)
    assert replay(history, Rules(capacity=100 * MIB)).counts == Counts(3, 1, 0, 0, largest_free=30 * MIB)
    assert replay(history, Rules(capacity=72 * MIB)).counts == Counts(3, 1, 1, 0, largest_free=0)
    assert replay(history, Rules(capacity=64 * MIB)).counts == Counts(2, 1, 1, 1, largest_free=0)
    assert replay(a_history((3 * MIB, 0, None)), Rules(expandable=True)).counts.largest_free == 17 * MIB


def test_a_history_of_nothing_has_nothing() -> None:
    replayed = replay(a_history(), Rules())
    assert [len(array) for array in (replayed.requested, replayed.allocated, replayed.reserved)] == [0, 0, 0]
    assert replayed.readings == [AllocatorReading(0, 0, 0, 0, 0)]


def test_a_position_without_an_event_changes_nothing() -> None:
    history = a_history((512, 1, None))
    history.length = 3
    assert replay(history, Rules()).allocated.tolist() == [0, 512, 512]
