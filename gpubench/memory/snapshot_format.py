"""The format of torch.cuda memory snapshots: blocks, segments, stack frames and annotations."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from gpubench.errors import DataError
from gpubench.memory.history import Phase
from gpubench.memory.unpickling import HOW, plain


class Frame(Struct, frozen=True, gc=False):
    """One level of a stack, of Python or C++."""

    name: str = ""
    filename: str = ""
    line: int = 0


class FrameInfo(Struct, frozen=True, gc=False):
    """What one frame tells. Stacks share their frames, so that there are few of these."""

    python: bool
    mark: Phase | None = None
    node: bool = False
    """A Python frame that evaluates an autograd node written in Python."""
    place: str = ""
    """file:line of a Python frame."""
    users: bool = False
    engine: bool = False
    """A C++ frame of autograd's engine."""
    operator: str = ""
    workspace: bool = False


@dataclass(frozen=True)
class StackInfo:
    phase: Phase | None = None
    """None if no frame tells."""
    operator: str = ""
    """The operator, as "aten::mm", if C++ frames were recorded."""
    where: str = ""
    """The innermost frame of the user's code, as "gpt/model.py:54", or else the innermost Python frame."""
    workspace: bool = False
    """A workspace of cuBLAS or cuBLASLt, if C++ frames were recorded."""


_CLASS = r"(?:.*\.)?"  # newer interpreters include the class in a function's name
_MARKS: tuple[tuple[Phase, str, str], ...] = (
    ("zero_grad", r"(optim/\w+|nn/modules/module)\.py", r"zero_grad"),
    ("optimizer", r"optim/(?!lr_scheduler|swa_utils)\w+\.py", r"step|wrapper"),
    ("optimizer", r"(cuda/)?amp/grad_scaler\.py", r"step|unscale_|update"),
    ("optimizer", r"nn/utils/clip_grad\.py", r".*"),
    ("backward", r"(autograd/__init__|autograd/graph|_tensor)\.py", r"backward|grad|_engine_run_backward"),
    ("backward", r"utils/checkpoint\.py", r"backward|unpack_hook|recompute_fn"),
    ("loss", r"nn/modules/loss\.py", r".*"),
    ("model", r"nn/modules/module\.py", r"_apply|to|to_empty|cuda|_?load_(state_dict|from_state_dict)"),
    ("model", r"nn/(init\.py|modules/\w+\.py)", r"__init__|reset_parameters|\w+_"),
    ("data", r"utils/data/.*", r".*"),
    ("forward", r"nn/modules/module\.py", r"_call_impl|_wrapped_call_impl|_slow_forward"),
)
"""Functions of PyTorch, with their files, that identify a phase; the first match counts."""
_PATTERNS = [
    (phase, re.compile(rf"(?:.*/)?torch/{file}$"), re.compile(rf"{_CLASS}(?:{name})$")) for phase, file, name in _MARKS
]
_ENGINE = re.compile(r"torch::autograd::(python::Python)?Engine::|THPEngine_run_backward")
_NODE = re.compile(r"(?:.*/)?torch/autograd/function\.py$")
_WORKSPACE = re.compile(r"getCUDABlasLtWorkspace|getNewWorkspace|cublasSetWorkspace|getCurrentCUDABlasHandle")
_OPERATOR = re.compile(r"at::_ops::(?!(?:new_)?empty|resize)(?P<name>\w+?)(?:_[A-Z]\w*|_out)?::(?:call|redispatch)\b")
_LIBRARY = re.compile(
    r"(.*/)?(site-packages|dist-packages|python\d\.\d+|torch/(nn|autograd|utils|optim|cuda|amp|distributed|_\w+))/"
    r"|(.*/)?python\d+/lib/|.*torch/\w+\.py$|<",
    re.IGNORECASE,
)


LONGEST = 1000
"""Characters of a name or path that are searched."""


def frame_info(frame: Frame) -> FrameInfo:
    name, file = frame.name[:LONGEST], frame.filename[-LONGEST:].replace("\\", "/")
    if not (file.endswith(".py") or file.startswith("<")):
        operator = _OPERATOR.search(name)
        return FrameInfo(
            python=False,
            engine=_ENGINE.search(name) is not None,
            operator=f"aten::{operator['name']}" if operator else "",
            workspace=_WORKSPACE.search(name) is not None,
        )
    marks = (phase for phase, path, function in _PATTERNS if path.match(file) and function.match(name))
    return FrameInfo(
        python=True,
        mark=next(marks, None),
        node=_NODE.match(file) is not None,
        place=f"{'/'.join(file.split('/')[-2:])}:{frame.line}",
        users=_LIBRARY.match(file) is None,
    )


