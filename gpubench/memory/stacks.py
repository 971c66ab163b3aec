"""What the stack of an allocation or a release tells: which part of training it is of, and where it was asked for."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from gpubench.memory.history import Phase


class Frame(Struct, frozen=True, gc=False):
    """One level of a stack, of Python or of C++."""

    name: str = ""
    filename: str = ""
    line: int = 0


class Sign(Struct, frozen=True, gc=False):
    """What one frame tells. Stacks share their frames, and there are far fewer of these."""

    python: bool
    mark: Phase | None = None
    node: bool = False
    """Of Python: it evaluates an autograd node that is written in Python."""
    place: str = ""
    """Of Python: file:line."""
    users: bool = False
    engine: bool = False
    """Of C++: autograd's engine."""
    operator: str = ""
    workspace: bool = False


@dataclass(frozen=True)
class Told:
    phase: Phase | None = None
    """None where no frame tells."""
    operator: str = ""
    """As "aten::mm": where C++ was recorded."""
    where: str = ""
    """As "gpt/model.py:54": the innermost frame that is the user's, of Python's if none is."""
    workspace: bool = False
    """It is cuBLAS's or cuBLASLt's: where C++ was recorded."""


_CLASS = r"(?:.*\.)?"  # newer interpreters name functions with their class
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
"""Functions of PyTorch that a phase is known by, with their files: of those that match the first counts."""
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
"""Characters of a name or a path that are looked at."""


def sign(frame: Frame) -> Sign:
    name, file = frame.name[:LONGEST], frame.filename[-LONGEST:].replace("\\", "/")
    if not (file.endswith(".py") or file.startswith("<")):
        operator = _OPERATOR.search(name)
        return Sign(
            python=False,
            engine=_ENGINE.search(name) is not None,
            operator=f"aten::{operator['name']}" if operator else "",
            workspace=_WORKSPACE.search(name) is not None,
        )
    marks = (phase for phase, path, function in _PATTERNS if path.match(file) and function.match(name))
    return Sign(
        python=True,
        mark=next(marks, None),
        node=_NODE.match(file) is not None,
        place=f"{'/'.join(file.split('/')[-2:])}:{frame.line}",
        users=_LIBRARY.match(file) is None,
    )


def told(stack: Sequence[Sign]) -> Told:
    """What a stack says, the innermost frame of which stands first.

    Of several phases it is the innermost one's, but what the backward pass does again of the forward pass is its own.
    """
    python = [one for one in stack if one.python]
    users = (one.place for one in python if one.users)
    return Told(
        phase=_phase(python, any(one.engine for one in stack)),
        operator=next((one.operator for one in stack if one.operator), ""),
        where=next(users, python[0].place if python else ""),
        workspace=any(one.workspace for one in stack),
    )


def _phase(python: Sequence[Sign], engine: bool) -> Phase | None:
    marks = [one.mark for one in python if one.mark]
    innermost = marks[0] if marks else None
    # On a thread of autograd's own the outermost frame of Python may be that of a node.
    backward = engine or "backward" in marks or (bool(python) and python[-1].node)
    return "backward" if backward and innermost in (None, "forward", "loss") else innermost
