"""Makes a training step on CPU tensors without memory allocate as it would on CUDA.

The CPU runs other kernels than CUDA, which keep other tensors for the backward pass. Each rule replaces kernels by ones
that keep what CUDA's keep. They are registered at torch's dispatcher, where they apply to every caller, including C++
and autograd.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gpubench import releases
from gpubench.kinds.memory.worker import attention_kernels
from gpubench.kinds.memory.worker.attention_kernels import Call, Capability


@dataclass(frozen=True)
class KernelOverride:
    """A `function` that replaces an operator's kernel at a dispatch key of torch."""

    operator: str
    """The operator's name in aten with its overload, such as "softmax.int"."""
    key: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Substitute:
    """A `function` that replaces the one called `name` in a Python module."""

    module: ModuleType
    name: str
    function: Callable[..., Any]


COMPOSITE = "CompositeImplicitAutograd"
"""The dispatch key of operators made of others: autograd sees only the operators that they call."""
_UNKNOWN_GPU: Capability = (8, 0)
"""The capability assumed for unknown GPUs and AMD's: it has flash attention, and cuDNN is not tried first."""

Count = Callable[[], None]
"""A function that counts one change made by a rule."""
Applied = Counter[str]
"""The number of changes by the name of the rule that made them."""


@dataclass(frozen=True)
class Rule:
    """One difference between CPU and CUDA, and the replacements that remove it."""

    name: str
    reason: str
    """A sentence that is shown to users."""
    changes: Callable[[Count, Capability], Iterator[KernelOverride | Substitute]]
    """Yields the replacements, which call `Count` once for each tensor that they change."""


@contextmanager
def as_cuda(*, without: Container[str] = (), capability: Capability | None = None) -> Iterator[Applied]:
    """Makes CPU operators keep, within the context, what they would keep on a GPU of this compute capability.

    The rules are made for FakeTensors. The results of real tensors change by rounding at most: where the CPU lacks a
    kernel, they are computed as without the rules. `without` names rules to leave out. The context applies to the whole
    process.
    """
    applied: Applied = Counter()
    with ExitStack() as stack:
        # torch itself would keep the kernels until the end of the process.
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for rule in RULES:
            if rule.name not in without:
                count = partial(applied.update, (rule.name,))
                for change in rule.changes(count, capability or _UNKNOWN_GPU):
                    _apply(change, library, stack)
        yield applied


def _apply(change: KernelOverride | Substitute, library: torch.library.Library, stack: ExitStack) -> None:
    if isinstance(change, KernelOverride):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*verriding a previously registered kernel")
            library.impl(change.operator, change.function, change.key)
    else:
        stack.callback(setattr, change.module, change.name, getattr(change.module, change.name))
        setattr(change.module, change.name, change.function)


# The operators of torch.autocast("cuda"), from the AT_FORALL_ macros of ATen/autocast_mode.h, which is installed with
# torch. They differ from those of torch.autocast("cpu") by some 170 operators: layer_norm and softmax run in
# bfloat16 on a CPU and in float32 on CUDA; cross_entropy is cast as a whole on a CPU, and only its second half on CUDA.
# What a kernel keeps for the backward pass has the type in which it runs.

AUTOCAST_LOWER = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
"""Operators whose inputs are cast to autocast's type, bfloat16 or float16."""

AUTOCAST_FP32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "rms_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity",
    "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss",
    "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss",
    "triplet_margin_loss", "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm",
    "logsumexp", "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d",
    "upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "_upsample_bilinear2d_aa", "upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
"""Operators whose inputs are cast to float32."""

AUTOCAST_FP32_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Operators whose `dtype` becomes float32 if the caller gave none."""

AUTOCAST_FP32_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Norms whose `dtype` becomes float32, each with its overload that takes a `dtype`."""

AUTOCAST_WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
"""Operators whose inputs are cast to float32 if one of them has that type, else to autocast's type."""

