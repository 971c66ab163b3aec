"""The events that workers send to the host, and the messages that the host sends to workers.

An event is one line of JSON with its type in the field `event`. Durations are in seconds, sizes in bytes, and points in
time in seconds since the epoch. On the host's machine, workers use the host's clock (see `Job.clock`), so that steps
and hardware samples have the same time base. Some types are also lines of files in the run directory, so the names of
their fields must not change.

The types limit the values that are accepted. The limits are checked when an event or a line of a file is decoded, so
that what one of them accepts, the others accept too.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from gpubench.loader_record import LoaderRecord
from gpubench.sampled import Calls, Sampled
from gpubench.surrogates import without_surrogates

A = TypeVar("A")

LONGEST = 1e9
"""The longest duration in seconds; sums of longer ones lose precision."""
SHORTEST = 1e-9
"""The shortest duration in seconds of anything that takes time."""
OTHER = "other"
"""The phase of the time outside of all others."""
MOST_PHASES = 64
"""The largest number of phases in a run, which has about ten; each has a column of its own."""
DEEPEST = 32
"""The largest depth of a value whose type is not known."""

# A step is sorted by a key of 64 bits: 16 bits of repeat, 16 of rank, 31 of step.
RepeatNumber = Annotated[int, Meta(ge=0, lt=1 << 16)]
RankNumber = Annotated[int, Meta(ge=-1, lt=1 << 16)]
"""The number of a rank, or -1 in place of it."""
Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""The number of a step, an epoch or a sample, or a number of them."""
ProcessNumber = Annotated[int, Meta(ge=1, lt=1 << 31)]
"""The number of a process. To the system, 0 and those below it stand for groups of processes, which get its signals."""
Size = Annotated[int, Meta(ge=0, lt=1 << 53)]
"""A number of bytes or elements, which a float can hold."""
Time = Annotated[float, Meta(ge=0, le=1e12)]
"""A point in time in seconds since the epoch."""
Duration = Annotated[float, Meta(ge=0, le=LONGEST)]
Elapsed = Annotated[float, Meta(ge=SHORTEST, le=LONGEST)]
"""A duration by which others are divided."""
Part = Annotated[float, Meta(ge=-1, le=LONGEST)]
"""A duration between two clocks, which may come out a little below zero."""
Rate = Annotated[float, Meta(ge=0, le=1e30)]
"""A number of floating-point operations, or of those in a second."""
Loss = Annotated[float, Meta(ge=-1e70, le=1e70)]
"""A number whose fourth power is finite, which comparisons compute. Those of 32 bits are smaller."""
Name = Annotated[str, Meta(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]+(?![\s\S])")]
"""The name of a phase, which may be a name of the user."""
Spread = Annotated[float, Meta(ge=0, le=1e18)]
"""A standard deviation of numbers of elements."""
Words = Annotated[str, Meta(max_length=1000)]
"""A short text that is shown in a line."""
UuidDigits = Annotated[str, Meta(pattern=r"^[0-9a-f]{1,64}(?![\s\S])")]
"""The hexadecimal digits of a GPU's uuid, or of a MIG instance's own; see `gpubench.devices.Gpu.digits`."""
FEW = Meta(max_length=1000)
"""The limit of entries of which a run has some tens."""


def _check_depth(values: Iterable[Any]) -> None:
    """Raises ValueError if a value is nested too deeply to be formatted again."""
    level = list(values)
    for _ in range(DEEPEST):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    raise ValueError(f"a value is nested more than {DEEPEST} levels deep")


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One optimizer step on one rank; also a line of steps.jsonl."""

    repeat: RepeatNumber
    rank: Annotated[int, Meta(ge=0, lt=1 << 16)]
    epoch: Number
    step: Number
    """The number of the step in its repeat, counted from 0 and including the warm-up."""
    time: Time
    """The time at which the step began on the device's timeline."""
    total: Elapsed
    """The time from the start of this step to the start of the next, so that the steps sum to the wall time."""
    phases: Annotated[dict[Name, Part], Meta(max_length=MOST_PHASES)]
    """The duration of each phase. The durations sum to `total`; `other` is the time outside of all other phases."""
    host: Part
    """The time that the CPU took to issue the work of the step."""
    samples: Number
    loss: Loss | None = None
    """The loss; None for a step whose loss is unknown, and for one whose loss is `not_finite`."""
    starved: bool | None = None
    """Whether the GPU was idle when the step began, so that the CPU limits the speed; None on a CPU."""
    skipped: bool = False
    """Whether the gradient scaler found infinities and skipped the update of the parameters."""
    not_finite: bool = False
    """Whether the loss was seen, and was NaN or infinite, for which JSON has no number."""


SpanKind = Literal["prepare", "evaluate", "decode", "recv_wait", "send_wait"]
BaselineKind = Literal["sequential", "replicas"]


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """One activity in the loop of a pipeline rank; also a line of timeline.jsonl.

    Work (prepare, evaluate, decode) is timed on the device, and waits are timed on the CPU.
    """

    repeat: RepeatNumber
    rank: RankNumber
    kind: SpanKind
    sample: Number
    """The first sample of the micro-batch."""
    time: Time
    """The time at which the activity began."""
    total: Part
    """The duration of the activity."""
    step: Number | None = None
    """The number of the evaluation, counted from 0 over all ranks; None for other kinds."""


class Handoff(msgspec.Struct, frozen=True):
    """One micro-batch that a rank sent or received; also a line of handoffs.jsonl."""

    repeat: RepeatNumber
    rank: RankNumber
    peer: RankNumber
    direction: Literal["send", "recv"]
    sample: Number
    """The first sample of the micro-batch."""
    step: Number
    """The number of evaluations that the micro-batch has had so far."""
    sequence: Number
    """The number of the transfer between these two ranks."""
    time: Time
    """The time at which packing began for a send, or at which the header arrived for a receive."""
    total: Part
    """The duration until the last byte is sent, or until everything is received and unpacked."""
    waited: Part
    """For a send, the part of `total` until the peer accepted the header.

    For a receive, the wait for the header before `time`.
    """
    header_bytes: Size
    """The size of the header, the description and the padding."""
    latent_bytes: Size
    state_bytes: Size
    """The size of the scheduler's tensors, including those that the denoising loop keeps for the scheduler."""
    generator_bytes: Size

    @property
    def size(self) -> int:
        """The total size in bytes."""
        return self.header_bytes + self.latent_bytes + self.state_bytes + self.generator_bytes


class Sample(msgspec.Struct, frozen=True):
    """One finished sample; also a line of samples.jsonl."""

    repeat: RepeatNumber
    sample: Number
    seed: int
    prompt: str | None
    started: Time
    """The time at which rank 0 began the sample."""
    finished: Time
    """The time at which the latent, and the image if there is one, was ready on the last rank."""
    sha256: Words
    """The hash of the final latent's bytes in the run's precision."""
    latent: Words | None = None
    """The path of the file with the latent, relative to the run directory."""
    image: Words | None = None
    """The path of the image, relative to the run directory."""
    resumed: bool = False
    """Whether the sample was made by the earlier run that this run resumes."""
    digests: dict[str, str] = {}
    """The sha256 of each of its files, by the path relative to the run directory."""


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, kw_only=True):
    """The base of all events. `rank` is the rank that sent the event."""

    rank: RankNumber

    def check(self) -> None:
        """Raises ValueError if its fields contradict each other. Called when it is decoded."""


