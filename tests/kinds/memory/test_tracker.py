"""Every tensor of a step is followed: against torch's own count, closed forms, and prediction against a run."""

import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from footprints_made import row
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._pytree import tree_leaves

from gpubench.channel import Activity
from gpubench.errors import ModelError
from gpubench.findings import Finding, Findings, Saving
from gpubench.kinds.memory.defaults import complete_memory
from gpubench.kinds.memory.predicted_device import Target, target_of
from gpubench.kinds.memory.settings import CompletedMemorySettings, MemorySettings
from gpubench.kinds.memory.worker import predict as forecast
from gpubench.kinds.memory.worker.predict import build_without_memory, predict
from gpubench.kinds.memory.worker.tracker import AllocationTracker, measure
from gpubench.memory.allocation_log import AllocationLog, Counts, classify
from gpubench.memory.analysis import footprint
from gpubench.memory.footprint import Footprint
from gpubench.ranks import Ranks
from gpubench.releases import installed
from gpubench.settings.loading import load
from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.worker.models import Workload, build

CPU = torch.device("cpu")
HOST = Target("cpu", 2**40, None, cuda=False)
H200 = Target("h200", 141 * 2**30, (9, 0))
MI300X = target_of(MemorySettings().memory.model_copy(update={"device_model": "mi300x"}), None)


def settings(model: str, **changes: Any) -> CompletedMemorySettings:
    given = {"model": model, "device": "cpu"} | {key.replace("__", "."): value for key, value in changes.items()}
    return complete_memory(load(MemorySettings, None, given).settings)[0]


def on_gpu(model: str, **changes: Any) -> CompletedMemorySettings:
    given = {"model": model, "predict": True, "device_model": "h200"}
    given |= {key.replace("__", "."): value for key, value in changes.items()}
    return complete_memory(load(MemorySettings, None, given).settings)[0]


def followed(asked: CompletedMemorySettings, steps: int = 2) -> AllocationLog:
    """Made once for each settings, as is what `predicted` returns. Neither is to be written to."""
    return made(asked.model_dump_json(), None, steps)


def predicted(asked: CompletedMemorySettings, target: Target = HOST, steps: int = 2) -> AllocationLog:
    return made(asked.model_dump_json(), target, steps)


@functools.cache
def made(settings: str, target: Target | None, steps: int) -> AllocationLog:
    asked = CompletedMemorySettings.model_validate_json(settings)
    if target is None:
        tracker = AllocationTracker(CPU)
        measure(asked, Ranks(0, 0, 1, 1), CPU, Activity(), tracker, steps)
        history = tracker.allocation_log()
    else:
        history = predict(asked, target, Activity(), steps).log
    classify(history)
    return history


def table(history: AllocationLog) -> Footprint:
    return footprint(history, source="measured", device="cpu", capacity=None)


def held(history: AllocationLog) -> Any:
    change = np.zeros(history.length + 1, np.int64)
    for one in history.allocations:
        change[one.begin] += one.size
        if one.end is not None:
            change[one.end] -= one.size
    return change.cumsum()


