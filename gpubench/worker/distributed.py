"""Connects the ranks of a run with torch.distributed: devices, rendezvous, process groups, DDP and FSDP2."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

from gpubench.errors import DeviceError
from gpubench.probe.gpus import uuid_digits
from gpubench.ranks import STORE_SOCKET, Ranks
from gpubench.settings.schema import Device, Precision
from gpubench.settings.sections import DistributedSettings
from gpubench.worker.checkpointing import blocks

UNLIMITED = timedelta(days=30)
WATCHDOG_SECONDS = 0.3  # three periods of NCCL's watchdog
HOST_ADDRESS = "gpubench/host"  # key of the host's address in the rendezvous store

log = logging.getLogger("gpubench.worker")


def open_store(ranks: Ranks, timeout: float) -> Store | None:
    """Opens the rendezvous store at MASTER_ADDR:MASTER_PORT. Returns None for a single rank.

    `timeout` is in seconds.
    """
    if ranks.world_size == 1:
        return None
    limit = timedelta(seconds=timeout)
    if bound := os.environ.get(STORE_SOCKET):
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            ranks.world_size,
            is_master=True,
            timeout=limit,
            multi_tenant=True,
            use_libuv=False,  # the libuv server accepts a bound socket only in newer releases
            master_listen_fd=int(bound),
        )
    stores = rendezvous("env://", ranks.rank, ranks.world_size, timeout=limit)
    return cast("Store", next(iter(stores))[0])


def pick_device(device: Device, ranks: Ranks, *, may_share: bool = False) -> torch.device:
    """Chooses this rank's device and makes it the current one. Raises DeviceError if torch cannot use it.

    The device is the GPU with the number of the rank on this machine, or the only one that this process sees. If there
    are fewer GPUs than ranks and ranks `may_share` them, they take turns.
    """
    if device is Device.cpu:
        return torch.device("cpu")
    refuse_without_gpu()
    visible = torch.cuda.device_count()
    index = 0 if visible == 1 else ranks.local_rank % visible if may_share else ranks.local_rank
    if index >= visible:
        raise DeviceError(
            f"rank {ranks.rank} needs GPU {index}, but torch finds only {visible}",
            "start fewer ranks, or show each rank its own GPU alone, as CUDA_VISIBLE_DEVICES and Slurm's --gpu-bind do",
        )
    chosen = torch.device("cuda", index)
    torch.cuda.set_device(chosen)
    return chosen


def refuse_without_gpu() -> None:
    """Raises DeviceError if torch finds no usable GPU."""
    if not torch.cuda.is_available():
        build = torch.version.cuda or torch.version.hip or "cpu"
        raise DeviceError(f"torch {torch.__version__} (build: {build}) finds no usable GPU", "use --device cpu")


def choose_backend(wanted: str | None, ranks: Ranks, store: Store, device: torch.device) -> str:
    """The wanted communication library, or else NCCL if each rank has a GPU of its own, and gloo if not.

    All ranks must call it. Raises DeviceError on all of them if NCCL is wanted and two ranks use the same GPU.
    """
    if wanted == "gloo" or device.type == "cpu":
        return "gloo"
    sharing = _first_sharing(ranks, store, device)
    if sharing is None:
        return "nccl"
    if wanted == "nccl":
        raise DeviceError(
            "ranks {} and {} use the same GPU, which NCCL does not support".format(*sharing),
            "use --distributed.backend=gloo, or give each rank its own LOCAL_RANK or CUDA_VISIBLE_DEVICES",
        )
    if ranks.is_rank_zero:
        log.info("ranks %s and %s use the same GPU: the ranks communicate over gloo", *sharing)
    return "gloo"


def _first_sharing(ranks: Ranks, store: Store, device: torch.device) -> tuple[str, str] | None:
    """The numbers of the first two ranks that use the same GPU; None if there are none, or uuids are unknown.

    Rank 0 compares the uuids, so that the number of messages is proportional to that of the ranks.
    """
    table = PrefixStore("gpubench/gpus", store)
    table.set(str(ranks.rank), _uuid(device) or f"unknown of rank {ranks.rank}")
    if ranks.is_rank_zero:
        owners: dict[bytes, int] = {}
        pairs = ((owners.setdefault(table.get(str(rank)), rank), rank) for rank in range(ranks.world_size))
        table.set("sharing", next((f"{first} {rank}" for first, rank in pairs if first != rank), "none"))
    first, _, second = table.get("sharing").decode().partition(" ")
    return (first, second) if second else None


def _uuid(device: torch.device) -> str | None:
    try:
        return uuid_digits(device.index)
    except Exception:  # this release of PyTorch has no uuids
        return None


def setup_ddp(
    settings: DistributedSettings,
    ranks: Ranks,
    store: Store | None,
    device: torch.device,
    timeout: float | None = None,
) -> None:
    """Joins the process group, which `cleanup_ddp` leaves; does nothing for a single rank.

    `choose_backend` chooses its backend, and says what is raised. `timeout` is the time limit of a collective in
    seconds, until `limit_collectives` changes it; by default it is that of the settings.
    """
    if store is None:
        return
    backend = choose_backend(settings.backend, ranks, store, device)
    dist.init_process_group(
        backend,
        store=PrefixStore("gpubench", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=timeout or settings.timeout),
        device_id=device if backend == "nccl" else None,
    )


def decided(settings: DistributedSettings) -> dict[str, str]:
    """The settings that `setup_ddp` has decided, by dot-key."""
    return {} if settings.backend or not dist.is_initialized() else {"distributed.backend": dist.get_backend()}


def limit_collectives(seconds: float) -> None:
    """Sets the time limit of all later collectives, in seconds; does nothing for a single rank."""
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def setup_control(ranks: Ranks, store: Store | None) -> None:
    """Joins a process group for control messages in CPU memory, which `cleanup_ddp` leaves.

    Does nothing for a single rank. The group has practically no time limit, because ranks wait in it for others that
    measure; the host detects a rank that has stopped.
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
    """Logs the machine, process and device of this rank, with `work` as further fields."""
    identity = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device),
        "threads": torch.get_num_threads(),
    }
    log.info("rank %d of %d", ranks.rank, ranks.world_size, extra={"fields": identity | work})