def _check_owner(rank: int, owners: Iterable[int]) -> None:
    """Raises ValueError if a part of an event of `rank` is of another rank."""
    if (other := next((owner for owner in owners if owner != rank), rank)) != rank:
        raise ValueError(f"a part of it is of rank {other}")


class Hello(Event, frozen=True):
    """The first line of a connection, with which a worker identifies itself. `secret` authenticates the worker."""

    world_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    pid: ProcessNumber
    host: Words
    machine: Words
    """See `gpubench.ranks.machine`."""
    secret: Words
    ranks_here: tuple[Number, Number] | None = None
    """(first rank, number of ranks) of a program that the rank's own host has started; None if it has started all."""
    home: Words | None = None
    """The address of the host on rank 0's machine, if that is another host; "" if the rank has not found it."""

    def check(self) -> None:
        first, here = self.ranks_here or (0, self.world_size)
        if not 0 <= first <= self.rank < first + here <= self.world_size:
            raise ValueError(f"rank {self.rank} is not one of {here} ranks from {first} of {self.world_size}")


class Seen(Event, frozen=True):
    """The only line of a connection on which a process of a measured program reports what it has done.

    `rank` is -1, because the process is not a rank, or not yet.
    """

    pid: ProcessNumber
    what: Literal["python", "torch", "trained"]
    """What has been loaded, the probe by a Python process or torch; or that a fork of a rank trains or infers too."""


