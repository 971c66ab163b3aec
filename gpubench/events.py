"""The events that workers send to the host, and the messages that the host sends to workers.

An event is one line of JSON with its type in the field `event`. Durations are in seconds, sizes in bytes, and points in
time in seconds since the epoch. On the host's machine, workers use the host's clock (see `Job.clock`), so that steps
and hardware samples have the same time base. Some types are also lines of files in the run directory, so the names of
their fields must not change.
"""

from typing import Any, Literal

import msgspec


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One optimizer step on one rank; also a line of steps.jsonl."""

    repeat: int
    rank: int
    epoch: int
    step: int
    """The number of the step in its repeat, counted from 0 and including the warm-up."""
    time: float
    """The time at which the step began on the device's timeline."""
    total: float
    """The time from the start of this step to the start of the next, so that the steps sum to the wall time."""
    phases: dict[str, float]
    """The duration of each phase. The durations sum to `total`; `other` is the time outside of all other phases."""
    host: float
    """The time that the CPU took to issue the work of the step."""
    samples: int
    loss: float | None = None
    starved: bool | None = None
    """Whether the GPU was idle when the step began, so that the CPU limits the speed; None on a CPU."""
    skipped: bool = False
    """Whether the gradient scaler found infinities and skipped the update of the parameters."""


SpanKind = Literal["prepare", "evaluate", "decode", "recv_wait", "send_wait"]
BaselineKind = Literal["sequential", "replicas"]


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """One activity in the loop of a pipeline rank; also a line of timeline.jsonl.

    Work (prepare, evaluate, decode) is timed on the device, and waits are timed on the CPU.
    """

    repeat: int
    rank: int
    kind: SpanKind
    sample: int
    """The first sample of the micro-batch."""
    time: float
    """The time at which the activity began."""
    total: float
    """The duration of the activity."""
    step: int | None = None
    """The number of the evaluation, counted from 0 over all ranks; None for other kinds."""


class Handoff(msgspec.Struct, frozen=True):
    """One micro-batch that a rank sent or received; also a line of handoffs.jsonl."""

    repeat: int
    rank: int
    peer: int
    direction: Literal["send", "recv"]
    sample: int
    """The first sample of the micro-batch."""
    step: int
    """The number of evaluations that the micro-batch has had so far."""
    sequence: int
    """The number of the transfer between these two ranks."""
    time: float
    """The time at which packing began for a send, or at which the header arrived for a receive."""
    total: float
    """The duration until the last byte is sent, or until everything is received and unpacked."""
    waited: float
    """For a send, the part of `total` until the peer accepted the header.

    For a receive, the wait for the header before `time`.
    """
    header_bytes: int
    """The size of the header, the description and the padding."""
    latent_bytes: int
    state_bytes: int
    """The size of the scheduler's tensors, including those that the denoising loop keeps for the scheduler."""
    generator_bytes: int

    @property
    def size(self) -> int:
        """The total size in bytes."""
        return self.header_bytes + self.latent_bytes + self.state_bytes + self.generator_bytes


class Sample(msgspec.Struct, frozen=True):
    """One finished sample; also a line of samples.jsonl."""

    repeat: int
    sample: int
    seed: int
    prompt: str | None
    started: float
    """The time at which rank 0 began the sample."""
    finished: float
    """The time at which the latent, and the image if there is one, was ready on the last rank."""
    sha256: str
    """The hash of the final latent's bytes in the run's precision."""
    latent: str | None = None
    """The path of the file with the latent, relative to the run directory."""
    image: str | None = None
    """The path of the image, relative to the run directory."""
    resumed: bool = False
    """Whether the sample was made by the earlier run that this run resumes."""


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, kw_only=True):
    """The base of all events. `rank` is the rank that sent the event."""

    rank: int


