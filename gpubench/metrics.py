"""The types of metrics, and the definition of every metric: what it measures, its unit and its better direction."""

import re
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

Better = Literal["lower", "higher"]
LATENCIES: Mapping[str, float] = {"latency_p50": 0.5, "latency_p95": 0.95, "latency_p99": 0.99}
"""The quantiles of the latency of inference: the share of the steps that take at most as long."""
PEAKS = ("peak_memory_reserved", "peak_memory_rss")
"""The metrics of the peak memory on a GPU and on a CPU."""
TOO_WIDE = 2.0
"""The ratio of an interval's upper end to its lower end above which the metric is shown as a range, not as a figure."""
SAYS_NOTHING = TOO_WIDE**2
"""The same for a ratio of two such metrics, if its interval contains 1: it then has neither estimate nor interval."""

LEADERS = (
    "speedup",
    "latency_p50",
    "throughput",
    "throughput_per_device",
    "token_throughput",
    "token_throughput_per_device",
    "step_time",
    "makespan",
    "peak_memory_total",
    "peak_memory_allocated",
    "peak_memory_rss",
)
"""The metrics of which the first that a run or a comparison has is its main one.

Only inference has a latency, and only a search by tune has a speedup. Runs that count memory have no throughput.
"""


class Distribution(Struct, frozen=True):
    """Statistics of the single steps of all repeats, in the unit of the metric."""

    mean: float
    std: float | None  # Bessel-corrected; None when n < 2
    median: float
    p95: float
    p99: float
    min: float
    max: float
    n: int
    effective_n: float | None  # effective sample size of the n autocorrelated values


class Metric(Struct, frozen=True):
    """One result of a run, with all that a comparison needs.

    A repeat is a measurement in a new process, and independent of the others. `interval` is the 95 % interval over
    `repeats`; None for fewer than two (see `runs.summary`). `n` is the number of steps in all repeats, and
    `effective_n` their effective sample size.
    """

    name: str
    unit: str
    better: Better | None
    estimate: float
    interval: tuple[float, float] | None
    n: int
    effective_n: float | None
    repeats: list[float]  # one estimate per repeat
    distribution: Distribution | None

    @property
    def reach(self) -> float | None:
        """The distance from the estimate to the farther end of the interval, as a fraction of the estimate.

        None without an interval.
        """
        if self.interval is None or not self.estimate:
            return None
        return max(abs(end / self.estimate - 1) for end in self.interval)

    @property
    def median(self) -> float:
        """The median of the repeats."""
        ordered = sorted(self.repeats)
        middle = len(ordered) // 2
        return (ordered[middle] + ordered[~middle]) / 2

    @property
    def too_noisy(self) -> bool:
        """Whether the ends of the interval differ by more than a factor of TOO_WIDE or have different signs."""
        if self.interval is None or self.interval[0] == self.interval[1]:
            return False
        ends = sorted(map(abs, self.interval))
        return self.interval[0] * self.interval[1] <= 0 or ends[1] > TOO_WIDE * ends[0]


class Definition(Struct, frozen=True):
    unit: str
    better: Better | None
    meaning: str
    per: Literal["job", "step"] | None = None
    """Whether the metric grows with the number of ranks ("job") or of samples in a step ("step"); None for neither."""


RATES = ("throughput", "token_throughput", "steady_throughput", "mfu", "hfu", "mfu_of_measured_peak")
"""The metrics of work per time. They are averaged by the harmonic mean, which is the mean of their times."""