class Heartbeat(Event, frozen=True):
    """Shows that the rank is alive, and what it is doing."""

    doing: Words
    """The current phase of the step, or the current stage of the set-up."""
    step: Number | None
    waits_for: RankNumber | None = None
    """The rank that this rank waits for."""
    within: Duration | None = None
    """The time limit of the activity; None for the run's own limit."""
    patience_factor: Elapsed = 1.0
    """The factor by which the run's limit is multiplied if `within` is None."""


class Log(Event, frozen=True):
    """A record of the worker's log. `level` is that of the logging module."""

    time: Time
    level: Annotated[int, Meta(ge=0, le=100)]
    logger: Words
    message: str
    fields: Annotated[dict[Words, Any], FEW] = {}

    def check(self) -> None:
        _check_depth(self.fields.values())


class GpuFacts(msgspec.Struct, frozen=True):
    """What a run needs to know of a GPU."""

    name: Words | None = None
    memory_bytes: Size | None = None
    uuid: Words | None = None


class _Environment(msgspec.Struct, frozen=True):
    gpus: list[GpuFacts] | None = None


class EnvironmentCaptured(Event, frozen=True):
    """The machine, libraries and process settings, as the content of environment.json."""

    environment: dict[str, Any]
    settings: Annotated[dict[Words, Any], FEW] = {}
    """The settings that the ranks have decided, by dot-key."""

    def check(self) -> None:
        _check_depth([*self.environment.values(), *self.settings.values()])
        msgspec.convert(self.environment, _Environment)

    @property
    def gpus(self) -> "list[GpuFacts]":
        """The GPUs that the rank sees."""
        return msgspec.convert(self.environment, _Environment).gpus or []


class ModelBuilt(Event, frozen=True):
    """The size of the model, and the time to build it with its optimizer and to place both on the device.

    A program of the user has no such time, because nothing marks where it builds the model.
    """

    repeat: RepeatNumber
    parameters: Size
    trainable_parameters: Size
    sample_shape: Words
    tokens_per_sample: Number | None
    seconds: Duration | None
    device: Words | None = None
    """The type of the parameters' device, if the worker and not the settings decided on it."""
    settings: Annotated[dict[str, Any], FEW] = {}
    """How a program of the user runs, by the dot-keys of the settings that can change it."""
    places: Annotated[dict[str, str], FEW] = {}
    """Where in a program of the user its fixes belong, as file and line; see `gpubench.settings.field.Place`."""
    optimizers: Annotated[dict[str, list[str]], FEW] = {}
    """The lines that make its optimizers which can be fused, as far as they are known, by the name of the class."""

    def check(self) -> None:
        _check_depth(self.settings.values())


class TreatmentsMissed(Event, frozen=True):
    """The settings that found nothing to change in a program of the user, by dot-key, each with the reason."""

    repeat: RepeatNumber
    missed: Annotated[dict[Words, str], FEW]


class GraphsCompiled(Event, frozen=True):
    """The steps of a program of the user in which torch.compile compiled code."""

    repeat: RepeatNumber
    steps: list[Number]


class Planned(Event, frozen=True):
    """The length of the repeat. Where it follows from the time of the first steps, it is sent again after them."""

    repeat: RepeatNumber
    steps: Number
    """The number of all steps, with those of the warm-up; 0 while it is unknown."""
    warmup: Number | None = None
    """The smallest number of steps that are excluded at the start; None while it is unknown."""
    each_update: bool = False
    """As in `gpubench.probe.length.Length`."""


class _Steps(Event, frozen=True):
    """Steps of one repeat, in their order."""

    steps: list[Step]

    def check(self) -> None:
        _check_owner(self.rank, (step.rank for step in self.steps))
        if len({step.repeat for step in self.steps}) > 1:
            raise ValueError("it has steps of several repeats")


