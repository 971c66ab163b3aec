"""The repeated parts of a network: the unit of sharding, and of recomputing activations."""

import functools
from collections.abc import Callable

from torch import nn
from torch.utils.checkpoint import checkpoint

from gpubench.errors import ModelError


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated parts of a network, outermost first met: transformer layers, ResNet blocks, levels of a UNet.

    They are the members of its nn.ModuleLists, and of its nn.Sequentials with more than one part that has parameters.
    A block that is nothing but one such container, as a ResNet's stage, gives way to the members. Blocks never
    contain one another; parts without parameters are left out. The unit of FSDP2's sharding and of checkpointing.
    """
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(_weighted(module)) > 1):
        return [block for member in _weighted(module) for block in _members(member)]
    return [block for child in module.children() for block in blocks(child)]


def _members(block: nn.Module) -> list[nn.Module]:
    children = list(block.children())
    return (len(children) == 1 and blocks(children[0])) or [block]


def _weighted(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if next(child.parameters(), None) is not None]


def checkpoint_activations(module: nn.Module) -> Callable[[], None]:
    """Makes each of `blocks(module)` recompute its activations in the backward pass; returns what undoes it.

    Gradients stay the same to the bit where kernels are deterministic. The running statistics of batch norm are
    updated twice per step. Call it before the module is compiled, sharded or wrapped.

    Raises ModelError if the module has no blocks, since nothing would be saved.
    """
    wrapped = blocks(module)
    if not wrapped:
        raise ModelError(
            f"model.activation_checkpointing: {type(module).__name__} has no repeated blocks",
            "hold its blocks in an nn.ModuleList or nn.Sequential, or set model.activation_checkpointing=false",
        )
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
