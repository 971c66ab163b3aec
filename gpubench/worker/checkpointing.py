"""Computes activations again in the backward pass instead of keeping them, in the blocks that a setting names."""

import difflib
import functools
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import nn
from torch.utils.checkpoint import checkpoint

from gpubench import units
from gpubench.errors import ModelError

SETTING = "model.activation_checkpointing"
SUGGESTIONS = 3
"""The largest number of similar names in an error message."""


def blocks(module: nn.Module) -> list[nn.Module]:
    """Finds the repeated parts of a network: transformer layers, ResNet blocks, levels of a UNet.

    FSDP2 shards block by block, and activation checkpointing recomputes block by block. Blocks are the members of the
    outermost nn.ModuleLists, and of nn.Sequentials with several members that have parameters. A block that only
    contains such a list, such as a stage of a ResNet, is replaced by the members of the list. No block contains another
    one, and modules without parameters are left out.
    """
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(_with_parameters(module)) > 1):
        return [block for member in _with_parameters(module) for block in _members(member)]
    return [block for child in module.children() for block in blocks(child)]


def _members(block: nn.Module) -> list[nn.Module]:
    children = list(block.children())
    return (len(children) == 1 and blocks(children[0])) or [block]


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if next(child.parameters(), None) is not None]


def checkpoint_activations(module: nn.Module, which: bool | int | str = True) -> Callable[[], None]:
    """Makes parts of `module` recompute their activations in the backward pass. Returns a function that undoes it.

    `which` is True for all of `blocks(module)`, k for every k-th of them (k, 2k, ...), or comma-separated patterns of
    module names such as "layers.*.mlp", in which a wildcard does not match a dot. If a matching module contains
    another one, only the outer one is checkpointed. Gradients stay bit-identical if the kernels are deterministic. The
    running statistics of batch norm are updated twice per step. Call this before the module is compiled, sharded or
    wrapped.

    Raises ModelError with the names of the existing blocks if nothing matches.
    """
    wrapped = _named(module, which) if isinstance(which, str) else _every(module, int(which))
    before = [block.__dict__.get("forward") for block in wrapped]
    for block in wrapped:
        plain = block.forward
        block.__dict__["forward"] = functools.wraps(plain)(functools.partial(checkpoint, plain, use_reentrant=False))

    def undo() -> None:
        for block, forward in zip(wrapped, before, strict=True):
            if forward is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = forward

    return undo


def _every(module: nn.Module, step: int) -> list[nn.Module]:
    known = blocks(module)
    if not known:
        raise ModelError(
            f"{SETTING}: {type(module).__name__} has no repeated blocks",
            f"put its blocks into an nn.ModuleList or nn.Sequential, name its modules, or set {SETTING}=false",
        )
    if step > len(known):
        raise ModelError(
            f"{SETTING}={step}: {type(module).__name__} has {units.counted(len(known), 'block')}, {_blocks_of(module)}",
            f"use a number up to {len(known)}, or true for all",
        )
    return known[step - 1 :: step]


def _named(module: nn.Module, patterns: str) -> list[nn.Module]:
    """The modules whose path matches one of the comma-separated patterns."""
    paths = _paths(module)
    found: dict[str, nn.Module] = {}
    for pattern in map(str.strip, patterns.split(",")):
        matching = [path for path in paths if _matches(path, pattern)]
        if not matching:
            raise _no_such(module, pattern)
        found |= {path: paths[path] for path in matching}
    return [part for path, part in found.items() if not any(path.startswith(f"{outer}.") for outer in found)]


def _paths(module: nn.Module) -> dict[str, nn.Module]:
    """The submodules by path, without torch's containers of modules, which are never called."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return {path: part for path, part in module.named_modules() if path and not isinstance(part, lists)}


def _matches(path: str, pattern: str) -> bool:
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _no_such(module: nn.Module, pattern: str) -> ModelError:
    existing = _blocks_of(module)
    near = difflib.get_close_matches(pattern, dict.fromkeys(map(_family, _paths(module))), n=SUGGESTIONS, cutoff=0)
    return ModelError(
        f"{SETTING}: {type(module).__name__} has no module {pattern}"
        + (f"; its blocks are {existing}" if existing else ""),
        f"the nearest names are {units.listed(near)}" if near else f"set {SETTING}=false",
    )


def _blocks_of(module: nn.Module) -> str:
    """The paths of the module's blocks with the number of each, such as "transformer.h.* (12)"."""
    known = set(map(id, blocks(module)))
    families = Counter(_family(path) for path, part in module.named_modules() if id(part) in known)
    return ", ".join(f"{family} ({count})" for family, count in families.items())


def _family(path: str) -> str:
    """The path with a wildcard for each number."""
    return ".".join("*" if name.isdecimal() else name for name in path.split("."))
