"""What traces show, as data: the content of profile.json, and what findings and reports are made from.

Times are integer nanoseconds of the profiled run: parts of a whole sum to it exactly. They tell where time went, never
how fast the program is, since recording costs time too. Sizes are bytes. Unknown is None.
"""

from typing import Literal

from msgspec import Struct

Cause = Literal[
    "data_loader", "allocator", "pageable_copy", "communication_wait", "synchronisation", "python_and_launch",
    "recording", "queued", "backlog", "unknown",
]  # fmt: skip
"""Why the device had nothing to do: what the host did meanwhile, for as long as it had not launched the next work.

`recording` is a wait that only the recording makes. From `queued` on the program's host is not known to be the cause:
`queued` is the time after the next work was launched (it stood in a queue, or the device did work that was not
recorded), and `backlog` the time before work that was launched before the trace began."""

CAUSES: tuple[Cause, ...] = Cause.__args__  # type: ignore[attr-defined]

HostPart = Literal["data_loader", "communication", "copies", "optimizer", "operators", "python"]
"""What the main thread did, of a trace without device work; `python` is all time outside the profiler's operators in
which it does not seem to wait for other threads."""

HOST_PARTS: tuple[HostPart, ...] = HostPart.__args__  # type: ignore[attr-defined]

Bound = Literal["compute", "memory", "insufficient data"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast", "other"]
CopyKind = Literal["host_to_device", "device_to_host", "device_to_device", "dtype_cast", "layout_change", "same"]


class Breakdown(Struct, frozen=True):
    """A device's wall time: compute + exposed_communication + exposed_copies + idle = wall."""

    wall: int
    compute: int
    """Kernels that are no communication, and memsets: the union of their time."""
    exposed_communication: int
    """Communication while nothing computes."""
    exposed_copies: int
    """Copies while nothing computes or communicates."""
    idle: int
    communication: int
    """All of it, hidden or not."""
    copies: int
    hidden_communication: int
    """Communication while something computes."""


class Step(Struct, frozen=True):
    """One step of a rank: from its ProfilerStep to the next one's, so that steps tile the window."""

    number: int
    start: int
    """Since the window began."""
    wall: int
    device: Breakdown | None
    idle: dict[Cause, int]
    host: dict[HostPart, int]


class Phase(Struct, frozen=True):
    """data_wait, host_to_device, forward, backward, optimizer, ... and `other`."""

    name: str
    host: int
    """Time of the main thread inside it."""
    device: int
    """Union of the work launched from it."""
    launches: int
    recompute: int
    """Forward work done again in the backward pass: of `device`, or on a CPU of `host`."""


class Module(Struct, frozen=True):
    """One nn.Module by its path; times are its own and its children's."""

    path: str
    kind: str
    """The class, where it is known."""
    calls: int
    host: int
    """Of its forward."""
    forward: int
    """Device time, or on a CPU the operators' own; so are the two below."""
    backward: int
    recompute: int
    own: int
    """forward + backward + recompute of no child."""


class Operator(Struct, frozen=True):
    """One operator with one set of input shapes. `device` is the work launched by it and not by an operator within."""

    name: str
    shapes: str
    """As "[64, 3, 224, 224] [64, 3, 7, 7]"; empty where none were recorded."""
    dtype: str
    calls: int
    host: int
    """Its own, without the operators it called."""
    device: int
    kernels: int
    flops: float | None
    """Of all calls; None where the formula needs shapes that are not there."""
    bytes: float | None
    """Least traffic: inputs read once, output written once."""
    bound: Bound
    """Which ceiling of the device its arithmetic intensity puts first."""
    of_ceiling: float | None
    """The time that ceiling allows over the time taken."""


class Attention(Struct, frozen=True, kw_only=True):
    """Attention made of separate operators, of one set of sizes: the scores of all queries with all keys go through
    memory. Times are the work of these operators; on a CPU, their own time."""

    groups: int | None
    """Batch x heads: the number of matrices of scores. None, as the sizes below, where shapes were not recorded."""
    queries: int | None
    keys: int | None
    head_size: int | None
    dtype: str
    """Of the queries; empty where it is not known."""
    calls: int
    """Softmaxes of the forward pass."""
    backward_calls: int
    products: int
    """The matrix products of queries with keys, of probabilities with values, and their gradients."""
    softmax: int
    elementwise: int
    """Between the products: scaling, mask, dropout, conversions."""
    backward: int
    """Of the three above, what belongs to the backward pass."""
    fallback: bool
    """Whether scaled_dot_product_attention was called, and fell back to its math backend."""
    obstacles: list[str]
    """What is known to keep its fused kernels from these inputs, a sentence each."""

    @property
    def total(self) -> int:
        return self.products + self.softmax + self.elementwise


class Kernel(Struct, frozen=True):
    name: str
    kind: Literal["compute", "communication", "copy", "set"]
    calls: int
    total: int
    shortest: int
    median: int
    longest: int
    operator: str
    """The one that launches it most; empty where no launch is in the trace."""


class Launches(Struct, frozen=True):
    """The road of work from the host to the device."""

    calls: int
    """Launches whose device work is in the trace."""
    host: int
    """Time in launch calls."""
    delay_median: int
    """From the end of the launch call to the start of the work, no less than 0."""
    delay_p95: int
    late: int
    """Launches after which the work began at once, as nothing was queued before it: the device waited for the host."""
    queue_mean: float
    """Work launched and not begun, over time."""
    queue_longest: int
    short: int
    """Kernels under SHORT_KERNEL."""
    short_total: int
    unlinked: int
    """Device work whose launch is not in the trace."""
    unlinked_total: int
    works: int = 0
    """Pieces of work that the calls brought: with CUDA graphs many a call. `late` and `short` are of these."""


class Copy(Struct, frozen=True):
    """Copies of one kind: `aten::copy_` and what else moves data."""

    kind: CopyKind
    pinned: bool | None
    """Whether the host's memory was page-locked; None where none is involved or it is not known."""
    calls: int
    host: int
    """Time that the calls kept the host."""
    device: int
    bytes: int | None
    phase: str
    example: str
    """Operator, shapes, types, strides of the largest one."""
    where: str | None
    """file:line of the user's code, where stacks were recorded."""


class Synchronisation(Struct, frozen=True):
    """Places where the host waited for the device."""

    operator: str
    """What asked for it, as aten::item; or the call itself."""
    call: str
    where: str | None
    calls: int
    blocked: int
    """Time the host waited."""
    idle: int
    """Time the device then had nothing to do."""
    phase: str


class Collective(Struct, frozen=True):
    name: str
    calls: int
    total: int
    exposed: int
    bytes: int | None
    kind: CollectiveKind | None = None
    """What the program asked for, else what the kernel's name says; None in profiles that do not tell."""


class Compiled(Struct, frozen=True):
    """What torch.compile left in the trace."""

    regions: int
    """Compiled graphs that were run, of one step at most."""
    graph_breaks: int
    """Regions of a step beyond the first."""
    compilations: int
    """Compilations inside the window: recompiles."""
    compiling: int
    """Host time of them."""


class Stretch(Struct, frozen=True):
    """A time in which the main thread was in no operator and waited for nothing: Python, or what it calls."""

    length: int
    """Of the longest one of its place, which is all that follows `total`."""
    count: int
    """Stretches of the place that are at least half as long."""
    total: int
    """Of these."""
    phase: str
    module: str
    """The path of the innermost module around it; empty outside of all, or where they are not recorded."""
    after: str
    """The operator, runtime call or loading of data before it; empty where there is none."""
    where: str | None
    """file:line of the user's code, where stacks were recorded."""


class Python(Struct, frozen=True):
    """Time of the main thread outside operators, and how finely operators cut it up."""

    total: int
    stretches: int
    median: int
    half: int
    """Half of `total` is in stretches at least this long: few long ones, if it is far beyond `median`."""
    longest: list[Stretch]
    """The longest of each place, at most a few."""
    operators: int
    """Operators that began in the window, on any thread; those called by others, or to load data, left out."""
    operator_median: int
    """Of their durations."""


class Box(Struct, frozen=True):
    """One box of the timeline, in nanoseconds since its step began."""

    start: int
    end: int
    name: str
    style: str
    """A Cause, a HostPart, a phase, or compute | communication | copy | set."""


class Lane(Struct, frozen=True):
    name: str
    boxes: list[Box]


class Timeline(Struct, frozen=True):
    """One step: the phases of the main thread, every stream, and why the device was idle."""

    step: int
    wall: int
    lanes: list[Lane]
    left_out: int
    """Boxes too short to be drawn."""


class Rank(Struct, frozen=True, kw_only=True):
    """One trace: one process."""

    label: str
    rank: int | None
    world_size: int | None = None
    device_name: str | None
    host_only: bool
    start: int
    """When the window began, on the trace's own clock."""
    wall: int
    """The window: from the first ProfilerStep to the end of the last; without any, from first to last device work."""
    step_numbers: list[int]
    device: Breakdown | None
    idle: dict[Cause, int]
    """Sums to device.idle."""
    host: dict[HostPart, int]
    """Sums to wall: the main thread, of a trace without device work; empty otherwise."""
    critical_path: dict[str, int]
    """Sums to wall: what the step could not have been shorter without. Of a trace without device work it is empty."""
    steps: list[Step]
    phases: list[Phase]
    modules: list[Module]
    operators: list[Operator]
    attention: list[Attention] = []
    """That which is made of separate operators, the most time first."""
    kernels: list[Kernel]
    fusible: int = 0
    """What fusing neighbours saves at the most: of each run of consecutive kernels on a stream that only move memory,
    all but the longest, which is left with their work."""
    launches: Launches | None
    copies: list[Copy]
    synchronisations: list[Synchronisation]
    collectives: list[Collective]
    compiled: Compiled | None
    python: Python | None = None
    """None without slices of the host."""
    threads: int
    """Host threads with operators."""
    unread: list[str] = []
    """Categories of events that are not read, most of them first: of a device that is not CUDA's, ROCm's or XPU's."""
    work_missing: bool = False
    """The trace launches work of a GPU and has none: it was not recorded."""
    zeroed_gradients: int
    """Calls that filled gradients with zeros instead of dropping them."""
    zeroing: int = 0
    """Time of those calls: of the work they launched, or on a CPU their own."""
    zeroing_idle: int = 0
    """Of `idle`, what waits for Python and launches while zero_grad writes zeros."""
    optimizer_kernels: int
    """Device launches, or on a CPU operators, in optimizer steps of the window."""
    optimizer_steps: int
    timeline: Timeline | None
    missing: dict[str, str]
    """What could not be told, and the option that would: {"shapes": "profiling.record_shapes"}."""
    notes: list[str]
    """What a reader must know: backlog, compiled regions, events that were dropped."""


class Straggler(Struct, frozen=True):
    rank: int
    late: int
    """Mean nanoseconds by which it reached collectives after the first rank."""
    waited_for: int
    """Collectives that it reached last, and by more than noise."""
    of: int


class KernelChange(Struct, frozen=True):
    """A kernel in two traces, per step."""

    name: str
    before: int
    after: int
    calls_before: float
    calls_after: float


class Profile(Struct, frozen=True):
    ranks: list[Rank]
    stragglers: list[Straggler]