def cleanup_ddp() -> None:
    """Leaves the process group; does nothing for a single rank."""
    if dist.is_initialized():
        dist.destroy_process_group()


def wrap(
    module: nn.Module,
    settings: DistributedSettings,
    precision: Precision,
    device: torch.device,
    last_bucket_ready: Callable[[], None],
) -> nn.Module:
    """Wraps `module` in DDP, or shards it with FSDP2. Returns the module itself for a single rank.

    DDP calls `last_bucket_ready` in each backward pass once all gradients are computed; the rest of the pass is exposed
    communication. FSDP2 never calls it.
    """
    if not dist.is_initialized():
        return module
    if settings.strategy == "fsdp2":
        return _shard(module, settings, precision, device)
    ddp = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=settings.bucket_mb,
        gradient_as_bucket_view=True,
    )
    ddp.register_comm_hook(last_bucket_ready, _notify_and_average)
    return ddp


def _notify_and_average(last_bucket_ready: Callable[[], None], bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Averages a bucket as DDP does by default, and calls `last_bucket_ready` before the last one."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if bucket.is_last():
        last_bucket_ready()
    return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def _shard(module: nn.Module, settings: DistributedSettings, precision: Precision, device: torch.device) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with _disable_current_modes():  # the mesh reads its own tensors, which are not part of the model
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
    if precision is Precision.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks(module):
        fully_shard(block, **options)
    fully_shard(module, **options)
    if settings.separate_reduce_scatter:
        with _disable_current_modes():
            cast("Any", module).set_separate_reduce_scatter_group()
    return module


def without_sync(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which gradients are not communicated.

    It is for all but the last backward pass of a gradient accumulation.
    """
    module = getattr(module, "_orig_mod", module)  # unwraps torch.compile
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


def broadcast(value: int, device: torch.device) -> int:
    """The `value` of rank 0 on every rank. All ranks must call it."""
    if not dist.is_initialized():
        return value
    shared = torch.tensor(value, device=device)
    dist.broadcast(shared, 0)
    return int(shared)


def barrier() -> None:
    """Waits until all ranks have called it; does nothing for a single rank."""
    if dist.is_initialized():
        dist.barrier()


def release_collectives() -> None:
    """Makes NCCL free the tensors of finished collectives, such as the last gradients. All ranks must call it.

    NCCL's watchdog checks ten times a second which collectives have finished; the next collective frees their tensors.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        time.sleep(WATCHDOG_SECONDS)
        dist.barrier()


def is_broken_collective(error: BaseException) -> bool:
    """Whether `error` is that of a broken collective, most likely because another rank failed."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        sign in text
        for sign in ("Connection closed by peer", "Connection reset by peer", "gloo/transport", "Broken pipe")
    )