class StepsMeasured(_Steps, frozen=True):
    """Steps that the device has finished since the last event.

    Its other fields are those by which the clock of a program is compared with the host's; see `gpubench.runs.clocks`.
    """

    token: tuple[Number, Number] | None = None
    """The first step that ended after the program had read another token of its host, and the number of the token; None
    if it has read none."""
    anew: bool = False
    """Whether these times are on another timeline than those before, such as that of another device."""
    sent: Duration | None = None
    """When the host has sent that token, by the monotonic clock of the rank's machine. The host adds it, and `read`."""
    read: Duration | None = None
    """When the host has read this event."""


class StepsHeld(_Steps, frozen=True):
    """The steps after those that were measured, if the rank ends now.

    A program sends them, again and again, while it is unknown which of its updates make a step.
    """


class FlopsCounted(Event, frozen=True):
    """The floating-point operations of the forward and backward pass of one sample.

    The numbers are None if the operations could not be counted, and `reason` says why.
    """

    model_flops_per_sample: Rate | None
    hardware_flops_per_sample: Rate | None
    method: Words
    by_operator: dict[str, Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]] = {}
    reason: str | None = None


class PeakMeasured(Event, frozen=True):
    """The attainable peak: the rate that is sustained by the product of two `size` x `size` matrices.

    The numbers are None if it could not be measured, and `reason` says why.
    """

    flops_per_s: Annotated[float, Meta(ge=1, le=1e30)] | None
    dtype: Words
    size: Size | None
    reason: str | None = None


class GraphTraced(Event, frozen=True):
    """The model as a serialised TensorBoard GraphDef."""

    graph: bytes


class WorkCounted(msgspec.Struct, frozen=True):
    """The work of all steps of a repeat, the warm-up included, counted where it is done and not taken from settings."""

    backward_passes: Size
    updated_first: Size
    """The elements of all parameters that the first update of each optimizer has changed."""
    updated_least: Size
    """The same for the update of each optimizer that has changed the fewest, among those that were counted."""
    forwarded: Size = 0
    """The samples that the model was given in forward passes of training; 0 if they were not counted."""
    calls: Size | None = None
    """The forward passes of training in which these were counted; None in runs of older versions, as all that follow.

    A program calls its model before the model is known, so that those of its first steps are missing.
    """
    counted_steps: Size | None = None
    """The steps, or updates, in which forward passes could be counted."""
    elements: Size | None = None
    """The elements of the first tensor of all these forward passes: a lower resolution has fewer for each sample."""
    elements_spread: Spread | None = None
    """Their standard deviation between forward passes."""
    shapes: Annotated[list[Words], FEW] = []
    """The shapes and types of that tensor, the most frequent ones first, such as "64x3x32x32 float32"."""
    batches: Size | None = None
    """The batches that were drawn from DataLoaders for training."""
    looked_at: Size | None = None
    """The forward passes of a sample of the steps, of which it was seen whether a backward pass reached them."""
    reached: Size | None = None
    """How many of these a backward pass has reached."""
    unused_passes: Size | None = None
    """The backward passes whose gradients were cleared before an update could use them."""
    contents: Size | None = None
    """The forward passes on the CPU whose first tensor was sampled, to find those with the same content."""
    repeated_contents: Size | None = None
    """How many of these had the content of an earlier one in the same sample of steps."""
    updated_bytes: Size | None = None
    """The bytes of the parameters of `updated_least`."""
    updated_parameters: Size | None = None
    """The number of these parameters, which are tensors."""
    looked_at_parameters: Size | None = None
    """The parameters of a sample of the updates, whose values were read on the CPU before and after the update."""
    changed_parameters: Size | None = None
    """How many of these an update has changed."""


