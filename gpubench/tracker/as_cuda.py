"""Makes a training step on CPU tensors without memory allocate as it would on CUDA.

The CPU takes other kernels than CUDA, and other kernels keep other tensors for the backward pass. Each rule puts CUDA's
choice where torch's dispatcher has the CPU's, for as long as the context lasts: there it holds for every caller, also
for operators that are called from C++ or within autograd.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gpubench.tracker import attention, autocast
from gpubench.tracker.kernels import COMPOSITE, Kernel, Met, Substitute

Capability = tuple[int, int]
_UNKNOWN: Capability = (8, 0)
"""A GPU of which nothing is known, or AMD's: it has flash attention, and cuDNN is not asked first."""

Applied = Counter[str]
"""How often each rule met something to change; rules that met nothing are not in it."""


@dataclass(frozen=True)
class Rule:
    name: str
    reason: str
    changes: Callable[[Met, Capability], Iterator[Kernel | Substitute]]
    """`Met` is to be called for each tensor that comes out otherwise."""


@contextmanager
def as_cuda(*, without: Container[str] = (), capability: Capability | None = None) -> Iterator[Applied]:
    """Within, operators on the CPU keep what they would keep on a GPU of this compute capability.

    It is meant for FakeTensors. The results of others stay right, but for rounding: where a CPU has no such kernel,
    they are computed as before. `without` names rules to leave out. It holds for the whole process.
    """
    applied: Applied = Counter()
    with ExitStack() as stack:
        # Left to itself, torch would keep the kernels until the end of the process.
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for rule in RULES:
            if rule.name not in without:
                for change in rule.changes(_counting(applied, rule.name), capability or _UNKNOWN):
                    _put(change, library, stack)
        yield applied


def _put(change: Kernel | Substitute, library: torch.library.Library, stack: ExitStack) -> None:
    if isinstance(change, Kernel):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
            library.impl(change.operator, change.function, change.key)
    else:
        stack.callback(setattr, change.module, change.name, getattr(change.module, change.name))
        setattr(change.module, change.name, change.function)


def _counting(applied: Applied, name: str) -> Met:
    return lambda: applied.update((name,))


def _autocast(met: Met, _: Capability) -> Iterator[Kernel]:
    return autocast.kernels(met)


def _dropout(met: Met, _: Capability) -> Iterator[Kernel]:
    """Where the fused kernel serves: is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp."""

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002  as in aten
        if not train or p == 0 or input.numel() == 0:
            return input
        if p == 1:
            return input.mul(torch.zeros((), dtype=input.dtype))
        met()
        out: Tensor = torch.ops.aten.native_dropout(input, p, train)[0]
        return out

    yield Kernel("dropout", COMPOSITE, dropout)


def _rms_norm(met: Met, _: Capability) -> Iterator[Kernel]:
    """The fused kernel keeps its input and one number a row; native_layer_norm keeps the same and one more."""

    def rms_norm(input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # noqa: A002
        operators = torch.ops.aten
        mixed = weight is not None and weight.dtype is not input.dtype
        if not isinstance(input, FakeTensor) or mixed:
            plain: Tensor = operators._fused_rms_norm(input, shape, weight, eps)[0]
            return plain
        met()
        out: Tensor = operators.native_layer_norm(input, shape, weight, None, 0.0)[0]
        return out

    yield Kernel("rms_norm", COMPOSITE, rms_norm)


def _softmax(met: Met, _: Capability) -> Iterator[Kernel]:
    """As in aten/src/ATen/native/SoftMax.cpp, but for names of dimensions."""

    def kernel(operator: Callable[[Tensor, int, bool], Tensor]) -> Callable[..., Tensor]:
        def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
            if isinstance(input, FakeTensor) and input.dtype is torch.float16 and dtype is torch.float32:
                met()
                return operator(input, dim, True)
            return operator(input if dtype is None else input.to(dtype), dim, False)

        return softmax

    yield Kernel("softmax.int", COMPOSITE, kernel(torch.ops.aten._softmax))
    yield Kernel("log_softmax.int", COMPOSITE, kernel(torch.ops.aten._log_softmax))


def _packing(met: Met, _: Capability) -> Iterator[Substitute]:
    if "transformers" not in sys.modules:  # nor does the model come from there
        return
    from transformers import masking_utils

    plain = masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if isinstance(position_ids, FakeTensor):
            met()
            return None
        found: Tensor | None = plain(position_ids)
        return found

    yield Substitute(masking_utils, plain.__name__, find_packed_sequence_indices)


RULES = (
    Rule(
        "autocast",
        "autocast on CUDA runs other operators in float32 than on the CPU, such as layer_norm, group_norm and softmax",
        _autocast,
    ),
    Rule("dropout", "CUDA keeps one byte an element for dropout, the CPU its noise in the input's type", _dropout),
    Rule(
        "attention",
        "CUDA's fused attention also takes dropout, and it falls back to plain attention for other inputs than the CPU",
        attention.kernels,
    ),
    Rule("rms_norm", "CUDA has a fused rms_norm, the CPU keeps what lies between its parts", _rms_norm),
    Rule(
        "softmax",
        "CUDA turns float16 into float32 within softmax and log_softmax, the CPU in a copy before",
        _softmax,
    ),
    Rule(
        "packing",
        "transformers cannot read positions without memory, and would make a mask for several sequences in a row",
        _packing,
    ),
)
"""Each reason is for people."""