def train(workload: Workload, mode: Any, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(workload.module.parameters(), foreach=False)
    batch = workload.make_batch(4) if workload.make_batch else None
    inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if isinstance(mode, MemTracker):
        mode.track_external(workload.module, optimizer, *inputs)
    with mode:
        if isinstance(mode, AllocationTracker):
            mode.claim_model(workload.module)
            mode.claim(inputs, "inputs")
        for _ in range(steps):
            if isinstance(mode, MemTracker):
                mode.reset_mod_stats()
            loss = workload.loss(workload.module, batch)
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize(
    "model", ["gpt2-tiny", "resnet-tiny", "bert-tiny", pytest.param("unet2d-tiny", marks=pytest.mark.stress)]
)
def test_the_peak_is_the_one_that_torchs_own_tracker_counts(model: str) -> None:
    ours, theirs = AllocationTracker(CPU), MemTracker()
    for mode in (ours, theirs):
        train(build(ModelSettings(name=model), DataSettings(), 0), mode)
    counted = theirs.get_tracker_snapshot("peak")[CPU]["Total"]
    assert held(ours.allocation_log()).max() == pytest.approx(
        counted, abs=4
    )  # PyTorch 2.6 rounds a storage up to 8 bytes


def test_adamw_in_fp32_takes_4_4_and_8_bytes_a_parameter() -> None:
    asked = settings("gpt2-tiny")
    found = table(followed(asked))
    count = sum(one.numel() for one in build(asked.model, asked.data, 0).module.parameters())
    tensors = len(list(build(asked.model, asked.data, 0).module.parameters()))
    end = row(found, "steady", "optimizer").end
    assert end["parameters"] == end["gradients"] == 4 * count
    assert end["optimizer_state"] == 8 * count + 4 * tensors  # and one step counter for each tensor
    assert "gradients" not in row(found, "steady", "zero_grad").end
    assert "optimizer_state" not in row(found, "first", "forward").end


@pytest.mark.parametrize(
    ("optimizer", "states"), [("sgd", 1), ("adam", 2), ("adamw", 2)]
)  # fmt: skip
def test_each_optimizer_has_its_state(optimizer: str, states: int) -> None:
    asked = settings("gpt2-tiny", training__optimizer=optimizer)
    end = row(table(predicted(asked)), "steady", "zero_grad").end
    extra = 4 * len(list(build(asked.model, asked.data, 0).module.parameters())) if states == 2 else 0
    assert end["optimizer_state"] == states * end["parameters"] + extra


@pytest.mark.parametrize("model", ["gpt2-tiny", "resnet-tiny", "bert-tiny", "unet2d-tiny", "llama-tiny", "vit-tiny"])
def test_on_a_cpu_what_is_predicted_is_what_is_measured(model: str) -> None:
    asked = settings(model, training__batch_size=2, training__grad_accumulation=2)
    build(asked.model, asked.data, 0)  # what a library makes once, as it is first used, belongs to neither
    truth, found = table(followed(asked)), table(predicted(asked))
    assert found.peak.level == truth.peak.level
    # The CPU's mse_loss leaves its scalar in the memory of all the squares; without values there are none.
    assert [one for one in found.phases if one.stage != "setup" and one.phase != "loss"] == [
        one for one in truth.phases if one.stage != "setup" and one.phase != "loss"
    ]


def test_checkpointing_keeps_less_and_is_predicted_to() -> None:
    plain, saving = (
        table(predicted(settings("gpt2-tiny", model__activation_checkpointing=flag))) for flag in (False, True)
    )
    assert row(saving, "steady", "forward").end["activations"] < row(plain, "steady", "forward").end["activations"]
    asked = settings("gpt2-tiny", model__activation_checkpointing=True)
    assert table(followed(asked)).peak.level == saving.peak.level


def test_the_more_blocks_are_checkpointed_the_less_is_kept_and_predicted() -> None:
    kept = {}
    for which in (False, "transformer.h.0.mlp", "transformer.h.*.mlp", 2, True):
        asked = settings("gpt2-tiny", model__activation_checkpointing=which)
        foretold = table(predicted(asked))
        assert table(followed(asked)).peak.level == foretold.peak.level
        kept[which] = row(foretold, "steady", "forward").end["activations"]
    assert kept[True] < kept[2] < kept["transformer.h.0.mlp"] < kept[False]  # it has two blocks
    assert kept[True] < kept["transformer.h.*.mlp"] < kept["transformer.h.0.mlp"]


@pytest.mark.parametrize("old", [False, True])
def test_of_a_gpu_the_allocator_s_own_counts_are_taken(monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    stats = {"allocation.all.allocated": 10, "allocation.all.freed": 4, "num_alloc_retries": 1, "num_ooms": 1}
    segments = [
        {"device": device, "blocks": [{"state": state, "size": size} for state, size in blocks]}
        for device, blocks in (
            (0, [("active_allocated", 900), ("inactive", 500)]), (0, [("inactive", 700)]), (1, [("inactive", 800)]),
        )
    ]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: dict(stats))
    monkeypatch.setattr(torch.cuda, "memory_snapshot", (lambda: segments) if old else lambda include_traces: segments)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    tracker = AllocationTracker(torch.device("cuda"))
    stats |= {"allocation.all.allocated": 30, "allocation.all.freed": 19, "num_alloc_retries": 3}
    assert tracker.allocation_log().counts == Counts(20, 15, retries=2, ooms=0, largest_free=700)


def test_on_a_cpu_the_tensors_that_were_followed_are_counted() -> None:
    history = followed(settings("gpt2-tiny"))
    freed = sum(one.end is not None for one in history.allocations)
    assert history.counts is None
    assert table(history).allocator == Counts(len(history.allocations), freed)


def test_foreach_takes_temporaries_that_fused_does_not() -> None:
    def temporaries(implementation: str) -> int:
        asked = on_gpu("gpt2-tiny", training__optimizer_impl=implementation, training__batch_size=1)
        return row(table(predicted(asked, H200)), "steady", "optimizer").peak.get("temporaries", 0)

    parameters = 4 * sum(
        one.numel() for one in build(ModelSettings(name="gpt2-tiny"), DataSettings(), 0).module.parameters()
    )
    assert temporaries("fused") < 0.1 * parameters
    assert temporaries("foreach") >= parameters


def test_allocations_know_their_phase_their_module_and_their_operator() -> None:
    history = followed(settings("gpt2-tiny"), 1)
    products = [one for one in history.allocations if one.operator == "aten::addmm" and one.phase == "forward"]
    assert {one.module for one in products} >= {"transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_attn"}
    assert {one.shape for one in products} >= {"float32[256, 128]"}
    order = [mark.phase for mark in history.marks if mark.step == 0]
    assert list(dict.fromkeys(order)) == ["data", "forward", "loss", "backward", "optimizer", "zero_grad", "unknown"]


def test_a_model_for_a_gpu_is_built_in_host_memory_and_moved_parameter_by_parameter() -> None:
    found = predicted(on_gpu("gpt2-tiny"), H200)  # its embedding and its last layer share a weight
    model = [one for one in found.allocations if one.phase == "model"]
    module = build_without_memory(on_gpu("gpt2-tiny").model, on_gpu("gpt2-tiny").data, 0).module
    assert [one.size for one in model] == [4 * tensor.numel() for tensor in (*module.parameters(), *module.buffers())]
    assert all(one.end is None for one in model)


@pytest.mark.skipif(not installed().keeps_blas_workspaces, reason="of PyTorch before 2.15")
def test_a_workspace_is_added_for_each_thread_that_multiplies() -> None:
    found = predicted(on_gpu("gpt2-tiny"), H200)
    spaces = [one for one in found.allocations if one.category == "workspaces"]
    assert [(one.size, one.phase, one.step) for one in spaces] == [(2**25, "forward", 0), (2**25, "backward", 0)]


@pytest.mark.skipif(not installed().keeps_blas_workspaces, reason="of PyTorch before 2.15")
def test_an_amd_gpu_has_workspaces_of_its_own_size() -> None:
    found = predicted(on_gpu("gpt2-tiny", device_model="mi300x"), MI300X)
    spaces = [one for one in found.allocations if one.category == "workspaces"]
    assert [(one.size, one.phase, one.step) for one in spaces] == [
        (76 * 2**20, "forward", 0),
        (76 * 2**20, "backward", 0),
    ]


@pytest.mark.parametrize("target", [H200, MI300X])
@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_on_a_gpu_the_step_counters_of_a_loop_stay_on_the_host(target: Target, optimizer: str) -> None:
    changes = {"training.optimizer": optimizer, "training.optimizer_impl": "loop", "device_model": target.name}
    asked = on_gpu("gpt2-tiny", **changes)
    count = sum(one.numel() for one in build(asked.model, asked.data, 0).module.parameters())
    end = row(table(predicted(asked, target)), "steady", "zero_grad").end
    assert end["parameters"] == 4 * count
    assert end["optimizer_state"] == 8 * count


def test_a_step_that_reads_values_is_refused_with_the_operators_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "reading.py").write_text(READING)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"_local_scalar_dense.*reads values"):
        predicted(settings("reading:build"))