class RepeatDone(Event, frozen=True):
    """The end of a repeat on one rank, with its wall time and peak memory. GPU memory is None without a GPU."""

    repeat: RepeatNumber
    wall: Part
    """The duration of the whole loop, measured on the CPU with the device synchronised at both ends.

    It is compared with the sum of the steps, which must be equal.
    """
    peak_allocated: Size | None
    """The peak of the memory held by tensors in the steps after the warm-up, or in all steps without a warm-up."""
    peak_reserved: Size | None
    """The same for the memory held by the caching allocator."""
    peak_rss: Size
    """The peak of the process's resident CPU memory."""
    setup_peak_allocated: Size | None = None
    """The peak until the end of the warm-up, in which libraries try out algorithms; None if unknown."""
    setup_peak_reserved: Size | None = None
    work: WorkCounted | None = None
    """None for inference."""
    gpus: Annotated[list[UuidDigits], FEW] | None = None
    """The GPUs on which the rank has held memory so far; None if they are unknown."""
    samples_from: Words = ""
    """What the samples of a program of the user are; empty if they are unknown, or those of gpubench's own loop."""
    timed_by: Words = ""
    """What the times of a program of the user are from, which uses GPUs; empty for one that uses none."""
    unanswered: Annotated[dict[Name, Words], FEW] = {}
    """The errors of queries of a device that failed in a program of the user, by the query."""
    partial_first: bool = False
    """Whether the first step of a program is timed from its first backward pass, because its beginning was not seen."""
    probe_time: Part | None = None
    """The CPU time of the probe in a step of a program, in seconds; None if it is unknown, as after too few steps."""


class TraceRecorded(Event, frozen=True):
    """A part of a trace of torch.profiler, or of a snapshot of CUDA's caching allocator.

    The parts arrive in order, one file after the other.
    """

    repeat: RepeatNumber
    name: Annotated[
        str, Meta(max_length=200, pattern=r"^\w[\w.-]*\.(pt\.trace\.json(\.gz)?|snapshot\.pickle)(?![\s\S])")
    ]
    data: bytes
    last: bool
    """Whether this is the last part of the file."""


class LoaderDrawn(Event, frozen=True):
    """What was seen of the DataLoader of a program whose batches were drawn alone."""

    repeat: RepeatNumber
    loader: LoaderRecord


class LoaderRefused(Event, frozen=True):
    """Why no batch of a program can be drawn alone."""

    reason: Words
    hint: Words


class CodeSampled(Event, frozen=True):
    """The samples of the code of a program, in the repeat that is recorded."""

    repeat: RepeatNumber
    main: Sampled
    workers: Sampled
    calls: Calls = []


class MemoryFollowed(Event, frozen=True):
    """The memory footprint of one rank, as the JSON of `gpubench.memory.footprint.Footprint`."""

    repeat: RepeatNumber
    footprint: bytes
    findings: bytes | None = None
    """The advice and the predicted saving of each fix, as the JSON of `gpubench.findings.Findings`."""


class MemoryRecorded(Event, frozen=True):
    """A part of the JSON of a `gpubench.memory.allocation_log.DeviceLog`: what one rank of a program has allocated."""

    repeat: RepeatNumber
    data: bytes
    last: bool
    """Whether this is the last part."""


class BatchSizesFound(Event, frozen=True):
    """The batch sizes that fit, as the JSON of `gpubench.memory.batch_sizes.BatchSizes`."""

    repeat: RepeatNumber
    found: bytes


class ReferenceWorkloadTimed(Event, frozen=True):
    """The mean time of the reference workload just before and after the repeat's steps; see `worker.compute_rates`."""

    repeat: RepeatNumber
    seconds: Elapsed


class PipelineBuilt(Event, frozen=True):
    """The properties of the pipeline, sent by each rank."""

    repeat: RepeatNumber
    model: str
    parameters: Size
    """The number of parameters of the denoiser. Every rank holds all of them."""
    weights: str
    """The SHA-256 hash of the parameters."""
    scheduler: str
    """The class name of the scheduler."""
    timesteps: list[Loss]
    """The timestep of every evaluation, in order."""
    threads: int | None
    """The number of threads of each rank's process; None on a GPU, where it does not affect the samples."""
    ranges: list[tuple[Number, Number]]
    """The range [start, end) of evaluations of each rank."""
    latent_shape: Annotated[list[Number], Meta(max_length=16)]
    """The shape of one sample's latent."""
    carried: list[str]
    """The attributes of the scheduler and the other values that a hand-off contains."""
    seconds: Duration
    """The time to build or load the model."""
    encode_seconds: Duration | None = None
    """The time to encode the prompts; None on ranks that encode none."""

    def check(self) -> None:
        if self.rank >= len(self.ranges):
            raise ValueError("it has no range of evaluations for its own rank")


class SpansMeasured(Event, frozen=True):
    """Spans of one rank, not in order of time: a wait may end before work that was issued earlier."""

    spans: list[Span]

    def check(self) -> None:
        _check_owner(self.rank, (span.rank for span in self.spans))


