"""`gpubench profile` as a user has it: planted troubles are found, their fixes tried, and traces of others read."""

import json
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli import complaint
from running import SMALL, Finished, decided, gpubench, started
from traces_made import LOADER, launched, slice_, step, write

PLANTED = '''
import torch
from torch import nn
from torch.utils.data import Dataset

class Images(Dataset):
    def __init__(self, channels, size):
        self.image = torch.rand(channels, size, size)

    def __len__(self):
        return 4000

    def __getitem__(self, index):
        return self.image, index % 10

def plain():
    return Images(3, 8)

def many_channels():
    """Quick to read and slow to rearrange."""
    return Images(1024, 64)

class Scaled(nn.Module):
    """Little arithmetic, whatever its parameters."""

    def __init__(self, count, size):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(size) for _ in range(count))
        self.head = nn.Linear(3, 10)

    def forward(self, images):
        return self.head(images[:, :3, 0, 0]) * torch.stack([weight[0] for weight in self.weights]).mean()

def small():
    return Scaled(1, 1)

def many_parameters():
    return Scaled(1, 4_000_000)
'''
SHORT = ("--training.warmup_steps=5", "--logging.graph=false", "--measurement.count_flops=false", "-q")


def profiled(folder: Path, *arguments: str) -> Finished:
    (folder / "planted.py").write_text(PLANTED)
    return gpubench("profile", *arguments, *SHORT, results=folder / "results", cwd=folder)


def directory(done: Finished) -> Path:
    """Of the profiled run, among those of its fixes."""
    (path,) = done.results.glob("profile/*")
    return path


def found(done: Finished) -> dict[str, Any]:
    assert not done.code, done.stderr
    findings: dict[str, Any] = json.loads((directory(done) / "findings.json").read_text())
    return findings


def finding(done: Finished, name: str) -> dict[str, Any]:
    """The one with this id."""
    by_id: dict[str, dict[str, Any]] = {one["id"]: one for one in found(done)["findings"]}
    assert name in by_id, sorted(by_id)
    return by_id[name]


@pytest.mark.stress
def test_an_optimizer_that_loops_is_found_and_the_fused_one_confirmed(tmp_path: Path) -> None:
    done = profiled(
        tmp_path, "--model", "planted:many_parameters", "--data", "planted:plain", "--data.workers=0",
        "--training.optimizer_impl=loop", "--batch-size", "1", "--steps", "60", "--repeats", "1", "--verify",
    )  # fmt: skip
    trouble = finding(done, "unfused-optimizer")
    assert trouble["fix"] == {"training.optimizer_impl": "fused"}
    decided(trouble["measured"]["outcome"], trouble["measured"]["reason"], trouble["measured"])
    assert trouble["measured"]["outcome"] == "confirmed", trouble["measured"]
    assert found(done)["keep"] == trouble["fix"]


@pytest.mark.alone
def test_a_blocking_copy_is_found_and_doing_without_it_confirmed(tmp_path: Path) -> None:
    done = profiled(
        tmp_path, "--model", "planted:small", "--data", "planted:many_channels", "--data.workers=0",
        "--performance.channels_last=true", "--batch-size", "1", "--steps", "16", "--repeats", "1", "--verify",
    )  # fmt: skip
    trouble = finding(done, "layout-of-batches")
    assert trouble["fix"] == {"performance.channels_last": False}
    decided(trouble["measured"]["outcome"], trouble["measured"]["reason"], trouble["measured"])
    assert trouble["measured"]["outcome"] == "confirmed", trouble["measured"]


def test_any_training_run_is_recorded_if_its_file_says_how(
    tmp_path: Path, command_line: Callable[..., Finished]
) -> None:
    (tmp_path / "mine.yaml").write_text("profiling: {all_ranks: true, repeat: 1, wait: 2, warmup: 1, active: 2}")
    done = gpubench(
        "train-bench", *SMALL, "--steps", "6", "--training.warmup_steps=5", "--repeats", "1", "--world-size", "2",
        "--config", str(tmp_path / "mine.yaml"), results=tmp_path,
    )  # fmt: skip
    assert not done.code, done.stderr
    profile = done.document("profile.json")
    assert [rank["rank"] for rank in profile["ranks"]] == [0, 1]
    for one in profile["ranks"]:
        assert sum(one["host"].values()) == one["wall"]
        assert len(one["step_numbers"]) == 2
    traces = sorted(path.name.split(".")[0] for path in done.run.glob("profiler_traces/*.gz"))
    assert traces == ["rank0", "rank0", "rank1", "rank1"], "a file for each of the two cycles"
    assert len(done.lines("steps.jsonl")) == 2 * 11, "the figures are those of the repeat that was not recorded"
    lines = done.stdout.splitlines()
    assert "samples/s" in lines[0]
    assert f"traces: {done.run / 'profiler_traces'}" in lines
    (advised,) = (line.partition(": ")[2] for line in lines if line.startswith("diagnosis: "))
    assert advised in re.sub("<[^>]+>", "", (done.run / "report.html").read_text())
    again = command_line(*shlex.split(advised)[1:], "--json")
    assert json.loads(again.stdout)["profile"]["ranks"][0]["step_numbers"] == profile["ranks"][0]["step_numbers"]


