"""A model made ready to train, with all that one step of it needs."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from gpubench import distributed
from gpubench.blocks import checkpoint_activations
from gpubench.data import to_device
from gpubench.defaults import sharded_sgd
from gpubench.errors import ModelError
from gpubench.models import Workload
from gpubench.precision import Arithmetic
from gpubench.ranks import Ranks
from gpubench.settings import TrainSettings
from gpubench.timing import EXPOSED_COMMUNICATION, StepTimer


class Batches(Protocol):
    """What a step draws from."""

    epoch: int

    def __next__(self) -> Any: ...


@dataclass(frozen=True)
class Trainer:
    """Everything that one step needs, ready to run."""

    settings: TrainSettings
    ranks: Ranks
    device: torch.device
    workload: Workload
    module: nn.Module
    """What is called: the workload's module on the device, compiled and wrapped as the settings ask."""
    optimizer: torch.optim.Optimizer
    arithmetic: Arithmetic
    timer: StepTimer[Any]
    forget_checkpoints: Callable[[], None] | None = None
    """Undoes activation checkpointing, where there is any."""

    def step(self, batches: Batches, samples: int) -> None:
        """One optimizer step over `grad_accumulation` batches; every phase border is marked, nothing waits."""
        timer, accumulation = self.timer, self.settings.training.grad_accumulation
        channels_last = bool(self.settings.performance.channels_last)
        total: Tensor | None = None
        for micro in range(accumulation):
            if micro:
                timer.enter("data_wait")
            batch = next(batches)
            timer.enter("host_to_device")
            batch = to_device(batch, self.device, non_blocking=True, channels_last=channels_last)
            timer.enter("forward")
            reduces = micro == accumulation - 1 or self.settings.distributed.sync_gradients == "each"
            with nullcontext() if reduces else distributed.without_sync(self.module):
                with self.arithmetic.forward():
                    loss = scalar(self.workload.loss(self.module, batch)) / accumulation
                timer.enter("backward")
                self.arithmetic.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
        timer.enter("optimizer")
        self.arithmetic.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        assert total is not None
        scale = self.arithmetic.scale()
        timer.issued(batches.epoch, samples, [total] if scale is None else [total, scale])
        if self.settings.training.read_loss:
            total.item()


def scalar(loss: object) -> Tensor:
    """`loss`, if it is something to train on. Raises ModelError otherwise."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    if isinstance(loss, Tensor) and loss.numel() == 1:
        found = "one that nothing with gradients went into"
    raise ModelError(f"the loss must be a scalar tensor with a gradient, and is {found}", "see loss(module, batch)")


def build_trainer(
    settings: TrainSettings,
    ranks: Ranks,
    device: torch.device,
    workload: Workload,
    arithmetic: Arithmetic,
    timer: StepTimer[Any],
) -> Trainer:
    """Moves the model to the device, wraps and compiles it, and makes its optimizer."""
    assert settings.precision
    performance = settings.performance
    which = settings.model.activation_checkpointing
    forget = checkpoint_activations(workload.module, which) if which else None
    own = workload.module if device.type == "cpu" else workload.module.to(device)
    if performance.channels_last:
        lay_out(own)
    module = distributed.share(
        own, settings.distributed, settings.precision, device, lambda: timer.enter(EXPOSED_COMMUNICATION)
    )
    if performance.compile:
        module = cast("nn.Module", torch.compile(module, mode=performance.compile_mode))
    return Trainer(
        settings=settings,
        ranks=ranks,
        device=device,
        workload=replace(workload, module=own),
        module=module,
        optimizer=make_optimizer(settings, own, device),
        arithmetic=arithmetic,
        timer=timer,
        forget_checkpoints=forget,
    )


def lay_out(module: nn.Module) -> None:
    """Puts images' weights in NHWC, in place: Module.to() cannot do so with tensors that have no memory."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def optimizer_impl(settings: TrainSettings, on_gpu: bool) -> str:
    """How the optimizer goes through the parameters: what `training.optimizer_impl` says, and the fastest for auto.

    That is fused on a GPU and PyTorch's own choice, a loop, on a CPU. SGD on parameters that FSDP2 has sharded takes
    foreach on a GPU, since PyTorch has no fused SGD for DTensors.
    """
    if settings.training.optimizer_impl != "auto":
        return settings.training.optimizer_impl
    if not on_gpu:
        return "loop"
    return "foreach" if sharded_sgd(settings) else "fused"


def make_optimizer(settings: TrainSettings, module: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of all parameters that need gradients."""
    training, chosen = settings.training, optimizer_impl(settings, device.type == "cuda")
    options: dict[str, Any] = {
        "lr": training.learning_rate,
        "weight_decay": training.weight_decay,
        "foreach": chosen == "foreach",
        "fused": chosen == "fused",
    }
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=training.momentum, **options)
    adam = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    return adam(parameters, **options)
