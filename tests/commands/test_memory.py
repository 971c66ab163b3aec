"""`gpubench memory` as a user has it: measured, predicted, from files, the largest batch, and what is refused."""

import json
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli import complaint
from running import SMALL, Finished, gpubench, started
from traces_made import PUBLIC

from gpubench.findings import Findings
from gpubench.memory.batch_sizes import BatchSizes, Trade, Trades, fit, largest, search, weigh
from gpubench.memory.footprint import Footprints

DEEP = '''
import torch
from torch import nn
from torch.nn import functional

def build():
    """Activations are most of it, and there are blocks to recompute."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    return blocks, make_batch, loss

def make_batch(size):
    return torch.rand(size, 64)

def loss(module, batch):
    return functional.mse_loss(module(batch), batch)
'''


def deep(folder: Path, *arguments: str) -> Finished:
    (folder / "deep.py").write_text(DEEP)
    return gpubench("memory", "--model", "deep:build", *arguments, results=folder / "results", cwd=folder)


def followed(path: Path) -> Footprints:
    return msgspec.json.decode((path / "memory.json").read_bytes(), type=Footprints)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("measured")
    return deep(folder, "--device", "cpu", "--batch-size", "512", "-q")


def test_what_was_followed_is_in_the_run_directory_and_sums(measured: Finished) -> None:
    assert not measured.code, measured.stderr
    (rank,) = followed(measured.run).ranks
    moments = [(rank.peak.amounts, rank.peak.level), *((one.peak, one.level) for one in rank.phases)]
    assert all(sum(amounts.values()) == level.total for amounts, level in moments)
    assert [one.phase for one in rank.phases if one.stage == "steady"] == [
        "data", "forward", "loss", "backward", "optimizer", "zero_grad",
    ]  # fmt: skip
    parameters = rank.phases[-1].end["parameters"]
    assert parameters == 4 * 4 * (64 * 256 + 256 + 256 * 64 + 64)
    (metric,) = json.loads((measured.run / "summary.json").read_text())["metrics"]
    assert (metric["name"], metric["estimate"]) == ("peak_memory_allocated", rank.peak.level.allocated)
    assert measured.document("run.json")["status"] == "completed"
    assert (
        "What fills the memory" in (measured.run / "report.html").read_text()
        or "activations" in (measured.run / "report.html").read_text()
    )


def test_the_terminal_leads_with_a_sentence_and_ends_with_where_it_all_is(measured: Finished) -> None:
    lines = [line for line in measured.stdout.splitlines() if line.strip()]
    assert lines[0].startswith("peak ")
    assert " activations" in lines[0]
    assert lines[-2:] == [f"completed: {measured.run}", f"page: {measured.run / 'report.html'}"]
    assert "--model.activation_checkpointing=true" not in measured.stdout, "this model is too small for advice"


def test_curves_of_the_peak_are_in_tensorboard(measured: Finished) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = [folder for folder in (measured.run / "tensorboard").iterdir() if folder.is_dir()]
    tags = {tag for folder in folders for tag in EventAccumulator(str(folder)).Reload().Tags()["scalars"]}
    assert {"memory/peak/allocated", "memory/peak/activations", "memory/steady/forward/peak"} <= tags


def test_a_prediction_says_what_a_measurement_finds_and_compare_lays_them_side_by_side(
    tmp_path: Path, measured: Finished
) -> None:
    done = deep(tmp_path, "--device", "cpu", "--batch-size", "512", "--predict", "--check", "--json", "-q")
    assert not done.code, done.stderr
    document = json.loads(done.stdout)
    predicted, again = (run["memory"]["ranks"][0] for run in document["runs"])
    assert predicted["source"] == "predicted"
    assert predicted["peak"]["level"] == again["peak"]["level"]
    assert msgspec.to_builtins(followed(measured.run).ranks[0].peak.level) == again["peak"]["level"]
    assert document["comparisons"][0]["memory"]["change"] == 0


