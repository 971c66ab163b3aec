"""What the data of a program costs: the content of loader.json."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from gpubench.loader_record import LoaderRecord, SampleTimes, StageKind

MOST_RATE, MOST_SECONDS = 1e18, 1e9

NAMES: Mapping[StageKind, str] = {
    "index": "index and sampler",
    "dataset": "__getitem__",
    "read": "read",
    "decode": "decode",
    "transform": "transform",
    "collate": "collate",
    "pin": "pinning",
    "transfer": "transfer between processes",
}
"""What the kinds of stages are called. A stage that has a name of its own is called by both."""


class Estimate(Struct, frozen=True):
    """A measured figure with its 95 % interval over repeats; None for a single repeat."""

    value: float
    interval: tuple[float, float] | None = None


class SampleStage(Struct, frozen=True):
    """A part of the work of a sample, in all processes."""

    kind: StageKind
    name: str
    seconds: float
    """Its time for one sample, without that of stages inside it; `cpu` is the part in which it computed, or waited for
    a core that another process had."""
    cpu: float
    share: float
    """Its share of the time of all stages."""
    calls: float
    """The calls for one sample."""
    place: str

    @property
    def called(self) -> str:
        """What it is called, such as "transform Normalize"."""
        if self.kind == "dataset":
            return f"__getitem__: {self.name}" if self.name else "the rest of __getitem__"
        return " ".join(filter(None, (NAMES[self.kind], self.name)))

    @property
    def waits(self) -> float:
        """The share of its time in which it did not compute."""
        return max(0.0, 1 - self.cpu / self.seconds) if self.seconds > 0 else 0.0


class WithWorkers(Struct, frozen=True):
    """The loader alone with some number of workers."""

    workers: int
    throughput: Estimate | None
    """In samples a second; None if it could not be measured, for the reason `error`."""
    cpu: float | None = None
    """The CPU time of all processes for one sample."""
    cores: float | None = None
    """The cores that all processes together kept busy."""
    main: float | None = None
    """The share of the time in which the process that draws computed."""
    memory: float | None = None
    """The proportional share of memory of one worker, in bytes, and in it the shared memory."""
    shm: float | None = None
    first_batch: float | None = None
    restart: float | None = None
    """The time from the end of a pass to the first batch of the next one."""
    run: str | None = None
    error: str | None = None


class ReadyCeiling(Struct, frozen=True):
    """How fast training is with data that is always ready."""

    training: Estimate
    """The throughput as it is, in samples a second."""
    ready: Estimate
    """That with the first batches kept and given again."""
    ratio: float | None
    interval: tuple[float, float] | None
    """The second by the first, with its interval; None if the repeats do not show it."""
    verdict: str
    runs: tuple[str, str]


class Proposed(Struct, frozen=True):
    """The number of workers that training was run with beside the one that it has."""

    workers: int
    ratio: float | None
    interval: tuple[float, float] | None
    verdict: str
    runs: tuple[str, str]
    """The run directories of training as it is, and of that with as many workers."""


class DataCost(Struct, frozen=True):
    record: LoaderRecord
    """What was seen in the repeat that was recorded, or else in the last one."""
    stages: list[SampleStage]
    """Those of one sample, those with most time first."""
    sample: float
    """The time of all stages for one sample, and the part of it in which they computed."""
    sample_cpu: float
    times: SampleTimes | None
    delay: float = 0.0
    """The part of `sample_cpu` in which a core was waited for that another process had."""
    scaling: list[WithWorkers] = []
    ceiling: ReadyCeiling | None = None
    proposed: Proposed | None = None


def impossible(found: DataCost) -> Iterator[str]:
    """Yields the values in what a file says that no run can produce."""
    known = [one.throughput.value for one in found.scaling if one.throughput]
    known += [found.ceiling.training.value, found.ceiling.ready.value] if found.ceiling else []
    if any(not 0 < value < MOST_RATE for value in known):
        yield "it has an impossible throughput"
    if any(not (0 <= one.cpu <= one.seconds <= MOST_SECONDS and 0 <= one.share <= 1) for one in found.stages):
        yield "it has an impossible stage"
    if found.times and (not found.times.quantiles or found.times.quantiles != sorted(found.times.quantiles)):
        yield "its times of samples are in no order"


def scalars(found: DataCost) -> dict[str, float]:
    """The time of each stage of a sample in seconds, and the throughput with each number of workers, by their tags."""
    stages = {f"loader/stage/{one.called}": one.seconds for one in found.stages}
    return stages | {f"loader/workers/{one.workers}": one.throughput.value for one in found.scaling if one.throughput}


_Key = tuple[StageKind, str]
_READ: _Key = ("read", "")


@dataclass
class _Sum:
    """The time, the CPU time and the calls of a stage for one sample."""

    seconds: float = 0.0
    cpu: float = 0.0
    calls: float = 0.0

    def add(self, seconds: float, cpu: float, calls: float) -> None:
        self.seconds += seconds
        self.cpu += cpu
        self.calls += calls


def stages_of(records: Sequence[LoaderRecord], recorded: LoaderRecord | None) -> list[SampleStage]:
    """Returns the stages of a sample as means over the records, those with most time first.

    The calls that read are timed in the recorded repeat alone: by the share that they have of a stage there they become
    a stage of their own.
    """
    sums: dict[_Key, _Sum] = {}
    places: dict[_Key, str] = {}
    reading = {(one.kind, one.name): one for one in recorded.stages} if recorded else {}
    of = list(records) or [one for one in [recorded] if one]
    for record in of:
        parts = len(of) * max(1, record.stage_samples)
        delayed = _delayed(record)
        for one in record.stages:
            key = (one.kind, one.name)
            places[key] = places.get(key) or one.place
            cpu = one.cpu + delayed * (one.seconds - one.cpu)
            sums.setdefault(key, _Sum()).add(one.seconds / parts, cpu / parts, one.calls / parts)
    for key, found in list(sums.items()):
        known = reading.get(key)
        if known and known.reading > 0 and key[0] not in ("read", "transfer"):
            seconds = found.seconds * known.reading / known.seconds
            computed = known.reading_cpu + _delayed(recorded or of[0]) * (known.reading - known.reading_cpu)
            cpu = min(found.cpu, seconds * computed / known.reading)
            found.add(-seconds, -cpu, 0.0)
            sums.setdefault(_READ, _Sum()).add(seconds, cpu, 0.0)
    whole = sum(found.seconds for found in sums.values()) or 1.0
    stages = [
        SampleStage(
            *key, found.seconds, min(found.cpu, found.seconds), found.seconds / whole, found.calls, places.get(key, "")
        )
        for key, found in sums.items()
        if found.seconds > 0
    ]
    return sorted(stages, key=lambda stage: -stage.seconds)


def delay_of(records: Sequence[LoaderRecord], recorded: LoaderRecord | None) -> float:
    """Returns for how long the stages of a sample waited for a core, as the mean of the records that `stages_of`
    takes."""
    of = list(records) or [one for one in [recorded] if one]
    known = [
        _delayed(one) * sum(each.seconds - each.cpu for each in one.stages) / max(1, one.stage_samples) for one in of
    ]
    return sum(known) / max(1, len(known))


def _delayed(record: LoaderRecord) -> float:
    """Returns the share of the time in which a stage did not compute that it waited for a core."""
    idle = sum(one.seconds - one.cpu for one in record.stages)
    return min(1.0, record.stage_delay / idle) if idle > 0 else 0.0
