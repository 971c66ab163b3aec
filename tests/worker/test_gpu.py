"""What can only be seen on a GPU: that nothing waits for it, and that what is read from it is right."""

import functools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Finished, gpubench, simulated
from waiting import nothing_waits
from worked import small

from gpubench.channel import Activity
from gpubench.ranks import Ranks
from gpubench.settings.schema import Precision
from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.worker.compute_rates import count_flops
from gpubench.worker.dataloader import Feed
from gpubench.worker.loop import Epochs, StepReader, Trainer, build_trainer
from gpubench.worker.models import build
from gpubench.worker.precision import arithmetic
from gpubench.worker.timing import CudaClock, StepTimer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHORT = ("--repeats", "1", "--logging.graph=false", "--device", "cuda")
SPIN = 200_000_000  # GPU clock cycles: about a tenth of a second


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


# --- The clock and the timer


@pytest.mark.simulated
def test_marks_never_wait_and_a_step_is_read_while_the_device_is_busy_with_the_next(device: torch.device) -> None:
    clock = CudaClock(device)
    timer = StepTimer(clock, Activity(), 0, 0)
    timer.start(0.0)
    value = torch.ones((), device=device)
    clock.read([value])  # the first allocation on the reading stream may wait
    torch.cuda.synchronize(device)
    with nothing_waits():
        timer.begin(0)
        timer.enter("forward")
        timer.issued(0, 1, [value * 3])
        timer.begin(1)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(SPIN)
    with nothing_waits():
        timer.issued(0, 1, [value * 4])
        timer.begin(2)
    busy = clock.mark()
    ((step, values),) = list(timer.collect())
    assert not clock.passed(busy), "reading the first step waited for the second"
    assert (step.step, values) == (0, [3.0])
    timer.stop()
    later = {step.step: values for step, values in timer.collect()}
    assert later[1] == [4.0]


@pytest.mark.simulated
def test_the_device_is_timed_and_not_the_host_that_issues(device: torch.device) -> None:
    clock = CudaClock(device)
    timer = StepTimer(clock, Activity(), 0, 0)
    torch.cuda._sleep(SPIN)  # loads the kernel, and clocks that idled go up
    torch.cuda.synchronize(device)
    timer.begin(0)
    timer.enter("forward")
    torch.cuda._sleep(SPIN)
    timer.enter("backward")
    torch.cuda._sleep(2 * SPIN)
    timer.issued(0, 1, [])
    timer.stop()
    ((step, _),) = list(timer.collect())
    assert step.phases["backward"] / step.phases["forward"] == pytest.approx(2, rel=0.25)
    assert step.host < step.total / 2


@pytest.mark.simulated
def test_marks_are_recycled(device: torch.device) -> None:
    clock = CudaClock(device)
    timer = StepTimer(clock, Activity(), 0, 0)
    seen = set()
    for number in range(50):
        timer.begin(number)
        timer.enter("forward")
        assert timer._current
        seen |= {id(mark) for _, mark in timer._current.marks}
        timer.issued(0, 1, [])
        torch.cuda.synchronize(device)
        list(timer.collect())
    assert len(seen) < 10


# --- The training step


def trainer_of(precision: Precision, device: torch.device, model: str = "resnet-tiny", **training: Any) -> Trainer:
    training = {"batch_size": 16} | training
    settings = small(device="cuda", precision=precision, model={"name": model}, training=training)
    workload = build(settings.model, settings.data, settings.seed)
    timer = StepTimer(CudaClock(device), Activity(), 0, 0)
    return build_trainer(settings, Ranks(0, 0, 1, 1), device, workload, arithmetic(precision, device), timer)


@contextmanager
def batches_of(trainer: Trainer) -> Iterator[Epochs]:
    settings, workload = trainer.settings, trainer.workload
    with Feed(settings.data, None, workload.make_batch, 16, 0, 1, settings.seed, trainer.device) as feed:
        yield Epochs(feed, 16)


@pytest.mark.parametrize("model", ["resnet-tiny", "vit-tiny", "bert-tiny"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "amp"])
@pytest.mark.simulated
def test_a_training_step_never_waits_for_the_device(precision: str, model: str, device: torch.device) -> None:
    trainer = trainer_of(Precision(precision), device, model, grad_accumulation=2)
    timer = trainer.timer
    with batches_of(trainer) as batches:
        for number in range(3):  # libraries load and kernels are chosen
            timer.begin(number)
            trainer.step(batches, 32)
        torch.cuda.synchronize(device)
        with nothing_waits():
            for number in range(3, 6):
                timer.begin(number)
                trainer.step(batches, 32)
        timer.stop()
        steps = [step for step, _ in timer.collect()]
    assert [step.step for step in steps] == list(range(6))
    for step in steps:
        assert {"forward", "backward", "optimizer"} <= step.phases.keys()
        assert all(seconds >= 0 for seconds in step.phases.values())