def test_a_gpu_is_predicted_for_without_one_and_advice_says_what_it_would_save(tmp_path: Path) -> None:
    large = ("--predict", "--device-model", "h200", "--batch-size", "262144", "--data.samples=262144", "-q")
    done = deep(tmp_path, *large)
    assert not done.code, done.stderr
    (rank,) = followed(done.run).ranks
    assert rank.device == "h200"
    assert rank.peak.level.requested <= rank.peak.level.allocated <= (rank.peak.level.reserved or 0)
    assert {"blocks", "segments", "workspaces", "context"} <= {one.name for one in rank.corrections}
    findings = msgspec.json.decode((done.run / "findings.json").read_bytes(), type=Findings)
    (saving,) = [one for one in findings.findings if one.fix == {"model.activation_checkpointing": True}]
    assert saving.expected
    (tmp_path / "apart").mkdir()
    brief = ("--memory.steps=2", "--memory.advise=false")
    plain = deep(tmp_path / "apart", *large, *brief, "--experiment", "plain")
    deep(tmp_path / "apart", *large, *brief, "--model.activation_checkpointing=true", "--experiment", "fixed")
    before, after = (followed(path).ranks[0].most for path in sorted(plain.runs, reverse=True))
    assert saving.expected.estimate == pytest.approx(1 - after / before, abs=1e-6)


def test_fixes_are_run_for_what_they_save_and_cost(tmp_path: Path) -> None:
    # An odd batch in two bytes leaves checkpointing alone to be tried.
    done = deep(tmp_path, "--device", "cpu", "--batch-size", "127", "--precision", "bf16", "--verify", "-q")
    assert not done.code, done.stderr
    (path,) = (tmp_path / "results" / "memory").iterdir()
    findings = msgspec.json.decode((path / "findings.json").read_bytes(), type=Findings)
    (saving,) = [one for one in findings.findings if one.fix == {"model.activation_checkpointing": True}]
    assert saving.measured
    assert saving.measured.outcome == "confirmed"
    assert saving.measured.saving
    assert saving.expected
    assert saving.measured.saving.estimate == pytest.approx(saving.expected.estimate, abs=0.01)
    assert saving.measured.cost
    assert findings.keep == ({} if saving.measured.cost.verdict == "slower" else saving.fix)
    trades = msgspec.json.decode((path / "trades.json").read_bytes(), type=Trades).trades
    assert all(trade.peak and trade.throughput for trade in trades)
    assert any(not trade.fix for trade in trades)
    assert trades[0].efficient, "nothing takes less"
    assert "--model.activation_checkpointing=true" in done.stdout
    assert "as it was" in (path / "report.html").read_text()


def test_the_largest_batch_is_predicted_run_and_timed(tmp_path: Path) -> None:
    done = deep(tmp_path, "--device", "cpu", "--device-memory", "6MiB", "--find-batch-size", "--spare", "5%", "-q")
    assert not done.code, done.stderr
    (path,) = (tmp_path / "results" / "memory").iterdir()
    found = msgspec.json.decode((path / "batch_sizes.json").read_bytes(), type=BatchSizes)
    assert found.limit == int(6 * 2**20 * 0.95)
    assert found.largest
    totals = {point.batch_size: point.total for point in found.points}
    assert totals[found.largest] <= found.limit
    assert min(size for size, total in totals.items() if total > found.limit) <= 1.02 * found.largest + 1
    (ran,) = found.confirmed
    assert (ran.batch_size, ran.total) == (found.largest, totals[found.largest])
    assert max(speed.batch_size for speed in found.speeds) == found.largest
    assert f"is {found.largest}" in done.stdout


def test_no_batch_fits_and_it_is_said(tmp_path: Path) -> None:
    done = deep(tmp_path, "--predict", "--device-memory", "100MiB", "--find-batch-size", "-q")
    assert not done.code, done.stderr
    assert "not even a batch of 1 fits" in done.stdout


