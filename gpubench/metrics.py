"""The metrics of runs: their units, better directions, definitions and data."""

from typing import Literal

from msgspec import Struct

Better = Literal["lower", "higher"]
TOO_WIDE = 2.0
"""The ratio of an interval's ends above which a figure is shown as a range and called too noisy to quote."""


class Distribution(Struct, frozen=True):
    """The distribution of single steps, pooled over the repeats, in the unit of the metric."""

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
    """One result of a run, with all that a comparison needs whatever command wrote it.

    A repeat is a new process and the independent unit. `interval` is the 95 % interval over `repeats`; None for fewer
    than two (see `runs.summary`). `n` and `effective_n` count the steps behind the repeats.
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
        """The distance from the estimate to the farther end of the interval, as a fraction; None if unknown."""
        if self.interval is None or not self.estimate:
            return None
        return max(abs(end / self.estimate - 1) for end in self.interval)

    @property
    def too_noisy(self) -> bool:
        """Whether the interval is wider than a factor of two, so that no single figure should be quoted."""
        if self.interval is None or self.interval[0] == self.interval[1]:
            return False
        ends = sorted(map(abs, self.interval))
        return self.interval[0] * self.interval[1] <= 0 or ends[1] > TOO_WIDE * ends[0]


class Definition(Struct, frozen=True):
    unit: str
    better: Better | None
    meaning: str
    per: Literal["job", "step"] | None = None
    """Whether the metric grows with the ranks of a job or with the samples of a step; None for neither."""


RATES = ("throughput", "token_throughput", "steady_throughput", "mfu", "hfu", "mfu_of_measured_peak")
"""The metrics of work over time. Their mean is harmonic, so that it agrees with the mean of their times."""

# In training, the steady window is the run after the warm-up, and the wall time is the host's time from the start of
# its first step to the end of its last. A step is one optimizer step with all its gradient accumulation. In a pipeline,
# the window is the whole makespan, fill and drain included, and a step is one evaluation of one micro-batch.
DEFINITIONS: dict[str, Definition] = {
    "throughput": Definition(
        "samples/s", "higher", "samples of all ranks / wall of the steady window; of a pipeline, / makespan", "job"
    ),
    "token_throughput": Definition("tokens/s", "higher", "tokens of all ranks / wall of the steady window", "job"),
    "mean_of_rates": Definition(
        "samples/s", None, "mean over steady steps of samples / step time; cross-check only", "job"
    ),
    "step_time": Definition("s", "lower", "wall of the steady window / its steps", "step"),
    "phase_data_wait": Definition("s", "lower", "mean time a steady step waits for its batches", "step"),
    "phase_host_to_device": Definition("s", "lower", "mean time a steady step copies batches to the device", "step"),
    "phase_forward": Definition("s", "lower", "mean time of a steady step in the forward pass and the loss", "step"),
    "phase_backward": Definition(
        "s", "lower", "mean time of a steady step in the backward pass, less exposed communication", "step"
    ),
    "phase_exposed_communication": Definition(
        "s", "lower", "mean time of a steady step in which only communication keeps the device from going on", "step"
    ),
    "phase_optimizer": Definition(
        "s", "lower", "mean time of a steady step in the optimizer and zeroing of gradients", "step"
    ),
    "phase_other": Definition("s", "lower", "mean step time less the mean of every other phase", "step"),
    "first_step_time": Definition(
        "s", "lower", "time of the first step of a process, compilation and tuning included", "step"
    ),
    "warmup_time": Definition("s", "lower", "sum of the times of all steps before the steady window", "step"),
    "model_build_time": Definition(
        "s", "lower", "time to build or load the model, and its optimizer if any, and to place them on the device"
    ),
    "model_flops_per_sample": Definition(
        "FLOP", None, "operations of one forward and backward pass over one sample, without recomputation"
    ),
    "mfu": Definition(
        "fraction", "higher", "model_flops_per_sample x throughput / (ranks x the device's published dense peak)"
    ),
    "hfu": Definition("fraction", "higher", "as mfu, with the operations of activation recomputation counted too"),
    "mfu_of_measured_peak": Definition(
        "fraction", "higher", "model_flops_per_sample x throughput / (ranks x measured_peak)"
    ),
    "measured_peak": Definition(
        "FLOP/s", "higher", "operations / time of a large square matrix product in the run's precision"
    ),
    "energy_per_sample": Definition(
        "J", "lower", "growth of the devices' energy counters over the steady window / its samples"
    ),
    "peak_memory_allocated": Definition(
        "B", "lower", "most memory held by tensors on a device at once after the warm-up, largest of the ranks"
    ),
    "peak_memory_reserved": Definition(
        "B", "lower", "most memory the allocator held of a device at once after the warm-up, largest of the ranks"
    ),
    "setup_peak_memory_allocated": Definition(
        "B",
        "lower",
        "most memory held by tensors on a device at once until the end of the warm-up, autotuning included",
    ),
    "setup_peak_memory_reserved": Definition(
        "B", "lower", "most memory the allocator held of a device until the end of the warm-up, autotuning included"
    ),
    "peak_memory_total": Definition(
        "B", "lower", "most memory of a device in use at once, context and libraries included, largest of the ranks"
    ),
    "peak_memory_rss": Definition(
        "B", "lower", "most host memory a worker process held at once (ru_maxrss), largest of the ranks"
    ),
    "starved_steps": Definition(
        "fraction", "lower", "steady steps that began with the GPU out of work, because the host could not keep up"
    ),
    "yardstick_time": Definition(
        "s", None, "time of a fixed piece of CPU work just before and after the steps: the machine's own speed"
    ),
    "final_loss": Definition("", None, "training loss of the last step, mean over ranks"),
    "skipped_steps": Definition("steps", "lower", "steady steps whose optimizer update the gradient scaler skipped"),
    "straggler_skew": Definition(
        "fraction",
        "lower",
        "mean over steady steps of (slowest rank's busy time - the median rank's, the lower of two) / step",
    ),
    "closure_error": Definition(
        "fraction", None, "larger of |phases' sum / step time - 1| and |steps' sum / wall - 1|"
    ),
    "makespan": Definition(
        "s", "lower", "from the first rank's start on the first sample to the last rank's end of the last one"
    ),
    "steady_throughput": Definition(
        "samples/s",
        "higher",
        "samples finished after the first / time from the first one's finish to the last's",
        "job",
    ),
    "time_to_first_sample": Definition("s", "lower", "from the start of the makespan until a first sample is finished"),
    "sample_latency": Definition(
        "s", "lower", "mean time from a sample's start on the first rank until it is finished"
    ),
    "evaluation_time": Definition(
        "s", "lower", "mean time of one evaluation of the denoiser, with the scheduler's step, over all ranks"
    ),
    "encode_time": Definition("s", "lower", "time to encode all prompts, before the makespan begins"),
    "decode_time": Definition("s", "lower", "mean time to decode the latents of one micro-batch"),
    "bubble": Definition("fraction", "lower", "share of all ranks' time in the makespan in which they do not compute"),
    "ideal_bubble": Definition(
        "fraction",
        "lower",
        "the bubble that this split has by arithmetic alone, with equal evaluations and free hand-overs",
    ),
    "pipeline_efficiency": Definition(
        "fraction",
        "higher",
        "ideal makespan / makespan: the same work (noise, evaluations with the scheduler's step, decoding) in the same "
        "order, with free hand-overs",
    ),
    "remainder_cost": Definition(
        "fraction", "lower", "evaluations of the rank that has most / a fair share, total evaluations / ranks, - 1"
    ),
    "handover_bytes": Definition(
        "B", "lower", "mean size of a hand-over: header, latents, scheduler and generator state"
    ),
    "handover_time": Definition(
        "s", "lower", "mean time of a send from packing until the last byte has left, without the wait for its taker"
    ),
    "sequential_makespan": Definition(
        "s", "lower", "time of the same samples made one after another on one rank alone"
    ),
    "pipeline_speedup": Definition("x", "higher", "sequential_makespan / makespan"),
    "replicas_bound": Definition(
        "s",
        "lower",
        "ceil(micro-batches / ranks) x the time of one, as measured on one rank alone and with as many on a device, "
        "else by evaluation_time",
    ),
    "replicas_makespan": Definition(
        "s", "lower", "time of the slowest rank where every rank makes its share of the samples from noise to the end"
    ),
    "verified_samples": Definition(
        "fraction", "higher", "samples whose final latent equals, bit for bit, that of single-process diffusers"
    ),
}
