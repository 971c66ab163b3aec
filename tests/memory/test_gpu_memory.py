"""What of memory can only be seen on a GPU: the allocator's own counts, its snapshot, running out, and predictions."""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from running import Finished, gpubench

from gpubench.channel import Activity
from gpubench.hardware import find_accelerator
from gpubench.kinds.memory.defaults import complete_memory
from gpubench.kinds.memory.settings import MemorySettings
from gpubench.kinds.memory.worker.tracker import AllocationTracker, measure
from gpubench.memory.allocation_log import AllocationLog
from gpubench.memory.analysis import footprint
from gpubench.memory.footprint import Footprint, Footprints
from gpubench.memory.snapshot import of_snapshot
from gpubench.ranks import Ranks
from gpubench.releases import Release, installed
from gpubench.runs.directory import MEMORY, SUMMARY, TRACES
from gpubench.settings.loading import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.simulated,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
MIB = 2**20
SNAPSHOT = "rank0.snapshot.pickle"
GPT2 = ("--model=gpt2", "--precision=bf16", "--batch-size=8", "--data.sequence_length=256", "--logging.graph=false")
GPT2_PARAMETERS = 124_439_808
RESNET = ("--model=resnet18", "--precision=fp32", "--batch-size=64", "--logging.graph=false")

GREEDY = """
import torch
from torch import nn

class Greedy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, batch):
        self.held = [torch.empty(2**28, device=batch.device) for _ in range(10_000)]
        return self.inner(batch)

def build():
    return Greedy(), lambda size: torch.ones(size, 16), lambda module, batch: module(batch).sum()
"""


def footprint_of(done: Finished) -> Footprint:
    (found,) = msgspec.json.decode((done.run / MEMORY).read_bytes(), type=Footprints).ranks
    return found


def followed(results: Path, *options: str) -> Finished:
    done = gpubench("memory", *options, "-q", results=results)
    assert done.code == 0, done.stderr
    return done


