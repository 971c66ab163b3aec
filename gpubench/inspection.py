"""What is looked at once, after the timed steps, because it needs no clock: FLOPs, the attainable peak, the graph."""

import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gpubench import events
from gpubench.channel import Activity
from gpubench.data import Feed, to_device
from gpubench.flops import count_flops, measure_peak
from gpubench.settings import Precision
from gpubench.trainer import Trainer
from gpubench.training import Event

METHOD = "torch.utils.flop_counter.FlopCounterMode over one real forward and backward pass"

log = logging.getLogger("gpubench.inspection")


def inspect(trainer: Trainer, feed: Feed, activity: Activity) -> Iterator[Event]:
    """Every rank takes part in the FLOP count, since a sharded model needs them all; rank 0 reports."""
    settings = trainer.settings
    batch = next(feed.epoch(0), None)
    if batch is None:  # a stream that was read to its end
        log.warning("no batch is left to count FLOPs on")
        return
    batch = to_device(batch, trainer.device, channels_last=bool(settings.performance.channels_last))
    if settings.measurement.count_flops:
        activity.doing = "counting FLOPs"
        counted = _flops(trainer, batch)
        if trainer.ranks.is_rank_zero:
            yield counted
    if not trainer.ranks.is_rank_zero:
        return
    if settings.measurement.measure_peak:
        activity.doing = "measuring the peak"
        assert settings.precision
        peak = measure_peak(trainer.device, _DTYPES[settings.precision])
        yield events.PeakMeasured(rank=0, flops_per_s=peak.flops_per_s, dtype=peak.dtype, size=peak.size)
    if settings.logging.graph and settings.distributed.strategy == "ddp":
        activity.doing = "tracing the graph"
        if graph := _graph(trainer.workload.module, batch):
            yield events.GraphTraced(rank=0, graph=graph)


_DTYPES = {
    Precision.fp32: torch.float32,
    Precision.tf32: torch.float32,
    Precision.amp: torch.float16,
    Precision.bf16: torch.bfloat16,
}


def _flops(trainer: Trainer, batch: Any) -> events.FlopsCounted:
    """Model FLOPs without recomputation, and hardware FLOPs with it, for one sample."""
    workload, samples = trainer.workload, trainer.settings.training.batch_size
    assert samples

    def step() -> None:
        with trainer.arithmetic.forward():
            loss = workload.loss(workload.module, batch)
        loss.backward()
        workload.module.zero_grad(set_to_none=True)

    try:
        performed = work = count_flops(step)
        if trainer.forget_checkpoints:
            trainer.forget_checkpoints()
            work = count_flops(step)
    except Exception as error:  # a model of the user's own may do anything; the times stand without the count
        log.warning("FLOPs could not be counted: %s", error)
        return _unknown(f"{type(error).__name__}: {error}")
    if not work.total:
        return _unknown("FlopCounterMode knows none of the model's operators")
    return events.FlopsCounted(
        rank=0,
        model_flops_per_sample=work.total / samples,
        hardware_flops_per_sample=performed.total / samples,
        method=METHOD,
        by_operator=work.by_operator,
    )


def _unknown(reason: str) -> events.FlopsCounted:
    return events.FlopsCounted(
        rank=0, model_flops_per_sample=None, hardware_flops_per_sample=None, method=METHOD, reason=reason
    )


class _Positional(nn.Module):
    """A model with its inputs by position and its output as one tensor, as the tracer wants them."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self._names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.module(**dict(zip(self._names, inputs, strict=True))) if self._names else self.module(inputs[0])
        if isinstance(out, Tensor):
            return out
        first: Tensor = out[0] if isinstance(out, tuple) else next(iter(out.values()))
        return first


_ARGUMENTS = {"input_ids": "input_ids", "clean": "sample", "timesteps": "timestep", "text": "encoder_hidden_states"}
"""What parts of a batch are called as arguments of the built-in models."""


def _graph(module: nn.Module, batch: Any) -> bytes | None:
    """The model as one sample runs it, traced for TensorBoard; None where it cannot be traced.

    One sample, and no gradients: tracing runs the model several times, in float32 whatever the precision.
    """
    from torch.utils.tensorboard._pytorch_graph import graph

    if isinstance(batch, dict):
        arguments = {_ARGUMENTS[name]: part for name, part in batch.items() if name in _ARGUMENTS}
        names, inputs = tuple(arguments), tuple(arguments.values())
    else:
        names, inputs = (), (batch[0] if isinstance(batch, tuple | list) else batch,)
    if not inputs:
        log.debug("the model graph is not traced: its inputs are not known by name")
        return None
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # tracing deprecations and data-dependent branches are no news to anybody
            definition, _ = graph(_Positional(module, names), tuple(tensor[:1] for tensor in inputs))
        serialised: bytes = definition.SerializeToString()
        return serialised
    except Exception as error:
        log.debug("the model graph cannot be traced: %s", error)
        return None