class Hello(Event, frozen=True):
    """The first line of a connection, with which a worker identifies itself. `secret` authenticates the worker."""

    world_size: int
    pid: int
    host: str
    machine: str
    """See `gpubench.ranks.machine`."""
    secret: str
    ranks_here: tuple[int, int] | None = None
    """(first rank, number of ranks) of a program that the rank's own host has started; None if it has started all."""
    home: str | None = None
    """The address of the host on rank 0's machine, if that is another host; "" if the rank has not found it."""


class Seen(Event, frozen=True):
    """The only line of a connection with which a process of a measured program says how far it has got.

    `rank` is -1, because the process is not a rank yet.
    """

    pid: int
    what: Literal["python", "torch"]
    """What has been loaded: the probe by a Python process, or torch."""


class Heartbeat(Event, frozen=True):
    """Shows that the rank is alive, and what it is doing."""

    doing: str
    """The current phase of the step, or the current stage of the set-up."""
    step: int | None
    waits_for: int | None = None
    """The rank that this rank waits for."""
    within: float | None = None
    """The time limit of the activity; None for the run's own limit."""
    patience_factor: float = 1.0
    """The factor by which the run's limit is multiplied if `within` is None."""


class Log(Event, frozen=True):
    """A record of the worker's log. `level` is that of the logging module."""

    time: float
    level: int
    logger: str
    message: str
    fields: dict[str, Any] = {}


class EnvironmentCaptured(Event, frozen=True):
    """The machine, libraries and process settings, as the content of environment.json."""

    environment: dict[str, Any]


class ModelBuilt(Event, frozen=True):
    """The size of the model, and the time to build it with its optimizer and to place both on the device.

    A program of the user has no such time, because nothing marks where it builds the model.
    """

    repeat: int
    parameters: int
    trainable_parameters: int
    sample_shape: str
    tokens_per_sample: int | None
    seconds: float | None
    device: str | None = None
    """The type of the parameters' device, if the worker and not the settings decided on it."""
    settings: dict[str, Any] = {}
    """How a program of the user runs, by the dot-keys of the settings that can change it."""
    places: dict[str, str] = {}
    """Where in a program of the user its fixes belong, as file and line; see `gpubench.settings.field.Place`."""
    optimizers: dict[str, list[str]] = {}
    """The lines that make its optimizers which can be fused, as far as they are known, by the name of the class."""


class TreatmentsMissed(Event, frozen=True):
    """The settings that found nothing to change in a program of the user, by dot-key, each with the reason."""

    repeat: int
    missed: dict[str, str]


class GraphsCompiled(Event, frozen=True):
    """The steps of a program of the user in which torch.compile compiled code."""

    repeat: int
    steps: list[int]


class Planned(Event, frozen=True):
    """The number of steps of the repeat. It is sent again when a limit in seconds has been converted to steps."""

    repeat: int
    steps: int


class StepsMeasured(Event, frozen=True):
    """Steps that the device has finished since the last event."""

    steps: list[Step]


class FlopsCounted(Event, frozen=True):
    """The floating-point operations of the forward and backward pass of one sample.

    The numbers are None if the operations could not be counted, and `reason` says why.
    """

    model_flops_per_sample: float | None
    hardware_flops_per_sample: float | None
    method: str
    by_operator: dict[str, int] = {}
    reason: str | None = None


class PeakMeasured(Event, frozen=True):
    """The attainable peak: the highest rate of a product of two `size` x `size` matrices.

    The numbers are None if it could not be measured, and `reason` says why.
    """

    flops_per_s: float | None
    dtype: str
    size: int | None
    reason: str | None = None


class GraphTraced(Event, frozen=True):
    """The model as a serialised TensorBoard GraphDef."""

    graph: bytes


class WorkCounted(msgspec.Struct, frozen=True):
    """The work of all steps of a repeat, the warm-up included, counted where it is done and not taken from settings."""

    backward_passes: int
    updated_first: int
    """The elements of all parameters that the first update of each optimizer has changed."""
    updated_least: int
    """The same for the update of each optimizer that has changed the fewest, among those that were counted."""
    forwarded: int = 0
    """The samples that the model was given in forward passes of training; 0 if they were not counted."""


