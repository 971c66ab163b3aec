"""`gpubench train-bench` as a user runs it, on the tiny models."""

import csv
import json
import re
import sys
from pathlib import Path
from statistics import harmonic_mean

import pytest
import yaml
from PIL import Image
from running import SMALL, TINY, Finished, gpubench, metrics

from gpubench.host.order import drawn

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One plain run of two repeats, shared by the tests that only look."""
    results = tmp_path_factory.mktemp("tiny")
    options = ("--steps", "20", "--repeats", "2", "--measurement.measure_peak", "--data.samples=100")
    done = gpubench("train-bench", "--model", "gpt2-tiny", "--performance.cpu_threads=1", *options, results=results)
    assert done.code == 0, done.stderr
    return done


def test_it_writes_the_whole_run_directory(tiny: Finished) -> None:
    names = {path.name for path in tiny.run.iterdir()}
    assert names == {
        "run.json",
        "config.yaml",
        "environment.json",
        "steps.jsonl",
        "epochs.jsonl",
        "telemetry.jsonl",
        "summary.json",
        "summary.csv",
        "noise.json",
        "report.html",
        "run.log",
        "tensorboard",
    }
    record = tiny.document("run.json")
    assert (record["status"], record["repeats"], record["repeat_kind"]) == ("completed", 2, "process")
    assert record["started"] < record["ended"]
    assert tiny.document("environment.json")["threads"]["intra_op"] == 1
    assert tiny.document("environment.json")["variables"]["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_log_says_who_each_rank_is(tiny: Finished) -> None:
    lines = [line for line in (tiny.run / "run.log").read_text().splitlines() if 'msg="rank 0 of 1"' in line]
    assert len(lines) == 2, "one of each repeat, which has a process of its own"
    for line in lines:
        assert re.search(r" level=INFO rank=0 .* host=\S+ pid=\d+ device=cpu threads=1$", line)


def test_every_repeat_on_a_cpu_times_the_reference_workload(tiny: Finished) -> None:
    reference = metrics(tiny)["yardstick_time"]
    assert len(reference["repeats"]) == 2
    assert 0 < reference["estimate"] < 1
    assert reference["better"] is None


def test_every_step_is_recorded_and_its_phases_sum_to_it(tiny: Finished) -> None:
    steps = tiny.lines("steps.jsonl")
    assert [(step["repeat"], step["step"]) for step in steps] == [(r, s) for r in range(2) for s in range(30)]
    for step in steps:
        assert sum(step["phases"].values()) == pytest.approx(step["total"], rel=1e-6)
        assert {"data_wait", "host_to_device", "forward", "backward", "optimizer", "other"} == step["phases"].keys()
        assert step["loss"] > 0


def test_the_throughput_is_the_samples_over_the_wall_of_the_steady_window(tiny: Finished) -> None:
    summary = tiny.document("summary.json")
    rates = []
    for window in summary["steady"]:
        own = [step for step in tiny.lines("steps.jsonl") if step["repeat"] == window["repeat"]][window["first"] :]
        assert len(own) == window["steps"]
        rates.append(sum(step["samples"] for step in own) / sum(step["total"] for step in own))
    throughput = metrics(tiny)["throughput"]
    assert throughput["repeats"] == pytest.approx(rates)
    mean = harmonic_mean(rates)  # of the time that one sample takes
    assert throughput["estimate"] == pytest.approx(mean)
    assert metrics(tiny)["token_throughput"]["estimate"] == pytest.approx(32 * mean)


def test_the_books_close(tiny: Finished) -> None:
    assert max(metrics(tiny)["closure_error"]["repeats"]) < 0.005
    phases = sum(metric["estimate"] for name, metric in metrics(tiny).items() if name.startswith("phase_"))
    assert phases == pytest.approx(metrics(tiny)["step_time"]["estimate"], rel=1e-6)


def test_an_unknown_device_has_no_mfu_but_a_share_of_the_measured_peak(tiny: Finished) -> None:
    found = metrics(tiny)
    assert "mfu" not in found
    assert 0 < found["mfu_of_measured_peak"]["estimate"] < 1
    ceiling = found["measured_peak"]["estimate"]
    achieved = found["model_flops_per_sample"]["estimate"] * found["throughput"]["estimate"]
    assert found["mfu_of_measured_peak"]["estimate"] == pytest.approx(achieved / ceiling)


def test_epochs_are_counted_by_the_size_of_the_data(tiny: Finished) -> None:
    epochs = [line for line in tiny.lines("epochs.jsonl") if line["repeat"] == 0]
    assert [line["epoch"] for line in epochs] == [0, 1, 2]
    assert [line["steps"] for line in epochs] == [12, 12, 6]  # 100 samples hold 12 batches of 8
    assert all(line["samples_per_second"] == pytest.approx(line["samples"] / line["seconds"]) for line in epochs)


def test_the_csv_says_what_the_json_says(tiny: Finished) -> None:
    rows = list(csv.DictReader((tiny.run / "summary.csv").read_text().splitlines()))
    assert {row["name"]: float(row["estimate"]) for row in rows} == {
        name: pytest.approx(metric["estimate"]) for name, metric in metrics(tiny).items()
    }


def test_tensorboard_holds_curves_configuration_graph_and_hyperparameters(tiny: Finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = EventAccumulator(str(tiny.run / "tensorboard"))
    root.Reload()
    assert root.Tags()["graph"]
    assert "config" in root.Tags()["tensors"]
    assert "_hparams_/session_start_info" in root.Tags()["tensors"]
    assert root.Scalars("summary/throughput")[0].value == pytest.approx(metrics(tiny)["throughput"]["estimate"])
    curve = EventAccumulator(str(tiny.run / "tensorboard" / "repeat-1"))
    curve.Reload()
    steps = [step for step in tiny.lines("steps.jsonl") if step["repeat"] == 1]
    assert [point.value for point in curve.Scalars("rank0/loss")] == [pytest.approx(step["loss"]) for step in steps]


def test_its_config_reproduces_the_run(tiny: Finished, tmp_path: Path) -> None:
    done = gpubench("train-bench", "--config", str(tiny.run / "config.yaml"), "--repeats", "1", results=tmp_path)
    assert done.code == 0, done.stderr
    again, before = (yaml.safe_load((run / "config.yaml").read_text()) for run in (done.run, tiny.run))
    again["measurement"]["repeats"], again["results"] = before["measurement"]["repeats"], before["results"]
    assert again == before
    losses = [[line["loss"] for line in run.lines("steps.jsonl") if line["repeat"] == 0] for run in (tiny, done)]
    assert losses[0] == losses[1]


def test_json_is_one_document_and_nothing_else(tmp_path: Path) -> None:
    options = ("--steps", "3", "--training.warmup_steps=1", "--repeats", "2", "--vs", "precision=bf16", "--json")
    done = gpubench("train-bench", *SMALL, *options, results=tmp_path)
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    assert [run["status"] for run in document["runs"]] == ["completed", "completed"]
    assert all(verdict["units"] == [2, 2] and verdict["paired"] for verdict in document["comparisons"][0]["verdicts"])
    assert document["comparisons"][0]["baseline"]["label"].startswith("baseline")
    configs = [yaml.safe_load((Path(run["path"]) / "config.yaml").read_text()) for run in document["runs"]]
    assert [config["precision"] for config in configs] == ["fp32", "bf16"]
    starts = []
    for number, run in enumerate(document["runs"]):
        steps = [json.loads(line) for line in (Path(run["path"]) / "steps.jsonl").read_text().splitlines()]
        starts += [(min(step["time"] for step in steps if step["repeat"] == repeat), number) for repeat in (0, 1)]
    records = [json.loads((Path(run["path"]) / "run.json").read_text()) for run in document["runs"]]
    (seed,) = {record["order_seed"] for record in records}
    assert [number for _, number in sorted(starts)] == [place for order in drawn(2, seed)[:2] for place in order]


def test_it_repeats_until_the_target_precision_or_the_cap(tmp_path: Path) -> None:
    options = ("--steps", "5", "--measurement.target_precision=0.001%", "--measurement.max_repeats=3")
    done = gpubench("train-bench", *SMALL, *options, results=tmp_path)
    assert done.code == 0, done.stderr
    assert done.document("run.json")["repeats"] == 3
    (missed,) = [said for said in done.document("summary.json")["warnings"] if "the target is" in said]
    assert missed.startswith("the throughput is known to ")
    assert f"warning: {missed}" in done.stdout
    assert missed not in done.stderr


def test_seconds_become_steps_and_epochs_count_batches(tmp_path: Path) -> None:
    timed = gpubench("train-bench", *SMALL, "--training.seconds=0.5", "--repeats", "1", results=tmp_path / "seconds")
    assert timed.code == 0, timed.stderr
    (window,) = timed.document("summary.json")["steady"]
    assert window["end"] - window["start"] > 0.1
    options = ("--training.epochs=2", "--data.samples=64", "--training.warmup_steps=2", "--repeats", "1")
    counted = gpubench("train-bench", *SMALL, *options, results=tmp_path / "epochs")
    assert counted.code == 0, counted.stderr
    assert len(counted.lines("steps.jsonl")) == 2 * 64 // 8


def test_gradient_accumulation_counts_all_its_samples(tmp_path: Path) -> None:
    options = ("--training.grad_accumulation=3", "--steps", "2", "--training.warmup_steps=1", "--repeats", "1")
    done = gpubench("train-bench", *SMALL, *options, results=tmp_path)
    assert done.code == 0, done.stderr
    assert {line["samples"] for line in done.lines("steps.jsonl")} == {24}


def test_two_ranks_share_the_work_and_the_straggler_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, time, torch\n"
        "from torch import nn\n"
        "def model():\n"
        "    def loss(module, batch):\n"
        "        if os.environ['RANK'] == '1': time.sleep(0.02)\n"
        "        return module(batch).square().mean()\n"
        "    return nn.Linear(8, 8), lambda n: torch.randn(n, 8), loss\n"
    )
    options = ("--world-size", "2", "--steps", "10", "--repeats", "1", "--performance.cpu_threads=1")
    done = gpubench("train-bench", "--model", "slow:model", *options, results=tmp_path / "results", cwd=tmp_path)
    assert done.code == 0, done.stderr
    summary = done.document("summary.json")
    first, second = summary["ranks"]
    assert second["slowest"] > 0.9
    assert second["busy_time"] - first["busy_time"] > 0.01  # it slept 20 ms a step
    assert abs(second["step_time"] - first["step_time"]) < 0.005  # but they step together
    found = metrics(done)
    assert found["straggler_skew"]["estimate"] > 0.3
    assert found["throughput"]["estimate"] == pytest.approx(2 * 8 / found["step_time"]["estimate"], rel=1e-6)
    assert {line["rank"] for line in done.lines("steps.jsonl")} == {0, 1}


def test_fsdp2_trains_with_accumulation_and_checkpointing(tmp_path: Path) -> None:
    options = ("--distributed.strategy=fsdp2", "--training.grad_accumulation=2", "--model.activation_checkpointing")
    done = gpubench(
        "train-bench", *SMALL, *options, "--world-size", "2", "--steps", "4", "--repeats", "1", results=tmp_path
    )
    assert done.code == 0, done.stderr
    assert "phase_exposed_communication" not in metrics(
        done
    )  # inside forward and backward, and not claimed to be known
    assert metrics(done)["throughput"]["estimate"] > 0


def test_under_torchrun_the_ranks_are_the_workers(tmp_path: Path) -> None:
    options = ("--steps", "5", "--repeats", "2", "-q")
    done = gpubench("train-bench", *SMALL, *options, results=tmp_path, launcher=TORCHRUN)
    assert done.code == 0, done.stderr
    record = done.document("run.json")
    assert (record["world_size"], record["repeats"], record["repeat_kind"]) == (2, 2, "in-process")
    assert {(line["repeat"], line["rank"]) for line in done.lines("steps.jsonl")} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_under_torchrun_a_wrong_setting_is_told_once(tmp_path: Path) -> None:
    done = gpubench("train-bench", "--precision", "fp64", results=tmp_path, launcher=TORCHRUN)
    assert done.code != 0
    assert done.stderr.count("error: precision = 'fp64'") == 1


def test_images_are_read_by_loader_processes(tmp_path: Path) -> None:
    for number in range(40):
        folder = tmp_path / "photos" / ("cats" if number % 2 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((48, 40), 60).convert("RGB").save(folder / f"{number}.png")
    options = (
        "--data",
        "image-folder",
        "--data.path",
        str(tmp_path / "photos"),
        "--data.workers=1",
        "--batch-size",
        "4",
    )
    done = gpubench(
        "train-bench",
        "--model",
        "resnet-tiny",
        *options,
        "--steps",
        "6",
        "--repeats",
        "1",
        results=tmp_path / "results",
    )
    assert done.code == 0, done.stderr
    assert [line["steps"] for line in done.lines("epochs.jsonl")] == [10, 6]


def test_text_is_read_byte_by_byte(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 200)
    options = ("--data", "text", "--data.path", str(text), "--steps", "30", "--repeats", "1")
    done = gpubench("train-bench", *TINY, *options, "--training.learning_rate=0.01", results=tmp_path / "results")
    assert done.code == 0, done.stderr
    losses = [line["loss"] for line in done.lines("steps.jsonl")]
    assert losses[-1] < losses[0] - 1  # a dull text is soon learnt


@pytest.mark.parametrize(
    ("activation", "precision"),
    [
        ("", "fp32"),  # has no kernels, each of which a C++ compiler would take several seconds for
        pytest.param("nn.ReLU(), ", "bf16", marks=pytest.mark.stress),
    ],
)
def test_compiled_models_run_and_their_first_step_pays(tmp_path: Path, activation: str, precision: str) -> None:
    (tmp_path / "small.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def model():\n"
        f"    layers = nn.Linear(8, 8, bias=False), {activation}nn.Linear(8, 4, bias=False)\n"
        "    loss = lambda module, batch: module(batch).square().mean()\n"
        "    return nn.Sequential(*layers), lambda n: torch.randn(n, 8), loss\n"
    )
    options = ("--performance.compile", "--steps", "5", "--repeats", "1", "--precision", precision)
    done = gpubench("train-bench", "--model", "small:model", *options, results=tmp_path / "results", cwd=tmp_path)
    assert done.code == 0, done.stderr
    found = metrics(done)
    assert found["first_step_time"]["estimate"] > 10 * found["step_time"]["estimate"]
    assert found["model_flops_per_sample"]["estimate"] == 3 * 2 * (64 + 32) - 2 * 64  # no gradient of the input


def test_wandb_works_offline_and_stays_in_the_run_directory(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    options = ("--logging.wandb", "--logging.wandb_mode=offline", "--steps", "3", "--repeats", "1")
    done = gpubench("train-bench", *SMALL, *options, results=tmp_path / "results", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "WeightsAndBiases failed" not in done.stderr
    (record,) = done.run.glob("wandb/offline-run-*/run-*.wandb")
    assert b"throughput" in record.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"results"}
