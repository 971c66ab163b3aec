"""The events that workers send to the host, and the messages that the host sends to workers.

An event is one line of JSON with its type in the field `event`. Times are in seconds and sizes in bytes. `time` is in
seconds since the epoch. On the host's machine it is the host's own clock (see `Job.clock`), so that steps and hardware
samples have the same time base. Some events are also lines of files in the run directory; the names of their fields are
persisted.
"""

from typing import Any, Literal

import msgspec


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One optimizer step on one rank; also a line of steps.jsonl."""

    repeat: int
    rank: int
    epoch: int
    step: int
    """The number of the step from 0 in each repeat, warm-up included."""
    time: float
    """The time at which the step began on the device's timeline."""
    total: float
    """The time from the start of this step to the start of the next, so that the steps sum to the wall time."""
    phases: dict[str, float]
    """The time of each phase. The phases sum to `total`; `other` is the time of gpubench itself."""
    host: float
    """The time that the host took to issue the step."""
    samples: int
    loss: float | None = None
    starved: bool | None = None
    """Whether the GPU was idle when the step began, so that the host limits the speed; None on a CPU.

    The name of the field is persisted in steps.jsonl.
    """
    skipped: bool = False
    """Whether the gradient scaler found infinities and skipped the update of the parameters."""


SpanKind = Literal["prepare", "evaluate", "decode", "recv_wait", "send_wait"]
BaselineKind = Literal["sequential", "replicas"]


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """One activity of the loop of a pipeline's rank; also a line of timeline.jsonl.

    Work (prepare, evaluate, decode) has times of the device's timeline, and waits have times of the host's.
    """

    repeat: int
    rank: int
    kind: SpanKind
    sample: int
    """The first of its micro-batch."""
    time: float
    """When it began."""
    total: float
    step: int | None = None
    """The number of an evaluation, from 0 through all ranks; None for other kinds."""


class Handoff(msgspec.Struct, frozen=True):
    """One micro-batch that a rank sent or received; also a line of handoffs.jsonl."""

    repeat: int
    rank: int
    peer: int
    direction: Literal["send", "recv"]
    sample: int
    """The first of its micro-batch."""
    step: int
    """The number of evaluations done so far."""
    sequence: int
    time: float
    """The time of its start: of packing for a send, of the header's arrival for a receive."""
    total: float
    """The time until the last byte is sent, or until all is received and unpacked."""
    waited: float
    """For a send, the time in it until the peer took the header.

    For a receive, the wait for the header before `time`.
    """
    header_bytes: int
    """The size of header, manifest and padding."""
    latent_bytes: int
    state_bytes: int
    """The size of the scheduler's tensors, and of those that its caller keeps for it."""
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
    """The time at which rank 0 began it."""
    finished: float
    """The time at which its latent, and its image if there is one, was ready on the last rank."""
    sha256: str
    """The hash of the final latent's contiguous bytes in the run's precision."""
    latent: str | None = None
    image: str | None = None
    """The path of the image in the run directory. `latent` is that of the latent."""
    resumed: bool = False
    """Whether the sample was taken over from the run that this one resumes."""


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, kw_only=True):
    rank: int


class Hello(Event, frozen=True):
    """The worker's part of the handshake: the first line of a connection. `secret` authenticates the worker."""

    world_size: int
    pid: int
    host: str
    machine: str
    """See `gpubench.ranks.machine`."""
    secret: str


class Heartbeat(Event, frozen=True):
    """Shows that the rank is alive. `doing` is a phase or a stage of the set-up, and `step` the current step."""

    doing: str
    step: int | None
    waits_for: int | None = None
    """The rank that it waits for."""
    within: float | None = None
    """The time limit of the activity; None for the run's own limit."""
    patience_factor: float = 1.0
    """The factor on the run's limit if `within` is None."""


class Log(Event, frozen=True):
    time: float
    level: int
    logger: str
    message: str
    fields: dict[str, Any] = {}


class EnvironmentCaptured(Event, frozen=True):
    environment: dict[str, Any]


class ModelBuilt(Event, frozen=True):
    repeat: int
    parameters: int
    trainable_parameters: int
    sample_shape: str
    tokens_per_sample: int | None
    seconds: float


class Planned(Event, frozen=True):
    """The number of steps of the repeat. It is sent again once a limit in seconds is converted to steps."""

    repeat: int
    steps: int


class StepsMeasured(Event, frozen=True):
    steps: list[Step]


class FlopsCounted(Event, frozen=True):
    """The floating-point operations of one sample's forward and backward pass; None with the reason in `reason`."""

    model_flops_per_sample: float | None
    hardware_flops_per_sample: float | None
    method: str
    by_operator: dict[str, int] = {}
    reason: str | None = None


class PeakMeasured(Event, frozen=True):
    """The attainable peak: the best rate of an n x n x n matrix product; None with the reason in `reason`."""

    flops_per_s: float | None
    dtype: str
    size: int | None
    reason: str | None = None


class GraphTraced(Event, frozen=True):
    """The model as a serialised TensorBoard GraphDef."""

    graph: bytes


class RepeatDone(Event, frozen=True):
    repeat: int
    wall: float
    """The time of the whole loop by the host's clock, with the device synchronised at both ends.

    The closure test compares it with the sum of the steps.
    """
    peak_allocated: int | None
    """The GPU's peak in the steps after the warm-up, or in all steps without a warm-up; None without a GPU."""
    peak_reserved: int | None
    peak_rss: int
    setup_peak_allocated: int | None = None
    """The peak until the end of the warm-up, in which libraries try out algorithms; None if unknown."""
    setup_peak_reserved: int | None = None


