"""What each of several ranks holds, against closed forms, against real tensors, and against two real ranks."""

import functools
import sys
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
import tracker_ranks_worker
from hypothesis import given
from hypothesis import settings as trying
from hypothesis import strategies as st
from running import ended
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.parallel import DistributedDataParallel

from gpubench.channel import Activity
from gpubench.kinds.memory.predicted_device import Target
from gpubench.kinds.memory.worker.predict import ALGORITHMS, predict, simulated_ranks
from gpubench.kinds.memory.worker.tracker import AllocationTracker, measure
from gpubench.memory.allocation_log import AllocationLog, Category, Phase, PhaseStart, classify
from gpubench.ranks import Ranks
from gpubench.releases import installed
from gpubench.settings.defaults import complete
from gpubench.settings.loading import apply_overrides
from gpubench.settings.schema import CompletedTrainSettings, TrainSettings
from gpubench.worker.models import build

torch.set_num_threads(1)

pytestmark = pytest.mark.skipif(not installed().predicts_ranks, reason="of PyTorch 2.7 and later")

CPU = torch.device("cpu")
LIKE_HERE = Target("cpu", 2**40, None, cuda=False)
MIB = 2**20


def _settings(
    model: str = "gpt2-tiny", strategy: str = "ddp", world_size: int = 2, **changes: Any
) -> CompletedTrainSettings:
    asked = {
        "device": "cpu",
        "precision": "fp32",
        "model": {"name": model},
        "training": {"batch_size": 4},
        "distributed": {"backend": "gloo"},
    }
    completed = complete(TrainSettings.model_validate(asked))[0]
    ranks = {"distributed.world_size": world_size, "distributed.strategy": strategy}
    return apply_overrides(completed, ranks | {key.replace("__", "."): value for key, value in changes.items()})


def _predicted(settings: CompletedTrainSettings, steps: int = 2, target: Target = LIKE_HERE) -> AllocationLog:
    """Made once for each. Not to be written to."""
    return _prediction(settings.model_dump_json(), steps, target)


@functools.cache
def _prediction(settings: str, steps: int, target: Target) -> AllocationLog:
    history = predict(CompletedTrainSettings.model_validate_json(settings), target, Activity(), steps).log
    classify(history)
    return history


def _weights(settings: CompletedTrainSettings) -> list[nn.Parameter]:
    return list(build(settings.model, settings.data, 0).module.parameters())


def _held(history: AllocationLog, mark: PhaseStart) -> dict[Category, int]:
    """By category, when the phase begins."""
    found: dict[Category, int] = {}
    for one in history.allocations:
        if one.begin < mark.at and (one.end is None or one.end >= mark.at):
            found[one.category] = found.get(one.category, 0) + one.size
    return found


def _last(history: AllocationLog, phase: Phase) -> PhaseStart:
    return [mark for mark in history.marks if mark.phase == phase][-1]


def _levels(history: AllocationLog) -> list[tuple[int | None, Phase, int, int]]:
    """Of each phase its step, the most that is held in it, and what is held at its end."""
    events = [(one.begin, one.size) for one in history.allocations]
    events += [(one.end, -one.size) for one in history.allocations if one.end is not None]
    changes = dict(events)
    assert len(changes) == len(events), "each position belongs to one event"
    found, held = [], 0
    for mark, end in zip(history.marks, [*(mark.at for mark in history.marks[1:]), history.length], strict=True):
        peak = held
        for position in range(mark.at, end):
            held += changes.get(position, 0)
            peak = max(peak, held)
        found.append((mark.step, mark.phase, peak, held))
    return found


# Closed forms.


@pytest.mark.parametrize("world_size", [2, 8])
def test_each_rank_of_ddp_holds_all_parameters_their_gradients_and_twice_as_much_state(world_size: int) -> None:
    settings = _settings(world_size=world_size)
    weights = _weights(settings)
    whole = 4 * sum(weight.numel() for weight in weights)
    history = _predicted(settings)
    held = _held(history, _last(history, "zero_grad"))
    assert held["parameters"] == whole
    assert held["gradients"] == whole
    assert held["optimizer_state"] == 2 * whole + 4 * len(weights)  # AdamW counts each parameter's steps in a float32


def test_the_buckets_of_ddp_stay_when_gradients_are_taken_away() -> None:
    history = _predicted(_settings())
    whole = 4 * sum(weight.numel() for weight in _weights(_settings()))
    buckets = [one for one in history.allocations if one.category == "gradients"]
    assert _held(history, _last(history, "data"))["gradients"] == whole
    assert [(one.step, one.size) for one in buckets] == [(None, whole), (1, whole)]  # made anew in the second step