class HandoffMeasured(Event, frozen=True):
    """One finished transfer of a micro-batch."""

    handoff: Handoff

    def check(self) -> None:
        _check_owner(self.rank, [self.handoff.rank])


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

    repeat: RepeatNumber
    started: Time
    ended: Time
    sent: Number
    """The number of hand-offs sent."""
    received: Number
    """The number of hand-offs received."""
    peak_allocated: Size | None
    peak_reserved: Size | None
    peak_rss: Size
    gpus: Annotated[list[UuidDigits], FEW] | None = None
    """As in `RepeatDone`."""


class BaselineMeasured(Event, frozen=True):
    """The time to make the same samples without a pipeline: all on one rank, or distributed over replicas."""

    repeat: RepeatNumber
    kind: BaselineKind
    seconds: list[Duration]
    """The time of each micro-batch that this rank made."""
    wall: Part
    """The time of all of them together."""
    samples: list[Number]


class Divergence(msgspec.Struct, frozen=True):
    """The first difference between a sample of the pipeline and its reference."""

    sample: Number
    largest_difference: float
    """The largest absolute difference between elements of the final latents."""
    step: Number | None
    """The first evaluation whose result differs; None if no difference occurred when the sample was made again."""
    rank: int | None
    """The rank that does this evaluation."""
    step_difference: float | None
    """The largest absolute difference after this evaluation."""


class Verified(Event, frozen=True):
    """The comparison of every sample with the one that diffusers makes in a single process."""

    repeat: RepeatNumber
    reference: str
    """A description of the program that made the references."""
    samples: list[Number]
    sha256: list[Words]
    """The hashes of the references, in the order of `samples`."""
    seconds: Duration
    divergence: Divergence | None


class Failed(Event, frozen=True):
    """The error that ended a rank."""

    kind: str
    """The name of the error class. A class of `gpubench.errors` determines the exit code."""
    message: str
    hint: str | None
    traceback: str | None
    doing: Words
    step: Number | None
    secondary: bool
    """Whether the error is that of a broken collective, most likely because another rank failed."""


class Done(Event, frozen=True):
    """The last event of a rank that succeeded."""


class RankLeft(Event, frozen=True):
    """Tells a recorder that a rank's connection has ended although it has not sent Done. The host makes it."""

    repeat: int
    how: Literal["closed", "replaced", "died"]
    """What the host has seen of the process; see `gpubench.kinds.program.endings`."""
    steps: int
    """The number of steps that had been received."""
    wanted: int | None
    """The number of steps that were to be received; None for all."""


class Unmeasured(Event, frozen=True):
    """Tells a recorder of a process that trained, or inferred, and is not a rank. The host makes it."""

    repeat: int
    command: str
    """The command that began it, in the words of a shell: the one in which its ancestry differs from that of a rank."""
    is_own: bool
    """Whether that is a command of its own, and not the measured program again, as after a fork."""
    measured: str
    """The command of the rank that took the first step."""
    later: bool
    """Whether all ranks had ended before it took its first step."""


class Elsewhere(Event, frozen=True):
    """Tells a recorder that the host of another machine, which has rank 0, records the run."""

    host: str
    """The name of that machine."""


Greeting = Hello | Seen
"""What a connection begins with."""
OfRank = (
    Heartbeat | Log | EnvironmentCaptured | ModelBuilt | TreatmentsMissed | GraphsCompiled | Planned | StepsMeasured
    | StepsHeld
    | FlopsCounted | PeakMeasured | GraphTraced | RepeatDone | TraceRecorded | CodeSampled | LoaderDrawn
    | LoaderRefused | MemoryFollowed | MemoryRecorded
    | BatchSizesFound | ReferenceWorkloadTimed | PipelineBuilt | SpansMeasured | HandoffMeasured
    | SampleFinished | StageDone | BaselineMeasured | Verified | Failed | Done
)  # fmt: skip
"""What a rank sends after its greeting."""
Message = Greeting | OfRank | Elsewhere | RankLeft | Unmeasured


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
    seconds: float | None = None
    """The time that the steps of a repeat may take, where their number is open; None where it is not."""
    length: tuple[int, int, bool] | None = None
    """The fields of `gpubench.probe.length.Length` of an earlier repeat in which an open number was decided, for this
    one; None before that."""
    sampled: int = 0
    """The number of steps of a program after those of torch.profiler in which its code is sampled."""