@pytest.mark.simulated
def test_steps_that_the_scaler_skips_are_told_by_its_scale(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**40))
    trainer = trainer_of(Precision.amp, device)
    scale = trainer.arithmetic.scale()
    assert scale is not None
    reader = StepReader(float(scale))
    parameter = next(trainer.workload.module.parameters())
    copies = [parameter.detach().clone()]
    with batches_of(trainer) as batches:
        for number in range(40):
            trainer.timer.begin(number)
            trainer.step(batches, 16)
            copies.append(parameter.detach().clone())
        trainer.timer.stop()
        steps = reader.read(trainer.timer)
    moved = [not torch.equal(before, after) for before, after in pairwise(copies)]
    assert [step.skipped for step in steps] == [not it for it in moved]
    assert steps[0].skipped
    assert not steps[-1].skipped


# --- FLOPs


@pytest.mark.parametrize("model", ["resnet-tiny", "gpt2-tiny", "bert-tiny"])
@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@pytest.mark.simulated
def test_the_flops_do_not_depend_on_the_device(model: str, precision: Precision, device: torch.device) -> None:
    totals = []
    for place in (torch.device("cpu"), device):
        workload = build(ModelSettings(name=model), DataSettings(), seed=0)
        assert workload.make_batch
        feed = Feed(DataSettings(), None, workload.make_batch, 2, 0, 1, 0, place)
        batch = next(feed.epoch(0))
        module, rules = workload.module.to(place), arithmetic(precision, place)

        def step(workload: Any = workload, module: Any = module, rules: Any = rules, batch: Any = batch) -> None:
            with rules.forward():
                loss = workload.loss(module, batch)
            loss.backward()

        totals.append(count_flops(step).total)
    assert totals[0] == totals[1] > 0


# --- Whole runs


def metrics(run: Finished) -> dict[str, Any]:
    return {metric["name"]: metric["estimate"] for metric in run.document("summary.json")["metrics"]}