def test_two_ranks_are_each_followed(tmp_path: Path) -> None:
    done = gpubench("memory", *SMALL, "--device", "cpu", "--world-size", "2", "-q", results=tmp_path)
    assert not done.code, done.stderr
    assert [rank.rank for rank in followed(done.run).ranks] == [0, 1]
    assert (
        followed(done.run).ranks[0].phases[-1].end["gradients"]
        == followed(done.run).ranks[0].phases[-1].end["parameters"]
    )


def test_a_model_that_fails_keeps_what_was_followed_until_then(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(DEEP + FAILING)
    model = ("--model", "failing:build_failing", "--device", "cpu", "-q")
    done = gpubench("memory", *model, results=tmp_path / "results", cwd=tmp_path)
    assert done.code == 1
    assert "as planned" in done.stderr
    (rank,) = followed(done.run).ranks
    assert rank.phases[-1].stage == "first", "the second never became whole"
    assert "it ended in the forward of step 1" in rank.notes
    assert done.document("run.json")["status"] == "failed"


FAILING = """
calls = []

def failing_loss(module, batch):
    calls.append(1)
    if len(calls) > 1:
        out = module(batch)
        raise RuntimeError("as planned")
    return loss(module, batch)

def build_failing():
    module, make, _ = build()
    return module, make, failing_loss
"""


def test_what_was_measured_stands_though_nothing_can_be_predicted(tmp_path: Path) -> None:
    reading = "def reading_loss(module, batch):\n    found = loss(module, batch)\n    found.item()\n    return found\n"
    built = "def build_reading():\n    module, make, _ = build()\n    return module, make, reading_loss\n"
    (tmp_path / "reading.py").write_text(DEEP + reading + built)
    run = ("memory", "--model", "reading:build_reading", "--device", "cpu", "--batch-size", "512", "-q")
    done = gpubench(*run, results=tmp_path / "measured", cwd=tmp_path)
    assert not done.code, done.stderr
    assert followed(done.run).ranks[0].phases[-1].stage == "steady"
    assert (
        "the savings of fixes cannot be predicted: the step cannot be predicted" in (done.run / "run.log").read_text()
    )
    refused = gpubench(*run, "--predict", results=tmp_path / "predicted", cwd=tmp_path)
    assert "_local_scalar_dense" in complaint(refused)[0]


def test_an_interrupt_while_fixes_are_run_keeps_the_advice(tmp_path: Path) -> None:
    (tmp_path / "deep.py").write_text(DEEP)
    arguments = ("memory", "--model", "deep:build", "--device", "cpu", "--batch-size", "512", "--verify")
    with started(*arguments, results=tmp_path / "results", cwd=tmp_path) as going:
        going.wait_for("memory-verify/*/run.json")
        going.process.send_signal(signal.SIGINT)
        assert going.finish(60).code == 130
    (path,) = (tmp_path / "results" / "memory").iterdir()
    assert json.loads((path / "run.json").read_text())["status"] == "completed"
    assert "activation_checkpointing" in (path / "findings.json").read_text()


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public traces are not here")
def test_a_snapshot_of_any_program_is_read_without_torch(tmp_path: Path, command_line: Callable[..., Finished]) -> None:
    page = tmp_path / "page.html"
    snapshot = str(PUBLIC / "snapshot_magma27_small.pickle")
    done = command_line("memory", "--snapshot", snapshot, "--html", str(page), "--json")
    assert not done.code, done.stderr
    document = json.loads(done.stdout)
    assert document["memory"]["ranks"][0]["peak"]["level"]["allocated"] == 13_927_832_064
    assert "activations" in page.read_text()


def test_a_page_does_not_take_the_place_of_what_it_is_of(tmp_path: Path, command_line: Callable[..., Finished]) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"traceEvents": []}')
    for option in ("--snapshot", "--trace"):
        done = command_line("memory", option, str(path), "--html", str(path))
        assert "is an input of this command" in complaint(done)[0]
    assert path.read_text() == '{"traceEvents": []}'