class RepeatDone(Event, frozen=True):
    """The end of a repeat on one rank, with its wall time and peak memory. GPU memory is None without a GPU."""

    repeat: int
    wall: float
    """The duration of the whole loop, measured on the CPU with the device synchronised at both ends.

    It is compared with the sum of the steps, which must be equal.
    """
    peak_allocated: int | None
    """The peak of the memory held by tensors in the steps after the warm-up, or in all steps without a warm-up."""
    peak_reserved: int | None
    """The same for the memory held by the caching allocator."""
    peak_rss: int
    """The peak of the process's resident host memory."""
    setup_peak_allocated: int | None = None
    """The peak until the end of the warm-up, in which libraries try out algorithms; None if unknown."""
    setup_peak_reserved: int | None = None
    work: WorkCounted | None = None
    """None for inference."""


class TraceRecorded(Event, frozen=True):
    """A part of a trace file of torch.profiler. The parts arrive in order, one file after the other."""

    repeat: int
    name: str
    data: bytes
    last: bool
    """Whether this is the last part of the file."""


class MemoryFollowed(Event, frozen=True):
    """The memory footprint of one rank, as the JSON of `gpubench.memory.footprint.Footprint`."""

    repeat: int
    footprint: bytes
    findings: bytes | None = None
    """The advice and the predicted saving of each fix, as the JSON of `gpubench.findings.Findings`."""


class MemoryRecorded(Event, frozen=True):
    """A part of the JSON of a `gpubench.memory.history.DeviceHistory`: what one rank of a program has allocated."""

    repeat: int
    data: bytes
    last: bool
    """Whether this is the last part."""


class BatchSizesFound(Event, frozen=True):
    """The batch sizes that fit, as the JSON of `gpubench.memory.batch_sizes.BatchSizes`."""

    repeat: int
    found: bytes


class ReferenceWorkloadTimed(Event, frozen=True):
    """The mean time of the reference workload just before and after the repeat's steps; see `worker.compute_rates`."""

    repeat: int
    seconds: float


class PipelineBuilt(Event, frozen=True):
    """The properties of the pipeline, sent by each rank."""

    repeat: int
    model: str
    parameters: int
    """The number of parameters of the denoiser. Every rank holds all of them."""
    weights: str
    """The SHA-256 hash of the parameters."""
    scheduler: str
    """The class name of the scheduler."""
    timesteps: list[float]
    """The timestep of every evaluation, in order."""
    threads: int | None
    """The number of threads of each rank's process; None on a GPU, where it does not affect the samples."""
    ranges: list[tuple[int, int]]
    """The range [start, end) of evaluations of each rank."""
    latent_shape: list[int]
    """The shape of one sample's latent."""
    carried: list[str]
    """The attributes of the scheduler and the other values that a hand-off contains."""
    seconds: float
    """The time to build or load the model."""
    encode_seconds: float | None = None
    """The time to encode the prompts; None on ranks that encode none."""


class SpansMeasured(Event, frozen=True):
    """Spans of one rank, not in order of time: a wait may end before work that was issued earlier."""

    spans: list[Span]


class HandoffMeasured(Event, frozen=True):
    """One finished transfer of a micro-batch."""

    handoff: Handoff


class SampleFinished(Event, frozen=True):
    """One finished sample, with the contents of its files."""

    sample: Sample
    latent: bytes | None
    """The content of a safetensors file with the final latent."""
    image: bytes | None
    """The content of a PNG file."""


class StageDone(Event, frozen=True):
    """A rank has finished its part of all samples.

    The makespan is the time from rank 0's `started` to the last rank's `ended`.
    """

    repeat: int
    started: float
    ended: float
    sent: int
    """The number of hand-offs sent."""
    received: int
    """The number of hand-offs received."""
    peak_allocated: int | None
    peak_reserved: int | None
    peak_rss: int


