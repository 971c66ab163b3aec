"""The rules of the caching allocator written twice more, slowly: for separate segments and for expandable ones."""

from itertools import pairwise

MIB = 2**20


class Lists:
    """Segments as lists of [size, whether held]; what fits best is sought among all."""

    def __init__(self) -> None:
        self.segments: list[tuple[bool, list[list[int]]]] = []

    def allocate(self, size: int) -> list[int]:
        rounded = -(-size // 512) * 512
        small = rounded <= MIB
        fits = [
            (block[0], number, place)
            for number, (is_small, blocks) in enumerate(self.segments)
            for place, block in enumerate(blocks)
            if is_small == small and not block[1] and block[0] >= rounded
        ]
        if not fits:
            segment = 2 * MIB if small else 20 * MIB if rounded < 10 * MIB else -(-rounded // (2 * MIB)) * 2 * MIB
            self.segments.append((small, [[segment, False]]))
            fits = [(segment, len(self.segments) - 1, 0)]
        _, number, place = min(fits)
        blocks = self.segments[number][1]
        rest = blocks[place][0] - rounded
        if rest >= 512 if small else rest > MIB:
            blocks[place : place + 1] = [[rounded, False], [rest, False]]
        blocks[place][1] = True
        return blocks[place]

    def free(self, block: list[int]) -> None:
        block[1] = False
        for _, blocks in self.segments:
            merged: list[list[int]] = []
            for one in blocks:
                if merged and not merged[-1][1] and not one[1]:
                    merged[-1][0] += one[0]
                else:
                    merged.append(one)
            blocks[:] = merged

    def empty(self) -> None:
        self.segments = [one for one in self.segments if any(held for _, held in one[1])]

    @property
    def levels(self) -> tuple[int, int]:
        every = [block for _, blocks in self.segments for block in blocks]
        return sum(size for size, held in every if held), sum(size for size, _ in every)


class Line:
    """An expandable segment as what is held on a line of addresses and which of its pages are mapped; what is free
    follows anew each time."""

    END = 2**60

    def __init__(self, page: int) -> None:
        self.page = page
        self.held: dict[int, int] = {}
        self.pages: set[int] = set()

    def allocate(self, size: int) -> int:
        rounded = -(-size // 512) * 512
        start = self._fitting(rounded)
        if start is None:
            start = self._growing(rounded)
            self.pages |= set(range(start // self.page, -(-(start + rounded) // self.page)))
        self.held[start] = rounded
        return start

    def free(self, start: int) -> None:
        del self.held[start]

    def empty(self) -> None:
        spans = self.held.items()
        used = {page for at, size in spans for page in range(at // self.page, -(-(at + size) // self.page))}
        self.pages &= used

    def _runs(self) -> list[tuple[int, int, bool]]:
        """Stretches that are not held and alike: their start, their end and whether they are mapped."""
        found: list[tuple[int, int, bool]] = []
        at = 0
        for held, size in [*sorted(self.held.items()), (self.END, 0)]:
            borders = {page * self.page for page in self.pages} | {(page + 1) * self.page for page in self.pages}
            edges = [at, *sorted(border for border in borders if at < border < held), held]
            for start, end in pairwise(edges):
                mapped = start // self.page in self.pages
                if found and found[-1][1:] == (start, mapped):
                    found[-1] = (found[-1][0], end, mapped)
                elif start < end:
                    found.append((start, end, mapped))
            at = held + size
        return found

    def _fitting(self, rounded: int) -> int | None:
        ends = {start: end for start, end, mapped in self._runs() if not mapped}
        free = sorted((end - start, start, ends.get(end, end) - start) for start, end, mapped in self._runs() if mapped)
        fits = [(extent, start) for size, start, extent in free if size >= rounded]
        while len(fits) > 1 and fits[1][0] < fits[0][0]:
            del fits[0]
        return fits[0][1] if fits else None

    def _growing(self, rounded: int) -> int:
        runs = self._runs()
        for start, end, mapped in runs:
            if not mapped:
                first = next((one for one, its_end, _ in runs if its_end == start), start)
                reach = end
                for following, its_end, _ in runs:
                    if following == reach:
                        reach = its_end
                if reach - first >= rounded:
                    return first
        raise AssertionError


class Lines:
    """A line for each pool."""

    def __init__(self) -> None:
        self.lines = {True: Line(2 * MIB), False: Line(20 * MIB)}

    def allocate(self, size: int) -> tuple[Line, int]:
        line = self.lines[size <= MIB]
        return line, line.allocate(size)

    def free(self, block: tuple[Line, int]) -> None:
        line, start = block
        line.free(start)

    def empty(self) -> None:
        for line in self.lines.values():
            line.empty()

    @property
    def levels(self) -> tuple[int, int]:
        lines = self.lines.values()
        return sum(sum(line.held.values()) for line in lines), sum(len(line.pages) * line.page for line in lines)
