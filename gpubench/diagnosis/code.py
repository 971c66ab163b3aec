"""What samples and calls of the program's own code add to a finding: the function and the line.

Samples show where time goes in Python, and in what Python calls directly. They are of other steps than those of the
clean run and of torch.profiler.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpubench import units
from gpubench.diagnosis.case import ProfileCase
from gpubench.sampled import SampledFunction, SeenCall

ENOUGH = 10
"""The least samples to judge by: with fewer, a share of a half is uncertain by more than 30 points."""
LEAST, LEAST_SAMPLES = 0.1, 5
"""A function is named if it has at least this share of the samples and this many of them."""
NAMED = 3  # functions or lines that a finding lists
OF_BATCHES = frozenset({"data_wait", "worker_start"})
"""The phases in which the main thread gets its batches."""


class CodeShares(NamedTuple):
    """Functions, most samples first, and the samples of which they are."""

    functions: Sequence[SampledFunction]
    samples: int
    of: str
    """What the samples are of, such as "the time in which workers make batches"."""

    def share(self, one: SampledFunction) -> float:
        return one.samples / self.samples

    @property
    def slowest(self) -> SampledFunction | None:
        """The function of the program with most of the samples; None if no such function has enough of them."""
        return next((one for one in self.named if one.file), None)

    @property
    def named(self) -> list[SampledFunction]:
        """The functions that have enough of the samples."""
        return [one for one in self.functions if self.share(one) >= LEAST and one.samples >= LEAST_SAMPLES]

    @property
    def summary(self) -> str:
        """The share of the slowest function, as a clause; empty without one."""
        slowest = self.slowest
        return f"{units.percent(self.share(slowest))} of {self.of} is in {named(slowest)}" if slowest else ""


def making_batches(case: ProfileCase) -> CodeShares | None:
    """Returns the samples of making batches: in the workers, or else in the main thread; None if there are few.

    The main thread of a program with workers only waits, and counts for nothing.
    """
    code = case.rank.code
    if code is None:
        return None
    workers = code.workers
    if workers.processes:
        working = "a worker makes" if workers.processes == 1 else f"the {workers.processes} workers make"
        return _enough(workers.functions, workers.samples - workers.waiting, f"the time in which {working} batches")
    if case.setting("data.workers"):
        return None
    found = [one for one in code.main.functions if one.phase in OF_BATCHES]
    return _enough(found, sum(one.samples for one in found), "the time in which batches are made")


def of_steps(case: ProfileCase, phases: Iterable[str]) -> CodeShares | None:
    """Returns the samples of the main thread in some phases, out of all of its samples; None if there are few."""
    code = case.rank.code
    if code is None:
        return None
    wanted = frozenset(phases)
    found = [one for one in code.main.functions if one.phase in wanted]
    return _enough(found, code.main.samples, "the steps")


def _enough(functions: Sequence[SampledFunction], samples: int, of: str) -> CodeShares | None:
    return CodeShares(functions, samples, of) if samples >= ENOUGH else None


def idle_workers(case: ProfileCase) -> list[str]:
    """States how much of their time the workers have nothing to do, if that is much."""
    share = idle_share(case)
    if share is None or share < LEAST:
        return []
    return [f"{units.percent(share)} of the workers' time is spent waiting for the next batch to make"]


def idle_share(case: ProfileCase) -> float | None:
    """Returns the fraction of their time in which workers have nothing to do; None if too little is known of them."""
    workers = case.rank.code.workers if case.rank.code else None
    return workers.waiting / workers.samples if workers is not None and workers.samples >= ENOUGH else None


def sampled_evidence(found: CodeShares | None) -> list[str]:
    """Returns a sentence for each function that has enough of the samples."""
    return [_describe(found, one) for one in found.named[:NAMED]] if found else []


def _describe(found: CodeShares, one: SampledFunction) -> str:
    share, count = units.percent(found.share(one)), f"{one.samples:,} of {units.counted(found.samples, 'sample')}"
    said = f"{share} of {found.of} is in {named(one)} ({count})"
    if one.on_line and one.file:
        part = "" if one.on_line == one.samples else f"{units.whole_percent(one.on_line / one.samples)} of it in "
        said += f", {part}line {one.line}{_text(one.source)}"
    return f"{said}, within {one.within}" if one.within else said


def named(one: SampledFunction) -> str:
    """Returns a function as "Images.augment at data.py:14"."""
    if not one.file:
        return one.function
    name = "the module's own code" if one.function == "<module>" else one.function
    return f"{name} at {one.place}"


def calls(case: ProfileCase, kind: str, phases: Iterable[str] = ()) -> list[SeenCall]:
    """Returns the lines that make calls of a kind, in some phases or in all."""
    code, wanted = case.rank.code, frozenset(phases)
    found = code.calls if code else []
    return [one for one in found if one.kind == kind and (not wanted or one.phase in wanted)]


def call_evidence(found: Sequence[SeenCall]) -> list[str]:
    """Returns a sentence for each line that makes calls."""
    return [_describe_call(one) for one in found[:NAMED]]


def call_places(found: Sequence[SeenCall]) -> str:
    """Returns the lines that make calls with what they call, as "train.py:31 item, train.py:32 tolist"; "" for none."""
    return ", ".join(f"{one.place} {one.name}" for one in found[:NAMED] if one.file)


def _describe_call(one: SeenCall) -> str:
    often = "" if one.phase == "set-up" else f" {units.counted(one.calls, 'time')} a step"
    where = f"{one.place} in {one.function}" if one.file else f"to make a batch, {one.function}"
    through = f", within {one.within}" if one.within else ""
    return f"{where} calls {one.name}{often}{through}{_text(one.source)}"


def _text(source: str) -> str:
    return f": {source}" if source else ""