READING = """
import torch
from torch import nn

def loss(module, batch):
    out = module(batch).mean()
    return out * 2 if out.item() > 0 else out

def build():
    return nn.Linear(4, 4), lambda n: torch.rand(n, 4), loss
"""


def test_a_fix_that_is_predicted_to_save_next_to_nothing_is_not_proposed() -> None:
    fixes: list[dict[str, Any]] = [
        {"training.optimizer_impl": "fused"}, {}, {"model.activation_checkpointing": True},
        {"training.batch_size": 2**19},
    ]  # fmt: skip
    given = [
        Finding(id=str(place), title="", severity="high", evidence=[], cause="", advice="", fix=fix, threshold="")
        for place, fix in enumerate(fixes)
    ]
    asked = on_gpu(f"{__name__}:deep", training__batch_size=2**18, data__samples=2**19)
    found = forecast.Forecast(asked, H200, Activity())
    before, after = found.footprint(), found.with_settings(fixes[2]).footprint()
    kept = found.with_savings(Findings(headline="", findings=given, unanswered=[]), before).findings
    assert [one.id for one in kept] == ["1", "2"], "fused it is already, and twice the batch takes more"
    assert kept[0] == given[1], "words need no prediction"
    assert kept[1].expected == Saving(1 - after.most / before.most)
    assert after.most < before.most * (1 - forecast.LEAST_SAVING)


