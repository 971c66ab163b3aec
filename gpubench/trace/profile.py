"""The profile of a rank: everything that the analysis of its trace found. It is stored as profile.json.

Times are integer nanoseconds of the profiled run; parts add up to their whole exactly. They show where time went, not
how fast the program is, because recording costs time. Sizes are bytes. None means unknown. Fields named `host` are
times of the CPU.
"""

import re
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from gpubench.sampled import SampledCode

Cause = Literal[
    "first_calls", "data_loader", "allocator", "pageable_copy", "communication_wait", "synchronisation",
    "python_and_launch", "recording", "queued", "backlog", "unknown",
]  # fmt: skip
"""Causes of idle time: what the CPU did while it had not launched the next work.

`first_calls` is what a program does only once, such as loading code; see trace/first_calls.py.
`recording` is a wait that only the recording makes. From `queued` on, the CPU is not known to be the cause: `queued`
is time after the next work was launched (it was in a queue, or the device did work that was not recorded), and
`backlog` is time before work that was launched before the trace began."""

STANDARD_INPUT_LABEL = "standard input"
"""The name of a trace that was read from standard input."""

CAUSES: tuple[Cause, ...] = Cause.__args__  # type: ignore[attr-defined]

HostPart = Literal["data_loader", "communication", "copies", "optimizer", "operators", "python"]
"""What the main thread did, in a trace without device work. `python` is all time outside the profiler's operators in
which the thread does not seem to wait for other threads."""

HOST_PARTS: tuple[HostPart, ...] = HostPart.__args__  # type: ignore[attr-defined]

Bound = Literal["compute", "memory", "insufficient data"]
CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast", "other"]
CopyKind = Literal[
    "host_to_device", "device_to_host", "peer_to_peer", "host_to_host", "device_to_device", "dtype_cast",
    "layout_change", "same",
]  # fmt: skip


class WallBreakdown(Struct, frozen=True):
    """A device's wall time: compute + exposed_communication + exposed_copies + idle = wall."""

    wall: int
    compute: int
    """The union of the time of memsets and of kernels other than communication."""
    exposed_communication: int
    """Communication while nothing computes."""
    exposed_copies: int
    """Copies while nothing computes or communicates."""
    idle: int
    communication: int
    """All communication, hidden or not."""
    copies: int
    hidden_communication: int
    """Communication while something computes."""


class ProfiledStep(Struct, frozen=True):
    """One step of a rank, from its ProfilerStep to the next one, so that steps tile the window."""

    number: int
    start: int
    """The start in nanoseconds since the window began."""
    wall: int
    device: WallBreakdown | None
    idle: dict[Cause, int]
    host: dict[HostPart, int]


class StepPhase(Struct, frozen=True):
    """One phase of a step, such as data_wait, host_to_device, forward, backward, optimizer or other."""

    name: str
    host: int
    """The time of the main thread in the phase."""
    device: int
    """The union of the times of the work launched from the phase."""
    launches: int
    recompute: int
    """The time of forward work recomputed in the backward pass: a part of `device`, or on a CPU of `host`."""


class UnusedGradients(Struct, frozen=True):
    """Calls of outermost modules that record gradients, beside others of which a backward pass uses the gradients."""

    calls: int
    total: int
    """The device time of these calls, or on a CPU their CPU time."""
    modules: list[str]
    """The classes of the modules."""
    where: str | None
    """file:line of the user's code that makes the first of these calls, if stacks were recorded."""


class Module(Struct, frozen=True):
    """One nn.Module by its path; times include its children."""

    path: str
    kind: str
    """The name of the class, if known."""
    calls: int
    host: int
    """The CPU time of the calls of its forward."""
    forward: int
    """The device time of the forward pass, or on a CPU the operators' own time; so in the next two fields."""
    backward: int
    recompute: int
    own: int
    """The sum of forward, backward and recompute without the module's children."""