def stack_info(stack: Sequence[FrameInfo]) -> StackInfo:
    """Return what a stack tells; its innermost frame comes first.

    The innermost phase counts, but recomputation in the backward pass counts as backward.
    """
    python = [one for one in stack if one.python]
    users = (one.place for one in python if one.users)
    return StackInfo(
        phase=_phase(python, any(one.engine for one in stack)),
        operator=next((one.operator for one in stack if one.operator), ""),
        where=next(users, python[0].place if python else ""),
        workspace=any(one.workspace for one in stack),
    )


def _phase(python: Sequence[FrameInfo], engine: bool) -> Phase | None:
    marks = [one.mark for one in python if one.mark]
    innermost = marks[0] if marks else None
    # On autograd's own threads the outermost Python frame may be a node's.
    backward = engine or "backward" in marks or (bool(python) and python[-1].node)
    return "backward" if backward and innermost in (None, "forward", "loss") else innermost


Size = Annotated[int, Meta(ge=0, lt=2**48)]
"""The largest size in bytes: as many of them as a file can hold sum to an int64."""


class Block(Struct, gc=False):
    size: Size
    requested_size: Size | None = None
    """Missing before PyTorch 2.1."""
    state: str = "inactive"
    frames: Any = ()

    @property
    def asked(self) -> int:
        return self.size if self.requested_size is None else self.requested_size


class Segment(Struct, gc=False):
    address: int
    total_size: Size
    device: int = 0
    blocks: list[Block] = []
    frames: Any = ()


class Event(Struct, gc=False):
    action: str
    addr: int = 0
    size: Size = 0
    """Bytes requested; for segments, bytes of the segment."""
    time_us: int = 0
    device_free: Size | None = None
    """What the driver had left, if memory was short."""
    frames: Any = ()


class Annotation(Struct, gc=False):
    """The beginning or end of a torch.profiler.record_function, also of the optimizer's own."""

    name: str = ""
    stage: str = ""
    """START or END."""
    time_us: int = 0


class Snapshot(Struct):
    segments: list[Segment]
    device_traces: list[list[Event]] = []
    """The events by device number."""
    external_annotations: list[Annotation] = []


def load(path: Path) -> Snapshot:
    """Load a snapshot.

    Raises DataError for a file that is not a snapshot, is damaged, holds code, or does not fit in memory.
    """
    found = plain(path)
    if isinstance(found, list):
        raise DataError(f"{path} has no history: it is a list of segments", HOW)
    try:
        return msgspec.convert(found, Snapshot)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the second one for unpaired surrogates
        raise DataError(f"{path} is a pickle of something else, or damaged: {error}", HOW) from None


class Stacks:
    """What the stacks of one file tell, cached, because many events share the same stacks and frames."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._signs: dict[int, FrameInfo] = {}
        self._told: dict[tuple[int, ...], StackInfo] = {}

    def told(self, frames: Any) -> StackInfo:
        """Raise DataError for invalid frames. Frames must outlive this object, which identifies them by id()."""
        try:
            key = tuple(map(id, frames))
            if key not in self._told:
                self._told[key] = stack_info([self._sign(one) for one in frames])
        except (TypeError, UnicodeEncodeError, msgspec.ValidationError) as error:
            raise DataError(f"{self._path} is damaged, or no memory snapshot: a stack: {error}", HOW) from None
        return self._told[key]

    def _sign(self, frame: Any) -> FrameInfo:
        if id(frame) not in self._signs:
            self._signs[id(frame)] = frame_info(msgspec.convert(frame, Frame))
        return self._signs[id(frame)]


_NAMES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"optimizer\.step#|optim(izer)?(_?step)?$")),
    ("zero_grad", re.compile(r"optimizer\.zero_grad#|zero_grad$")),
    ("data", re.compile(r"enumerate\(dataloader\)|data(_?wait|_?load(er|ing))?$")),
    ("forward", re.compile(r"(forward|fwd)(_pass)?$")),
    ("loss", re.compile(r"loss$")),
    ("backward", re.compile(r"(backward|bwd)(_pass)?$")),
)
"""PyTorch's own annotations and usual names of users, in lower case."""


def announced(times: Sequence[int], annotations: Sequence[Annotation]) -> list[Phase | None]:
    """Return the phase of each of the ascending `times`, from the innermost annotation around it that tells a phase.

    An annotation counts as open in the microseconds in which it begins and ends.
    """
    borders = sorted(
        ((one.time_us, one.stage == "END", phase) for one in annotations if (phase := _phase_named(one.name))),
        key=lambda border: border[:2],
    )
    found: list[Phase | None] = []
    open_: list[Phase] = []
    coming = 0
    for time in times:
        while coming < len(borders) and borders[coming][:2] <= (time, False):
            _, ends, phase = borders[coming]
            coming += 1
            if not ends:
                open_.append(phase)
            elif phase in open_:
                del open_[len(open_) - 1 - open_[::-1].index(phase)]
        found.append(open_[-1] if open_ else None)
    return found


def _phase_named(name: str) -> Phase | None:
    bare = name.strip("#. ").lower()
    return next((phase for phase, pattern in _NAMES if pattern.match(bare)), None)