class TraceRecorded(Event, frozen=True):
    """A piece of a trace file of torch.profiler. The pieces arrive in order, one file after the other."""

    repeat: int
    name: str
    data: bytes
    last: bool
    """Whether this is the last piece of the file."""


class MemoryFollowed(Event, frozen=True):
    """The memory footprint of one rank, as the JSON of `gpubench.memory.footprint.Footprint`."""

    repeat: int
    footprint: bytes
    findings: bytes | None = None
    """The JSON of `gpubench.findings.Findings`: the advice, with the predicted saving of each fix."""


class BatchSizesFound(Event, frozen=True):
    """The batch sizes that fit, as the JSON of `gpubench.memory.batch_sizes.BatchSizes`."""

    repeat: int
    found: bytes


class ReferenceWorkloadTimed(Event, frozen=True):
    """The mean time of the reference workload just before and after the repeat's steps; see `worker.probes`."""

    repeat: int
    seconds: float


class PipelineBuilt(Event, frozen=True):
    """The facts of the pipeline, from each rank."""

    repeat: int
    model: str
    parameters: int
    """The number of parameters of the denoiser. Every rank holds all of them."""
    weights: str
    """The sha256 of the parameters."""
    scheduler: str
    timesteps: list[float]
    """The timestep of every evaluation, in order."""
    threads: int | None
    """The number of threads in each rank's process; None on a GPU, where it does not affect the samples."""
    ranges: list[tuple[int, int]]
    """The evaluations [start, end) of each rank."""
    latent_shape: list[int]
    """The shape of one sample's latent."""
    carried: list[str]
    """The attributes of the scheduler, and the other values, that a hand-over contains."""
    seconds: float
    """The time to build or load the model."""
    encode_seconds: float | None = None
    """The time to encode the prompts, on the rank that does it."""


class SpansMeasured(Event, frozen=True):
    """Spans of one rank. They are not in order of time: a wait may end before work that was issued earlier."""

    spans: list[Span]


class HandoffMeasured(Event, frozen=True):
    handoff: Handoff


class SampleFinished(Event, frozen=True):
    sample: Sample
    latent: bytes | None
    """The content of a safetensors file."""
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
    received: int
    peak_allocated: int | None
    peak_reserved: int | None
    peak_rss: int


class BaselineMeasured(Event, frozen=True):
    """The time of the same samples without a pipeline: all on one rank, or distributed over replicas."""

    repeat: int
    kind: BaselineKind
    seconds: list[float]
    """The time of each micro-batch that this rank made."""
    wall: float
    samples: list[int]


class Divergence(msgspec.Struct, frozen=True):
    """The point at which a sample of the pipeline begins to differ from its reference."""

    sample: int
    largest_difference: float
    """The largest difference of the final latents."""
    step: int | None
    """The first evaluation whose result differs; None if a second pass through the pipeline did not differ."""
    rank: int | None
    """The rank that makes this evaluation."""
    step_difference: float | None


class Verified(Event, frozen=True):
    """The comparison of every sample with the one that diffusers makes in a single process."""

    repeat: int
    reference: str
    """The program that made the references, in words."""
    samples: list[int]
    sha256: list[str]
    """The hashes of the references, in the order of `samples`."""
    seconds: float
    divergence: Divergence | None


class Failed(Event, frozen=True):
    kind: str
    """The name of the error class. A class of `gpubench.errors` determines the exit code."""
    message: str
    hint: str | None
    traceback: str | None
    doing: str
    step: int | None
    secondary: bool
    """Whether a collective broke, most likely because another rank failed."""


class Done(Event, frozen=True):
    """The last event of a rank that succeeded."""


Message = (
    Hello | Heartbeat | Log | EnvironmentCaptured | ModelBuilt | Planned | StepsMeasured | FlopsCounted
    | PeakMeasured | GraphTraced | RepeatDone | TraceRecorded | MemoryFollowed | BatchSizesFound
    | ReferenceWorkloadTimed | PipelineBuilt | SpansMeasured | HandoffMeasured | SampleFinished | StageDone
    | BaselineMeasured | Verified | Failed | Done
)  # fmt: skip


class Job(msgspec.Struct, frozen=True):
    """The host's answer to `Hello`: the job of the worker."""

    worker: str
    """The module whose function `work` does the job."""
    lighter: str
    """The hint for a worker that runs out of memory."""
    settings: dict[str, Any]
    repeats: list[int]
    """The repeats that this process runs: one in a new process, all of them under torchrun."""
    clock: tuple[float, float]
    """(seconds since the epoch, monotonic seconds) read together by the host."""
    machine: str
    """The host's machine; see `gpubench.ranks.machine`."""
    silence: float = 30.0
    """The time without a message after which either end considers the other lost."""
    samples: list[int] | None = None
    """The samples to make; None for all."""
    profiled: int | None = None
    """The last of the repeats if torch.profiler records it and it is not measured; otherwise None."""


class DumpStacks(msgspec.Struct, frozen=True):
    """Asks a worker on another machine to print every thread's stack."""


_encoder = msgspec.json.Encoder()
_message_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: msgspec.Struct) -> bytes:
    """Returns the message as one line of JSON, newline included."""
    return _encoder.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    """Parses one line. Raises msgspec.DecodeError, or its subclass ValidationError, if it is not an event."""
    return _message_decoder.decode(line)
