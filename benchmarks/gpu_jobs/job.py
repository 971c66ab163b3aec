"""One command of the GPU suite, a group of them, and the options that many commands have."""

from dataclasses import dataclass

RUNS = "RUNS"  # in a job's arguments: the folder for its run directories
OUTPUT = "OUTPUT"  # where an argument begins so: the suite's own folder, with the runs of the jobs before
VERIFY = "--verify"
COMPILED = "--vs=performance.compile=true"


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
    rehearsed: tuple[str, ...] = ()
    """What is appended in a rehearsal; later options win."""
    reference: Reference | None = None
    """For the first of its runs."""
    finds: tuple[str, ...] = ()
    """What its diagnosis must name, by the ids of findings."""
    after: tuple[str, ...] = ()
    """The jobs of its group whose runs it needs."""
    patience: float = 2.0
    """It is stopped after so many times as long."""
    judged: bool = True
    """Whether a bar that it misses is a failure."""
    fits: bool = True
    """Whether the GPU has the memory for it."""
    verdicts: bool = False
    """Whether its result is a verdict on each of its bars; then it is one too that the job fails, or is not done."""


@dataclass(frozen=True)
class Group:
    """Jobs that are run together, and need none of another group."""

    name: str
    shows: str
    jobs: tuple[Job, ...]
    by_name: bool = False
    """Whether it is run only if it is named."""

    @property
    def seconds(self) -> float:
        return sum(job.seconds for job in self.jobs)


def cli(command: str, *arguments: str) -> tuple[str, ...]:
    return ("-m", "gpubench", command, "--quiet", "--results", RUNS, *arguments)


REHEARSED = (
    "--device=cpu",
    "--repeats=1",
    "--training.warmup_steps=2",
    "--training.seconds=0.2",
    "--measurement.measure_peak=false",
    "--performance.cpu_threads=1",
    "--batch-size=4",
)
TINY_RESNET = (*REHEARSED, "--model=resnet-tiny")
TINY_GPT2 = (*REHEARSED, "--model=gpt2-tiny", "--data.sequence_length=32")
TINY_BERT = (*REHEARSED, "--model=bert-tiny", "--data.sequence_length=32")