# In training, the steady window consists of the steps after the warm-up, and its wall time is measured on the CPU from
# the start of the first of them to the end of the last. A step is one optimizer step, including gradient accumulation,
# and in inference one forward pass.
# A phase is the part of a step between two marks on the device's timeline. In a pipeline, the window is the makespan,
# including the time to fill and drain the pipeline, and a step is one evaluation of one micro-batch.
DEFINITIONS: dict[str, Definition] = {
    "throughput": Definition(
        "samples/s",
        "higher",
        "samples of all ranks / wall time of the steady window; for a pipeline, samples / makespan",
        "job",
    ),
    "token_throughput": Definition("tokens/s", "higher", "tokens of all ranks / wall time of the steady window", "job"),
    "mean_of_rates": Definition(
        "samples/s", None, "mean over the steady steps of samples / step time; only a cross-check of throughput", "job"
    ),
    **{
        name: Definition(
            "s",
            "lower",
            f"{100 * share:g}th percentile over a repeat's steady steps of the time from a batch in CPU memory to its "
            "result, without the wait for the batch",
            "step",
        )
        for name, share in LATENCIES.items()
    },
    "step_time": Definition("s", "lower", "wall time of the steady window / number of its steps", "step"),
    "phase_data_wait": Definition(
        "s", "lower", "mean time per steady step in which the loop waits for its batches", "step"
    ),
    "phase_host_to_device": Definition(
        "s", "lower", "mean time per steady step in which batches are copied to the device", "step"
    ),
    "phase_forward": Definition("s", "lower", "mean time per steady step of the forward pass and the loss", "step"),
    "phase_backward": Definition(
        "s", "lower", "mean time per steady step of the backward pass, without exposed communication", "step"
    ),
    "phase_exposed_communication": Definition(
        "s",
        "lower",
        "mean time per steady step in which gradients are still communicated after the last one is computed",
        "step",
    ),
    "phase_optimizer": Definition(
        "s",
        "lower",
        "mean time per steady step of clipping the gradients, the optimizer step and zeroing the gradients",
        "step",
    ),
    "phase_evaluation": Definition(
        "s", "lower", "mean time per steady step in which a program evaluates its model between two updates", "step"
    ),
    "phase_worker_start": Definition(
        "s",
        "lower",
        "mean time per steady step in which a program starts the workers of a DataLoader again, and waits for their "
        "first batch",
        "step",
    ),
    "phase_graph_replay": Definition(
        "s", "lower", "mean time per steady step in which a program replays CUDA graphs that update parameters", "step"
    ),
    "phase_graph_capture": Definition(
        "s", "lower", "mean time per steady step in which a program captures a CUDA graph", "step"
    ),
    "phase_other": Definition("s", "lower", "mean time per steady step outside of all other phases", "step"),
    "first_step_time": Definition(
        "s",
        "lower",
        "time of the first step of a process, including compilation and autotuning; unknown for a program in "
        "which no batch was drawn and no gradient set to zero before its first forward pass",
        "step",
    ),
    "warmup_time": Definition("s", "lower", "sum of the times of all steps before the steady window", "step"),
    "model_build_time": Definition(
        "s",
        "lower",
        "time to build or load the model and its optimizer, if it has one, and to place them on the device",
    ),
    "model_flops_per_sample": Definition(
        "FLOP",
        None,
        "floating-point operations of one forward and backward pass over one sample, without recomputation; in "
        "inference of the forward pass alone",
    ),
    "mfu": Definition(
        "fraction", "higher", "model_flops_per_sample x throughput / (ranks x published dense peak of the device)"
    ),
    "hfu": Definition(
        "fraction", "higher", "the same as mfu, but including the operations of activation recomputation"
    ),
    "mfu_of_measured_peak": Definition(
        "fraction", "higher", "model_flops_per_sample x throughput / (ranks x measured_peak)"
    ),
    "measured_peak": Definition(
        "FLOP/s", "higher", "measured rate that a large square matrix product sustains in the run's precision"
    ),
    "energy_per_sample": Definition(
        "J",
        "lower",
        "increase of the energy counters of the GPUs that the ranks used over the steady window / samples in it",
    ),
    "peak_memory_allocated": Definition(
        "B", "lower", "largest device memory held by tensors at any time after the warm-up, on the rank with the most"
    ),
    "peak_memory_reserved": Definition(
        "B",
        "lower",
        "largest device memory held by the caching allocator at any time after the warm-up, on the rank with the most",
    ),
    "setup_peak_memory_allocated": Definition(
        "B",
        "lower",
        "largest device memory held by tensors at any time until the end of the warm-up, including autotuning",
    ),
    "setup_peak_memory_reserved": Definition(
        "B",
        "lower",
        "largest device memory held by the caching allocator until the end of the warm-up, including autotuning",
    ),
    "peak_memory_total": Definition(
        "B",
        "lower",
        "largest device memory in use at any time, including context and libraries, on the rank with the most",
    ),
    "peak_memory_rss": Definition(
        "B", "lower", "largest resident CPU memory of a worker process (ru_maxrss), on the rank with the most"
    ),
    "starved_steps": Definition(
        "fraction",
        "lower",
        "share of steady steps that began while the GPU was idle because the CPU had not issued work in time",
    ),
    "probe_time": Definition(
        "s",
        None,
        "CPU time that gpubench's own code took in a step of a program, from a sample of its steps, on the rank with "
        "the most; without what it displaces from the caches of the CPU",
    ),
    "probe_share": Definition(
        "fraction",
        None,
        "probe_time / step_time; on a GPU, times the share of steps that began while the GPU was idle, because it "
        "does not wait for the CPU in others; unknown if that is",
    ),
    "yardstick_time": Definition(
        "s",
        None,
        "time of a fixed CPU workload, measured before and after the steps, which shows the speed of the machine "
        "itself",
    ),
    "final_loss": Definition("", None, "training loss of the last step, mean over the ranks"),
    "skipped_steps": Definition(
        "steps", "lower", "number of steady steps whose optimizer update was skipped by the gradient scaler"
    ),
    "straggler_skew": Definition(
        "fraction",
        "lower",
        "mean over the steady steps of (busy time of the slowest rank - that of the lower median rank) / step time",
    ),
    "closure_error": Definition(
        "fraction", None, "larger of |sum of the phases / step time - 1| and |sum of the steps / wall time - 1|"
    ),
    "makespan": Definition(
        "s", "lower", "time from the first rank's start on the first sample to the last rank's end of the last sample"
    ),
    "steady_throughput": Definition(
        "samples/s",
        "higher",
        "number of samples finished after the first one / time from the first one's finish to the last one's",
        "job",
    ),
    "time_to_first_sample": Definition(
        "s", "lower", "time from the start of the makespan until the first sample is finished"
    ),
    "sample_latency": Definition(
        "s", "lower", "mean time from a sample's start on the first rank until it is finished"
    ),
    "evaluation_time": Definition(
        "s",
        "lower",
        "mean time over all ranks of one evaluation of the denoiser and its scheduler step, for one micro-batch",
    ),
    "encode_time": Definition("s", "lower", "time to encode all prompts, before the makespan begins"),
    "decode_time": Definition("s", "lower", "mean time to decode the latents of one micro-batch"),
    "bubble": Definition(
        "fraction", "lower", "share of the makespan in which a rank does not compute, mean over the ranks"
    ),
    "ideal_bubble": Definition(
        "fraction", "lower", "bubble of the same work in the same order with hand-offs that take no time"
    ),
    "pipeline_efficiency": Definition(
        "fraction",
        "higher",
        "ideal makespan / makespan, where the ideal is the same work (noise, evaluations with scheduler steps, "
        "decoding) in the same order with hand-offs that take no time",
    ),
    "remainder_cost": Definition(
        "fraction", "lower", "evaluations of the rank with the most / (total evaluations / ranks) - 1"
    ),
    "handover_bytes": Definition(
        "B", "lower", "mean size of a hand-off: header, latents, scheduler state and generator state"
    ),
    "handover_time": Definition(
        "s",
        "lower",
        "mean time of sending a hand-off, from packing to the last byte, without the wait for the receiver",
    ),
    "sequential_makespan": Definition("s", "lower", "time to make the same samples one after another on a single rank"),
    "pipeline_speedup": Definition("x", "higher", "sequential_makespan / makespan"),
    "replicas_makespan": Definition(
        "s", "lower", "time of the slowest rank if every rank makes its share of the samples from noise to the end"
    ),
    "replicas_speedup": Definition("x", "higher", "replicas_makespan / makespan of the same repeat"),
    "first_batch_time": Definition(
        "s",
        "lower",
        "time from the start of the first pass over the data to its first batch, with the start of workers",
    ),
    "pass_start_time": Definition(
        "s", "lower", "mean time from the end of a pass over the data to the first batch of the next one"
    ),
    "sample_cpu_time": Definition(
        "s", "lower", "CPU time of all processes that make batches / samples, while nothing but batches is made"
    ),
    "worker_memory": Definition(
        "B", "lower", "mean proportional share of memory of a worker of the DataLoader, at the last batch"
    ),
    "verified_samples": Definition(
        "fraction", "higher", "share of samples whose final latent is bit-identical to that of single-process diffusers"
    ),
}


def stage_metric(kind: str, name: str) -> str:
    """The name of the metric of a stage in which batches are made."""
    return "stage_" + re.sub(r"\W+", "_", " ".join(filter(None, (kind, name)))).strip("_")


def definition_of(name: str) -> Definition:
    """The definition of a metric, also that of a phase or a stage that has a name of the program."""
    if name.startswith("stage_"):
        stage = name.removeprefix("stage_").replace("_", " ")
        return Definition("s", "lower", f"mean time for one sample in the stage {stage!r} of making batches")
    if name.startswith("phase_") and name not in DEFINITIONS:
        region = name.removeprefix("phase_")
        return Definition("s", "lower", f"mean time per steady step in the program's own region {region!r}", "step")
    return DEFINITIONS[name]


def place_of_phase(name: str) -> float:
    """The place of a phase in the order of every report; phases of a program come before `other`."""
    places = {known: place for place, known in enumerate(DEFINITIONS)}
    return places.get(f"phase_{name}", places["phase_other"] - 0.5)
