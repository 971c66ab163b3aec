"""What a worker tells the host, and the one thing the host tells a worker.

One event is one JSON line with its type in the field `event`. Times are seconds, sizes bytes. `time` is seconds since
the epoch on the host's own clock where worker and host share a machine (see `Job.clock`), so that steps and hardware
samples can be laid side by side.
"""

from typing import Any, Literal

import msgspec


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One optimizer step on one rank; also the record of one line in steps.jsonl."""

    repeat: int
    rank: int
    epoch: int
    step: int
    """Counts from 0 in each repeat, warm-up included."""
    time: float
    """When the step began on the device's timeline."""
    total: float
    """From the start of this step to the start of the next, so that the steps tile the wall time."""
    phases: dict[str, float]
    """Seconds by phase; they sum to `total`, `other` being what the harness itself took."""
    host: float
    """Seconds the host took to issue the step."""
    samples: int
    loss: float | None = None
    starved: bool | None = None
    """Whether the GPU had run out of work when the step began: the host, not the device, sets the pace."""
    skipped: bool = False
    """The gradient scaler found infinities and left the parameters alone: time spent, no work done."""


SpanKind = Literal["prepare", "evaluate", "decode", "recv_wait", "send_wait"]
BaselineKind = Literal["sequential", "replicas"]


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the loop of one rank of a pipeline did for a while; also the record of one line in timeline.jsonl.

    Work (prepare, evaluate, decode) is placed on the device's timeline, waits on the host's.
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
    """Of an evaluation: which, counting from 0 through all ranks."""


class Handoff(msgspec.Struct, frozen=True):
    """One micro-batch sent or received; also the record of one line in handoffs.jsonl."""

    repeat: int
    rank: int
    peer: int
    direction: Literal["send", "recv"]
    sample: int
    """The first of its micro-batch."""
    step: int
    """Evaluations done so far."""
    sequence: int
    time: float
    """When it began: packing for a send, the header's arrival for a receive."""
    total: float
    """Until the last byte has left, or has arrived and is unpacked."""
    waited: float
    """Of a send, the part spent until the peer took the header; of a receive, the wait for the header before `time`."""
    header_bytes: int
    """All that is none of what follows: header, manifest, padding."""
    latent_bytes: int
    state_bytes: int
    """Of the scheduler's tensors, and of what its caller holds."""
    generator_bytes: int

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.header_bytes + self.latent_bytes + self.state_bytes + self.generator_bytes


class Sample(msgspec.Struct, frozen=True):
    """One finished sample; also the record of one line in samples.jsonl."""

    repeat: int
    sample: int
    seed: int
    prompt: str | None
    started: float
    """When rank 0 took it up."""
    finished: float
    """When its latent, and its image where one is made, were ready on the last rank."""
    sha256: str
    """Of the final latent's bytes, contiguous, in the run's precision."""
    latent: str | None = None
    image: str | None = None
    """Files in the run directory."""
    resumed: bool = False
    """Taken over from the run that this one resumes."""


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, kw_only=True):
    rank: int


class Hello(Event, frozen=True):
    """The first line of a connection."""

    world_size: int
    pid: int
    host: str
    machine: str
    """See `gpubench.ranks.machine`."""
    secret: str


class Heartbeat(Event, frozen=True):
    """Alive, and in `doing` (a phase, or a stage of the set-up) at `step`."""

    doing: str
    step: int | None
    waits_for: int | None = None
    """The rank without which it cannot go on."""
    within: float | None = None
    """Seconds that what it is doing may take; None leaves it to the patience of the run."""


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
    """How many steps this repeat will take; sent again when a limit in seconds has been turned into steps."""

    repeat: int
    steps: int


class StepsMeasured(Event, frozen=True):
    steps: list[Step]


class FlopsCounted(Event, frozen=True):
    """Floating-point operations of one sample's forward and backward pass; None says why in `reason`."""

    model_flops_per_sample: float | None
    hardware_flops_per_sample: float | None
    method: str
    by_operator: dict[str, int] = {}
    reason: str | None = None


class PeakMeasured(Event, frozen=True):
    """An attainable ceiling: the best rate of an n x n x n matrix product."""

    flops_per_s: float
    dtype: str
    size: int


class GraphTraced(Event, frozen=True):
    """The model as a serialised TensorBoard GraphDef."""

    graph: bytes


class RepeatDone(Event, frozen=True):
    repeat: int
    wall: float
    """The whole timed loop by the host clock, device synchronised at both ends: the closure test's other side."""
    peak_allocated: int | None
    """On the GPU, by the steps after the warm-up; by all, where no warm-up was set."""
    peak_reserved: int | None
    peak_rss: int
    setup_peak_allocated: int | None = None
    """Until the end of the warm-up, in which libraries try out algorithms."""
    setup_peak_reserved: int | None = None


class TraceRecorded(Event, frozen=True):
    """A piece of a trace file of torch.profiler, in order; a file begins where the one before it ended."""

    repeat: int
    name: str
    data: bytes
    last: bool
    """Whether the file is complete with it."""


