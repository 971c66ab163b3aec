"""The settings that `gpubench tune` tries: their levels, where they can matter, and what they change.

The table holds for gpubench's own models and for programs of the user, which have the same dot-keys. A setting that a
command lacks is left out. The findings of a profile come first, and add fixes that the table does not have.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gpubench import units
from gpubench.hardware import computes_in
from gpubench.settings.programs import from_outside
from gpubench.settings.roles import ROLES

Changes = Mapping[str, Any]
"""Values by dot-key."""
Numbers = Literal["same", "rounding", "type", "batch", "data"]
"""What a treatment changes: nothing that is computed, its last digits, the type it is computed in, the batch, or the
data."""

LITTLE = 0.01
"""Loading data faster can matter if the loop waits for at least this fraction of a step."""
MOST_WORKERS = 8
ON_CPU = "the model runs on a CPU"
ON_GPU = "the model runs on a GPU"
ONE_RANK = "there is one rank"
NO_IMAGES = "the samples are not images"
OPT_IN = "it changes the batch: --only or --try names it"
NOT_NAMED = "--only does not name it"
KEPT = "--keep-arithmetic"
OF_ARITHMETIC: tuple[Numbers, ...] = ("type", "batch")
"""The changes of the computed numbers that are not tried with --keep-arithmetic."""
SAVE_MEMORY = ("model.activation_checkpointing", "performance.expandable_segments")
"""The settings that are tried first if the program needs too much memory."""
OWN_NUMBERS: Mapping[str, Numbers] = {
    "distributed.backend": "rounding",
    "distributed.separate_reduce_scatter": "same",
    "distributed.strategy": "rounding",
    "distributed.sync_gradients": "rounding",
    "model.activation_checkpointing": "rounding",
    "performance.omp_wait_policy": "same",
    "training.read_loss": "same",
}
"""What settings of gpubench's own loop alone change. The others declare it with what they do to a program."""


