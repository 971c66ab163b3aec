"""`--inference`: forward passes of a model or of a user's program, their latency, and what only training uses."""

import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from cases_made import PERCENT, STEPS, case, cpu, ids, metric, phase, training
from cli import complaint
from places import SUPPORT
from running import SMALL, Finished, gpubench, metrics
from torch import nn

from gpubench.errors import ModelError
from gpubench.report.run import beyond_latency
from gpubench.runs import stats
from gpubench.settings.defaults import complete
from gpubench.settings.loading import completed, load
from gpubench.settings.schema import TrainSettings
from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.worker import models

CommandLine = Callable[..., Finished]
PROGRAM = str(SUPPORT / "inference_program.py")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Two batch sizes, each with as many steps as the 99th percentile takes."""
    options = ("--inference", "--batch-size", "4,2", "--steps", "450", "--repeats", "1", "-q")
    done = gpubench("train-bench", *SMALL, *options, results=tmp_path_factory.mktemp("swept"))
    assert done.code == 0, done.stderr
    return done


def loaded(run: Path) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]:
    """Returns the metrics by name, the steps and the summary of a run."""
    summary = json.loads((run / "summary.json").read_text())
    steps = [json.loads(line) for line in (run / "steps.jsonl").read_text().splitlines()]
    return {metric["name"]: metric for metric in summary["metrics"]}, steps, summary


def test_a_step_is_a_forward_pass_alone(swept: Finished) -> None:
    for run in swept.runs:
        found, steps, summary = loaded(run)
        assert len(steps) == 460
        assert {"data_wait", "host_to_device", "forward", "other"} == {
            name for step in steps for name in step["phases"]
        }
        assert not any("loss" in step for step in steps)
        assert summary["flops"]["model_flops_per_sample"] == 2 * (16 * 32 + 32 * 4)
        assert not {"final_loss", "starved_steps", "straggler_skew"} & found.keys()


def test_the_latency_is_from_the_batch_on_the_host_to_its_result(swept: Finished) -> None:
    found, steps, summary = loaded(swept.runs[0])
    steady = [step["phases"] for step in steps[summary["steady"][0]["first"] :]]
    latencies = [phases["host_to_device"] + phases["forward"] for phases in steady]
    for name, share in (("latency_p50", 0.5), ("latency_p95", 0.95)):
        assert found[name]["repeats"] == [pytest.approx(np.quantile(latencies, share))]
        assert found[name]["interval"] is None  # one repeat says nothing about others
    assert ("latency_p99" in found) == (len(steady) >= 299)


def test_several_batch_sizes_make_one_table(swept: Finished) -> None:
    sizes = {json.loads((run / "run.json").read_text())["workload"]["sample_shape"] for run in swept.runs}
    assert (len(swept.runs), len(sizes)) == (2, 1)
    lines = swept.stdout.splitlines()
    rows = [line.split()[0] for line in lines if line.strip().endswith("samples/s")]
    assert rows == ["4", "2"]  # in the order given
    assert next(line for line in lines if line.startswith("batch  ")).split()[1:3] == ["latency", "p50"]


def test_what_the_throughput_counts_besides_the_latency_is_named_where_it_is_notable() -> None:
    times = {"latency_p50": 27e-6, "step_time": 100e-6, "phase_forward": 50e-6, "phase_data_wait": 1e-6}
    more = {"phase_other": 29e-6, "phase_evaluation": 20e-6}
    known = {name: metric(name, estimate) for name, estimate in (times | more).items()}
    assert re.findall(r"([\d.]+) %", beyond_latency(known)) == ["27.0", "49.0", "23.0"]
    assert beyond_latency(known | {"step_time": metric("step_time", 30e-6)}) == ""
    assert beyond_latency({"step_time": metric("step_time", 1.0)}) == ""


def test_a_quantile_needs_values_beyond_it() -> None:
    assert [stats.least_values(share) for share in (0.5, 0.95, 0.99)] == [5, 59, 299]
    assert stats.quantile(range(298), 0.99) is None
    assert stats.quantile(range(299), 0.99) == pytest.approx(0.99 * 298)
    assert 1 - 0.99**299 >= 0.95 > 1 - 0.99**298


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--training.optimizer=sgd", "--training.clip_grad_norm=1"], "training.optimizer and training.clip_grad_norm"),
        (["--vs", "distributed.strategy=fsdp2"], "distributed.strategy"),
        (["--batch-size", "2,4", "--vs", "precision=bf16"], "different comparisons"),
        (["--batch-size", "2,2"], "'2' is given twice"),
        (["--batch-size", "2,two"], "training.batch_size = 'two'"),
    ],
)
def test_what_makes_no_sense_is_refused(command_line: CommandLine, options: list[str], said: str) -> None:
    error, _ = complaint(command_line("train-bench", "--inference", "--device", "cpu", *options, "--print-config"))
    assert said in error


def test_a_preset_of_training_serves_inference() -> None:
    run = completed(load(TrainSettings, "resnet50", {"inference": "true", "device": "cpu"}), complete)
    assert (run.settings.training.optimizer, run.settings.training.momentum) == ("adamw", 0.9)  # the defaults
    assert (run.settings.data.image_size, run.settings.training.steps) == (224, None)
    assert not {"training.optimizer", "training.learning_rate"} & run.origins.keys()


Built = tuple[Any, ...]


def pair() -> Built:
    return nn.Linear(3, 2).requires_grad_(False), lambda size: {"input": torch.ones(size, 3)}


def without_loss() -> Built:
    return nn.Bilinear(3, 3, 2), lambda size: (torch.ones(size, 3), torch.ones(size, 3)), None


@pytest.mark.parametrize("build", [pair, without_loss])
def test_inference_needs_no_loss_and_nothing_to_train(build: Callable[[], Built]) -> None:
    name = f"{__name__}:{build.__name__}"
    workload = models.build(ModelSettings(name=name), DataSettings(), 0, inference=True)
    assert not workload.module.training
    assert workload.make_batch
    output = workload.forward(workload.module, workload.make_batch(5))
    assert isinstance(output, torch.Tensor)
    assert output.shape == (5, 2)
    with pytest.raises(ModelError):
        models.build(ModelSettings(name=name), DataSettings(), 0)


@pytest.mark.parametrize("name", ["gpt2-tiny", "unet2d-tiny", "vit-tiny"])
def test_built_in_models_predict_without_their_targets(name: str) -> None:
    workload = models.build(ModelSettings(name=name), DataSettings(), 0, inference=True)
    assert workload.make_batch
    batch = workload.make_batch(2)
    kept = {"input_ids", "clean", "timesteps"}
    needed = {key: batch[key] for key in batch.keys() & kept} if isinstance(batch, dict) else batch[:1]
    with torch.inference_mode():
        assert workload.forward(workload.module, needed) is not None


def test_rules_about_training_say_nothing_about_inference() -> None:
    rank = cpu(
        host={"optimizer": 30 * PERCENT}, phases=[phase("optimizer", host=30 * PERCENT)], optimizer_kernels=STEPS
    )
    environment = {"cpu.usable_cores": 2}
    settings = {"performance__cpu_threads": 2, "training__optimizer_impl": "loop"}
    assert ids(case(rank, settings=training(**settings), environment=environment)) == ["unfused-optimizer"]
    assert ids(case(rank, settings=training(**settings, inference=True), environment=environment)) == []


def test_memory_of_inference_has_neither_gradients_nor_optimizer_state(tmp_path: Path) -> None:
    done = gpubench("memory", *SMALL, "--inference", "-q", results=tmp_path)
    (rank,) = done.document("memory.json")["ranks"]
    held = {category for one in rank["phases"] for category, size in one["peak"].items() if size}
    assert held <= {"parameters", "inputs", "temporaries"}
    assert {one["phase"] for one in rank["phases"]} == {"start", "model", "data", "forward"}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Finished]:
    monkeypatch.setenv(forked.PROGRAMS, "1")

    def call(kind: str, *options: str) -> Finished:
        few = ("--inference", "--repeats", "1", "--steps", "20", "-q", *options)
        return gpubench("train-bench", *few, "--", sys.executable, PROGRAM, kind, results=tmp_path)

    return call


def test_a_program_that_trains_as_well_is_measured_where_it_evaluates(serve: Callable[..., Finished]) -> None:
    done = serve("both")
    assert done.code == 0, done.stderr
    steps = done.lines("steps.jsonl")
    assert len(steps) == 30
    assert {name for step in steps for name in step["phases"]} == {"data_wait", "forward", "other"}
    assert {step["samples"] for step in steps} == {8}  # of a batch of the loader, where training takes 32
    gaps = [after["time"] - before["time"] - before["total"] for before, after in itertools.pairwise(steps)]
    assert [place for place, gap in enumerate(gaps, 1) if gap > 0.09] == [8, 16, 24]  # training, which is left out
    assert metrics(done)["closure_error"]["estimate"] < 0.005
    assert "model.eval()" not in done.stderr


def test_modules_that_take_turns_make_one_step_and_training_mode_a_warning(
    serve: Callable[..., Finished],
) -> None:
    done = serve("turns", "--training.warmup_steps=5")
    steps = done.lines("steps.jsonl")
    assert (done.code, len(steps)) == (0, 25)
    assert {step["samples"] for step in steps} == {8}
    assert "model.eval()" in done.stderr


def test_calls_in_several_threads_at_once_all_count_and_those_inside_of_them_do_not(
    serve: Callable[..., Finished],
) -> None:
    done = serve("threads", "--training.warmup_steps=5")
    steps = done.lines("steps.jsonl")
    assert (done.code, len(steps)) == (0, 25)
    assert [step["samples"] for step in steps[1:]] == [16] * 24  # of the call that is measured and of one beside it
    assert "calls of the model began in another thread" in done.stderr


def test_a_program_that_calls_no_model_is_an_error(serve: Callable[..., Finished]) -> None:
    done = serve("nothing")
    assert done.code == 1
    assert "no call of a model in inference was seen" in done.stderr
