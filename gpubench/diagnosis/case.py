"""The input of the rules: a profile or a footprint, with the questions that several rules ask of it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from gpubench import units
from gpubench.findings import Finding, Saving, Severity, Unanswered
from gpubench.hardware import ACCELERATORS, Accelerator, computes_in, find_accelerator
from gpubench.memory.allocation_log import PLACES, Phase
from gpubench.memory.footprint import Footprint, FootprintPeak, Holder, Source
from gpubench.metrics import Metric
from gpubench.runs.levels import ChangedLevel
from gpubench.trace.profile import Cause, Copy, CopyKind, HostPart, Operator, Profile, RankProfile, StepPhase

HIGH = 0.2
"""A finding has high severity from this share of the step, or of the peak memory, on."""
MEDIUM = 0.05
"""A finding has medium severity from this share on."""

WORTH = 0.01
"""The part of the step that is worth a finding. A few repeats of a run rarely distinguish a smaller saving from
noise."""

NOTABLE = 0.05
"""The threshold for what every program has, such as an optimizer. Below it, there is more to gain elsewhere."""

CPU_WORTH = 0.1
"""The threshold for time in Python and launches. Recording slows these, so that a smaller part may come from it."""
UNCORRECTED_CPU_WORTH = 0.25
"""The same where the overhead of recording is unknown: it was 22 % of the step of a 20-layer MLP on a CPU."""

OVERLAPPING = 1.05
"""Work of more than this part of the window is said to overlap: a device's clock lets neighbours overlap a little."""

LONG_NAME = 80  # characters
OTHERS_TIME = ("communication", "data_loader", "allocator")
"""The classes of the critical path that less work of the device does not shorten."""


class Estimated(NamedTuple):
    """A finding with an estimate of its saving that orders it, but is too rough to be shown as `expected`."""

    finding: Finding
    saving: float
    """The largest saving, as a fraction of the step or of the memory's peak."""


Answers = Iterable[Finding | Estimated | Unanswered]
LEARNING = frozenset({"backward", "optimizer"})
"""Phases that only training has."""
_RECORDS_PHASES: dict[Source, str] = {
    "snapshot": 'torch.cuda.memory._record_memory_history(stacks="python")',
    "trace": 'torch.profiler.record_function("forward"), and so for each phase',
}
_RECORDS_OPERATORS: dict[Source, str] = {"snapshot": 'torch.cuda.memory._record_memory_history(stacks="all")'}


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    settings: Mapping[str, Any] | None = None
    """The settings of the run, by dot-key; None for a file from elsewhere, whose settings are unknown."""

    @property
    @abstractmethod
    def whole(self) -> int:
        """The quantity of which rules state fractions, in nanoseconds or bytes."""

    def share(self, part: int) -> float:
        return part / self.whole if self.whole > 0 else 0.0

    def setting(self, key: str) -> Any:
        """Returns a setting; None if it is unknown or the command has no such setting."""
        return None if self.settings is None else self.settings.get(key)

    @property
    def infers(self) -> bool:
        """Whether the run is known to be one of inference."""
        return self.setting("inference") is True

    def fix(self, **overrides: Any) -> dict[str, Any]:
        """Returns overrides by dot-key from keywords such as training__optimizer.

        The result is {} if one of them is not a setting of the program, or if none differs from its current value.
        """
        known = self.settings or {}
        keys = {name.replace("__", "."): value for name, value in overrides.items()}
        changing = keys.keys() <= known.keys() and any(known[key] != value for key, value in keys.items())
        return keys if changing else {}


def severity(share: float | None) -> Severity:
    """Returns the severity for a share of the step or of the peak; None if the share is unknown."""
    if share is None or share < MEDIUM:
        return "low"
    return "high" if share >= HIGH else "medium"


class ReadyData(NamedTuple):
    """How much faster a program is with data that is always ready."""

    ratio: Annotated[float, Meta(ge=0, le=1e9)]
    run: str
    """The run that has measured it."""

    @property
    def found(self) -> str:
        return (
            f"with data that is always ready the program is {units.digits(self.ratio)} times as fast, as gpubench "
            f"loader has measured in {self.run}"
        )


