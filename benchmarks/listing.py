"""All benchmarks: what each asks, how the suite asks it, what it has to reach."""

from dataclasses import dataclass

GPU = "a GPU"


@dataclass(frozen=True)
class Benchmark:
    name: str
    question: str
    command: tuple[str, ...]
    """Arguments of the Python interpreter, in the root of the checkout."""
    bar: str
    """In words."""
    minutes: float
    """About, on two quiet cores; with peers that are installed already."""
    needs: str | None = None
    """What not every machine has."""


BENCHMARKS = (
    Benchmark(
        "overhead",
        "What does gpubench cost, and is its claim true?",
        ("benchmarks/overhead.py", "--peers", "all", "--rounds", "3", "--steps", "30", "--units", "60"),
        "costs at most 1 % of the bare loop's speed; claims what the stopwatch has, within 0.5 %",
        6,
    ),
    Benchmark(
        "compare-scale",
        "How long does `compare` take, and how much memory, whatever it is given?",
        ("benchmarks/compare_scale.py",),
        "0.4 s for two small runs; 3 s and 500 MB for two runs of 1,000,000 steps; 5 s for 1,000 runs against 10",
        2,
    ),
    Benchmark(
        "compare-peers",
        "Whose verdicts can be believed?",
        ("benchmarks/compare_peers.py", "--trials", "100"),
        "at most 5 % of gpubench's verdicts are false; its intervals of single processes miss in at most 7 and 9 %",
        2,
    ),
    Benchmark(
        "compare-equal",
        "How often does `compare` call equal runs different on this machine?",
        ("benchmarks/compare_equal.py",),
        "at most 5 % of the pairs",
        4,
    ),
    Benchmark(
        "trace-speed",
        "How long does it take to tell what a large trace shows, and how much memory?",
        ("benchmarks/trace_speed.py", "--rounds", "2", "--peers", "all"),
        "10 s and 1.2 GB for 1.7 million events",
        4,
    ),
    Benchmark(
        "memory-peers",
        "What will a training step take, and who says so?",
        ("benchmarks/memory_peers.py", "--only", "gpt2", "--only", "resnet50"),
        "GPT-2 predicted in 8 s and 800 MB",
        6,
    ),
    Benchmark(
        "pipeline-efficiency",
        "What does a pipeline lose to its hand-overs?",
        ("benchmarks/pipeline_efficiency.py", "--samples", "8"),
        "at most 1, 1.5 and 3 % above the ideal makespan with 2, 4 and 8 ranks",
        5,
    ),
    Benchmark(
        "schedulers",
        "What has to travel between ranks, for each scheduler of diffusers?",
        ("benchmarks/schedulers.py",),
        "every sample that was handed over is bit-identical",
        1,
    ),
    Benchmark(
        "fuzz",
        "What can a damaged or hostile file do to it?",
        ("benchmarks/fuzz.py", "--seconds", "300"),
        "every case is read or refused as it should be: no crash, hang, bomb or change elsewhere",
        6,
    ),
    Benchmark(
        "kills",
        "What does `kill -9` leave behind?",
        ("benchmarks/kills.py", "--instants", "50"),
        "no process, nothing that does not read, and no status that is not true, after any kill",
        25,
    ),
    Benchmark(
        "endurance",
        "Does a long run stay as quick and as small as a short one?",
        ("benchmarks/endurance.py",),
        "1,000 bytes for each further step, 20,000 for each sample and 1,000 on a rank; 10 s and 0.5 ms a step to end",
        4,
    ),
    Benchmark(
        "memory-check",
        "Does a prediction of memory hold on the device?",
        ("benchmarks/memory_check.py", "--results", "results/memory-check", "--config=gpt2", "--precision=bf16"),
        "2 % on what is allocated, 5 % on what is reserved",
        1,
        GPU,
    ),
    Benchmark(
        "gpu-suite",
        "How do all five commands do on a GPU?",
        ("benchmarks/gpu_suite.py",),
        "every job completes; planted faults are found and predictions of memory hold",
        8,
        GPU,
    ),
)