class Operator(Struct, frozen=True):
    """One operator with one set of input shapes. `device` is the work launched by it and not by an operator within."""

    name: str
    shapes: str
    """The shapes, such as "[64, 3, 224, 224] [64, 3, 7, 7]"; empty if they were not recorded."""
    dtype: str
    calls: int
    host: int
    """The operator's own CPU time, without the operators that it called."""
    device: int
    kernels: int
    flops: float | None
    """The FLOPs of all calls; None if the formula needs shapes that were not recorded."""
    bytes: float | None
    """The least traffic: inputs read once, output written once."""
    bound: Bound
    """The ceiling of the device that its arithmetic intensity selects."""
    of_ceiling: float | None
    """The time that this ceiling allows, divided by the time taken."""


LONG_SHAPES = 80
"""The number of characters from which on a list of shapes is cut."""


def short_shapes(shapes: str) -> str:
    """The shapes of an operator, of which an optimizer's may have hundreds, cut after the first ones."""
    if len(shapes) <= LONG_SHAPES:
        return shapes
    end = max(shapes.rfind("]", 0, LONG_SHAPES), shapes.find("]")) + 1
    cut, innermost = shapes[: end or LONG_SHAPES], re.compile(r"\[[^\[\]]*\]")
    left = len(innermost.findall(shapes)) - len(innermost.findall(cut))
    return f"{cut} and {left} more" if left else shapes


class Attention(Struct, frozen=True, kw_only=True):
    """Attention in separate operators, of one set of sizes, whose scores go through memory.

    Times are of the work of these operators; on a CPU their own time.
    """

    groups: int | None
    """The number of score matrices, batch x heads. This and the sizes below are None if shapes were not recorded."""
    queries: int | None
    keys: int | None
    head_size: int | None
    dtype: str
    """The type of the queries; empty if unknown."""
    calls: int
    """The number of softmaxes in the forward pass."""
    backward_calls: int
    products: int
    """The time of the products of queries with keys and of probabilities with values, and of their gradients."""
    softmax: int
    elementwise: int
    """The time of the work between the products: scaling, mask, dropout, conversions."""
    backward: int
    """The part of the three times above that is in the backward pass."""
    fallback: bool
    """Whether scaled_dot_product_attention was called and fell back to its math backend."""
    obstacles: list[str]
    """The known reasons why its fused kernels do not take these inputs, one sentence each."""
    where: str | None = None
    """file:line of the user's code that calls the softmax, if stacks were recorded."""
    module: str = ""
    """The path of the module around the softmax that was called first; empty if modules are not recorded."""

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
    """The operator that launches it most; empty if no launch is in the trace."""


ON_HOST = "all times below are of the CPU"
"""The end of the note on a trace without work of a device."""
SHORT_KERNEL = 10_000
"""Nanoseconds: about the cost of a launch on the CPU; a run of shorter kernels cannot keep the device busy."""


class Launches(Struct, frozen=True):
    """Launches of device work by the CPU, and the queue between the two."""

    calls: int
    """The number of launches whose device work is in the trace."""
    host: int
    """The time in launch calls."""
    delay_median: int
    """The median time from the end of the launch call to the start of the work, at least 0."""
    delay_p95: int
    late: int
    """The number of works that began at once because the queue was empty: the device had waited for the CPU."""
    queue_mean: float
    """The mean number of works that are launched and have not begun."""
    queue_longest: int
    short: int
    """The number of works shorter than SHORT_KERNEL."""
    short_total: int
    unlinked: int
    """The number of works whose launch is not in the trace."""
    unlinked_total: int
    works: int = 0
    """The number of kernels and copies that the calls launched; a CUDA graph launches many per call. `late` and
    `short` count these."""


class Copy(Struct, frozen=True):
    """Copies of one kind, by `aten::copy_` or anything else that moves data."""

    kind: CopyKind
    pinned: bool | None
    """Whether the CPU memory was page-locked; None if no CPU memory is involved or it is unknown."""
    calls: int
    host: int
    """The time for which the calls blocked the CPU."""
    device: int
    bytes: int | None
    phase: str
    example: str
    """The operator, shapes, types and strides of the largest copy."""
    where: str | None
    """file:line of the user's code, if stacks were recorded."""