@dataclass(frozen=True)
class Subject:
    """What is known of the program before anything is changed."""

    settings: Mapping[str, Any]
    """The settings that can be changed, by dot-key, as the program runs with them; None for an unknown value."""
    on_gpu: bool
    cores: int
    """The physical cores of the machine that this process may use."""
    ranks: int
    """The ranks on this machine."""
    sample_shape: str
    """The shape of one sample, as "3 x 224 x 224"; empty if it is unknown."""
    waits: float | None
    """The fraction of a step in which the loop waits for data; None if it is unknown."""
    is_too_large: bool = False
    """Whether it needs more memory than the settings to keep may need."""
    reduced_types: Sequence[str] | None = None
    """The types of 16 bits that the CPU computes in; None if they are unknown."""
    fixes: Sequence[Changes] = ()
    """The fixes that a profile of it proposes, the most promising one first."""

    def now(self, key: str) -> Any:
        """Returns the present value of a setting; None if it is unknown."""
        return self.settings.get(key)

    def lacks(self, precision: str) -> bool:
        """Returns whether the model runs on a CPU that is known to have no arithmetic for a value of `precision`."""
        return not self.on_gpu and computes_in(self.reduced_types, precision) is False

    @property
    def takes_images(self) -> bool:
        return self.sample_shape.count(" x ") == 2

    @property
    def cores_of_a_rank(self) -> int:
        return max(1, self.cores // max(1, self.ranks))


@dataclass(frozen=True)
class Treatment:
    """A setting to try, with its levels beside the present value."""

    name: str
    """Its dot-key, or the first of its dot-keys."""
    levels: Sequence[Changes]
    numbers: Numbers


@dataclass(frozen=True)
class Untried:
    """A setting that is not tried, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class _Row:
    """A row of the table: `levels` returns the changes to try, or the reason why none can matter."""

    name: str
    levels: Callable[[Subject], Sequence[Changes] | str]


def _precision(subject: Subject) -> Sequence[Changes] | str:
    now = subject.now("precision")
    if now not in ("fp32", "tf32", None):
        return [{"precision": "fp32"}] if subject.lacks(now) else f"it is {now} already"
    if subject.lacks("bf16"):
        return "the CPU has no arithmetic in bf16"
    is_own = "training.batch_size" in subject.settings
    values = ["tf32", "bf16"] if subject.on_gpu and is_own and now == "fp32" else ["bf16"]
    return [{"precision": value} for value in values]


def _matmul_precision(subject: Subject) -> Sequence[Changes] | str:
    if not subject.on_gpu:
        return f"{ON_CPU}, which has no TF32"
    if subject.now("precision") not in ("fp32", None):
        return "no fp32 matrix products are left"
    if "training.batch_size" in subject.settings:
        return "precision=tf32 is the same"
    return [{"performance.matmul_precision": "high"}]


def _compile(subject: Subject) -> Sequence[Changes] | str:
    modes = ["reduce-overhead", "max-autotune-no-cudagraphs"] if subject.on_gpu else []
    found = [{"performance.compile": True, "performance.compile_mode": mode} for mode in modes]
    return found if subject.now("performance.compile") else [{"performance.compile": True}, *found]


def _channels_last(subject: Subject) -> Sequence[Changes] | str:
    if not subject.takes_images:
        return NO_IMAGES
    return [{"performance.channels_last": not subject.now("performance.channels_last")}]


def _cudnn_benchmark(subject: Subject) -> Sequence[Changes] | str:
    if not subject.on_gpu:
        return ON_CPU
    return [{"performance.cudnn_benchmark": True}] if subject.takes_images else NO_IMAGES


def _sdpa(subject: Subject) -> Sequence[Changes] | str:
    if subject.now("performance.sdpa") in ("fused", None):
        return "all kernels of attention are allowed already"
    return [{"performance.sdpa": "fused"}]


def _optimizer_impl(subject: Subject) -> Sequence[Changes] | str:
    now = subject.now("training.optimizer_impl")
    if now is None:
        return "the optimizer is not one of PyTorch that has several implementations"
    if now == "fused" or (now == "auto" and subject.on_gpu):
        return "the optimizer is fused already"
    return [{"training.optimizer_impl": value} for value in (("fused",) if subject.on_gpu else ("fused", "foreach"))]


def _read_loss(subject: Subject) -> Sequence[Changes] | str:
    return [{"training.read_loss": False}] if subject.now("training.read_loss") else "the loss is not read"


def _loads_in_time(subject: Subject) -> str:
    """Returns why loading data faster cannot matter; "" if it can."""
    if subject.waits is not None and subject.waits < LITTLE:
        return f"the loop waits for data in {units.percent(subject.waits)} of a step"
    return "" if "data.workers" in subject.settings else "the program makes no DataLoader"


def _workers(subject: Subject) -> Sequence[Changes] | str:
    if reason := _loads_in_time(subject):
        return reason
    stay = {"data.persistent_workers": True} if "data.persistent_workers" in subject.settings else {}
    counts = [count for count in (1, 2, 4, MOST_WORKERS) if count <= max(2, subject.cores_of_a_rank)]
    return [{"data.workers": count, **stay} for count in counts]


def _pin_memory(subject: Subject) -> Sequence[Changes] | str:
    if not subject.on_gpu:
        return ON_CPU
    return [{"data.pin_memory": True}] if "data.pin_memory" in subject.settings else "the program makes no DataLoader"


def _prefetch(subject: Subject) -> Sequence[Changes] | str:
    if not subject.now("data.workers"):
        return "the loader has no worker processes"
    return _loads_in_time(subject) or [{"data.prefetch": 2 * (subject.now("data.prefetch") or 2)}]


def _cpu_threads(subject: Subject) -> Sequence[Changes] | str:
    if subject.on_gpu:
        return ON_GPU
    most = subject.cores_of_a_rank
    return [{"performance.cpu_threads": count} for count in sorted({1, max(1, most // 2), most})]


def _bucket(subject: Subject) -> Sequence[Changes] | str:
    if subject.ranks < 2:
        return ONE_RANK
    return [{"distributed.bucket_mb": value} for value in (5.0, 100.0)]


def _bucket_view(subject: Subject) -> Sequence[Changes] | str:
    return [{"distributed.gradient_as_bucket_view": True}] if subject.ranks > 1 else ONE_RANK


def _sync_gradients(subject: Subject) -> Sequence[Changes] | str:
    if subject.ranks < 2:
        return ONE_RANK
    if subject.now("training.grad_accumulation") == 1:
        return "no gradients are accumulated"
    return [{"distributed.sync_gradients": "last"}]


def _checkpointing(subject: Subject) -> Sequence[Changes] | str:
    if subject.is_too_large and subject.now("model.activation_checkpointing") is False:
        return [{"model.activation_checkpointing": True}]
    if not subject.now("model.activation_checkpointing"):
        return "no activations are computed again"
    return [{"model.activation_checkpointing": False}]


def _expandable_segments(subject: Subject) -> Sequence[Changes] | str:
    if not subject.on_gpu:
        return ON_CPU
    return [{"performance.expandable_segments": True}] if subject.is_too_large else "the memory is not short"


def _batch_size(subject: Subject) -> Sequence[Changes] | str:
    now = subject.now("training.batch_size")
    return [{"training.batch_size": factor * now} for factor in (2, 4)] if now else "it is the program's own"


TABLE: Sequence[_Row] = (
    _Row("precision", _precision),
    _Row("performance.compile", _compile),
    _Row("data.workers", _workers),
    _Row("performance.channels_last", _channels_last),
    _Row("performance.sdpa", _sdpa),
    _Row("training.optimizer_impl", _optimizer_impl),
    _Row("training.read_loss", _read_loss),
    _Row("performance.matmul_precision", _matmul_precision),
    _Row("performance.cudnn_benchmark", _cudnn_benchmark),
    _Row("performance.cpu_threads", _cpu_threads),
    _Row("data.pin_memory", _pin_memory),
    _Row("data.prefetch", _prefetch),
    _Row("distributed.sync_gradients", _sync_gradients),
    _Row("distributed.bucket_mb", _bucket),
    _Row("distributed.gradient_as_bucket_view", _bucket_view),
    _Row("model.activation_checkpointing", _checkpointing),
    _Row("performance.expandable_segments", _expandable_segments),
    _Row("training.batch_size", _batch_size),
)
"""The settings to try, in the order in which they usually matter."""


def numbers_of(key: str) -> Numbers:
    """Returns what a setting changes about the computed numbers; the type if nothing is declared."""
    declared = ROLES.get(key)
    if declared and declared.role == "scale":
        return "batch"
    outside = from_outside().get(key)
    return outside.numbers if outside else OWN_NUMBERS.get(key, "type")


def choose(
    subject: Subject,
    known: frozenset[str],
    *,
    only: frozenset[str] = frozenset(),
    asked: Mapping[str, Sequence[Any]] | None = None,
    keep_arithmetic: bool = False,
) -> tuple[list[Treatment], list[Untried]]:
    """Returns the treatments to try, in their order, and the settings that are not tried, with the reasons.

    `known` are the settings of the command. `only` restricts the choice to these settings, and `asked` gives the values
    of a setting to try, whatever the table says of it.
    """
    rows = [row for row in TABLE if row.name in known]
    first = [next(iter(fix)) for fix in subject.fixes]  # a fix of several settings is a level of its first one
    extra = dict.fromkeys(key for key in [*first, *(asked or {})] if key in known)
    tabled = {row.name for row in rows}
    rows += [_Row(key, lambda subject: "no value is known to help") for key in extra if key not in tabled]
    promising = list(dict.fromkeys([*(SAVE_MEMORY if subject.is_too_large else ()), *first]))
    rows.sort(key=lambda row: promising.index(row.name) if row.name in promising else len(promising))

    treatments: list[Treatment] = []
    untried: list[Untried] = []
    for row in rows:
        found = _levels(row, subject, known, asked or {}, only)
        if isinstance(found, str):
            untried.append(Untried(row.name, found))
        elif keep_arithmetic and numbers_of(row.name) in OF_ARITHMETIC:
            untried.append(Untried(row.name, KEPT))
        else:
            treatments.append(Treatment(row.name, found, numbers_of(row.name)))
    return treatments, untried


def _levels(
    row: _Row, subject: Subject, known: frozenset[str], asked: Mapping[str, Sequence[Any]], only: frozenset[str]
) -> list[Changes] | str:
    """Returns the levels of a row, or why it is not tried."""
    if row.name in asked:
        return _changed(subject, [{row.name: value} for value in asked[row.name]]) or "it has these values already"
    if only and row.name not in only:
        return NOT_NAMED
    if numbers_of(row.name) == "batch" and row.name not in only:
        return OPT_IN
    proposed = [fix for fix in subject.fixes if next(iter(fix)) == row.name]
    found = row.levels(subject)
    if isinstance(found, str) and not proposed:
        return found
    usual = [] if isinstance(found, str) else [_only(changes, known) for changes in found]
    levels = _changed(subject, [*(_only(fix, known) for fix in proposed), *usual])
    return levels or "it has the value that would be tried already"


def _only(changes: Changes, known: frozenset[str]) -> Changes:
    return {key: value for key, value in changes.items() if key in known}


def _changed(subject: Subject, levels: Sequence[Changes]) -> list[Changes]:
    """Returns the levels that differ from the present values, without duplicates."""
    found: list[Changes] = []
    for changes in levels:
        if changes not in found and any(subject.now(key) != value for key, value in changes.items()):
            found.append(changes)
    return found
