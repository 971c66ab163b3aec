"""Ranks: who is who, how they meet, and how they share a model. Everything else is PyTorch's."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from gpubench.blocks import blocks
from gpubench.errors import DeviceError
from gpubench.ranks import Ranks
from gpubench.settings import Device, DistributedSettings, Precision

UNLIMITED = timedelta(days=30)
HOST_ADDRESS = "gpubench/host"  # key in the rendezvous store

log = logging.getLogger("gpubench.worker")


def meet(ranks: Ranks, timeout: float) -> Store | None:
    """The rendezvous store at MASTER_ADDR:MASTER_PORT, before any process group; None for a rank alone."""
    if ranks.world_size == 1:
        return None
    met = rendezvous("env://", ranks.rank, ranks.world_size, timeout=timedelta(seconds=timeout))
    return cast("Store", next(iter(met))[0])


def pick_device(device: Device, ranks: Ranks) -> torch.device:
    """Raises DeviceError where this torch cannot use the device asked for."""
    if device is Device.cpu:
        return torch.device("cpu")
    refuse_without_gpu()
    if ranks.local_rank >= torch.cuda.device_count():
        raise DeviceError(
            f"rank {ranks.rank} needs GPU {ranks.local_rank}, and torch sees {torch.cuda.device_count()}",
            "lower --world-size",
        )
    chosen = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(chosen)
    return chosen


def refuse_without_gpu() -> None:
    """Raises DeviceError where this torch finds none."""
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip or "cpu"
        raise DeviceError(f"torch {torch.__version__} (build: {build}) finds no usable GPU", "use --device cpu")


def setup_ddp(settings: DistributedSettings, ranks: Ranks, store: Store | None, device: torch.device) -> None:
    """Joins the process group; does nothing for a rank alone. `cleanup_ddp` leaves it."""
    if store is None:
        return
    dist.init_process_group(
        settings.backend,
        store=PrefixStore("gpubench", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=settings.timeout),
        device_id=device if device.type == "cuda" else None,
    )


def setup_control(ranks: Ranks, store: Store | None) -> None:
    """Joins a group for words among ranks, in host memory; does nothing for a rank alone. `cleanup_ddp` leaves it.

    It has no time limit to speak of: ranks wait there for others that measure. The host watches over them.
    """
    if store is None:
        return
    dist.init_process_group(
        "gloo",
        store=PrefixStore("gpubench", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=UNLIMITED,
    )


def introduce(ranks: Ranks, device: torch.device, **work: Any) -> None:
    """Leaves a line in run.log that says who this rank is, with what is known of its `work` as further fields."""
    who = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
    }
    log.info("rank %d of %d", ranks.rank, ranks.world_size, extra={"fields": who | work})


def cleanup_ddp() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def share(
    module: nn.Module,
    settings: DistributedSettings,
    precision: Precision,
    device: torch.device,
    last_bucket_ready: Callable[[], None],
) -> nn.Module:
    """`module` wrapped so that the ranks train it together; itself where there is one rank.

    `last_bucket_ready` is called in each backward pass when no gradient is left to compute: what the pass takes from
    there on is communication that nothing hides. FSDP2 has no such moment, and never calls it.
    """
    if not dist.is_initialized():
        return module
    if settings.strategy == "fsdp2":
        return _shard(module, precision, device)
    ddp = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=settings.bucket_mb,
        gradient_as_bucket_view=True,
    )
    ddp.register_comm_hook(last_bucket_ready, _average_and_tell)
    return ddp


def _average_and_tell(last_bucket_ready: Callable[[], None], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own all-reduce mean (torch.distributed.algorithms.ddp_comm_hooks), with a call before the last bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if bucket.is_last():
        last_bucket_ready()
    return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def _shard(module: nn.Module, precision: Precision, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with _disable_current_modes():  # it reads its tensors, and they are no part of the model
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    if precision is Precision.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(module):
        fully_shard(block, **options)
    fully_shard(module, **options)
    return module


def without_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Keeps gradients local for one backward pass: all but the last of an accumulation."""
    module = getattr(module, "_orig_mod", module)  # torch.compile's wrapper is not what it wraps
    if isinstance(module, DistributedDataParallel):
        return cast("AbstractContextManager[None]", module.no_sync())
    if hasattr(module, "set_requires_gradient_sync"):
        return _sharded_without_sync(module)
    return nullcontext()


@contextmanager
def _sharded_without_sync(module: nn.Module) -> Iterator[None]:
    sharded = cast("Any", module)
    sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)


def agree(value: int, device: torch.device) -> int:
    """Rank 0's `value`, on every rank."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor(value, device=device)
    dist.broadcast(shared, 0)
    return int(shared)


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def is_broken_collective(error: BaseException) -> bool:
    """Whether `error` says that another rank went away, rather than what is wrong with this one."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "Broken pipe")
    )
