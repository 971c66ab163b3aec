"""torch.autocast("cpu") with the operator lists of CUDA.

The CPU's own lists differ by some 170 operators: there layer_norm and softmax run in bfloat16, on CUDA in float32, and
cross_entropy is cast as a whole, on CUDA only its second half. What a kernel keeps for the backward pass has the type
it ran in.

The policies are those of ATen/autocast_mode.h and are put where torch has its own, at the dispatch key of autocast.
There they also see what an operator written in C++ calls (cross_entropy calls log_softmax and nll_loss), which a
TorchFunctionMode does not, and autograd records the casts, as on CUDA.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpubench.tracker.autocast_lists import CUDA, FLOAT, FLOAT_NORM, FLOAT_RESULT, LOWER, WIDEST
from gpubench.tracker.kernels import Kernel, Met

_KEY = "AutocastCPU"
_Policy = Callable[[Callable[..., Any], Met], Callable[..., Any]]


def kernels(met: Met) -> Iterator[Kernel]:
    """What has to be replaced for the CPU to do as CUDA; `met` is called where a tensor gets another type by it.

    Where both have an operator in the list of the same name, the CPU's own kernel stays: it also keeps the copies of
    the weights that autocast makes until it ends. For the few in LOWER that are CUDA's alone, such as einsum, a copy
    is made at each call instead.
    """
    theirs = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(_KEY)}
    policies: list[tuple[_Policy, set[str]]] = [
        (_lower, set(LOWER) - theirs),
        (_float, set(FLOAT) - theirs),
        (_float_result, set(FLOAT_RESULT)),
        (_widest, set(WIDEST)),
    ]
    for policy, names in policies:
        for name in sorted(names):
            yield Kernel(name, _KEY, policy(_operator(name), met))
    for name, typed in FLOAT_NORM.items():
        yield Kernel(name, _KEY, _float_norm(_operator(name), _operator(typed), met))
    for name in sorted(theirs - CUDA):
        yield Kernel(name, _KEY, torch.library.fallthrough_kernel)


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _apart() -> Any:
    """Autocast is off for what is called within."""
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
            # `dims` is nothing, or (dim, keepdim), whose default the overload with a type does not have.
            return typed(first, p, *(*dims, False)[: 2 * bool(dims)], dtype=torch.float32)

    return policy
