"""torch.autocast("cpu") with the operator lists of CUDA.

The lists of the two devices differ by some 170 operators: on a CPU layer_norm and softmax run in bfloat16, on CUDA in
float32; cross_entropy is cast as a whole on a CPU, on CUDA only its second half. What a kernel keeps for the backward
pass has the type in which it runs.

The lists and policies are those of the AT_FORALL_ macros of ATen/autocast_mode.h, which is installed with torch. They
are registered at autocast's dispatch key, where torch has its own. There they also apply to what an operator written in
C++ calls (cross_entropy calls log_softmax and nll_loss), which a TorchFunctionMode does not see, and autograd records
the casts, as on CUDA.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """A `function` that replaces an operator's kernel at a dispatch key of torch."""

    operator: str
    """The operator's name in aten with its overload, as "softmax.int"."""
    key: str
    function: Callable[..., Any]


@dataclass(frozen=True)
class Substitute:
    """A `function` that replaces the one called `name` in a Python module."""

    module: ModuleType
    name: str
    function: Callable[..., Any]


Met = Callable[[], None]
"""A callback for rules that have changed something."""

COMPOSITE = "CompositeImplicitAutograd"
"""The dispatch key of operators made of others: autograd sees only the operators that they call."""


LOWER = (
    "_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul",
    "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
    "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
"""Operators whose inputs are cast to autocast's type, bfloat16 or float16."""

FLOAT = (
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

FLOAT_RESULT = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
    "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
"""Operators whose `dtype` becomes float32 if the caller gave none."""

FLOAT_NORM = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""The same, with the overload that takes a `dtype`."""

WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add",
)  # fmt: skip
"""Operators whose inputs are cast to float32 if one of them has that type, else to autocast's type."""

REFUSED = ("binary_cross_entropy",)
"""Operators for which CUDA raises an error; the CPU computes them in float32."""


_KEY = "AutocastCPU"
_Policy = Callable[[Callable[..., Any], Met], Callable[..., Any]]


def kernels(met: Met) -> Iterator[Kernel]:
    """Yield the kernels that make the CPU act like CUDA; `met` is called when one of them changes a tensor's type.

    If both devices have an operator in the same list, the CPU's own kernel stays: it also caches the casts of weights
    until autocast ends. For the few operators in LOWER that only CUDA has, such as einsum, each call makes a copy.
    """
    theirs, cudas = registered(_KEY), registered("AutocastCUDA")
    policies: list[tuple[_Policy, set[str]]] = [
        (_lower, cudas & set(LOWER) - theirs),
        (_float, cudas & set(FLOAT) - theirs),
        (_float_result, set(FLOAT_RESULT)),
        (_widest, set(WIDEST)),
    ]
    for policy, names in policies:
        for name in sorted(names):
            yield Kernel(name, _KEY, policy(_operator(name), met))
    for name, typed in FLOAT_NORM.items():
        yield Kernel(name, _KEY, _float_norm(_operator(name), _operator(typed), met))
    for name in sorted(theirs - cudas):
        yield Kernel(name, _KEY, torch.library.fallthrough_kernel)


def registered(key: str) -> set[str]:
    """Return the aten operators for which this PyTorch, also a CPU build, has a kernel at a dispatch key."""
    return {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _apart() -> Any:
    """Return a context in which autocast is off."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype is not torch.float64
    )


def _cast(value: Any, dtype: torch.dtype, met: Met) -> Any:
    if isinstance(value, list | tuple):
        return [_cast(one, dtype, met) for one in value]
    if not _eligible(value) or value.dtype is dtype:
        return value
    met()
    return value.to(dtype)


def _call(operator: Callable[..., Any], dtype: torch.dtype, met: Met, args: Any, kwargs: dict[str, Any]) -> Any:
    with _apart():
        return operator(*_cast(args, dtype, met), **{key: _cast(value, dtype, met) for key, value in kwargs.items()})


def _lower(operator: Callable[..., Any], met: Met) -> Callable[..., Any]:
    return lambda *args, **kwargs: _call(operator, torch.get_autocast_dtype("cpu"), met, args, kwargs)


def _float(operator: Callable[..., Any], met: Met) -> Callable[..., Any]:
    return lambda *args, **kwargs: _call(operator, torch.float32, met, args, kwargs)


def _widest(operator: Callable[..., Any], met: Met) -> Callable[..., Any]:
    def policy(*args: Any, **kwargs: Any) -> Any:
        wide = any(one.dtype is torch.float32 for one in _tensors([*args, *kwargs.values()]))
        return _call(operator, torch.float32 if wide else torch.get_autocast_dtype("cpu"), met, args, kwargs)

    return policy


def _tensors(values: list[Any] | tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _tensors(value)
        elif _eligible(value):
            yield value


def _float_result(operator: Any, met: Met) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    def policy(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        first = args[0]
        if _eligible(first) and given.get("dtype") is None:
            given["dtype"] = torch.float32
            if first.dtype is not torch.float32:
                met()
        with _apart():
            return operator(**given)

    return policy


def _float_norm(operator: Callable[..., Any], typed: Callable[..., Any], met: Met) -> Callable[..., Any]:
    def policy(first: Tensor, p: Any = 2, *dims: Any) -> Any:
        with _apart():
            if not _eligible(first):
                return operator(first, p, *dims)
            if first.dtype is not torch.float32:
                met()
            # `dims` is empty, or (dim, keepdim); the typed overload has no defaults for these.
            return typed(first, p, *(*dims, False)[: 2 * bool(dims)], dtype=torch.float32)

    return policy
