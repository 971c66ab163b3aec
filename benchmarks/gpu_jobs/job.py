"""One command of the GPU suite, and the options that many of them have."""

from dataclasses import dataclass

RUNS = "RUNS"  # in a job's arguments: the folder for its run directories
OUTPUT = "OUTPUT"  # where an argument begins so: the suite's own folder, with the runs of the jobs before


@dataclass(frozen=True)
class Reference:
    """A figure that somebody else published for the same work."""

    throughput: float
    """Samples per second."""
    source: str


@dataclass(frozen=True)
class Job:
    """One command of the suite."""

    name: str
    arguments: tuple[str, ...]
    """Of the Python interpreter; see RUNS and OUTPUT."""
    shows: str
    seconds: float
    """How long it should take on an H200."""
    dry: tuple[str, ...] = ()
    """What is appended in a dry run; later options win."""
    reference: Reference | None = None
    finds: tuple[str, ...] = ()
    """What its diagnosis must name, by the ids of findings."""
    after: tuple[str, ...] = ()
    """The jobs whose runs it needs."""
    patience: float = 2.0
    """It is stopped after so many times as long."""
    judged: bool = True
    """Whether a bar that it misses is a failure."""


def cli(command: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", "gpubench", command, "--quiet", "--results", RUNS, *arguments)


DRY = (
    "--device=cpu",
    "--repeats=1",
    "--training.warmup_steps=2",
    "--training.seconds=0.2",
    "--measurement.measure_peak=false",
    "--performance.cpu_threads=1",
    "--batch-size=4",
)
DRY_RESNET = (*DRY, "--model=resnet-tiny", "--performance.compile=false")
DRY_GPT2 = (*DRY, "--model=gpt2-tiny", "--data.sequence_length=32")
DRY_BERT = (*DRY, "--model=bert-tiny", "--data.sequence_length=32")

GPU_TESTS = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider")
