"""Whatever is wrong with a request is told in one line, and the next move in another; before a run starts, if known."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cli import complaint
from PIL import Image
from running import Finished, gpubench

CommandLine = Callable[..., Finished]
CPU = ("--device", "cpu", "--model", "gpt2-tiny")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--steps", "x"], "training.steps = 'x': input should be a valid integer", "a whole number, such as 20"),
        (
            ["--training.learning_rate=fast"],
            "training.learning_rate = 'fast': input should be a valid number",
            "it is a number, such as ",
        ),
        (
            ["--logging.wandb=maybe"],
            "logging.wandb = 'maybe': input should be a valid boolean",
            "true or false, such as false",
        ),
        (
            ["--precision", "fp8"],
            "precision = 'fp8': input should be 'fp32', 'tf32', 'amp' or 'bf16'",
            "for example fp32",
        ),
        (["--device", "gpu"], "device = 'gpu': input should be 'cpu' or 'cuda'", "did you mean 'cuda'?"),
        (
            ["--batch-size", "0"],
            "training.batch_size = '0': input should be greater than or equal to 1",
            "did you mean '1'?",
        ),
        (["--repeats", "-1"], "measurement.repeats = '-1'", "did you mean '1'?"),
        (["--steps", "5", "--epochs", "3"], "training.steps and training.epochs both say when to stop", "--print"),
        (["--stps", "5"], "there is no option --stps", "did you mean '--steps'?"),
        (["--training.epoch=5"], "there is no option --training.epoch", "did you mean '--training.epochs'?"),
        (["--training", "5"], "training = '5': a section of settings takes no value", "training.batch_size"),
        (["--experiment", "a/b"], "experiment = 'a/b': should be a plain folder name", "--print-config"),
        (["--experiment", ".."], "experiment = '..': should be a plain folder name", "--print-config"),
        (["--experiment", ""], "experiment = '': should be a plain folder name", "--print-config"),
        (["--results", "r\udcff"], "results = 'r\\udcff' is not UTF-8", "rename it"),
        (["--config", "nowhere.yaml"], "no preset or file 'nowhere.yaml'", "presets are bert-base,"),
        (["--config", "resnet5O"], "no preset or file 'resnet5O'", "did you mean 'resnet50'?"),
        (["--config", ""], "no preset or file ''", "presets are bert-base,"),
        (["--config", "."], "no preset or file '.'", "presets are bert-base,"),
        (["--config", "a" * 300], "no preset or file 'aaa", "presets are bert-base,"),
        (["--model", "resnet5"], "called 'resnet5'", "did you mean 'resnet50'?"),
        (["--model", ""], "called ''", "choose one of resnet18"),
        (["--model", "gpt2-tiny", "--data.samples=4", "--batch-size=8"], "a batch of 8 takes 8 samples", "4 or less"),
        (
            ["--model", "gpt2-tiny", "--data.samples=40", "--epochs=1"],
            "training.warmup_steps=10 leaves none to measure",
            "lower training.warmup_steps",
        ),
        (
            ["--model", "gpt2-tiny", "--data.sequence_length=65"],
            "data.sequence_length 65 exceeds the 64 positions of gpt2-tiny",
            "64 or less",
        ),
        (["--model", "a" * 300], "called 'aaa", "choose one of resnet18"),
        (["--data", "image-floder"], "unknown data.source 'image-floder'", "did you mean 'image-folder'?"),
        (["--data", "image-folder"], "data.source image-folder reads data.path, and none is given", "set data.path"),
        (["--data", "text", "--data.path", "nowhere"], "data.path nowhere does not exist", "set data.path to"),
        (["--data", "text", "--data.path", "/dev/null"], "data.path /dev/null holds no text", "set data.path to"),
        (["--data", "not a name:x"], "data.source 'not a name:x' is not module:callable", "for example mypackage.data"),
        (["--world-size", "999999"], "distributed.world_size=999999", "use --world-size"),
        (["--distributed.backend=nccl"], "distributed.backend=nccl moves data between GPUs only", "use gloo"),
        (["--precision", "tf32"], "precision=tf32", "use fp32 or bf16"),
        (["--vs", "precision"], "'precision' is not KEY=VALUE", "for example precision=fp32"),
        (["--vs", "precison=fp32"], "unknown setting 'precison' (from --vs)", "did you mean 'precision'?"),
        (["--vs", "precision=fp8"], "precision = 'fp8': input should be", "for example fp32"),
        (["--vs", "precision=tf32"], "precision=tf32", "use fp32 or bf16"),
        (["--vs", "model=resnet5"], "called 'resnet5'", "did you mean 'resnet50'?"),
        (["junk"], "unexpected argument 'junk'", "--section.key=value"),
        (["sh", "train.sh"], "unexpected argument 'sh'", "--model gpt2-tiny -- sh train.sh"),
        (["-x"], "there is no option -x", "gpubench train-bench --help"),
        (["--steps"], "--steps has no value", "write --steps N; gpubench train-bench --help"),
    ],
)
def test_what_cannot_be_done_as_asked_is_refused(
    command_line: CommandLine, tmp_path: Path, arguments: list[str], error: str, hint: str
) -> None:
    done = command_line("train-bench", *CPU, *arguments)
    said, advised = complaint(done)
    assert error in said
    assert hint in advised
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (
            ["train-bnch"],
            "there is no command 'train-bnch'",
            "did you mean 'train-bench'? gpubench --help lists all commands",
        ),
        (["--bogus"], "there is no option --bogus", "gpubench --help shows the usage"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(
    command_line: CommandLine, arguments: list[str], error: str, hint: str
) -> None:
    assert complaint(command_line(*arguments)) == (error, hint)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"- 1\n- 2\n", "mine.yaml is not a mapping of settings"),
        (b"just words", "mine.yaml is not a mapping of settings"),
        (b"5: 6", "mine.yaml is not a mapping of settings"),
        (b"a: [1,\nb: }", "mine.yaml cannot be read as YAML"),
        (b"\xff\xfe\x00\x01", "mine.yaml cannot be read as YAML"),
        (b"training: {epoch: 3}", "unknown setting 'training.epoch' (from mine.yaml)"),
        (b"training: {5: 3}", "unknown setting 'training.5' (from mine.yaml)"),
        (b"training: {epochs: x}", "training.epochs = 'x': input should be a valid integer"),
        (b"training: {epochs: [1]}", "training.epochs = [1]: input should be a valid integer"),
        (b"training: 5", "training = 5: a section of settings takes no value (from mine.yaml)"),
        (b"experiment: ../x", "experiment = '../x': should be a plain folder name"),
    ],
)
def test_a_file_that_does_not_configure_is_named(
    command_line: CommandLine, tmp_path: Path, content: bytes, error: str
) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    said, _ = complaint(command_line("train-bench", *CPU, "--config", "mine.yaml"))
    assert error in said
    assert "mine.yaml" in said
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    "words",
    [
        "runs", "runs list", "runs show latest", "runs open latest", "runs tag latest one", "runs remove latest",
        "runs prune --failed", "compare latest latest~1", "history", "mcp", "judge --ledger edits.jsonl",
        "tune --apply folder", "tune -- python train.py", "profile --trace trace.json", "loader -- python train.py",
        "memory --snapshot snapshot.pickle", "train-bench --config results/run/config.yaml",
        "train-bench --print-config", "pipe-infer --print-config",
    ],
)  # fmt: skip
def test_a_variable_that_names_no_setting_is_refused_by_every_command(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("GPUBENCH_RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("GPUBENCH_RESULT", "results")
    assert complaint(command_line(*words.split())) == (
        "unknown setting in environment variable GPUBENCH_RESULT",
        "did you mean 'GPUBENCH_RESULTS'?",
    )


@pytest.mark.parametrize("words", ["runs", "compare latest~1 latest", "history"])
def test_the_variable_of_the_results_counts_in_capitals_or_not(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("GPUBENCH_RESULTS", "restored after the test")
    monkeypatch.delenv("GPUBENCH_RESULTS")
    monkeypatch.setenv("gpubench_Results", "elsewhere")
    assert "elsewhere" in complaint(command_line(*words.split()))[0]


@pytest.mark.parametrize("words", ["--version", "runs --help", "runs show --help", "train-bench -h"])
def test_a_variable_that_names_no_setting_does_not_keep_help_away(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("GPUBENCH_RESULT", "results")
    assert command_line(*words.split()).code == 0


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("GPUBENCH_TRAINING__EPOCHS", "x", "training.epochs = 'x': input should be a valid integer"),
        ("GPUBENCH_TRAINING__EPOCH", "3", "unknown setting in environment variable GPUBENCH_TRAINING__EPOCH"),
        ("GPUBENCH_TRAINING", "3", "unknown setting in environment variable GPUBENCH_TRAINING"),
        ("GPUBENCH_EXPERIMENT", "", "experiment = '': should be a plain folder name"),
    ],
)
def test_a_variable_that_does_not_configure_is_named(
    command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: str
) -> None:
    monkeypatch.setenv(variable, value)
    said, _ = complaint(command_line("train-bench", *CPU))
    assert error in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_images_is_refused(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    arguments = ("--device=cpu", "--model", "resnet-tiny", "--data", "image-folder", "--data.path", "photos")
    said, advised = complaint(command_line("train-bench", *arguments))
    assert (said, advised[:17]) == ("data.path photos holds no images", "images end in one")
    assert not (tmp_path / "results").exists()


def test_a_folder_of_dead_links_and_pipes_holds_no_text(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "gone.txt").symlink_to("nowhere")
    os.mkfifo(tmp_path / "texts" / "pipe.txt")
    said, _ = complaint(command_line("train-bench", *CPU, "--data", "text", "--data.path", "texts"))
    assert said == "data.path texts holds no text"


def test_a_model_folder_needs_a_configuration(command_line: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    said, _ = complaint(command_line("train-bench", "--device=cpu", "--model", "model"))
    assert said == "model.name: folder 'model' has no config.json"


def test_cuda_without_a_gpu_is_refused(command_line: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said, _ = complaint(command_line("train-bench", "--device", "cuda"))
    assert said.startswith("device=cuda, but ")


@pytest.mark.parametrize("inside", ["file", "/proc"])
def test_results_that_cannot_be_written_are_refused(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("in the way")
    done = gpubench("train-bench", *CPU, results=tmp_path / inside)
    said, advised = complaint(done)
    assert said.startswith(f"cannot create a run directory under {tmp_path / inside}")
    assert advised == "choose another --results"


MODELS = """
import torch
def number(): return 5
def steps_out(): raise ValueError("not today")
"""


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--model", "zoo_of_mine:number"], "model 'zoo_of_mine:number' returned int"),
        (["--model", "zoo_of_mine:steps_out"], "model 'zoo_of_mine:steps_out' raised ValueError: not today"),
        (
            ["--model", "resnet-tiny", "--data", "image-folder", "--data.path", "photos", "--batch-size=1"],
            "image photos/a/broken.png cannot be read",
        ),
    ],
)
def test_what_only_the_worker_can_see_fails_the_run_and_is_recorded(
    tmp_path: Path, arguments: list[str], error: str
) -> None:
    (tmp_path / "zoo_of_mine.py").write_text(MODELS)
    (tmp_path / "photos" / "a").mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(tmp_path / "photos" / "a" / "good.png")
    (tmp_path / "photos" / "a" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing more")
    done = gpubench("train-bench", "--device=cpu", "--quiet", *arguments, results=tmp_path / "results", cwd=tmp_path)
    said, advised = complaint(done)
    assert error in said
    record = done.document("run.json")
    assert record["status"] == "failed"
    assert (record["error"]["message"], record["error"]["hint"]) == (said, advised)
    assert json.loads((done.run / "run.json").read_text())["ended"]