class Harmful:
    def __reduce__(self) -> Any:
        return (print, ("harm",))


def test_a_snapshot_that_holds_code_is_refused(tmp_path: Path, command_line: Callable[..., Finished]) -> None:
    (tmp_path / "bad.pickle").write_bytes(pickle.dumps({"segments": [Harmful()], "device_traces": []}))
    done = command_line("memory", "--snapshot", str(tmp_path / "bad.pickle"))
    assert done.code == 2
    assert "harm" not in done.stdout
    complaint(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--snapshot", "none.pickle"), "none.pickle"),
        (("--trace", "none.json"), "none.json"),
        (("--snapshot", "a", "--trace", "b"), "cannot be combined"),
        (("--snapshot", "a", "--batch-size", "3"), "--batch-size is for a new run"),
        (("--html", "x.html"), "--html needs --snapshot or --trace"),
        (("--predict", "--device-model", "h20x"), "no accelerator is called 'h20x'"),
        (("--predict",), "no GPU model is given"),
        (("--predict", "--device-memory", "80Foo"), "is not a size"),
        (
            ("--predict", "--verify", "--device-model", "h200"),
            "--verify runs each fix, and memory.predict=true runs nothing",
        ),
        (("--check",), "--check compares a prediction with a measurement"),
        (("--spare", "5%"), "--spare is for --find-batch-size"),
        (("--find-batch-size", "--spare", "100%"), "less than 1"),
        (("--find-batch-size", "--device", "cpu"), "a CPU's memory is shared"),
        (("--find-batch-size", "--verify"), "memory.find_batch_size=true tries several"),
        (("--device-model", "h200"), "memory.device_model=h200 is for predictions only"),
        (("--snapshot", "a", "--verify"), "--verify is for a new run"),
        (("--batch-size", "0"), "greater than or equal to 1"),
        (("--profiling.enabled=true",), "is a setting of train-bench, profile and pipe-infer, not of memory"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    arguments: tuple[str, ...], said: str, command_line: Callable[..., Finished]
) -> None:
    assert said in complaint(command_line("memory", *arguments))[0]


def test_torchrun_has_no_part_in_a_prediction(
    command_line: Callable[..., Finished], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    refused = complaint(command_line("memory", "--predict", "--device-model", "h200"))
    assert "one process predicts for all ranks" in refused[0]
    assert "--world-size" in refused[1]


def test_a_curve_that_is_no_line_ends_the_search_as_well() -> None:
    looks: list[int] = []

    def jump(batch: int) -> int:
        looks.append(batch)
        return 100 if batch < 75_094 else 10**12

    assert 75_094 * 0.98 < (largest(search(1000, jump), 1000) or 0) < 75_094
    assert len(looks) < 30
    assert search(1000, lambda batch: batch, most=40)[-1].batch_size == 40, "no more data than that"


@pytest.mark.parametrize(("constant", "per_sample", "limit"), [(419, 331, 97_280), (10**9, 10**6, 10**11), (5, 7, 11)])
def test_the_search_meets_the_limit_of_a_line(constant: int, per_sample: int, limit: int) -> None:
    points = search(limit, lambda batch: constant + per_sample * batch)
    best = max(0, (limit - constant) // per_sample)
    assert (largest(points, limit) or 0) >= 0.98 * best - 1
    assert (largest(points, limit) or 0) <= best
    line = fit(points)
    assert line.constant == pytest.approx(constant, rel=1e-3)
    assert line.per_sample == pytest.approx(per_sample)
    assert len(points) < 12


def test_what_is_beaten_in_memory_and_speed_is_not_efficient() -> None:
    trades = [Trade({}, 100, 10.0), Trade({"a": 1}, 80, 9.0), Trade({"b": 1}, 90, 8.0), Trade({"c": 1}, None, None)]
    weighed = weigh(trades).trades
    assert [(trade.peak, trade.efficient) for trade in weighed] == [(80, True), (90, False), (100, True), (None, False)]
