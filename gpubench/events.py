"""What a worker tells the host, and the one thing the host tells a worker.

One event is one JSON line with its type in the field `event`. Times are seconds, sizes bytes. `time` is seconds since
the epoch on the host's own clock where worker and host share a machine (see `Job.clock`), so that steps and hardware
samples can be laid side by side.
"""

from typing import Any

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


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower, kw_only=True):
    rank: int


class Hello(Event, frozen=True):
    """The first line of a connection."""

    world_size: int
    pid: int
    host: str
    secret: str


class Heartbeat(Event, frozen=True):
    """Alive, and in `doing` (a phase, or a stage of the set-up) at `step`."""

    doing: str
    step: int | None


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
    peak_reserved: int | None
    peak_rss: int


class YardstickRead(Event, frozen=True):
    """How long a fixed piece of work took just before and after the repeat's steps; see `gpubench.yardstick`."""

    repeat: int
    seconds: float


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
    | PeakMeasured | GraphTraced | RepeatDone | YardstickRead | Failed | Done
)  # fmt: skip


class Job(msgspec.Struct, frozen=True):
    """The host's answer to `Hello`: everything a worker needs to know."""

    command: str
    settings: dict[str, Any]
    repeats: list[int]
    """The repeats this process runs: one for a fresh process, all of them under torchrun."""
    clock: tuple[float, float]
    """(seconds since the epoch, monotonic seconds) read together by the host."""
    host: str


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