def test_small_buckets_are_more_buckets_of_the_same_size_in_all() -> None:
    history = _predicted(_settings(distributed__bucket_mb=0.02))
    whole = 4 * sum(weight.numel() for weight in _weights(_settings()))
    first, *rebuilt = [one.size for one in history.allocations if one.category == "gradients"]
    assert first == sum(rebuilt) == whole
    # A bucket is closed by the tensor that fills it, and none here is larger than 32 KiB.
    assert len(rebuilt) > 2
    assert all(0.02 * MIB <= size < 0.02 * MIB + 32 * 1024 for size in rebuilt[:-1])


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_each_rank_of_fsdp2_holds_its_share_of_each_parameter_its_gradient_and_its_state(world_size: int) -> None:
    settings = _settings(strategy="fsdp2", world_size=world_size)
    weights = _weights(settings)
    # A parameter is cut along its first dimension, and all shares are as large as the first.
    share = 4 * sum(-(-len(weight) // world_size) * prod(weight.shape[1:]) for weight in weights)
    history = _predicted(settings)
    held = _held(history, _last(history, "zero_grad"))
    assert held["parameters"] == share
    assert held["gradients"] == share
    state = sum(one.size for one in history.allocations if one.category == "optimizer_state")
    own = 4 * sum(len(weight.chunk(world_size)[0]) * prod(weight.shape[1:]) for weight in weights)
    assert state == held["optimizer_state"] == 2 * own + 4 * len(weights)
    assert "gradients" not in _held(history, _last(history, "unknown"))


def test_fsdp2_has_no_more_whole_parameters_at_a_time_than_those_outside_the_blocks_and_one_block() -> None:
    settings = _settings(strategy="fsdp2")
    module = build(settings.model, settings.data, 0).module
    block = 4 * sum(weight.numel() for weight in module.get_submodule("transformer.h.0").parameters())
    whole = 4 * sum(weight.numel() for weight in module.parameters())
    history = _predicted(settings)
    held = [_held(history, PhaseStart(position, "unknown")).get("parameters", 0) for position in range(history.length)]
    first = _last(history, "data").at
    assert max(held[first:]) == whole // 2 + (whole - 2 * block) + block
    assert min(held[first:]) == whole // 2
    gathered = {one.module for one in history.allocations if one.category == "parameters" and one.step == 1}
    assert {"transformer.wpe", "transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc"} <= gathered


def test_a_step_of_fsdp2_finds_the_memory_as_the_one_before_left_it() -> None:
    levels = _levels(_predicted(_settings(strategy="fsdp2"), steps=3))
    assert [level[1:] for level in levels if level[0] == 1] == [level[1:] for level in levels if level[0] == 2][:-1]


def test_fused_adamw_takes_nothing_but_its_state_for_shards() -> None:
    """DTensor tries each operator out on whole tensors first, which no rank holds."""
    history = _predicted(_settings(strategy="fsdp2", training__optimizer_impl="fused"))
    for step, phase, peak, end in _levels(history):
        assert phase != "optimizer" or peak == end, step


# Against the same code on tensors that have memory.


@pytest.mark.parametrize(
    ("model", "strategy", "changes"),
    [
        ("gpt2-tiny", "ddp", {}),
        ("resnet-tiny", "ddp", {"training__grad_accumulation": 2}),
        ("gpt2-tiny", "fsdp2", {}),
        ("gpt2-tiny", "fsdp2", {"precision": "bf16"}),
        ("gpt2-tiny", "fsdp2", {"training__grad_accumulation": 2}),
        ("gpt2-tiny", "fsdp2", {"model__activation_checkpointing": True}),
        ("gpt2-tiny", "fsdp2", {"model__activation_checkpointing": "transformer.h.*.mlp"}),
        ("resnet-tiny", "fsdp2", {"training__grad_accumulation": 2, "distributed__sync_gradients": "each"}),
    ],
)
def test_tensors_without_memory_take_what_others_take_to_the_byte(
    model: str, strategy: str, changes: dict[str, Any]
) -> None:
    settings = _settings(model, strategy, **changes)
    tracker = AllocationTracker(CPU)
    with simulated_ranks(2):
        measure(settings, Ranks(0, 0, 2, 2), CPU, Activity(), tracker, 2)
    measured = tracker.allocation_log()
    classify(measured)
    predicted = _predicted(settings)
    during = [level for level in _levels(measured) if level[0] is not None]
    assert [level for level in _levels(predicted) if level[0] is not None] == during
    assert _held(predicted, _last(predicted, "backward")) == _held(measured, _last(measured, "backward"))


def test_two_ranks_on_gloo_take_what_was_predicted_for_each(tmp_path: Path) -> None:
    asked = {"ddp": _settings("resnet-tiny"), "fsdp2": _settings("resnet-tiny", strategy="fsdp2")}
    for name, settings in asked.items():
        (tmp_path / f"{name}.settings.json").write_text(settings.model_dump_json())
    command = [sys.executable, tracker_ranks_worker.__file__]
    ranks = range(tracker_ranks_worker.RANKS)
    assert ended([*command, str(rank), str(tmp_path)] for rank in ranks) == [0 for _ in ranks]
    for name, settings in asked.items():
        predicted = _predicted(settings)
        whole = 4 * sum(weight.numel() for weight in _weights(settings))
        for rank in (0, 1):
            found = (tmp_path / f"{name}-{rank}.history.json").read_bytes()
            measured = msgspec.json.decode(found, type=AllocationLog)
            classify(measured)
            here, there = (_held(one, _last(one, "zero_grad")) for one in (measured, predicted))
            kept: tuple[Category, ...] = ("parameters", "gradients", "optimizer_state", "inputs")
            assert [here[category] for category in kept] == [there[category] for category in kept]
            for expected, level in zip(_levels(predicted), _levels(measured), strict=True):
                assert expected[:2] == level[:2]
                if expected[0] is not None:
                    # A thread of gloo's may let go of what it sent or gathered a moment later.
                    assert 0 <= level[2] - expected[2] <= whole, expected
                    assert 0 <= level[3] - expected[3] <= whole, expected


# What the tracker makes of storages that change their size, and of memory that several parameters share.


@trying(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4096), max_size=8))
def test_a_storage_that_is_resized_is_held_at_its_size_of_the_moment(sizes: list[int]) -> None:
    tracker, module = AllocationTracker(CPU), nn.Linear(1, 1)
    with tracker, tracker.following(module):
        tensor = torch.empty(64)
        tracker.claim([tensor], "parameters", "layer")
        for size in sizes:
            tensor.untyped_storage().resize_(size)
    history = tracker.allocation_log()
    taken = [after for before, after in pairwise([256, *sizes]) if after and after != before]
    assert [one.size for one in history.allocations] == [256, *taken]
    assert {(one.category, one.module) for one in history.allocations} == {("parameters", "layer")}
    held = [one.size for one in history.allocations if one.end is None]
    assert held == ([[256, *sizes][-1]] if [256, *sizes][-1] else [])
    for before, after in pairwise(history.allocations):
        assert before.end is not None
        assert before.end <= after.begin