class BaselineMeasured(Event, frozen=True):
    """The time to make the same samples without a pipeline: all on one rank, or distributed over replicas."""

    repeat: int
    kind: BaselineKind
    seconds: list[float]
    """The time of each micro-batch that this rank made."""
    wall: float
    """The time of all of them together."""
    samples: list[int]


class Divergence(msgspec.Struct, frozen=True):
    """The first difference between a sample of the pipeline and its reference."""

    sample: int
    largest_difference: float
    """The largest absolute difference between elements of the final latents."""
    step: int | None
    """The first evaluation whose result differs; None if no difference occurred when the sample was made again."""
    rank: int | None
    """The rank that does this evaluation."""
    step_difference: float | None
    """The largest absolute difference after this evaluation."""


class Verified(Event, frozen=True):
    """The comparison of every sample with the one that diffusers makes in a single process."""

    repeat: int
    reference: str
    """A description of the program that made the references."""
    samples: list[int]
    sha256: list[str]
    """The hashes of the references, in the order of `samples`."""
    seconds: float
    divergence: Divergence | None


class Failed(Event, frozen=True):
    """The error that ended a rank."""

    kind: str
    """The name of the error class. A class of `gpubench.errors` determines the exit code."""
    message: str
    hint: str | None
    traceback: str | None
    doing: str
    step: int | None
    secondary: bool
    """Whether the error is that of a broken collective, most likely because another rank failed."""


class Done(Event, frozen=True):
    """The last event of a rank that succeeded."""


class Elsewhere(Event, frozen=True):
    """Tells a recorder that the host of another machine, which has rank 0, records the run."""

    host: str
    """The name of that machine."""


Message = (
    Hello | Seen | Heartbeat | Log | EnvironmentCaptured | ModelBuilt | TreatmentsMissed | GraphsCompiled | Planned
    | StepsMeasured | FlopsCounted | PeakMeasured | GraphTraced | RepeatDone | TraceRecorded | MemoryFollowed
    | MemoryRecorded | BatchSizesFound | ReferenceWorkloadTimed | PipelineBuilt | SpansMeasured | HandoffMeasured
    | SampleFinished | StageDone | BaselineMeasured | Verified | Failed | Done | Elsewhere
)  # fmt: skip


class Job(msgspec.Struct, frozen=True):
    """The host's answer to `Hello`: the job of the worker."""

    worker: str
    """The name of the module whose function `work` does the job."""
    lighter: str
    """The hint of the error if a worker runs out of memory."""
    settings: dict[str, Any]
    repeats: list[int]
    """The numbers of the repeats that this process runs: one of them, or all under the user's own torchrun."""
    clock: tuple[float, float]
    """The host's clocks, read at the same time: (seconds since the epoch, monotonic seconds)."""
    machine: str
    """The host's machine; see `gpubench.ranks.machine`."""
    silence: float = 30.0
    """The time without a message after which host and worker consider each other lost."""
    samples: list[int] | None = None
    """The numbers of the samples to make; None for all."""
    profiled: int | None = None
    """The repeat that torch.profiler records and that is not measured, always the last one; None if there is none."""
    host: str = ""
    """The name of the host's machine, for the hosts of a program's other machines."""
    address: str | None = None
    """The address for the hosts of a program's other machines, which rank 0 puts into the store of the ranks."""


class RepeatEnded(msgspec.Struct, frozen=True):
    """The last line from the host of rank 0's machine to a host of another one."""

    error: str | None
    """The message of the error that ended the repeat, or None."""
    host: str
    """The name of the machine that had the error."""


class DumpStacks(msgspec.Struct, frozen=True):
    """Asks a worker on another machine to print the stacks of all threads."""


_encoder = msgspec.json.Encoder()
_message_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: msgspec.Struct) -> bytes:
    """Returns the message as one line of JSON, newline included."""
    return _encoder.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    """Parses one line. Raises msgspec.DecodeError, or its subclass ValidationError, if it is not an event."""
    return _message_decoder.decode(line)