class Synchronisation(Struct, frozen=True):
    """The waits of the CPU for the device in one place."""

    operator: str
    """The operator that asked for the wait, such as aten::item, or the call itself."""
    call: str
    where: str | None
    calls: int
    blocked: int
    """The time for which the CPU waited."""
    idle: int
    """The time for which the device was idle because of the wait."""
    phase: str


class AnomalyChecks(Struct, frozen=True):
    """The checks for NaN that torch.autograd.detect_anomaly makes in a backward pass."""

    calls: int
    host: int
    """The CPU time of the checks, which on a GPU contains the waits for it."""


class Collective(Struct, frozen=True):
    name: str
    calls: int
    total: int
    exposed: int
    bytes: int | None
    kind: CollectiveKind | None = None
    """The kind that the program requested, or else that of the kernel's name; None in profiles without this field."""
    median: int = 0
    longest: int = 0
    place: int = 0
    """The number of the longest one among all collectives of the window, from 1; 0 in profiles without this field."""
    after: str = ""
    """The kernel that computed last before the longest one; an empty string if none did."""


class Compiled(Struct, frozen=True):
    """What a trace shows of torch.compile."""

    regions: int
    """The largest number of compiled graphs run in one step."""
    graph_breaks: int
    """The number of regions of a step beyond the first."""
    compilations: int
    """The number of compilations in the window, all of which are recompilations."""
    compiling: int
    """The CPU time of the compilations."""


class PythonStretch(Struct, frozen=True):
    """A time in which the main thread was in no operator and did not wait: in Python, or in what Python calls."""

    length: int
    """The length of the longest stretch of its place; the fields after `total` describe it."""
    count: int
    """The number of stretches of the place that are at least half as long."""
    total: int
    """The total time of these stretches."""
    phase: str
    module: str
    """The path of the innermost module around it; empty outside all modules, or if modules are not recorded."""
    after: str
    """The operator, runtime call or loading of data before it; empty if there is none."""
    where: str | None
    """file:line of the user's code, if stacks were recorded."""


FirstKind = Literal["load", "initialise", "operator", "autotune", "capture", "compile"]


class FirstCall(Struct, frozen=True):
    """Calls of the CPU that a program makes only in its first steps."""

    kind: FirstKind
    what: str
    """The name of the call, and of the kernel whose code it loads."""
    calls: int
    host: int
    """The time of the CPU in them."""


class Held(Struct, frozen=True):
    """What the CPU was in during long waits of the device for the next launch."""

    name: str
    """The operator, or the call of the runtime; empty for the rest of these waits."""
    calls: int
    idle: int
    """The time of the waits within these calls."""


class Python(Struct, frozen=True):
    """The time of the main thread outside operators, and its division into stretches by the operators."""

    total: int
    stretches: int
    median: int
    half: int
    """The length above which stretches make up half of `total`. If it is far above `median`, few stretches are long."""
    longest: list[PythonStretch]
    """The longest stretch of each place, at most a few."""
    operators: int
    """The number of operators that began in the window, on any thread, without nested ones and those that load data."""
    operator_median: int
    """The median duration of these operators."""


class Box(Struct, frozen=True):
    """One box of the timeline, in nanoseconds since its step began."""

    start: int
    end: int
    name: str
    style: str
    """The style of the box: a Cause, a HostPart, a phase, or compute | communication | copy | set."""


class Lane(Struct, frozen=True):
    name: str
    boxes: list[Box]


class Reservations(Struct, frozen=True):
    """The calls by which PyTorch's allocators get memory from the driver, and give it back."""

    calls: dict[str, int]
    """The number of calls by name, such as cudaMalloc, those with most time first."""
    host: int
    """The time that all of them take."""
    page_locked: int
    """The part of `host` in calls for page-locked CPU memory."""
    given: int
    """The number of calls that get memory."""
    freed: int
    """The number of calls that give it back."""
    tensors: int
    """The number of tensors for which operators asked for memory."""
    maps: bool
    """Whether there are calls of expandable segments."""
    by_step: list[int]
    """The number of calls in each step."""