@dataclass(frozen=True)
class ProfileCase(Case):
    """A profile of a program, and for a run of our own what its clean repeats measured without the profiler."""

    profile: Profile
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """The metrics of the clean run: only these are quoted as times."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """The run's environment.json, by dot-key."""
    overhead: float | None = None
    """The time of a recorded step over that of a clean one, less 1; None if no clean step does the same work."""
    others: float = 0.0
    """The CPU cores that other processes of the machine kept busy in the clean run."""
    ready: ReadyData | None = None
    """What `gpubench loader` has measured of the same program with data that is always ready; None if it has not."""
    changed: ChangedLevel | None = None
    """From which step on the clean steps take another time; None if they do not, or if there are none."""

    @property
    def rank(self) -> RankProfile:
        """The lowest rank, for rules that look at one rank."""
        return self.profile.ranks[0]

    @property
    def on_cpu(self) -> bool:
        """Whether the trace has no work of a device."""
        return self.rank.device is None

    @property
    def has_operators(self) -> bool:
        """Whether operators were recorded: without them nothing is known of what the program did between its calls."""
        return self.rank.python is not None and self.rank.python.operators > 0

    @property
    def whole(self) -> int:
        """The nanoseconds of the recorded window."""
        return self.rank.wall

    @property
    def steps(self) -> int:
        """The number of recorded steps, at least 1: a trace without steps counts as one step."""
        return max(1, len(self.rank.step_numbers))

    @property
    def ranks(self) -> int:
        return int(self.setting("distributed.world_size") or self.rank.world_size or 1)

    @property
    def trains(self) -> bool:
        """Whether the program is known to train: by its settings, or by what was recorded."""
        known = any(phase.name in LEARNING and (phase.host or phase.device) for phase in self.rank.phases)
        return not self.infers and (self.settings is not None or known)

    @property
    def warms_up(self) -> bool:
        """Whether first calls are most of the idle time, so that other delays of the CPU say little of later steps."""
        return 2 * self.rank.idle.get("first_calls", 0) >= sum(self.rank.idle.values()) > 0

    @property
    def cores(self) -> int | None:
        """The cores for each rank of the run, as recorded; None for a trace from elsewhere."""
        usable = self.environment.get("cpu.usable_cores")
        return None if usable is None else max(1, usable // self.ranks)

    def cpu_computes_in(self, precision: str) -> bool | None:
        """Returns whether the CPU of the run has arithmetic for a value of `precision`; None if it is unknown."""
        return computes_in(self.environment.get("cpu.reduced_types"), precision)

    @property
    def taken(self) -> float:
        """The cores per rank that other processes kept busy, which it would have on an idle machine."""
        return self.others / self.ranks

    def taken_evidence(self) -> list[str]:
        """States how many cores other processes kept busy, if they did."""
        return [f"other processes kept {self.others:.1f} cores busy meanwhile"] if self.others else []

    @property
    def threads(self) -> int | None:
        """The threads with which each rank of a run on a CPU computes; None if unknown, or on a GPU."""
        if not self.on_cpu:
            return None
        return self.setting("performance.cpu_threads") or self.environment.get("threads.intra_op")

    @property
    def gpu(self) -> Mapping[str, Any]:
        """What the environment records about the first GPU."""
        gpus = self.environment.get("gpus")
        return gpus[0] if gpus else {}

    @property
    def compute_capability(self) -> int | None:
        """The GPU's major compute capability, as recorded in the environment."""
        capability = self.gpu.get("compute_capability")
        return int(capability.partition(".")[0]) if capability else None

    @property
    def memory_used(self) -> float | None:
        """The fraction of the GPU's memory that the clean run held at its peak, with setup and autotuning."""
        names = ("peak_memory_reserved", "setup_peak_memory_reserved")
        peaks = [self.metrics[name].estimate for name in names if name in self.metrics]
        memory = self.gpu.get("memory_bytes")
        return max(peaks) / memory if peaks and memory else None

    @property
    def on_amd(self) -> bool:
        """Whether the trace is of an AMD GPU, from its name or from kernels of AMD's matrix product library."""
        name = self.rank.device_name
        return name.startswith("AMD") if name else any(one.name.startswith("Cijk_") for one in self.rank.kernels)

    @property
    def recorded_eagerly(self) -> bool:
        """Whether the run is compiled and its recording is not: the launches of the two are not comparable."""
        return self.setting("performance.compile") is True and self.rank.compiled is None

    @property
    def cpu_worth(self) -> float:
        """The threshold, a part of the step, for rules about the main thread of a program on a CPU."""
        return UNCORRECTED_CPU_WORTH if self.overhead is None else CPU_WORTH

    def less_work(self, cost: float) -> Saving:
        """Returns the saving from giving the device less or faster work.

        On a GPU it is at most the time with such work, however many streams share it, and nothing of what the critical
        path has in `OTHERS_TIME`. Launches on that path do not limit it, since recording prolongs them.
        """
        device, path = self.rank.device, self.rank.critical_path
        if device is None:
            return at_most(cost)
        working = device.compute + device.exposed_copies
        others = sum(path.get(one, 0) for one in OTHERS_TIME)
        return at_most(min(cost, self.share(min(working, self.whole - others))))

    def spent(self, one: Operator | Copy | StepPhase) -> int:
        """Returns the nanoseconds of the device in an operator, a copy or a phase; of the main thread on a CPU."""
        return one.host if self.on_cpu else one.device

    def copies(self, kind: CopyKind) -> list[Copy]:
        return [copy for copy in self.rank.copies if copy.kind == kind]

    def idle_share(self, cause: Cause) -> float:
        """Returns the fraction of the step in which the device is idle for this cause."""
        return self.share(self.rank.idle.get(cause, 0))

    def cpu_share(self, part: HostPart) -> float:
        """Returns the fraction of the step that the main thread spends in this part; 0 for a trace with device work."""
        return self.share(self.rank.host.get(part, 0))

    def without_recording(self, part: float) -> float:
        """Returns a part of the recorded step as a fraction of a clean step, assuming that all overhead was in it.

        Without a known overhead, `part` is returned as it is.
        """
        cost = max(0.0, self.overhead or 0.0)
        return min(1.0, max(0.0, part * (1 + cost) - cost))

    def clean_share(self, metric: str) -> float | None:
        """Returns a time of the clean run as a fraction of its step; None without a clean run."""
        part, step = self.metrics.get(metric), self.metrics.get("step_time")
        if part is None or step is None or step.estimate <= 0:
            return None
        return part.estimate / step.estimate

    def phase_share(self, name: str) -> float:
        """Returns the fraction of the step in a phase, from the clean run if there is one.

        Otherwise it is the device time of the work launched from the phase, or on a CPU the time of the main thread in
        it.
        """
        clean = self.clean_share(f"phase_{name}")
        if clean is not None:
            return clean
        found: StepPhase | None = next((one for one in self.rank.phases if one.name == name), None)
        return 0.0 if found is None else self.share(self.spent(found))

    def option(self, lacking: str) -> str | None:
        """Returns the option that records what the trace lacks, as a setting of the program if it has one.

        None means that the trace lacks nothing.
        """
        needed = self.rank.missing.get(lacking)
        own = f"profiling.{needed}"
        return own if own in (self.settings or {}) else needed

    def compile_fix(self) -> dict[str, Any]:
        """Returns the next compile setting to try. CUDA graphs do not work with gradient accumulation."""
        graphs = not self.on_cpu and (self.setting("training.grad_accumulation") or 1) == 1
        if self.setting("performance.compile") is False:
            if graphs:
                return self.fix(performance__compile=True, performance__compile_mode="reduce-overhead")
            return self.fix(performance__compile=True)
        if graphs and self.setting("performance.compile_mode") == "default":
            return self.fix(performance__compile_mode="reduce-overhead")
        return {}

    def batch_fix(self, factor: int) -> dict[str, Any]:
        """Returns the fix for a larger batch; a pipeline's micro-batch is at most the number of samples."""
        if batch := self.setting("training.batch_size"):
            return self.fix(training__batch_size=factor * batch)
        micro, samples = self.setting("work.micro_batch"), self.setting("work.samples")
        if micro and samples and factor * micro <= samples:
            return self.fix(work__micro_batch=factor * micro)
        return {}

    def per_step(self) -> str:
        """Returns what a count or a time refers to: a step, or the whole trace if nothing marks steps."""
        return "a step" if self.rank.step_numbers else "in the trace"

    @property
    def worth_reason(self) -> str:
        """The threshold of most findings, with its reason."""
        least = f"at least {units.percent(WORTH)} of {self.window()}"
        return f"{least}, as a few repeats rarely distinguish less from noise"

    def who(self) -> str:
        """Returns what waits: the step, or the program if nothing marks steps."""
        return "the step" if self.rank.step_numbers else "the program"

    def in_every_step(self) -> str:
        """Returns "in every step", or "each time" where nothing marks steps."""
        return "in every step" if self.rank.step_numbers else "each time"

    def less_often(self) -> str:
        """Returns how often is enough to read values: once in many steps, or when the program needs them."""
        return "once in many steps" if self.rank.step_numbers else "only when the program needs them"

    def window(self, clean: bool = False) -> str:
        """Returns what a fraction refers to; with `clean`, the step without the overhead of recording."""
        if clean and self.overhead is not None:
            return "a step without the profiler"
        return "the step" if self.rank.step_numbers else "the trace"

    def time_per_step(self, part: int) -> str:
        """Returns a time per step with its share of the step, such as "1.2 ms a step (3.4 %)".

        Streams or threads that overlap may add up to more than the step, and the text then says so.
        """
        spent, share = units.seconds(part / self.steps / 1e9), self.share(part)
        whose = "threads" if self.on_cpu else "streams"
        said = f"{share:.1f} x {self.window()}, as {whose} overlap"
        if share < OVERLAPPING:
            said = units.percent(min(share, 1.0))
        return f"{spent} {self.per_step()} ({said})"

    def calls_per_step(self, calls: int) -> str:
        """Returns a count per step: "3 times a step", or "2 times in 6 steps" if it is less than one."""
        if calls == 0 or not self.rank.step_numbers:
            return f"{units.counted(calls, 'time')} {self.per_step()}"
        if calls < self.steps:
            return f"{units.counted(calls, 'time')} in {units.counted(self.steps, 'step')}"
        each = calls / self.steps
        return f"{units.digits(each)} time{'s' * (each != 1)} {self.per_step()}"

    def idle_starts_evidence(self) -> list[str]:
        """States in how many steps of the clean run the GPU was idle at the start, if it was in any."""
        idle_starts = self.metrics.get("starved_steps")  # the persisted name of the metric
        if idle_starts is None or idle_starts.estimate <= 0:
            return []
        return [
            f"the GPU was idle at the start of {units.percent(idle_starts.estimate)} of the steps without the profiler"
        ]

    def recording_evidence(self, left: float) -> list[str]:
        """States how much longer recording made the step, and which part, `left`, of a clean one remains.

        The list is empty if recording is not known to cost anything.
        """
        if self.overhead is None or self.overhead <= 0:
            return []
        longer = f"{units.difference(self.overhead)} longer"
        if self.overhead >= 1:
            longer = f"{1 + self.overhead:.1f} x as long"
        if left <= 0:
            return [f"recording made the step {longer}, which is more than that part of it"]
        return [f"recording made the step {longer}; without that overhead, {units.percent(left)} of it is left"]


def at_most(cost: float) -> Saving:
    """Returns a saving of at most the whole step: work of several streams may add up to more."""
    return Saving(min(1.0, cost))


def at_place(where: str | None) -> str:
    """Returns " at train.py:12", or an empty string if stacks were not recorded."""
    return f" at {where}" if where else ""


def shortened(name: str) -> str:
    """Returns a kernel's name cut to LONG_NAME characters: the rest is mostly template arguments."""
    return name if len(name) <= LONG_NAME else f"{name[:LONG_NAME]}..."


WORTH_SAVING = 16 * 2**20  # bytes: what is smaller is worth no change


@dataclass(frozen=True)
class FootprintCase(Case):
    """The footprint of a program's memory, and the settings of its run if they are known."""

    footprint: Footprint

    @property
    def peak(self) -> FootprintPeak:
        return self.footprint.peak

    @property
    def whole(self) -> int:
        """The bytes at the peak."""
        return self.peak.level.total

    @property
    def in_passes(self) -> bool:
        """Whether the peak is in a phase that needs activations."""
        return self.peak.phase in ("forward", "loss", "backward")

    @property
    def trains(self) -> bool:
        """Whether the program is known to train: by its settings, or by what was recorded."""
        known = any(phase.phase in LEARNING for phase in self.footprint.phases)
        return not self.infers and (self.settings is not None or known)

    @property
    def accelerator(self) -> Accelerator | None:
        """The device in the hardware table, found by key or name; None if it is not in there."""
        name = self.footprint.device or ""
        return next((one for one in ACCELERATORS if one.key == name), None) or find_accelerator(name)

    @property
    def at_peak(self) -> str:
        """The peak in words, such as "at the peak in the forward pass"."""
        if self.footprint.is_state:
            return "when the snapshot was taken"
        return f"at the peak {phase_name(self.peak.phase)}"

    def held(self, category: str) -> int:
        """Returns the bytes of a category at the peak."""
        return self.peak.amounts.get(category, 0)

    def holders(self, *categories: str) -> list[Holder]:
        """Returns the recorded holders of these categories at the peak, largest first."""
        return [one for one in self.footprint.holders if one.category in categories]

    def format_size(self, size: int) -> str:
        """Returns a size with its share of the peak, such as "3.07 GiB (12.7 %)"."""
        return f"{units.size(size)} ({units.percent(self.share(size))})"

    def estimated(self, finding: Finding, freed: int) -> Estimated:
        """Returns a finding whose advice frees at most `freed` bytes of the peak; a few of them are of low severity."""
        if freed < WORTH_SAVING:
            finding = msgspec.structs.replace(finding, severity="low")
        return Estimated(finding, self.share(freed))

    def sharding_fix(self) -> dict[str, Any]:
        """Returns the fix that shards parameters, gradients and optimizer state, if several ranks have all of them."""
        several = (self.setting("distributed.world_size") or 1) > 1
        return self.fix(distributed__strategy="fsdp2") if several else {}

    def unknown_phase(self, rule: str) -> Unanswered:
        """Returns the answer of a rule that needs the phase of the peak, with what records it."""
        return Unanswered(rule, "the phase of the peak", _RECORDS_PHASES.get(self.footprint.source, ""))

    def unknown_operators(self, rule: str) -> Unanswered:
        return Unanswered(
            rule, "the operators that asked for memory", _RECORDS_OPERATORS.get(self.footprint.source, "")
        )


def phase_name(phase: Phase) -> str:
    return PLACES[phase].format("") or "in an unknown phase"


def describe_holder(holder: Holder) -> str:
    """Describes a holder, such as "aten::tanh float32[16, 1024, 3072] in transformer.h.0.mlp.act: 192 MiB"."""
    words = [holder.operator, holder.shape]
    words += [f"in {holder.module}"] if holder.module else []
    words += [f"at {holder.where}"] if holder.where else []
    name = " ".join(filter(None, words))
    pieces = f" in {holder.count:,} pieces" if holder.count > 1 else ""
    return f"{name or 'unnamed'}: {units.size(holder.size)}{pieces}"


def of_peak(share: float, why: str) -> str:
    """Returns the threshold of a rule, a fraction of the peak, with the reason for it."""
    return f"at least {units.percent(share)} of the peak, as {why}"
