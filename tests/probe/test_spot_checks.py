"""Parameters, batches and losses are read from their memory, and never where a tensor has none."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from gpubench.probe.device import loss_of
from gpubench.probe.spot_checks import SpotChecks
from gpubench.releases import installed


class StandsIn(torch.Tensor):
    """A tensor without memory of its own, which stands for another one."""

    stood_for: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.stood_for = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        bare = [each.stood_for if isinstance(each, cls) else each for each in args]
        return return_and_correct_aliasing(func, args, kwargs or {}, func(*bare, **(kwargs or {})))


def left_with(size: int, tensor: torch.Tensor) -> torch.Tensor:
    """Leaves a tensor less memory than it has elements, as sharding does between the uses of a parameter."""
    tensor.untyped_storage().resize_(size)
    return tensor


WITHOUT_MEMORY: dict[str, Callable[[], torch.Tensor]] = {
    "stands for another one": lambda: StandsIn(torch.ones(4096)),
    "freed": lambda: left_with(0, torch.ones(4096)),
    "part of a freed one": lambda: left_with(0, torch.ones(8192)[4096:]),
    "shortened": lambda: left_with(8, torch.ones(4096)),
    "part of a shortened one": lambda: left_with(8, torch.ones(8192)[4096:]),
    "of zeros only": lambda: torch._efficientzerotensor(4096),
    "fake": lambda: FakeTensorMode().from_tensor(torch.ones(4096)),
    "on no device": lambda: torch.ones(4096, device="meta"),
    "empty": lambda: torch.ones(0),
}


def with_gradient(parameter: Any, gradient: Any) -> Any:
    return SimpleNamespace(param_groups=[{"params": [SimpleNamespace(grad=gradient, _local_tensor=parameter)]}])


@pytest.mark.parametrize("kind", WITHOUT_MEMORY)
def test_a_tensor_without_memory_is_read_nowhere(kind: str) -> None:
    made, checks = WITHOUT_MEMORY[kind](), SpotChecks()
    for parameter, gradient in ((made, torch.ones(4096)), (torch.ones(4096), made), (made, made)):
        checks.before_update(with_gradient(parameter, gradient))
        checks.after_update()
    assert checks.parameters == 0
    checks.give(made)
    checks.end_step()
    assert checks.repeated == 0


@pytest.mark.parametrize(
    "loss",
    [
        StandsIn(torch.ones(())),
        left_with(0, torch.ones(())),
        left_with(4, torch.ones(8)[7]),
        torch._efficientzerotensor(()),
    ],
)
def test_a_loss_without_memory_has_no_value(loss: torch.Tensor) -> None:
    assert loss_of(loss) is None


def test_a_parameter_that_an_update_frees_is_not_counted() -> None:
    parameter, checks = torch.ones(64), SpotChecks()
    checks.before_update(with_gradient(parameter, torch.ones(64)))
    left_with(0, parameter)
    checks.after_update()
    assert (checks.parameters, checks.changed) == (0, 0)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(not installed().shards_on_cpu, reason="FSDP2 on a CPU is of PyTorch 2.7 and later")
@pytest.mark.usefixtures("group")
def test_sharded_parameters_are_read_in_the_part_of_their_rank() -> None:
    model, checks = torch.nn.Linear(8, 4), SpotChecks()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        checks.before_update(optimizer)
        optimizer.step()
        checks.after_update()
        optimizer.zero_grad()
    assert (checks.parameters, checks.changed) == (4, 4)


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # of PyTorch 2.6
@pytest.mark.usefixtures("group")
def test_a_loss_that_is_a_dtensor_does_not_end_the_program() -> None:
    mesh = init_device_mesh("cpu", (1,))
    assert loss_of(distribute_tensor(torch.ones(()), mesh, [Replicate()])) in (None, 1.0)