class StepTimeline(Struct, frozen=True):
    """One step: the phases of the main thread, every stream, and why the device was idle."""

    step: int
    wall: int
    lanes: list[Lane]
    left_out: int
    """The number of boxes that are too short to draw."""


class RankProfile(Struct, frozen=True, kw_only=True):
    """The profile of one trace: one process."""

    label: str
    rank: int | None
    world_size: int | None = None
    device_name: str | None
    host_only: bool
    start: int
    """The start of the window on the trace's own clock."""
    wall: int
    """The length of the window: from the first ProfilerStep to the end of the last one, or else all device work."""
    step_numbers: list[int]
    device: WallBreakdown | None
    idle: dict[Cause, int]
    """The idle time by cause, which adds up to device.idle."""
    host: dict[HostPart, int]
    """The main thread's time by part, which adds up to wall, in a trace without device work; empty otherwise."""
    critical_path: dict[str, int]
    """The time on the critical path by class, which adds up to wall; empty in a trace without device work."""
    steps: list[ProfiledStep]
    phases: list[StepPhase]
    modules: list[Module]
    unused_gradients: UnusedGradients | None = None
    """The calls of outermost modules in vain for a backward pass; None without any."""
    operators: list[Operator]
    attention: list[Attention] = []
    """The attention in separate operators, most time first."""
    kernels: list[Kernel]
    fusible: int = 0
    """An upper limit for what fusing neighbours saves: of each run of consecutive memory-moving kernels on a stream,
    all but the longest kernel."""
    launches: Launches | None
    copies: list[Copy]
    synchronisations: list[Synchronisation]
    collectives: list[Collective]
    reservations: Reservations | None = None
    """None if the driver was not called for memory."""
    compiled: Compiled | None
    first_calls: list[FirstCall] = []
    """What the window has of calls that a program makes only in its first steps, most time first."""
    held: list[Held] = []
    """The long waits that count as python_and_launch, by what the CPU was in, most time first."""
    python: Python | None = None
    """The time outside operators; None without slices of the CPU."""
    anomaly: AnomalyChecks | None = None
    """None if anomaly detection is off."""
    loads_in_workers: bool | None = None
    """Whether most waits for batches are for worker processes of a DataLoader; None if the trace does not say it."""
    code: SampledCode | None = None
    """The samples of the program's own code; None if it was not sampled, as for a trace from elsewhere."""
    threads: int
    """The number of CPU threads with operators."""
    unread: list[str] = []
    """The unread categories, such as those of devices other than CUDA's, ROCm's and XPU's; most events first."""
    work_missing: bool = False
    """Whether the trace launches work of a GPU and has none, because it was not recorded."""
    zeroed_gradients: int
    """The number of calls that filled gradients with zeros instead of dropping them."""
    zeroing: int = 0
    """The time of those calls: of the work that they launched, or on a CPU their own."""
    zeroing_idle: int = 0
    """The part of `idle` that waits for Python and launches while zero_grad writes zeros."""
    optimizer_kernels: int
    """The number of launches, or on a CPU of operators, in the window's optimizer steps."""
    optimizer_steps: int
    timeline: StepTimeline | None
    missing: dict[str, str]
    """The facts that the trace lacks, and the options that record them: {"shapes": "profiling.record_shapes"}."""
    notes: list[str]
    """Notes for the reader, for example on backlog, compiled regions and dropped events."""


class Straggler(Struct, frozen=True):
    rank: int
    late: int
    """The mean time in nanoseconds by which it reached collectives after the first rank."""
    waited_for: int
    """The number of collectives that it reached last by more than noise."""
    of: int
    waits: int | None = None
    """The number of its collectives in which any rank waited."""
    among: int | None = None
    """The smallest number of ranks with which it was compared, itself included."""
    whole: bool = True
    """Whether traces of all ranks of its process groups were given; if not, ranks that were not may come later."""


class KernelChange(Struct, frozen=True):
    """A kernel in two traces, per step."""

    name: str
    before: int
    after: int
    calls_before: float
    calls_after: float