def deep() -> Any:
    """Activations are most of it, and there are blocks to recompute."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    return blocks, lambda size: torch.rand(size, 64), lambda module, batch: module(batch).square().mean()


class Twice(nn.Module):
    """Its storage is shared, resized and given back in odd ways."""

    def forward(self, x: Tensor) -> Tensor:
        view = x.view(-1)[::2]
        return torch.cat([view, view]).clone()


def test_views_share_their_storage_and_what_is_freed_is_free() -> None:
    tracker = AllocationTracker(CPU)
    with tracker:
        x = torch.zeros(256)
        y = Twice()(x)
        del x
        z = y[:10]
        del y
        assert z.numel() == 10
    sizes = Counter(one.size for one in tracker.allocation_log().allocations)
    assert sizes == {1024: 3}, "x, what cat made, and its clone"
    assert [one.end is None for one in tracker.allocation_log().allocations] == [False, False, True]


def sizes(tracker: AllocationTracker) -> list[int]:
    """Of what is held now, the oldest first."""
    return [one.size for one in tracker._allocations if one.end is None]


def test_memory_that_an_operator_makes_larger_in_place_counts_at_its_new_size() -> None:
    tracker = AllocationTracker(CPU)
    with tracker:
        x = torch.empty(10)
        x.resize_(100)
        assert sizes(tracker) == [400]
        x.resize_(5)
        assert sizes(tracker) == [400], "torch keeps what it has"
        out = torch.empty(0)
        torch.cat([torch.zeros(150), torch.zeros(50)], out=out)
        assert sizes(tracker) == [400, 800]
        out.resize_(0)
        torch.cat([torch.zeros(200), torch.zeros(100)], out=out)
        assert sizes(tracker) == [400, 1200]
        assert (x.numel(), out.numel()) == (5, 300)
    assert held(tracker.allocation_log()).max() == 400 + 1200 + 800 + 400


def test_sparse_gradients_are_followed_with_their_indices() -> None:
    asked = settings(
        f"{__name__}:sparse", training__optimizer="sgd", training__momentum=0.0, training__batch_size=8,
        training__optimizer_impl="loop",
    )  # fmt: skip
    history = followed(asked)
    found = table(history)
    for stage in ("first", "steady"):
        end = row(found, stage, "backward").end
        assert end["parameters"] == 4 * ROWS * WIDTH
        assert end["gradients"] == 8 * TOKENS * (8 + 4 * WIDTH), "8 bytes an index, not a row for each of the table"
        assert "gradients" not in row(found, stage, "zero_grad").end
    made = [one for one in history.allocations if one.category == "gradients"]
    assert {one.module for one in made} == {"0"}
    assert {one.shape for one in made} == {f"int64[1, {8 * TOKENS}]", f"float32[{8 * TOKENS}, {WIDTH}]"}


ROWS, WIDTH, TOKENS = 1000, 16, 3


def sparse() -> Any:
    def loss(module: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = module(batch).sum()
        return out

    module = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True))
    return module, lambda size: torch.randint(0, ROWS, (size, TOKENS)), loss


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
def test_tensors_that_do_not_tell_where_their_memory_is_are_refused_by_name() -> None:
    with AllocationTracker(CPU), pytest.raises(ModelError, match=r"^nested tensors cannot be recorded"):
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    with (
        AllocationTracker(CPU),
        pytest.raises(ModelError, match=r"^tensors of layout torch.sparse_csr cannot be recorded"),
    ):
        torch.eye(3).to_sparse_csr()


def test_nested_tensors_that_wrap_a_dense_one_are_followed() -> None:
    tracker = AllocationTracker(CPU)
    with tracker:
        parts = [torch.zeros(2, 4), torch.zeros(3, 4)]
        before = torch.nested.nested_tensor(parts, layout=torch.jagged)
        after = before * 2
        assert [one.size for one in tracker._allocations if one.operator == "aten::mul"] == [4 * 5 * 4]
        assert after.numel() == 20


def test_what_follows_the_end_is_no_part_of_the_history() -> None:
    tracker = AllocationTracker(CPU)
    with tracker:
        x = torch.zeros(256)
        tracker.close()
        y = torch.zeros(512)
    del x, y
    (one,) = tracker.allocation_log().allocations
    assert (one.size, one.end) == (1024, None)