class MemoryFollowed(Event, frozen=True):
    """What filled one rank's memory, as the JSON of `gpubench.memory.footprint.Footprint`."""

    repeat: int
    footprint: bytes
    findings: bytes | None = None
    """The JSON of `gpubench.findings.Findings`: advice, with what each fix is predicted to save."""


class BatchSizesFound(Event, frozen=True):
    """Which batch sizes fit, as the JSON of `gpubench.memory.batch_sizes.BatchSizes`."""

    repeat: int
    found: bytes


class YardstickRead(Event, frozen=True):
    """How long a fixed piece of work took just before and after the repeat's steps; see `gpubench.yardstick`."""

    repeat: int
    seconds: float


class PipelineBuilt(Event, frozen=True):
    """What a pipeline is made of, from each rank."""

    repeat: int
    model: str
    parameters: int
    """Of the denoiser, which every rank holds whole."""
    weights: str
    """sha256 of them."""
    scheduler: str
    timesteps: list[float]
    """Of every evaluation, in order."""
    threads: int | None
    """That compute in each rank's process; None on a GPU, where they have no part in the samples."""
    ranges: list[tuple[int, int]]
    """Evaluations [start, end) of each rank."""
    latent_shape: list[int]
    """Of one sample."""
    carried: list[str]
    """Attributes of the scheduler that travel with a sample, and what else does."""
    seconds: float
    """To build or load the model."""
    encode_seconds: float | None = None
    """To encode the prompts, on the rank that did."""


class SpansMeasured(Event, frozen=True):
    """Of one rank, not in order of time: a wait is over before the work that was issued earlier."""

    spans: list[Span]


class HandoffMeasured(Event, frozen=True):
    handoff: Handoff


class SampleFinished(Event, frozen=True):
    sample: Sample
    latent: bytes | None
    """A safetensors file."""
    image: bytes | None
    """A PNG file."""


class StageDone(Event, frozen=True):
    """A rank has worked through all samples: the makespan is from rank 0's `started` to the last rank's `ended`."""

    repeat: int
    started: float
    ended: float
    sent: int
    received: int
    peak_allocated: int | None
    peak_reserved: int | None
    peak_rss: int


class BaselineMeasured(Event, frozen=True):
    """The same samples without a pipeline: all on one rank, or shared out over replicas of it."""

    repeat: int
    kind: BaselineKind
    seconds: list[float]
    """Of each micro-batch that this rank made."""
    wall: float
    samples: list[int]


class Divergence(msgspec.Struct, frozen=True):
    """Where a sample of the pipeline and its reference part."""

    sample: int
    largest_difference: float
    """Of the final latents."""
    step: int | None
    """The first evaluation whose result differs; None where a second pass through the pipeline did not differ."""
    rank: int | None
    """Whose evaluation that is."""
    step_difference: float | None


class Verified(Event, frozen=True):
    """Every sample beside the one that single-process diffusers makes."""

    repeat: int
    reference: str
    """What made the references, in words."""
    samples: list[int]
    sha256: list[str]
    """Of the references, in the order of `samples`."""
    seconds: float
    divergence: Divergence | None


class Failed(Event, frozen=True):
    kind: str
    """Name of the error class; one of `gpubench.errors` keeps its exit code."""
    message: str
    hint: str | None
    traceback: str | None
    doing: str
    step: int | None
    secondary: bool
    """A collective broke, most likely because another rank did."""


class Done(Event, frozen=True):
    """The last line of a connection that ended well."""


Message = (
    Hello | Heartbeat | Log | EnvironmentCaptured | ModelBuilt | Planned | StepsMeasured | FlopsCounted
    | PeakMeasured | GraphTraced | RepeatDone | TraceRecorded | MemoryFollowed | BatchSizesFound | YardstickRead
    | PipelineBuilt | SpansMeasured | HandoffMeasured | SampleFinished | StageDone | BaselineMeasured | Verified
    | Failed | Done
)  # fmt: skip


class Job(msgspec.Struct, frozen=True):
    """The host's answer to `Hello`: everything a worker needs to know."""

    worker: str
    """The module whose `work` does it."""
    lighter: str
    """What takes less memory, for a worker that has not enough."""
    settings: dict[str, Any]
    repeats: list[int]
    """The repeats this process runs: one for a fresh process, all of them under torchrun."""
    clock: tuple[float, float]
    """(seconds since the epoch, monotonic seconds) read together by the host."""
    machine: str
    """The host's; see `gpubench.ranks.machine`."""
    silence: float = 30.0
    """Seconds after which either end takes the other for lost."""
    samples: list[int] | None = None
    """The samples still to be made; None for all."""
    profiled: int | None = None
    """The repeat, the last of them, that torch.profiler records and that is not measured."""


class DumpStacks(msgspec.Struct, frozen=True):
    """Asks a worker on another machine to print every thread's stack."""


_encoder = msgspec.json.Encoder()
_message_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: msgspec.Struct) -> bytes:
    """One line, newline included."""
    return _encoder.encode(message) + b"\n"


def decode(line: bytes) -> Message:
    """Raises msgspec.DecodeError (ValidationError among it) for anything that is not an event."""
    return _message_decoder.decode(line)