_AUTOCAST = "AutocastCPU"
_Policy = Callable[[Callable[..., Any], Count], Callable[..., Any]]


def _autocast(count: Count, _: Capability) -> Iterator[KernelOverride]:
    """Yields kernels that give torch.autocast("cpu") the policies of CUDA.

    They are registered at autocast's dispatch key, where torch has its own. There they also apply to operators that
    other operators call in C++ (cross_entropy calls log_softmax and nll_loss), which a TorchFunctionMode does not see,
    and autograd records the casts, as on CUDA.

    Where both devices have an operator in the same list, the CPU's kernel stays, because it also caches the casts of
    weights until autocast ends. For operators in AUTOCAST_LOWER that only CUDA has, such as einsum, each call makes a
    copy.
    """
    cpu, cuda = registered(_AUTOCAST), registered("AutocastCUDA")
    policies: list[tuple[_Policy, set[str]]] = [
        (_lower, cuda & set(AUTOCAST_LOWER) - cpu),
        (_float, cuda & set(AUTOCAST_FP32) - cpu),
        (_float_result, set(AUTOCAST_FP32_RESULT)),
        (_widest, set(AUTOCAST_WIDEST)),
    ]
    for policy, names in policies:
        for name in sorted(names):
            yield KernelOverride(name, _AUTOCAST, policy(_operator(name), count))
    for name, typed in AUTOCAST_FP32_NORM.items():
        yield KernelOverride(name, _AUTOCAST, _float_norm(_operator(name), _operator(typed), count))
    for name in sorted(cpu - cuda):
        yield KernelOverride(name, _AUTOCAST, torch.library.fallthrough_kernel)


def registered(key: str) -> set[str]:
    """The aten operators with a kernel at a dispatch key. CPU builds have the kernels of AutocastCUDA too."""
    return {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _without_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _is_castable(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype, count: Count) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(item, dtype, count) for item in value]
    if not _is_castable(value) or value.dtype is dtype:
        return value
    count()
    return value.to(dtype)


def _call(operator: Callable[..., Any], dtype: torch.dtype, count: Count, args: Any, kwargs: dict[str, Any]) -> Any:
    with _without_autocast():
        return operator(
            *_cast(args, dtype, count), **{key: _cast(value, dtype, count) for key, value in kwargs.items()}
        )


def _lower(operator: Callable[..., Any], count: Count) -> Callable[..., Any]:
    return lambda *args, **kwargs: _call(operator, torch.get_autocast_dtype("cpu"), count, args, kwargs)


def _float(operator: Callable[..., Any], count: Count) -> Callable[..., Any]:
    return lambda *args, **kwargs: _call(operator, torch.float32, count, args, kwargs)


def _widest(operator: Callable[..., Any], count: Count) -> Callable[..., Any]:
    def policy(*args: Any, **kwargs: Any) -> Any:
        wide = any(tensor.dtype is torch.float32 for tensor in _float_tensors([*args, *kwargs.values()]))
        return _call(operator, torch.float32 if wide else torch.get_autocast_dtype("cpu"), count, args, kwargs)

    return policy