@pytest.fixture(scope="module", autouse=True)
def without_arithmetic() -> Iterator[None]:
    """On the simulated CUDA, models of full size: the allocator works as ever, and values do not matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKECUDA_ARITHMETIC", "0")
        yield


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return followed(tmp_path_factory.mktemp("language"), *GPT2, "--device=cuda")


# --- What is measured


def test_phases_and_categories_sum_to_what_the_gpu_has_given_out(language: Finished) -> None:
    found = footprint_of(language)
    assert {one.phase for one in found.phases if one.stage == "steady"} == {
        *("data", "forward", "loss", "backward", "optimizer", "zero_grad")
    }
    moments = [(one.peak, one.level) for one in found.phases]
    for amounts, level in (*moments, (found.peak.amounts, found.peak.level)):
        assert level.reserved is not None
        assert level.requested <= level.allocated <= level.reserved < level.total
        assert sum(amounts.values()) == level.total
        assert min(amounts.values()) > 0
    assert found.device == torch.cuda.get_device_name(DEVICE)
    assert found.capacity == torch.cuda.mem_get_info(DEVICE)[1]
    assert found.most < found.capacity


def test_weights_gradients_and_adamws_state_are_the_closed_forms(language: Finished) -> None:
    found, weights = footprint_of(language), 4 * GPT2_PARAMETERS
    (end,) = (one.end for one in found.phases if (one.stage, one.phase) == ("steady", "optimizer"))
    # In blocks of 512 bytes, and AdamW counts its steps in a tensor for each parameter.
    assert end["parameters"] == pytest.approx(weights, rel=0.001)
    assert end["gradients"] == pytest.approx(weights, rel=0.001)
    assert end["optimizer_state"] == pytest.approx(2 * weights, rel=0.001)


def test_what_the_device_holds_beside_the_allocator_is_a_context(language: Finished) -> None:
    assert 50 * MIB < footprint_of(language).peak.amounts["other"] < 4096 * MIB


def test_allocated_is_what_torch_counts(tmp_path: Path) -> None:
    given = {"model": "gpt2-tiny", "device": "cuda", "precision": "fp32"}
    settings, _ = complete_memory(load(MemorySettings, None, given).settings)
    tracker = AllocationTracker(DEVICE)
    measure(settings, Ranks(0, 0, 1, 1), DEVICE, Activity(), tracker, 3)
    log = tracker.allocation_log()
    found = footprint(log, source="measured", device=None, capacity=None)
    assert found.peak.level.allocated == max(one.peak_allocated for one in log.readings)
    assert not found.notes, "the log holds no more than the allocator counted"


def test_the_allocators_counts_are_those_of_its_snapshot(language: Finished) -> None:
    (read,) = of_snapshot(language.run / TRACES / SNAPSHOT)
    measured = footprint_of(language).allocator
    assert measured is not None
    assert read.allocator is not None
    assert measured.allocations == pytest.approx(read.allocator.allocations, rel=0.01)
    # The run counts until its last step ends; the snapshot is written once what was held until then has been let go.
    assert measured.frees < read.allocator.frees <= read.allocator.allocations
    assert (measured.retries, measured.ooms) == (0, 0)
    assert measured.largest_free


def test_a_tensor_is_seen_when_it_comes_and_when_it_goes() -> None:
    torch.cuda.empty_cache()  # a block that was larger would be given out whole
    before = torch.cuda.memory_allocated(DEVICE)
    with AllocationTracker(DEVICE) as tracker:
        tracker.enter("model")
        kept = torch.empty(10 * MIB, dtype=torch.uint8, device=DEVICE)
        torch.empty(30 * MIB, dtype=torch.uint8, device=DEVICE)
        counted = torch.cuda.memory_allocated(DEVICE)
        tracker.close()
    assert counted == before + kept.nbytes
    log: AllocationLog = tracker.allocation_log()
    assert [one.size for one in log.allocations] == [10 * MIB, 30 * MIB]
    assert [one.end is None for one in log.allocations] == [True, False]
    (model,) = (
        one for one in footprint(log, source="measured", device=None, capacity=None).phases if one.phase == "model"
    )
    assert model.level.allocated == counted + 30 * MIB


def test_following_does_not_change_what_training_takes(language: Finished, tmp_path: Path) -> None:
    done = gpubench(
        *("train-bench", *GPT2, "--device=cuda", "--repeats=1", "--steps=5", "--training.warmup_steps=2", "-q"),
        results=tmp_path,
    )
    assert done.code == 0, done.stderr
    peaks = {one["name"]: one["estimate"] for one in done.document(SUMMARY)["metrics"]}
    assert footprint_of(language).peak.level.allocated == pytest.approx(peaks["peak_memory_allocated"], rel=0.01)


# --- The allocator's own snapshot


def test_the_snapshot_of_a_run_reads_back_to_the_same_peak(language: Finished) -> None:
    (read,) = of_snapshot(language.run / TRACES / SNAPSHOT)
    measured = footprint_of(language).peak
    assert not read.truncated
    assert read.peak.level.allocated == pytest.approx(measured.level.allocated, rel=0.01)
    assert read.peak.phase == measured.phase


def test_a_run_that_is_out_of_memory_keeps_what_held_it_and_where(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(GREEDY)
    done = gpubench(
        *("memory", "--model=greedy:build", "--device=cuda", "--precision=fp32", "--batch-size=4", "-q"),
        results=tmp_path / "results",
        cwd=tmp_path,
    )
    assert done.code == 1
    assert "out of memory in forward of step 0" in done.stderr
    found = footprint_of(done)
    assert (found.peak.stage, found.peak.phase) == ("first", "forward")
    assert found.holders[0].operator == "aten::empty"
    assert found.holders[0].size > found.peak.level.total / 2
    (read,) = of_snapshot(done.run / TRACES / SNAPSHOT)
    assert read.peak.level.allocated == pytest.approx(found.peak.level.allocated, rel=0.01)


def test_a_run_that_computes_activations_again_is_recorded(tmp_path: Path) -> None:
    # BERT ends a recomputation early, by an exception through which the allocator frees memory.
    options = ("--model=bert-tiny", "--batch-size=2", "--model.activation_checkpointing=true", "--device=cuda")
    assert footprint_of(followed(tmp_path, *options)).peak.stage == "steady"


# --- What was predicted


TENSORS = ("parameters", "buffers", "optimizer_state", "activations", "inputs")


def kept_for_the_backward_pass(found: Footprint) -> int:
    """The bytes of tensors that a steady step holds after its forward pass."""
    (end,) = (one.end for one in found.phases if (one.stage, one.phase) == ("steady", "forward"))
    return sum(end.get(name, 0) for name in TENSORS)


@pytest.mark.parametrize("options", [GPT2, RESNET], ids=["gpt2", "resnet18"])
def test_a_prediction_meets_what_is_measured(options: tuple[str, ...], tmp_path: Path) -> None:
    known = find_accelerator(torch.cuda.get_device_name(DEVICE).removesuffix(" (simulated)"))
    if known is None:
        pytest.skip("predictions are for GPUs of the hardware table")
    measured = footprint_of(followed(tmp_path / "measured", *options, "--device=cuda"))
    predicted = footprint_of(followed(tmp_path / "predicted", *options, "--predict", f"--device-model={known.key}"))
    assert kept_for_the_backward_pass(predicted) == pytest.approx(kept_for_the_backward_pass(measured), rel=0.02)
    if options == RESNET:
        return  # cuDNN's workspaces are not predicted, and are most of the peak where it tries algorithms
    assert predicted.peak.phase == measured.peak.phase
    assert predicted.peak.level.allocated == pytest.approx(measured.peak.level.allocated, rel=0.02)
    if installed() < Release(2, 15):  # later ones are predicted with a warning
        assert predicted.peak.level.reserved == pytest.approx(measured.peak.level.reserved, rel=0.05)
    assert measured.peak.amounts["parameters"] == predicted.peak.amounts["parameters"]
    assert measured.peak.amounts["optimizer_state"] == predicted.peak.amounts["optimizer_state"]


PROGRAM = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)).to("cuda")
adam = torch.optim.Adam(model.parameters(), foreach=False)
scaler = torch.amp.GradScaler("cuda", init_scale=1.0)
fast = torch.compile(model, fullgraph=True)
for _ in range(9):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = fast(torch.randn(64, 512).to("cuda")).square().mean()
    scaler.scale(loss).backward()
    scaler.step(adam)
    scaler.update()
    adam.zero_grad()
"""


