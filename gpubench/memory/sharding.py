"""DDP and FSDP2 on one rank: collectives of the other ranks are simulated, and this rank's memory is real."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from gpubench.settings.schema import DistributedSettings


def assumptions(settings: DistributedSettings) -> list[str]:
    """Return sentences on what a prediction for GPUs leaves out of a rank's memory.

    The size of NCCL's buffers depends on links, channels and algorithms. Reported were 544 MB for a group of two A100
    and 688 MB for a larger one (NCCL issue 964), and 1.6 GB for one communicator (NCCL issue 864).
    """
    found = [
        f"this is rank 0 of {settings.world_size}, and the others take as much; NCCL's own buffers are not included, "
        "and can take some hundred MB of each GPU or more"
    ]
    if settings.strategy == "fsdp2":
        found.append(
            "FSDP2 gathers and reduces on streams of its own, for which the allocator has separate pools: more may be "
            "reserved than predicted"
        )
    return found


@contextmanager
def pretended(world_size: int) -> Iterator[None]:
    """Make this process rank 0 of `world_size`; collectives return at once and move nothing.

    This is for FakeTensors: DDP and FSDP2 run unchanged, except where DDP reads a tensor's values. An existing process
    group is left alone and restored afterwards.
    """
    with ExitStack() as stack:
        stack.enter_context(_alone_in_a_group(world_size))
        stack.enter_context(trials_unseen())
        for place, name, function in (
            (distributed, "_verify_param_shape_across_processes", lambda *_: None),
            (default_hooks, "allreduce_hook", _averaged),
            (DistributedDataParallel, "_pre_forward", _rebuilding(DistributedDataParallel._pre_forward)),
        ):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, function)
        yield


@contextmanager
def _alone_in_a_group(world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if find_spec("torch.distributed._meta_registrations") is None:  # before PyTorch 2.11
        import_module("torch.distributed._tools.fake_collectives")  # lets collectives take tensors without memory
    outer, hook = distributed_c10d._world.default_pg, sys.excepthook
    distributed_c10d._update_default_pg(None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    own = dist.group.WORLD
    try:
        yield
    finally:
        if outer is not None:
            distributed_c10d._update_default_pg(outer)  # before the destruction, which would include all groups
        dist.destroy_process_group(own)
        sys.excepthook = hook  # the group's hook adds a rank to every line


def _averaged(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average as DDP's all-reduce does, in place; the fake group's own one has no result to continue with."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _rebuilding(plain: Callable[..., Any]) -> Callable[..., Any]:
    def pre_forward(ddp: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            with _Readable():  # type: ignore[no-untyped-call]
                ddp.reducer._rebuild_buckets()
        return plain(ddp, *inputs, **kwargs)

    return pre_forward


class _Readable(TorchDispatchMode):
    """Give memory to the int32 tensors in which DDP exchanges its assignment of buckets, as it reads them back.

    Source: sync_bucket_indices in torch/csrc/distributed/c10d/reducer.cpp.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, Tensor)]
        fake = any(isinstance(one, FakeTensor) for one in tensors) or kwargs.get("dtype", torch.int32) != torch.int32
        if fake:
            return func(*args, **kwargs)
        with _disable_current_modes():
            return func(*args, **kwargs)


@contextmanager
def trials_unseen() -> Iterator[None]:
    """Hide from dispatch modes that DTensor computes the shape of an operator's result.

    DTensor does this once for each operator and shape, with fakes of whole tensors, for which no rank has memory.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    plain = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(propagator: ShardingPropagator, schema: Any) -> Any:
        with _disable_current_modes():
            return plain(propagator, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = plain  # type: ignore[method-assign]


@contextmanager
def watching(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` after each `resize_` of a storage, which no dispatch mode sees.

    FSDP2 allocates in this way. torch.distributed._tools.MemTracker uses the same method.
    """
    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        plain(storage, size)
        resized(storage)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
