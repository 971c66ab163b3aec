"""Whether gpubench is right on this GPU, each job a check of `first_gpu.py` with its verdicts."""

from gpu_jobs.card import Card
from gpu_jobs.job import RUNS, Job

SECONDS = {
    "stopwatch": ("a program on the first and on the last GPU, by its own events and by gpubench", 60.0),
    "graphs": ("programs that replay CUDA graphs: their own, make_graphed_callables, reduce-overhead", 50.0),
    "energy": ("the energy counter against the sampled power, and the clocks under load", 20.0),
    "inference": ("the latency of a model that answers requests", 15.0),
    "ranks": ("DDP and a pipeline over NCCL on two GPUs", 45.0),
    "memory": ("a prediction of memory against what the allocator takes", 35.0),
    "faults": ("faults that profile has to name", 85.0),
    "tuned": ("a search of two minutes, with TF32 to be found and proved", 145.0),
}
"""By check: what it shows, and how long it should take on an H100 or H200."""
MEMORY = ("benchmarks/memory_check.py", "--results", RUNS, "--precision=fp32", "--logging.graph=false", "--read-back")
TINY_MEMORY = ("--model=gpt2-tiny", "--data.sequence_length=32", "--batch-size=4")


def first(card: Card) -> tuple[Job, ...]:
    """Of sizes that the card computes in their time: a simulated one computes on the CPU."""
    batch = card.batch("gpt2", 4)
    sized = {
        "memory": (*MEMORY, *(TINY_MEMORY if card.simulated else ("--config=gpt2", f"--batch-size={batch}"))),
    }
    return tuple(
        Job(
            f"first-{check}",
            sized.get(check) or ("benchmarks/first_gpu.py", check, *("--tiny",) * card.simulated),
            shows,
            seconds,
            ("--device=cpu", *TINY_MEMORY) if check == "memory" else ("--tiny",),
            fits=check != "memory" or card.simulated or bool(batch),
            patience=10.0 if card.simulated else 2.0,
            verdicts=True,
        )
        for check, (shows, seconds) in SECONDS.items()
    )