def test_the_memory_of_a_program_is_that_of_its_shapes_in_blocks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    done = gpubench("memory", "-q", "--", sys.executable, str(script), results=tmp_path)
    assert done.code == 0, done.stderr
    found = footprint_of(done)
    weights = 4 * (512 * 1024 + 1024 + 1024 * 512 + 512)
    amounts = found.peak.amounts
    assert found.device == torch.cuda.get_device_name()
    assert found.capacity == torch.cuda.mem_get_info()[1]
    # The peak of a run is in the backward pass where autograd's thread has a large workspace of its own.
    (update,) = [one for one in found.phases if (one.stage, one.phase) == ("steady", "optimizer")]
    assert (update.peak["parameters"], update.peak["gradients"]) == (weights, weights)
    assert found.peak.phase == ("optimizer" if installed() < Release(2, 15) else "backward")
    # The counters of the steps are on the host. The scaler keeps a number, made in the optimizer's phase.
    assert amounts["optimizer_state"] == pytest.approx(2 * weights, abs=512)
    (forward,) = [one for one in found.phases if (one.stage, one.phase) == ("steady", "forward")]
    assert forward.peak["activations"] >= 2 * 64 * (512 + 1024 + 512)
    assert found.peak.level.reserved
    assert found.peak.level.reserved >= found.peak.level.allocated
    assert sum(amounts.values()) == found.peak.level.total
    assert any("torch.compile was off" in note for note in found.notes)