class Token(msgspec.Struct, frozen=True):
    """What a host sends to a rank of a program after each report of steps; see `StepsMeasured.token`."""

    token: Number


class RepeatEnded(msgspec.Struct, frozen=True):
    """The last line from the host of rank 0's machine to a host of another one."""

    error: str | None
    """The message of the error that ended the repeat, or None."""
    host: str
    """The name of the machine that had the error."""


class DumpStacks(msgspec.Struct, frozen=True):
    """Asks a worker on another machine to print the stacks of all threads."""


LONGEST_GREETING = 4096
"""The largest length of a greeting in bytes."""
LONGEST_LINE = 256 * 2**20
"""The largest length of any other line in bytes: that of the largest document that a rank sends."""

_encoder = msgspec.json.Encoder()
_greeting_decoder: msgspec.json.Decoder[Greeting] = msgspec.json.Decoder(Greeting)
_rank_decoder: msgspec.json.Decoder[OfRank] = msgspec.json.Decoder(OfRank)
_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_SECRET = re.compile(rb'"secret":"([^"\\]*)"')


def encode(message: msgspec.Struct | Mapping[str, Any]) -> bytes:
    """Encodes the message as one line of JSON, newline included. Lone surrogates, which JSON lacks, become escapes."""
    try:
        return _encoder.encode(message) + b"\n"
    except UnicodeEncodeError:
        return _encoder.encode(without_surrogates(msgspec.to_builtins(message))) + b"\n"


def decode(line: bytes) -> Message:
    """Parses a line. Raises msgspec.DecodeError, or its subclass ValidationError, if it is not an event."""
    return _decoded(_decoder, line)


def decode_of(rank: int, line: bytes) -> OfRank:
    """Parses a line that `rank` has sent after its greeting. Raises msgspec.DecodeError if it sends no such event."""
    event = _decoded(_rank_decoder, line)
    if event.rank != rank:
        raise msgspec.ValidationError(f"it is in the name of rank {event.rank}")
    return event


def greeting(line: bytes, secret: str) -> Greeting | None:
    """Parses the first line of a connection; None if it is too long, has another `secret`, or is not a greeting.

    Nothing of it is decoded before its secret has been compared. The line of `Seen` has none.
    """
    if len(line) > LONGEST_GREETING:
        return None
    found = _SECRET.search(line)
    if not secrets.compare_digest(found[1] if found else b"", secret.encode()):
        return None
    try:
        said = _decoded(_greeting_decoder, line)
    except msgspec.DecodeError:
        return None
    # JSON may repeat a key, of which the last one counts
    return said if isinstance(said, Seen) or secrets.compare_digest(said.secret.encode(), secret.encode()) else None


def parse(content: bytes | bytearray, type_: type[A]) -> A:
    """Parses a line of a host, or JSON in an event, of the type that is due. Raises msgspec.DecodeError."""
    return _decoded(msgspec.json.Decoder(type_), content)


def _decoded(decoder: msgspec.json.Decoder[A], line: bytes | bytearray) -> A:
    """Decodes a line. Whatever is wrong with it is a msgspec.DecodeError."""
    try:
        found = decoder.decode(line)
        if isinstance(found, Event):
            found.check()
        return found
    except msgspec.DecodeError:
        raise
    except (ValueError, RecursionError, MemoryError) as error:  # ValueError: not UTF-8
        raise msgspec.DecodeError(str(error) or "it does not fit in memory") from None


class LineBuffer:
    """Splits what arrives over a connection into lines."""

    def __init__(self) -> None:
        self._unfinished = bytearray()

    def take(self, piece: bytes) -> Iterator[bytes]:
        """Yields the lines that `piece` ends. Raises msgspec.DecodeError if one becomes longer than LONGEST_LINE."""
        *ended, rest = piece.split(b"\n")
        for end in ended:
            line, self._unfinished = bytes(self._unfinished + end), bytearray()
            yield line
        self._unfinished += rest
        if len(self._unfinished) > LONGEST_LINE:
            raise msgspec.DecodeError(f"a line of it is longer than {LONGEST_LINE >> 20} MiB")

    def __len__(self) -> int:
        """The number of bytes of the unfinished line."""
        return len(self._unfinished)
