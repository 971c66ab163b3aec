"""What was seen of a program's DataLoader when its batches were drawn without anything else going on."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Text = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Few = Meta(max_length=1000)
StageKind = Literal["index", "dataset", "read", "decode", "transform", "collate", "pin", "transfer"]


class StageTime(Struct, frozen=True):
    """The time of one stage in all batches, in all processes that take part in it."""

    kind: StageKind
    name: Text
    """The name of what runs; empty where the kind says it."""
    seconds: Seconds
    """Its time by the clock, without that of stages inside it."""
    cpu: Seconds
    """The part of it in which its thread computed. In the rest it waited."""
    calls: Count
    place: Text = ""
    """The line of the program where it is defined; empty for one of a package."""
    reading: Seconds = 0.0
    """The part of `seconds` in calls that read files, and the part of it in which they computed. They are timed in the
    repeat that is recorded."""
    reading_cpu: Seconds = 0.0


class SlowSample(Struct, frozen=True):
    """A sample that took long."""

    index: Text
    """Its index in the dataset, or its number in the stream."""
    seconds: Seconds
    again: Annotated[list[Seconds], Few] = []
    """How long it took when it was made again; empty if that was not tried."""
    file: Text = ""
    """The file that was opened for it; empty if none was, or if that was not looked at."""


class SampleTimes(Struct, frozen=True):
    """How long single samples took."""

    number: Count
    quantiles: Annotated[list[Seconds], Few]
    """The shortest, each percentile and the longest: 101 values."""
    slowest: Annotated[list[SlowSample], Few] = []
    typical_again: Annotated[list[Seconds], Few] = []
    """How long other samples took when they were made again, beside the slowest ones."""


class WorkerMemory(Struct, frozen=True):
    """The bytes of memory of a worker when it starts and at its last batch."""

    pss: Count
    """Its proportional share at the end, shared memory included."""
    shm: Count
    """The share of it that is shared memory."""
    private: Count
    shared: Count
    private_first: Count
    shared_first: Count
    samples: Count
    """The samples that all workers made."""


class SameNumbers(Struct, frozen=True):
    """A generator of random numbers from which several workers, passes or batches have drawn the same numbers."""

    generator: Text
    """What it is, such as "numpy.random" or "Photos.rng"."""
    where: Literal["workers", "passes", "batches"]
    number: Count
    """The number of them with the same numbers; of batches, the number of workers whose batches all have the same."""


class ReadBytes(Struct, frozen=True):
    """The bytes that were read in some batches."""

    samples: Count
    asked: Count
    """Those that were asked for by calls."""
    disk: Count
    """Those of them that came from a disk, and not from memory."""


class BatchFacts(Struct, frozen=True):
    """What a batch consists of."""

    size: Count
    """The bytes of its tensors."""
    wide: Count = 0
    """Those of tensors of float64."""
    from_bytes: Count = 0
    """Those of tensors of floating-point numbers that are all multiples of 1/255, or whole numbers up to 255."""
    pinned: bool = False


class LoaderRecord(Struct, frozen=True, kw_only=True):
    """What was seen in one repeat."""

    place: Text = ""
    """The line of the program that makes the DataLoader."""
    others: Count = 0
    """The number of other DataLoaders that the program trains from."""
    dataset: Text
    """The class of the dataset."""
    style: Literal["map", "iterable"]
    length: Count | None
    """The samples of the dataset; None if that is unknown."""
    batch_size: Count | None
    workers: Count
    start_method: Text
    """How the workers are started; empty without workers."""
    prefetch: Count | None
    persistent: bool
    pin_memory: bool
    threads: Count
    """The threads with which PyTorch computes in the process that makes samples."""
    cores: Count | None
    """The cores that the process may use."""
    gpus: Count | None = None
    """The GPUs that PyTorch sees."""
    decoders: Annotated[list[Text], Few] = []
    """The installed packages that decode pictures."""
    batches: Count
    """The batches after the warm-up; `samples` are those in them."""
    samples: Count
    wall: Seconds
    """The time of these batches."""
    cpu: Seconds | None
    """The CPU time of all processes in it, and that of the process that draws."""
    main_cpu: Seconds | None
    first_batch: Seconds
    """The time from the start of the first pass to its first batch."""
    passes: Count
    restarts: Annotated[list[Seconds], Few] = []
    """The times from the end of a pass to the first batch of the next one."""
    stages: Annotated[list[StageTime], Few]
    stage_samples: Count
    """The samples in whose batches the stages were timed."""
    stage_delay: Seconds = 0.0
    """The part of the time of the stages in which they waited for a core that another process had."""
    times: SampleTimes | None = None
    memory: Annotated[list[WorkerMemory], Few] = []
    same_numbers: Annotated[list[SameNumbers], Few] = []
    read: ReadBytes | None = None
    batch: BatchFacts | None = None
    objects: Count = 0
    """The largest number of Python objects in a collection that the dataset holds, such as a list or a mapping."""
    object_bytes: Count = 0
    """About the bytes that a forked worker copies which reads all of them."""
