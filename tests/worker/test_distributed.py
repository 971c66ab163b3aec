import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import pytest
import ranks_worker
import torch
from running import PATIENCE, environment
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.fsdp import FSDPModule

from gpubench.errors import DeviceError
from gpubench.ranks import Ranks, is_rank_zero, launched_by_torchrun
from gpubench.releases import installed
from gpubench.settings.schema import Device, Precision
from gpubench.settings.sections import DistributedSettings
from gpubench.worker import distributed
from gpubench.worker.distributed import is_broken_collective, pick_device, setup_ddp, wrap


@pytest.mark.parametrize(
    ("strategy", "accumulation"),
    [
        ("ddp", 1),
        ("ddp", 2),
        ("fsdp2", 2),
        pytest.param(
            "fsdp2-separate",
            1,
            marks=pytest.mark.skipif(
                not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="came with torch 2.13"
            ),
        ),
    ],
    ids=["ddp", "ddp-accumulated", "fsdp2", "fsdp2-separate"],
)
def test_two_ranks_give_the_gradients_of_one_process_on_the_joined_batch(
    strategy: str, accumulation: int, tmp_path: Path
) -> None:
    if strategy == "fsdp2" and not installed().shards_on_cpu:
        pytest.skip("FSDP2 on a CPU is of PyTorch 2.7 and later")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, ranks_worker.__file__, strategy, str(accumulation), str(tmp_path)]
    done = forked.run(command, PATIENCE, env=environment())
    assert done.returncode == 0, done.stderr

    alone = ranks_worker.model()
    inputs, targets = ranks_worker.batch()
    nn.functional.cross_entropy(alone(inputs), targets).backward()
    together = torch.load(tmp_path / "gradients.pt")
    for parameter, gradient in zip(alone.parameters(), together, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-14)
    # The moment from which communication is exposed comes once a step, and FSDP2 has none.
    assert {(tmp_path / f"calls-{rank}").read_text() for rank in (0, 1)} == {"1" if strategy == "ddp" else "0"}


def test_a_rank_alone_needs_no_process_group() -> None:
    settings, cpu = DistributedSettings(), torch.device("cpu")
    module = nn.Linear(1, 1)
    setup_ddp(settings, Ranks(0, 0, 1, 1), None, cpu)
    assert not torch.distributed.is_initialized()
    assert wrap(module, settings, Precision.fp32, cpu, lambda: None) is module


def test_ranks_come_from_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks.from_environment() == Ranks(0, 0, 1, 1)
    assert is_rank_zero()
    assert not launched_by_torchrun()
    variables = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items():  # as a scheduler may set them where no launcher runs
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(0, 0, 1, 1)
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(3, 1, 4, 2)
    assert not is_rank_zero()
    assert launched_by_torchrun()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_gpu_that_torch_cannot_use_is_refused_with_the_build() -> None:
    with pytest.raises(DeviceError, match=r"finds no usable GPU"):
        pick_device(Device.cuda, Ranks(0, 0, 1, 1))


def test_a_rank_without_a_gpu_of_its_own_is_refused_unless_ranks_may_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    with pytest.raises(DeviceError, match="rank 3 needs GPU 3, but torch finds only 2") as refused:
        pick_device(Device.cuda, Ranks(3, 3, 4, 4))
    assert "start fewer ranks" in (refused.value.hint or "")
    assert pick_device(Device.cuda, Ranks(3, 3, 4, 4), may_share=True) == torch.device("cuda", 1)


def backends(monkeypatch: pytest.MonkeyPatch, wanted: str | None, uuids: Sequence[str | None]) -> list[str]:
    """What each rank chooses, or the error that it raises, if the ranks use the GPUs with these uuids."""
    monkeypatch.setattr(distributed, "_uuid", lambda device: uuids[device.index])
    store = HashStore()

    def choose(rank: int) -> str:
        ranks = Ranks(rank, rank, len(uuids), len(uuids))
        try:
            return distributed.choose_backend(wanted, ranks, store, torch.device("cuda", rank))
        except DeviceError as error:
            return str(error)

    with ThreadPoolExecutor(len(uuids)) as pool:
        return list(pool.map(choose, range(len(uuids))))


@pytest.mark.parametrize(
    ("wanted", "uuids", "backend"),
    [
        (None, ["a", "b", "c"], "nccl"),
        (None, ["a", "b", "a"], "gloo"),
        (None, [None, None], "nccl"),
        ("gloo", ["a", "b"], "gloo"),
        ("nccl", ["a", "b"], "nccl"),
        ("nccl", ["a", "b", "b"], "ranks 1 and 2 use the same GPU, which NCCL does not support"),
    ],
)
def test_ranks_use_nccl_where_each_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, uuids: list[str | None], backend: str
) -> None:
    assert backends(monkeypatch, wanted, uuids) == [backend] * len(uuids)


@pytest.mark.parametrize(
    ("visible", "rank", "may_share", "device"),
    [(4, 2, False, "cuda:2"), (1, 2, False, "cuda:0"), (2, 3, True, "cuda:1"), (2, 2, False, None)],
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, rank: int, may_share: bool, device: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    ranks = Ranks(rank, rank, 4, 4)
    if device:
        assert str(pick_device(Device.cuda, ranks, may_share=may_share)) == device
    else:
        with pytest.raises(DeviceError, match="rank 2 needs GPU 2, but torch finds only 2"):
            pick_device(Device.cuda, ranks, may_share=may_share)


def test_a_broken_collective_is_told_from_an_error_of_ones_own() -> None:
    assert is_broken_collective(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
    assert not is_broken_collective(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_broken_collective(ValueError("Connection closed by peer"))