def _float_tensors(values: list[Any] | tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _float_tensors(value)
        elif _is_castable(value):
            yield value


def _float_result(operator: Any, count: Count) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    def policy(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        first = args[0]
        if _is_castable(first) and arguments.get("dtype") is None:
            arguments["dtype"] = torch.float32
            if first.dtype is not torch.float32:
                count()
        with _without_autocast():
            return operator(**arguments)

    return policy


def _float_norm(operator: Callable[..., Any], typed: Callable[..., Any], count: Count) -> Callable[..., Any]:
    def policy(first: Tensor, p: Any = 2, *dims: Any) -> Any:
        with _without_autocast():
            if not _is_castable(first):
                return operator(first, p, *dims)
            if first.dtype is not torch.float32:
                count()
            # `dims` is empty, or (dim, keepdim); the typed overload has no defaults for these.
            return typed(first, p, *(*dims, False)[: 2 * bool(dims)], dtype=torch.float32)

    return policy


def _attention(count: Count, capability: Capability) -> Iterator[KernelOverride]:
    """Yields attention with the kernel that CUDA would choose; tensors with memory are computed by plain attention."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if not isinstance(query, FakeTensor):
            return attention_kernels.plain(call)
        count()
        return attention_kernels.chosen(call, capability)

    yield KernelOverride("scaled_dot_product_attention", COMPOSITE, attention)


def _dropout(count: Count, _: Capability) -> Iterator[KernelOverride]:
    """Yields CUDA's fused dropout, for the inputs that is_fused_kernel_acceptable accepts (ATen/native/Dropout.cpp)."""

    def dropout(input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002  as in aten
        if not train or p == 0 or input.numel() == 0:
            return input
        if p == 1:
            return input.mul(torch.zeros((), dtype=input.dtype))
        count()
        out: Tensor = torch.ops.aten.native_dropout(input, p, train)[0]
        return out

    yield KernelOverride("dropout", COMPOSITE, dropout)


def _rms_norm(count: Count, _: Capability) -> Iterator[KernelOverride]:
    """Yields native_layer_norm in place of CUDA's fused rms_norm, which keeps its input and one number per row.

    native_layer_norm keeps two numbers per row. Releases without the fused kernel compute rms_norm from the same
    operators on CUDA as on a CPU.
    """
    if not releases.installed().fuses_rms_norm:
        return

    def rms_norm(input: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:  # noqa: A002
        operators = torch.ops.aten
        mixed = weight is not None and weight.dtype is not input.dtype
        if not isinstance(input, FakeTensor) or mixed:
            plain: Tensor = operators._fused_rms_norm(input, shape, weight, eps)[0]
            return plain
        count()
        out: Tensor = operators.native_layer_norm(input, shape, weight, None, 0.0)[0]
        return out

    yield KernelOverride("rms_norm", COMPOSITE, rms_norm)


def _softmax(count: Count, _: Capability) -> Iterator[KernelOverride]:
    """Yields softmax and log_softmax as in aten/src/ATen/native/SoftMax.cpp, without named dimensions."""

    def kernel(operator: Callable[[Tensor, int, bool], Tensor]) -> Callable[..., Tensor]:
        def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
            if isinstance(input, FakeTensor) and input.dtype is torch.float16 and dtype is torch.float32:
                count()
                return operator(input, dim, True)
            return operator(input if dtype is None else input.to(dtype), dim, False)

        return softmax

    yield KernelOverride("softmax.int", COMPOSITE, kernel(torch.ops.aten._softmax))
    yield KernelOverride("log_softmax.int", COMPOSITE, kernel(torch.ops.aten._log_softmax))


def _packing(count: Count, _: Capability) -> Iterator[Substitute]:
    """Yields a find_packed_sequence_indices that finds no packed sequences in positions without memory."""
    if "transformers" not in sys.modules:  # the model is not one of transformers
        return
    from transformers import masking_utils

    plain = masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if isinstance(position_ids, FakeTensor):
            count()
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
    Rule("dropout", "CUDA keeps one byte per element for dropout, the CPU its noise in the input's type", _dropout),
    Rule(
        "attention",
        "CUDA's fused attention also supports dropout, and falls back to plain attention for other inputs than the CPU",
        _attention,
    ),
    Rule("rms_norm", "CUDA has a fused rms_norm, the CPU keeps intermediate results", _rms_norm),
    Rule(
        "softmax",
        "CUDA converts float16 to float32 within softmax and log_softmax, the CPU makes a copy first",
        _softmax,
    ),
    Rule(
        "packing",
        "transformers cannot read positions that have no memory, and would make a mask for packed sequences",
        _packing,
    ),
)
"""All rules, in the order in which they are applied."""