class Profile(Struct, frozen=True):
    ranks: list[RankProfile]
    stragglers: list[Straggler]


def shares(profile: Profile) -> dict[str, float]:
    """The breakdown of the lowest rank by tag, as fractions of its wall time; the step time is in seconds.

    Tags are "profile/device/compute", "profile/idle/data_loader", "profile/host/python" and so on.
    """
    rank = profile.ranks[0]
    if not rank.wall:
        return {}
    parts: dict[str, int] = {f"host/{part}": time for part, time in rank.host.items()}
    if rank.device:
        device = msgspec.structs.asdict(rank.device)
        parts |= {f"device/{name}": time for name, time in device.items() if name != "wall"}
        parts |= {f"idle/{cause}": time for cause, time in rank.idle.items()}
    found = {f"profile/{tag}": time / rank.wall for tag, time in parts.items()}
    return found | ({"profile/step_time": rank.wall / 1e9 / len(rank.steps)} if rank.steps else {})


_NUMBER = re.compile(r"(^|(?<=_))\d+$")
"""The last number of a part of a path, if it is the whole part or follows an underscore."""


def folded(found: Sequence[Module]) -> list[tuple[Module, int]]:
    """Combines equal layers, those of one class whose paths differ only in numbers, and returns each with its count.

    The sum of "layers.0.attn" to "layers.23.attn" has the path "layers.*.attn"; a single module keeps its own path.
    """
    groups: dict[tuple[str, ...], list[Module]] = {}
    for module in found:
        groups.setdefault((module.kind, *without_numbers(module.kind, module.path)), []).append(module)
    return [(_sum(group), len(group)) for group in groups.values()]


def without_numbers(kind: str, path: str) -> list[str]:
    """The parts of the path of a module of class `kind`, which are the same for equal layers.

    A star replaces numbers of a qualified path, and the numbers by which the profiler distinguishes modules of a class.
    """
    counted = path.rpartition("/")[2].rpartition("_")[0] == kind
    parts = path.split("/" if counted else ".")
    return [_NUMBER.sub("*", part) if counted or part.isdecimal() else part for part in parts]


def common_path(paths: Sequence[str]) -> str:
    """The common path of equal layers, with a star for each number in which they differ."""
    separator = "/" if "/" in paths[0] else "."
    parts = [path.split(separator) for path in paths]
    if len({len(one) for one in parts}) > 1:
        return paths[0]
    return separator.join(
        same[0] if len(set(same)) == 1 else _NUMBER.sub("*", same[0]) for same in zip(*parts, strict=True)
    )


def _sum(group: Sequence[Module]) -> Module:
    return Module(
        path=common_path([module.path for module in group]),
        kind=group[0].kind,
        calls=sum(module.calls for module in group),
        host=sum(module.host for module in group),
        forward=sum(module.forward for module in group),
        backward=sum(module.backward for module in group),
        recompute=sum(module.recompute for module in group),
        own=sum(module.own for module in group),
    )


def kernel_changes(before: RankProfile, after: RankProfile) -> list[KernelChange]:
    """The changes per step, largest change first.

    Kernels are identified by name; a name in only one trace counts 0 in the other. A trace without steps counts as one
    step.
    """
    steps_before, steps_after = (max(len(rank.step_numbers), 1) for rank in (before, after))
    old, new = _by_name(before.kernels), _by_name(after.kernels)
    none = (0, 0)
    changes = [
        KernelChange(
            name=name,
            before=round(old.get(name, none)[0] / steps_before),
            after=round(new.get(name, none)[0] / steps_after),
            calls_before=old.get(name, none)[1] / steps_before,
            calls_after=new.get(name, none)[1] / steps_after,
        )
        for name in old | new
    ]
    return sorted(changes, key=lambda change: (-abs(change.after - change.before), change.name))


def _by_name(kernels: list[Kernel]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for kernel in kernels:
        total, calls = found.get(kernel.name, (0, 0))
        found[kernel.name] = (total + kernel.total, calls + kernel.calls)
    return found
