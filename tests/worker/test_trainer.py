import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses import FakeTensorMode

from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.worker.loop import to_channels_last
from gpubench.worker.models import build


def convolutions() -> nn.Module:
    """The kinds that ResNets and ConvNeXts are made of: ordinary, 1x1, depthwise, of one channel, patches."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 4, stride=4),
        nn.Conv2d(8, 8, 7, groups=8, padding=3),
        nn.Conv2d(8, 16, 1),
        nn.BatchNorm2d(16),
        nn.Conv2d(16, 8, 3),
        nn.Conv2d(8, 1, 3),
        nn.Conv2d(1, 4, 1),
        nn.Flatten(),
        nn.Linear(4, 2),
    )


def strides(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tensor.stride() for name, tensor in module.state_dict().items()}


def test_weights_in_nhwc_have_the_strides_that_module_to_gives_them() -> None:
    ours, torchs = convolutions(), convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    to_channels_last(ours)
    assert strides(ours) == strides(torchs)
    assert strides(ours)["2.weight"] == (8, 1, 8, 8), "of a 1x1 convolution, as of any other"


def test_a_resnet_in_nhwc_has_the_strides_that_module_to_gives_it() -> None:
    ours, torchs = (build(ModelSettings(name="resnet-tiny"), DataSettings(), 0).module for _ in range(2))
    to_channels_last(ours)
    assert strides(ours) == strides(torchs.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def test_weights_without_memory_are_laid_out_too() -> None:
    with FakeTensorMode():
        module = convolutions()
        to_channels_last(module)
    assert strides(module)["2.weight"] == (8, 1, 8, 8)


@pytest.mark.filterwarnings("error")
def test_ddp_has_no_gradient_to_copy_into_another_layout() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        module = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 4, 1))
        to_channels_last(module)
        shared = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
        images = torch.randn(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
        for _ in range(3):
            shared(images).sum().backward()
    finally:
        dist.destroy_process_group()