@pytest.fixture(scope="module")
def transformer(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A few seconds of a model that is mostly matrix products."""
    size = ("--model=bert-tiny", "--batch-size=8") if simulated() else ("--model=bert-base", "--batch-size=128")
    peak = () if simulated() else ("--measurement.measure_peak",)  # whose products the CPU would compute for minutes
    options = (*size, "--precision", "bf16", *peak)
    pace = ("--training.warmup_steps=10", "--training.seconds=5", "--measurement.telemetry_interval=0.1")
    done = gpubench("train-bench", *options, *pace, *SHORT, results=tmp_path_factory.mktemp("transformer"))
    assert done.code == 0, done.stderr
    return done


@pytest.mark.simulated
def test_phases_steps_and_wall_agree_within_half_a_percent(transformer: Finished) -> None:
    assert 0 <= metrics(transformer)["closure_error"] < 0.005


@pytest.mark.device
def test_a_limit_in_seconds_is_kept_though_the_first_step_is_slow(transformer: Finished) -> None:
    steps = transformer.lines("steps.jsonl")
    assert steps[0]["total"] > steps[-1]["total"]
    assert sum(step["total"] for step in steps[10:]) == pytest.approx(5, rel=0.4)


@pytest.mark.device
def test_mfu_is_a_fraction_and_the_measured_peak_lies_below_the_data_sheets(transformer: Finished) -> None:
    found, summary = metrics(transformer), transformer.document("summary.json")
    assert 0.05 < found["mfu_of_measured_peak"] < 1
    assert 0 < found["measured_peak"] < 1e16
    if summary["peak"]:
        assert 0 < found["mfu"] < found["mfu_of_measured_peak"]
        assert found["measured_peak"] < summary["peak"]["flops_per_s"]


@pytest.mark.simulated
def test_energy_and_telemetry_come_from_the_driver(transformer: Finished) -> None:
    steps = [step["time"] for step in transformer.lines("steps.jsonl")]
    samples = [one for one in transformer.lines("telemetry.jsonl") if steps[0] <= one["time"] <= steps[-1]]
    gpus = [sample["gpus"][0] for sample in samples]  # without those before the process uses the GPU, and after it
    joules = [gpu["energy_j"] for gpu in gpus]
    assert joules == sorted(joules)
    assert joules[-1] > joules[0]
    for field in ("power_w", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "memory_used_bytes"):
        assert all(gpu[field] > 0 for gpu in gpus), field
    if not simulated():  # which is faster than the processor that feeds it
        assert max(gpu["utilization"] for gpu in gpus) > 0.5
    assert all(isinstance(gpu["throttle_reasons"], list) for gpu in gpus)
    found = metrics(transformer)
    # Energy is power x time: J/sample x samples/s is the mean power, which the samples show too.
    watts = found["energy_per_sample"] * found["throughput"]
    assert min(gpu["power_w"] for gpu in gpus) < watts < 1.2 * max(gpu["power_w"] for gpu in gpus)


@pytest.mark.simulated
def test_the_environment_names_the_gpu(transformer: Finished) -> None:
    (gpu, *_) = transformer.document("environment.json")["gpus"]
    assert gpu["name"] == torch.cuda.get_device_name(0)


@pytest.mark.simulated
def test_peak_memory_is_what_the_allocator_says(transformer: Finished) -> None:
    found = metrics(transformer)
    assert 0 < found["peak_memory_allocated"] <= found["peak_memory_reserved"]
    assert found["peak_memory_reserved"] < torch.cuda.get_device_properties(0).total_memory


TUNED = """
import torch
from torch import nn

class Tuned(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = nn.Linear(16, 16), 0

    def forward(self, batch):
        self.calls += 1
        if self.calls == 1:
            torch.empty(2**28, device=batch.device)  # as a search for the fastest algorithm takes
        return self.inner(batch)

def build():
    return Tuned(), lambda size: torch.ones(size, 16), lambda module, batch: module(batch).sum()
"""


@pytest.mark.simulated
def test_what_only_the_first_step_takes_is_the_setups_peak_and_not_the_steps(tmp_path: Path) -> None:
    (tmp_path / "tuned.py").write_text(TUNED)
    options = ("--model", "tuned:build", "--precision", "fp32", "--steps", "5", "--training.warmup_steps=3")
    done = gpubench("train-bench", *options, *SHORT, results=tmp_path / "results", cwd=tmp_path)
    assert done.code == 0, done.stderr
    found = metrics(done)
    assert found["setup_peak_memory_allocated"] >= 2**30 > 10 * found["peak_memory_allocated"]
    assert found["setup_peak_memory_reserved"] >= 2**30


@pytest.mark.simulated
def test_running_out_of_memory_names_the_phase_and_the_peak(tmp_path: Path) -> None:
    too_much = ("--model", "gpt2", "--precision", "bf16", "--batch-size", "100000", "--data.samples=100000")
    done = gpubench("train-bench", *too_much, "--steps", "1", *SHORT, results=tmp_path)
    assert done.code == 1
    assert "out of memory in forward of step 0; peak allocated" in done.stderr
    assert "--batch-size" in done.stderr
    record = done.document("run.json")
    assert (record["status"], record["error"]["kind"]) == ("failed", "OutOfMemory")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            "--model=resnet-tiny --performance.channels_last=true --precision=amp", marks=pytest.mark.simulated
        ),
        pytest.param(
            "--model=resnet-tiny --performance.compile=true --performance.channels_last=true", marks=pytest.mark.device
        ),
        pytest.param(
            "--model=gpt2-tiny --performance.compile=true --performance.compile_mode=reduce-overhead",
            marks=pytest.mark.device,
        ),
        pytest.param(
            "--model=resnet-tiny --data=synthetic-host --data.workers=2 --data.samples=400", marks=pytest.mark.simulated
        ),
        pytest.param(
            "--model=gpt2-tiny --model.activation_checkpointing=true --precision=tf32", marks=pytest.mark.simulated
        ),
    ],
    ids=["channels-last", "compile", "cuda-graphs", "loader", "checkpointing"],
)
def test_a_run_completes_and_its_loss_is_finite(options: str, tmp_path: Path) -> None:
    done = gpubench("train-bench", *options.split(), "--steps", "20", *SHORT, results=tmp_path)
    assert done.code == 0, done.stderr
    losses = [step["loss"] for step in done.lines("steps.jsonl")]
    assert len(losses) == 30
    assert losses[-1] < 1.5 * losses[0]


@pytest.mark.simulated
def test_data_from_the_host_is_copied_in_a_phase_of_its_own(tmp_path: Path) -> None:
    options = ("--model", "resnet-tiny", "--data", "synthetic-host", "--data.image_size=128", "--data.samples=3000")
    done = gpubench("train-bench", *options, "--data.workers=4", "--steps", "20", *SHORT, results=tmp_path)
    assert done.code == 0, done.stderr
    found = metrics(done)
    assert found["phase_host_to_device"] > 0
    assert found["phase_data_wait"] > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NCCL refuses two ranks on one")
@pytest.mark.simulated
def test_two_ranks_reduce_their_gradients(tmp_path: Path) -> None:
    options = (
        "--model",
        "bert-tiny" if simulated() else "bert-base",
        "--batch-size",
        "32",
        "--world-size",
        "2",
        "--steps",
        "20",
    )
    done = gpubench("train-bench", *options, *SHORT, results=tmp_path)
    assert done.code == 0, done.stderr
    found = metrics(done)
    assert found["phase_exposed_communication"] > 0
    assert found["closure_error"] < 0.005


@pytest.mark.simulated
def test_json_is_one_document_on_a_gpu_too(tmp_path: Path) -> None:
    began = time.time()
    done = gpubench("train-bench", "--json", "--model", "resnet-tiny", "--steps", "5", *SHORT, results=tmp_path)
    assert done.code == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    (window,) = run["steady"]
    assert began < window["start"] < window["end"] < time.time(), "steps lie on the calendar of the host"
