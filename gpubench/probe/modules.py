"""The modules, parameters and buffers of a model as torch.nn.Module keeps them, whatever its class makes of them.

A program may override `parameters` or `named_modules`, with other results or exceptions of its own.
"""

from __future__ import annotations

from typing import Any, Iterator

import torch


def named_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields each module of a model once, the outer before the inner, with its path, which is "" for the model."""
    seen = {id(root)}
    waiting = [("", root)]
    while waiting:
        path, module = waiting.pop()
        yield path, module
        inner = []
        for name, part in getattr(module, "_modules", {}).items():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                inner.append((f"{path}.{name}" if path else name, part))
        waiting += reversed(inner)


def parameters_of(root: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yields each parameter of a model once."""
    seen = set()
    for _, module in named_modules(root):
        for parameter in own_parameters(module):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def first_parameter(root: torch.nn.Module) -> torch.nn.Parameter | None:
    """Returns the first of `parameters_of` in less time, which does not depend on the size of the model."""
    seen: set[int] = set()
    waiting = [iter((root,))]
    while waiting:
        for module in waiting[-1]:
            if module is not None and id(module) not in seen:
                break
        else:
            waiting.pop()
            continue
        seen.add(id(module))
        for parameter in getattr(module, "_parameters", {}).values():
            if parameter is not None:
                return parameter  # type: ignore[no-any-return]
        waiting.append(iter(getattr(module, "_modules", {}).values()))
    return None


def own_parameters(module: torch.nn.Module) -> list[Any]:
    """Returns the parameters of a module without those of the modules in it."""
    return [each for each in getattr(module, "_parameters", {}).values() if each is not None]


def own_buffers(module: torch.nn.Module) -> list[Any]:
    """Returns the buffers of a module without those of the modules in it."""
    return [each for each in getattr(module, "_buffers", {}).values() if each is not None]