def test_a_pipeline_can_be_recorded_and_its_steps_are_evaluations(tmp_path: Path) -> None:
    done = gpubench(
        "pipe-infer", "--samples", "2", "--steps", "12", "--repeats", "1", "--unet", "dummy", "--step-ms", "1",
        "--baseline", "off", "--profiling.compress=false", results=tmp_path,
    )  # fmt: skip
    assert not done.code, done.stderr
    (rank,) = done.document("profile.json")["ranks"]
    assert len(rank["step_numbers"]) == 3
    assert {"forward", "scheduler"} <= {phase["name"] for phase in rank["phases"]}
    assert len(done.lines("samples.jsonl")) == 2, "those of the recorded pass are not kept"


def test_a_pipeline_shorter_than_the_schedule_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    done = gpubench(
        "pipe-infer", "--samples", "1", "--steps", "4", "--repeats", "1", "--profiling.enabled=true", results=tmp_path
    )
    assert done.code == 2
    assert "wait 3 + (warmup 1 + active 3) x (repeat 1 + 1) = 11 steps" in complaint(done)[0]


def test_an_interrupt_while_fixes_are_tried_keeps_the_diagnosis(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(PLANTED)
    arguments = (
        "profile", "--model", "planted:many_parameters", "--data", "planted:plain", "--data.workers=0",
        "--training.optimizer_impl=loop", "--batch-size", "1",
        "--repeats", "1", "--training.warmup_steps=5", "--steps", "20", "--verify",
    )  # fmt: skip
    with started(*arguments, results=tmp_path / "results", cwd=tmp_path) as going:
        going.wait_for("profile-verify/*/run.json")
        going.process.send_signal(signal.SIGINT)
        done = going.finish(60)
    assert done.code == 130
    assert "unfused-optimizer" in (next(tmp_path.glob("results/profile/*")) / "findings.json").read_text()
    assert "the optimizer is not fused" in done.stdout
    assert json.loads((next(tmp_path.glob("results/profile/*")) / "findings.json").read_text())["interrupted"]


def made(path: Path, waits: float) -> Path:
    """Two steps whose loader leaves the device idle, the second with a kernel."""
    events = [
        step(1, 0, 100), step(2, 100, 200), slice_(LOADER, 10, 10 + waits),
        *launched("gemm", 5, 6, 10, 1), *launched("gemm", 150, 152, 190, 2),
    ]  # fmt: skip
    return write(path, events)


def test_a_trace_of_any_program_is_read_without_a_run(tmp_path: Path, command_line: Callable[..., Finished]) -> None:
    path = made(tmp_path / "mine.json.gz", 60)
    done = command_line("profile", "--trace", str(path))
    assert not done.code, done.stderr
    assert done.stdout.startswith("GPU idle")
    assert not (tmp_path / "results").exists()


def test_equal_layers_share_a_row_unless_every_module_is_asked_for(
    tmp_path: Path, command_line: Callable[..., Finished]
) -> None:
    events = [step(1, 0, 300)]
    for number in range(15):
        at = 10 * number
        events.append(slice_(f"module: layers.{number}.attn (Attention)", at, at + 9, "user_annotation"))
        events += launched("gemm", at + 1, 20 + at, 29 + at, number + 1)
    path = str(write(tmp_path / "layers.json", events))
    folded = command_line("profile", "--trace", path, "-v")
    assert "layers.*.attn (15)" in folded.stdout
    assert "layers.3.attn" not in folded.stdout
    unfolded = command_line("profile", "--trace", path, "-vv")
    assert "layers.3.attn" in unfolded.stdout
    assert "layers.*.attn" not in unfolded.stdout
    modules = json.loads(command_line("profile", "--trace", path, "--json").stdout)["profile"]["ranks"][0]["modules"]
    assert len(modules) == 15


def test_two_traces_are_set_side_by_side(tmp_path: Path, command_line: Callable[..., Finished]) -> None:
    before, after = made(tmp_path / "before.json", 90), made(tmp_path / "after.json", 1)
    done = command_line("profile", "--trace", str(before), "--against", str(after), "--html", "page.html")
    assert not done.code, done.stderr
    assert "idle, data wait" in done.stdout
    assert "gone:" in done.stdout
    assert "before.json" in (tmp_path / "page.html").read_text()


def test_a_trace_as_json_is_one_document(tmp_path: Path, command_line: Callable[..., Finished]) -> None:
    done = command_line("profile", "--trace", str(made(tmp_path / "mine.json", 60)), "--json")
    document = json.loads(done.stdout)
    assert document["profile"]["ranks"][0]["idle"]["data_loader"] == 60_000
    assert document["findings"]["headline"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--trace", "none.json"), "cannot read none.json"),
        (("--trace", "x.json", "--verify"), "--verify is for a new run"),
        (("--trace", "x.json", "--steps", "3"), "--steps is for a new run"),
        (("--trace", "x.json", "--bogus", "1"), "there is no option --bogus"),
        (("--against", "x.json"), "--against needs --trace"),
        (("--html", "x.html"), "--html belongs to --trace"),
        (("--device", "mps"), "no timing events exist for MPS"),
        (("--profiling.enabled=false",), "records no profile to diagnose"),
        (("--steps", "2", "--training.warmup_steps=0"), "= 11 steps, and the run has 2"),
        (("--profiling.unit=epoch",), "counts training.epochs"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    arguments: tuple[str, ...], said: str, command_line: Callable[..., Finished]
) -> None:
    assert said in complaint(command_line("profile", *arguments))[0]


def test_a_files_name_cannot_write_to_the_terminal(command_line: Callable[..., Finished]) -> None:
    done = command_line("profile", "--trace", "bad\n\x1b[31mred.json")
    assert complaint(done)[0].startswith(r"cannot read bad\n\x1b[31mred.json")


def test_the_configuration_of_a_profiled_run_reproduces_it(
    tmp_path: Path, command_line: Callable[..., Finished]
) -> None:
    first = command_line("profile", "--model", "gpt2-tiny", "--profiling.active=5", "--print-config").stdout
    (tmp_path / "mine.yaml").write_text(first)
    again = command_line("profile", "--config", "mine.yaml", "--print-config").stdout
    plain = [[line.split("#")[0].rstrip() for line in text.splitlines()] for text in (first, again)]
    assert plain[0] == plain[1]
    assert "  active: 5" in plain[0]
    assert "  enabled: true" in plain[0]


SLOW = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Images(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        return self.augment(torch.rand(16, 16)), index % 10

    def augment(self, image):
        for y in range(16):
            for x in range(16):
                image[y, x] = min(1.0, image[y, x].item() * 1.1)
        return image

model = nn.Sequential(nn.Flatten(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for images, labels in DataLoader(Images(), batch_size=8, num_workers=int(sys.argv[1])):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
"""


@pytest.mark.stress
@pytest.mark.parametrize("workers", [0, 2])
def test_the_function_that_makes_batches_slow_is_named(tmp_path: Path, workers: int) -> None:
    (tmp_path / "train.py").write_text(SLOW)
    done = gpubench(
        "profile", "--repeats", "1", "--steps", "20", "--program.directory", str(tmp_path),
        "--", sys.executable, "train.py", str(workers), results=tmp_path,
    )  # fmt: skip
    assert not done.code, done.stderr
    code = done.document("profile.json")["ranks"][0]["code"]
    functions = code["workers" if workers else "main"]["functions"]
    making = next(one for one in functions if one["phase"] == ("" if workers else "data_wait"))
    assert (making["function"], making["file"], making["first_line"]) == ("Images.augment", "train.py", 14)
    assert making["source"] == "image[y, x] = min(1.0, image[y, x].item() * 1.1)"
    assert code["workers"]["processes"] == workers
    found = done.document("findings.json")["findings"]
    waits = next(one for one in found if one["id"] in ("data-loading", "too-few-workers"))
    assert "Images.augment at train.py:14" in waits["evidence"][0]
