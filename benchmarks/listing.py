"""All benchmarks: the question of each, the command that answers it, and its bar."""

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
    """Approximate, on two quiet cores, with peers already installed."""
    needs: str | None = None
    """A requirement that not every machine meets."""


BENCHMARKS = (
    Benchmark(
        "overhead",
        "How much does gpubench slow training down, and is its throughput correct?",
        ("benchmarks/overhead.py", "--peers", "all", "--rounds", "3", "--steps", "30", "--units", "60"),
        "cost at most 1 % of the bare loop's speed; reported rate within 0.5 % of the stopwatch",
        6,
    ),
    Benchmark(
        "probe-overhead",
        "How much does gpubench slow a program of the user down, and do its runs say so themselves?",
        ("benchmarks/probe_overhead.py", "--rounds", "4"),
        "steps of 5 ms at most 2 % longer; the CPU time that the process takes more within 30 % of what the run says; "
        "the step time within 0.5 % of the program's own stopwatch",
        8,
    ),
    Benchmark(
        "clocks",
        "Is the clock of a program accused only if it is false, and found to be false where that can be seen?",
        ("benchmarks/clocks.py", "--repeats", "40", "--false", "4"),
        "a true clock is never accused, beside up to 60 busy processes and with a host that is stopped; a false one "
        "always is on a quiet machine, and is never called the same",
        30,
    ),
    Benchmark(
        "data-cost",
        "Does `loader` say where the time of a sample goes, and how fast the loader is?",
        ("benchmarks/data_cost.py",),
        "shares within 3 points of the programs' own clocks, the largest stage named first; throughput alone and with "
        "`data.cached` within 5 % of the loops written by hand; at most 1 % of a sample of 1 ms for the stopwatches",
        9,
    ),
    Benchmark(
        "compare-scale",
        "How much time and memory does `compare` take for small, long and many runs?",
        ("benchmarks/compare_scale.py",),
        "0.4 s for two small runs; 3 s and 500 MB for two runs of 1,000,000 steps; 5 s for 1,000 runs against 10",
        2,
    ),
    Benchmark(
        "listing-scale",
        "How much time does `runs` take to list thousands of runs, and does it notice changes by hand?",
        ("benchmarks/listing_scale.py",),
        "1 s of processor time for 10,000 runs with the cache; every change by hand is listed",
        2,
    ),
    Benchmark(
        "compare-peers",
        "How often are the verdicts of gpubench and other tools false?",
        ("benchmarks/compare_peers.py", "--trials", "60"),
        "at most 5 % of gpubench's verdicts are false; intervals of single processes miss in at most 7 and 9 %; "
        "changes under a schedule are found as often as by Welch's test, within 5 points",
        3,
    ),
    Benchmark(
        "compare-equal",
        "How often does `compare` call equal runs different on this machine?",
        ("benchmarks/compare_equal.py",),
        "at most 5 % of the pairs",
        4,
    ),
    Benchmark(
        "cheats",
        "Are edits that make a program faster by less work caught, and honest ones not?",
        ("benchmarks/cheats.py", "--jobs", "2"),
        "all cheats but those that docs/same-work.md lists; no honest edit is refused",
        30,
    ),
    Benchmark(
        "clocks",
        "Is the clock of a program accused only if it is false, however busy the machine is?",
        ("benchmarks/clocks.py", "--repeats", "4", "--false", "1"),
        "no true clock is accused; all false ones are on a quiet machine, and none is called the same on a busy one",
        9,
    ),
    Benchmark(
        "tune-peers",
        "How well do searches for the fastest settings work?",
        ("benchmarks/tune_peers.py", "--trials", "100", "--peer-trials", "5"),
        "at most 3 % of the searches end more than 1 % from the best at 2 % noise, 10 % at 5 % or with uneven noise; "
        "2 % false gains; the headline is right within 0.3 % on average",
        10,
    ),
    Benchmark(
        "history-peers",
        "How well are change points in a series of runs found?",
        ("benchmarks/history_peers.py",),
        "up to 0.7 % noise, 95 % of steps of 3 % found within 2 runs; false change points in at most 5 % of series",
        4,
    ),
    Benchmark(
        "judge-power",
        "How often is a decision of `judge` wrong, and how many rounds does it take?",
        ("benchmarks/judge_power.py",),
        "at most 5 % false `keep` on equal programs with any noise; at most 2 % of power lost by ending early; at "
        "most 1.3 times the rounds of a fixed number with the same power, where that is 80 %",
        2,
    ),
    Benchmark(
        "trace-speed",
        "How much time and memory does the analysis of a large trace take?",
        ("benchmarks/trace_speed.py", "--rounds", "2", "--peers", "all"),
        "10 s and 1.2 GB for 1.7 million events",
        4,
    ),
    Benchmark(
        "memory-peers",
        "How do memory predictions compare with other estimators?",
        ("benchmarks/memory_peers.py", "--only", "gpt2", "--only", "resnet50"),
        "GPT-2 predicted in 8 s and 800 MB",
        6,
    ),
    Benchmark(
        "pipeline-efficiency",
        "How much time does a pipeline lose to its hand-offs?",
        ("benchmarks/pipeline_efficiency.py", "--samples", "8"),
        "at most 1, 1.5 and 3 % above the ideal makespan with 2, 4 and 8 ranks",
        5,
    ),
    Benchmark(
        "schedulers",
        "Which state must ranks exchange for each scheduler of diffusers?",
        ("benchmarks/schedulers.py",),
        "every sample is bit-identical after a hand-off",
        1,
    ),
    Benchmark(
        "fuzz",
        "Does gpubench handle damaged and hostile files safely?",
        ("benchmarks/fuzz.py", "--seconds", "300"),
        "every case is read or refused correctly: no crash, hang, memory exhaustion or change to other files",
        6,
    ),
    Benchmark(
        "kills",
        "What state remains after `kill -9`?",
        ("benchmarks/kills.py", "--instants", "50"),
        "no process left, every file readable and every status correct after any kill",
        25,
    ),
    Benchmark(
        "endurance",
        "Do memory and time to finish stay bounded in long runs?",
        ("benchmarks/endurance.py",),
        "1,000 bytes per further step, 20,000 per sample and 1,000 on a rank; 10 s plus 0.5 ms a step to finish",
        4,
    ),
    Benchmark(
        "memory-check",
        "Does a memory prediction match the measurement on the device?",
        ("benchmarks/memory_check.py", "--results", "results/memory-check", "--config=gpt2", "--precision=bf16"),
        "allocated memory within 2 %, reserved memory within 5 %",
        1,
        GPU,
    ),
    Benchmark(
        "gpu-suite",
        "Do all five commands work on a GPU, and how well?",
        ("benchmarks/gpu_suite.py", "--budget", "1740"),
        "every job completes; planted faults are found and memory predictions hold",
        29,
        GPU,
    ),
)