def test_what_a_sharded_tensor_takes_within_an_operator_is_seen() -> None:
    tracker = AllocationTracker(CPU)
    with simulated_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(torch.ones(8), mesh, [Shard(0)])
        part = DTensor.from_local(torch.ones(16), mesh, [Partial()])
        with tracker:
            shard + part  # reduced, and cut into shards, before it can be added
    found = [(one.operator, one.size) for one in tracker.allocation_log().allocations]
    assert ("aten::reduce_scatter_tensor", 32) in found
    assert found[-1] == ("aten::add", 32)


def test_the_gradients_of_a_bucket_belong_to_the_module_around_them() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    tracker = AllocationTracker(CPU)
    with tracker:
        inner, outer = torch.zeros(12), torch.zeros(6)
        for part, bucket in ((module[0], inner), (module[1], outer)):
            weights = list(part.parameters())
            for weight, piece in zip(weights, bucket.split([one.numel() for one in weights]), strict=True):
                weight.grad = piece.view_as(weight)
        tracker.claim_gradients(module)
        tracker.claim_gradients(module)
    found = {one.size: (one.category, one.module) for one in tracker.allocation_log().allocations}
    assert found == {48: ("gradients", "0"), 24: ("gradients", "1")}


# What is simulated_ranks ends with the context.


def test_a_group_that_was_joined_before_is_the_group_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the next line changes it for good
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    before = DistributedDataParallel._pre_forward, sys.excepthook, torch.UntypedStorage.resize_
    try:
        with simulated_ranks(5):
            assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 5, "fake")
        assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
        _predicted(_settings("resnet-tiny", strategy="fsdp2", world_size=4))
        tensor = torch.ones(())
        dist.all_reduce(tensor)
        assert (float(tensor), dist.get_backend()) == (1, "gloo")
    finally:
        dist.destroy_process_group()
    with pytest.raises(KeyError), simulated_ranks(2):
        raise KeyError
    assert not dist.is_initialized()
    assert before == (DistributedDataParallel._pre_forward, sys.excepthook, torch.UntypedStorage.resize_)


def test_what_nccl_takes_is_said_not_to_be_counted() -> None:
    gpu = Target(None, 2**40, (9, 0))
    alone = predict(_settings("resnet-tiny", world_size=1), gpu, Activity(), 1).log
    ddp = predict(_settings("resnet-tiny"), gpu, Activity(), 1).log
    fsdp2 = predict(_settings("resnet-tiny", strategy="fsdp2"), gpu, Activity(), 1).log
    assert alone.notes == [*installed().notes, ALGORITHMS]
    assert "rank 0 of 2" in ddp.notes[-1]
    assert "NCCL" in ddp.notes[-1]
    assert "streams" in fsdp2.notes[-1]
    assert _predicted(_settings("resnet-tiny")).notes == []  # nothing is kept back on a CPU


def test_sgd_on_sharded_parameters_of_a_gpu_is_predicted_and_holds_one_momentum() -> None:
    settings = _settings(strategy="fsdp2", training__optimizer="sgd", training__momentum=0.9)
    history = _predicted(settings, target=Target("h200", 2**40, (9, 0)))
    held = _held(history, _last(history, "zero_grad"))
    assert held["optimizer_state"] == held["parameters"] > 0
