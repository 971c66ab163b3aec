"""What `gpubench pipe-infer` refuses before it starts anything: in one line, with the next move in another."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from cli import complaint
from running import Finished, gpubench

from gpubench.errors import SettingsError
from gpubench.kinds.pipeline.defaults import check_guidance_rescale, check_schedule
from gpubench.kinds.pipeline.folders import SUPPORTED, PipelineFolder, check_negative_prompt
from gpubench.kinds.pipeline.settings import PipeSettings

CommandLine = Callable[..., Finished]
CPU = ("--device", "cpu", "--performance.cpu_threads=1")
TWO = ("--world-size", "2")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--steps", "0"], "sampling.steps = '0': input should be greater than or equal to 1", "did you mean '1'?"),
        (["--steps", "few"], "sampling.steps = 'few': input should be a valid integer", "a whole number"),
        (["--samples", "-1"], "work.samples = '-1': input should be greater than or equal to 1", "did you mean '1'?"),
        (["--micro-batch", "0"], "work.micro_batch = '0': input should be greater", "did you mean '1'?"),
        (
            ["--micro-batch", "9", "--samples", "4"],
            "work.micro_batch=9 is more than the 4 samples to make",
            "use --micro-batch 4 or less",
        ),
        (["--world-size", "0"], "distributed.world_size = '0'", "did you mean '1'?"),
        (["--seed=-1"], "seed = '-1': input should be greater than or equal to 0", "did you mean '0'?"),
        (["--guidance-scale", "nan"], "sampling.guidance_scale = 'nan': input should be a finite", "--print-config"),
        (["--sampling.eta=-1"], "sampling.eta = '-1'", "did you mean '0'?"),
        (["--step-ms", "-1"], "model.step_ms = '-1'", "did you mean '0'?"),
        (["--in-flight", "0"], "pipeline.in_flight = '0'", "did you mean '1'?"),
        (["--pipeline.deadline=0"], "pipeline.deadline = '0': input should be greater than 0", "--print-config"),
        (["--pipeline.deadline=nan"], "pipeline.deadline = 'nan'", "--print-config"),
        (
            ["--precision", "tf32"],
            "precision = 'tf32': input should be 'fp32', 'fp16' or 'bf16'",
            "did you mean 'fp32'?",
        ),
        (["--baseline", "fast"], "measurement.baseline = 'fast': input should be 'off'", "for example off"),
        (["--distributed.backend=nccl"], "distributed.backend=nccl moves data between GPUs only", "use gloo"),
        (
            ["--distributed.strategy=ddp"],
            "'distributed.strategy' is a setting of train-bench, profile and memory, not of pipe-infer",
            "use gpubench train-bench",
        ),
        (["--smples", "4"], "there is no option --smples", "did you mean '--samples'?"),
        (["--pipeline.in_fligth=2"], "there is no option --pipeline.in_fligth", "did you mean '--pipeline.in_flight'?"),
        (["--verify", "maybe"], "unexpected argument 'maybe'", "--section.key=value"),
        (["--steps", "5", "--sampling.steps=6"], "sampling.steps is '5' and '6'", "give each setting once"),
        (["--vs", "split=evn"], "pipeline.split = 'evn'", "for example 10"),
        (["--vs", "splt=even"], "unknown setting 'splt' (from --vs)", "did you mean 'split'?"),
    ],
)
def test_settings_out_of_range_are_named(
    command_line: CommandLine, arguments: list[str], error: str, hint: str
) -> None:
    refused(command_line, arguments, error, hint)


@pytest.mark.parametrize(
    ("split", "error"),
    [
        ("evn", "pipeline.split = 'evn' is not even, balanced or counts like 13,13,12"),
        ("a,b", "pipeline.split = 'a,b' is not even, balanced or counts like 13,13,12"),
        ("", "pipeline.split = '' is not even, balanced or counts like 13,13,12"),
        ("1,2,3", "pipeline.split = '1,2,3' has 3 counts for 2 ranks"),
        ("10", "pipeline.split = '10' has 1 count for 2 ranks"),
        ("0,20", "pipeline.split = '0,20' gives rank 0 nothing to do"),
        ("25,-5", "pipeline.split = '25,-5' gives rank 1 nothing to do"),
    ],
)
def test_a_split_that_no_scheduler_could_make_right_is_refused(
    command_line: CommandLine, split: str, error: str
) -> None:
    refused(
        command_line, [*TWO, "--split", split], error, "for example 10,10; the counts must add up to the scheduler's"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (
            ["--scheduler", "DDIMSchedular"],
            "diffusers has no scheduler 'DDIMSchedular'",
            "did you mean 'DDIMScheduler'?",
        ),
        (["--scheduler", "ancestral"], "diffusers has no scheduler 'ancestral'", "EulerAncestralDiscreteScheduler"),
        (["--scheduler", "zzz"], "diffusers has no scheduler 'zzz'", "for example DDIMScheduler"),
        (["--scheduler", ""], "diffusers has no scheduler ''", "Scheduler"),
        (["--sampling.options=solver_order"], "scheduler option 'solver_order' is not key=value", "solver_order=3"),
        (["--sampling.options=a=1,a=2"], "scheduler option a is given twice", "'1' and '2'; keep one"),
        (
            ["--unet", "dummy", "--sampling.options=beta_strat=1"],
            "sampling.options: DDIMScheduler has no option 'beta_strat'",
            "did you mean 'beta_start'?",
        ),
        (
            ["--unet", "dummy", "--sampling.options=beta_start=low"],
            "sampling.options: option beta_start of DDIMScheduler cannot be 'low'",
            "its default is 0.0001",
        ),
        (
            ["--scheduler", "HeliosScheduler"],
            "HeliosScheduler cannot be split over ranks: between its stages the caller enlarges the latents; "
            "it works with stages=1",
            "docs/schedulers.md",
        ),
        (
            ["--scheduler", "EulerDiscreteScheduler", "--sampling.eta=0.5"],
            "sampling.eta is 0.5, and EulerDiscreteScheduler takes none",
            "leave sampling.eta at 0",
        ),
    ],
)
def test_a_scheduler_that_is_not_there_is_answered_with_the_nearest(
    command_line: CommandLine, arguments: list[str], error: str, hint: str
) -> None:
    refused(command_line, arguments, error, hint)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "work.prompts: the file prompts.txt cannot be read: No such file or directory"),
        (b"", "work.prompts: the file prompts.txt is empty"),
        (b" \n\n\t\n", "work.prompts: the file prompts.txt is empty"),
        (b"\xff\xfe\x00\x01", "work.prompts: the file prompts.txt cannot be read: it is not UTF-8 text"),
    ],
)
def test_a_prompts_file_without_prompts_is_named(
    command_line: CommandLine, tmp_path: Path, content: bytes | None, error: str
) -> None:
    if content is not None:
        (tmp_path / "prompts.txt").write_bytes(content)
    said, advised = complaint(command_line("pipe-infer", *CPU, "--prompts", "prompts.txt"))
    assert said.replace(f"{tmp_path}/", "") == error
    assert "one prompt per line" in advised
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("fault", "error", "hint"),
    [
        ("", "inject: there is no fault ''", "one of drop, duplicate"),
        ("drp,rank=0,sample=0", "inject: there is no fault 'drp'", "did you mean 'drop'?"),
        ("drop", "inject: no rank is given", "KIND,rank=R,sample=S"),
        ("drop,rank=0", "inject: no sample is given", "KIND,rank=R,sample=S"),
        ("drop,0,1", "inject: '0' is not key=value", "KIND,rank=R,sample=S"),
        ("drop,rank=first,sample=0", "inject: rank is 'first', not a whole number from 0", "KIND,rank=R"),
        ("drop,rank=-1,sample=0", "inject: rank is '-1', not a whole number from 0", "KIND,rank=R"),
        ("kill,rank=0,rank=1,sample=0", "inject: rank is given twice", "'0' and '1'; keep one"),
        ("kill,rank=2,sample=0", "inject: there is no rank 2 among 2", "ranks count from 0"),
        ("kill,rank=0,sample=8", "inject: there is no sample 8 among 8", "samples count from 0"),
        ("drop,rank=1,sample=0", "inject: drop is a fault of what a rank sends, and rank 1, the last", "below 1"),
        ("drop,rank=0,sample=0,seconds=3", "inject: drop takes no 'seconds'", "drop takes rank and sample"),
        ("late,rank=0,sample=0,seconds=-3", "inject: seconds is '-3', not a time", "seconds=T"),
    ],
)
def test_a_fault_that_cannot_be_provoked_is_refused(
    command_line: CommandLine, fault: str, error: str, hint: str
) -> None:
    refused(command_line, [*TWO, "--inject", fault], error, hint)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--unet", "sd16"], "model.unet = 'sd16': input should be 'dummy', 'tiny'", "did you mean 'sd15'?"),
        (["--model", "nowhere"], "there is no pipeline folder", "save_pretrained() of a diffusers pipeline wrote"),
        (
            ["--model", "a/sd15"],
            "there is no pipeline folder",
            "fetch a/sd15 first",
        ),
        (["--model", "nowhere", "--unet", "tiny"], "model.name and model.unet both select the model", "leave one of"),
        (["--output.images=true"], "output.images: random weights have no decoder", "give --model PIPELINE_FOLDER"),
        (["--model.height=7"], "model.height = '7': input should be greater than or equal to 8", "did you mean '8'?"),
    ],
)
def test_a_model_that_cannot_be_made_is_named(
    command_line: CommandLine, arguments: list[str], error: str, hint: str
) -> None:
    refused(command_line, arguments, error, hint)


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (
            ["--world-size", "40", "--steps", "10"],
            "40 ranks for 11 evaluations: some would",
            "--world-size 11 or fewer",
        ),
        (["--world-size", "4", "--steps", "2"], "4 ranks for 3 evaluations", "--world-size 3 or fewer"),
        (
            ["--world-size", "4", "--steps", "2", "--scheduler", "HeunDiscreteScheduler"],
            "4 ranks for 3 evaluations",
            "or more --steps",
        ),
        (
            ["--world-size", "11", "--steps", "10", "--scheduler", "DPMSolverMultistepInverseScheduler"],
            "11 ranks for 10 evaluations",
            "--world-size 10 or fewer",
        ),
        (["--unet", "dummy", *TWO, "--split", "5,5"], "5 + 5 = 10, but the scheduler makes 20 evaluations", "10,10"),
        (
            ["--scheduler", "DPMSolverSDEScheduler", "--micro-batch", "2"],
            "DPMSolverSDEScheduler draws the noise of a whole micro-batch from one seed",
            "set work.micro_batch to 1",
        ),
        (["--scheduler", "RePaintScheduler"], "RePaintScheduler cannot be split over ranks", "docs/schedulers.md"),
        (
            ["--profiling.enabled=true", "--profiling.active=500"],
            "the run has 168 (21 evaluations of 8 micro-batches)",
            "raise --samples or --steps",
        ),
    ],
)
def test_what_arithmetic_can_refuse_starts_no_worker(
    command_line: CommandLine, arguments: list[str], error: str, hint: str
) -> None:
    refused(command_line, arguments, error, hint)


def test_as_many_ranks_as_evaluations_are_not_refused(command_line: CommandLine) -> None:
    done = command_line("pipe-infer", *CPU, "--world-size", "3", "--steps", "2", "--print-config")
    assert (done.code, done.stderr) == (0, "")


@pytest.fixture
def pipeline_folder(tmp_path: Path) -> Path:
    """A DDPM pipeline as far as it can be told without loading it."""
    folder = tmp_path / "ddpm"
    write(
        folder / "model_index.json",
        {
            "_class_name": "DDPMPipeline",
            "unet": ["diffusers", "UNet2DModel"],
            "scheduler": ["diffusers", "DDPMScheduler"],
        },
    )
    write(folder / "unet" / "config.json", {})
    write(folder / "scheduler" / "scheduler_config.json", {})
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"\2" + bytes(7) + b"{}")  # of no tensor
    return folder


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def lose_the_weights(folder: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()


def lose_the_end_of_the_weights(folder: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"\2" + bytes(6))


def keep_pickle_only(folder: Path) -> None:
    lose_the_weights(folder)
    (folder / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"\x80\x04.")


def lose_the_scheduler(folder: Path) -> None:
    shutil.rmtree(folder / "scheduler")


def be_of_an_unknown_class(folder: Path) -> None:
    write(folder / "model_index.json", {"_class_name": "AudioLDMPipeline"})


def bring_code_of_its_own(folder: Path) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    write(folder / "model_index.json", index | {"unet": ["my_unet", "MyUNet"]})


def garble_the_index(folder: Path) -> None:
    (folder / "model_index.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "error", "hint"),
    [
        (empty, "cannot read model_index.json: No such file", "save_pretrained()"),
        (garble_the_index, "cannot read model_index.json: ", "save_pretrained()"),
        (lose_the_weights, "unet lacks diffusion_pytorch_model.safetensors or a part of it", "save_pretrained()"),
        (lose_the_end_of_the_weights, "diffusion_pytorch_model.safetensors is incomplete or damaged", "download"),
        (keep_pickle_only, "unet has its weights in pickle format, which is not loaded", "writes safetensors"),
        (lose_the_scheduler, "cannot read scheduler/scheduler_config.json", "save_pretrained()"),
        (be_of_an_unknown_class, "is for AudioLDMPipeline, which gpubench does not run", "StableDiffusionPipeline"),
        (bring_code_of_its_own, "its unet is my_unet.MyUNet", "only diffusers and transformers are loaded"),
    ],
)
def test_a_pipeline_folder_that_is_not_whole_is_refused(
    command_line: CommandLine, pipeline_folder: Path, damage: Callable[[Path], None], error: str, hint: str
) -> None:
    damage(pipeline_folder)
    refused(command_line, ["--model", "ddpm"], error, hint)


@pytest.mark.parametrize(
    ("pipeline", "scheduler", "config", "refused"),
    [
        ("FluxPipeline", "DDIMScheduler", {}, "its pipeline sets mu and sigmas, which DDIMScheduler.set_timesteps()"),
        ("FluxPipeline", "FlowMatchEulerDiscreteScheduler", {}, None),
        (
            "FluxPipeline",
            "FlowMatchHeunDiscreteScheduler",
            {},
            "FlowMatchHeunDiscreteScheduler does not fit this model",
        ),
        ("StableDiffusion3Pipeline", "FlowMatchHeunDiscreteScheduler", {"use_dynamic_shifting": True}, None),
        ("StableDiffusion3Pipeline", "UniPCMultistepScheduler", {"use_dynamic_shifting": True}, None),
        ("StableDiffusionPipeline", "DDIMScheduler", {}, None),
    ],
)
def test_a_scheduler_that_does_not_take_what_the_models_pipeline_sets_is_refused(
    pipeline: str, scheduler: str, config: dict[str, bool], refused: str | None
) -> None:
    own = ("FlowMatchEulerDiscreteScheduler", config)
    folder = PipelineFolder(Path(), pipeline, SUPPORTED[pipeline], (), None, own)
    asked = PipeSettings.model_validate({"sampling": {"scheduler": scheduler}})
    with pytest.raises(SettingsError, match=re.escape(refused)) if refused else nullcontext():
        check_schedule(asked, folder, pipeline, 20, 1)


def test_only_pipelines_that_rescale_guidance_take_its_share() -> None:
    with pytest.raises(
        SettingsError, match=r"guidance_rescale=0\.7 is given, and the pipeline of FluxPipeline has none"
    ):
        check_guidance_rescale("FluxPipeline", 0.7)
    check_guidance_rescale("FluxPipeline", 0)
    check_guidance_rescale("StableDiffusionXLPipeline", 0.7)


def test_flux_has_no_negative_prompt() -> None:
    with pytest.raises(SettingsError, match="Flux is guided without one"):
        check_negative_prompt("FluxPipeline", "dull")
    check_negative_prompt("FluxPipeline", "")
    check_negative_prompt("StableDiffusionPipeline", "dull")


def test_a_whole_pipeline_folder_is_not_refused(command_line: CommandLine, pipeline_folder: Path) -> None:
    done = command_line("pipe-infer", *CPU, "--model", str(pipeline_folder), "--print-config")
    assert (done.code, done.stderr) == (0, "")


def test_a_run_of_another_command_has_nothing_to_resume(command_line: CommandLine, finished_run: Path) -> None:
    said, advised = complaint(command_line("pipe-infer", *CPU, "--resume", str(finished_run)))
    assert said == f"{finished_run} is a run of train-bench, which has no samples"
    assert advised == "give a run of pipe-infer"


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["--resume", "nowhere"], "nowhere: no such run", "give a run directory"),
        (["--resume", ""], ". holds no runs", "give a run directory"),
        (["--resume", "x", "--config", "tiny"], "--resume uses the configuration of its run", "leave --config out"),
        (
            ["--resume", "x", "--vs", "split=even"],
            "--resume completes one run, and --vs starts two",
            "leave one of them out",
        ),
    ],
)
def test_what_cannot_be_resumed_is_refused(
    command_line: CommandLine, arguments: list[str], error: str, hint: str
) -> None:
    refused(command_line, arguments, error, hint)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--vs", "split=balanced"], "--vs starts fresh processes, which torchrun does not"),
        (["--world-size", "3"], "--world-size is 3, but torchrun started 2 processes"),
        (["--resume", "x"], "--resume cannot run under torchrun"),
        (["--measurement.target_precision=1%"], "a target precision takes fresh processes"),
    ],
)
def test_under_torchrun_what_starts_processes_is_refused(
    command_line: CommandLine, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: str
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    refused(command_line, arguments, error, "")


@pytest.mark.parametrize("inside", ["file", "/proc"])
def test_results_that_cannot_be_written_are_refused(tmp_path: Path, inside: str) -> None:
    (tmp_path / "file").write_text("in the way")
    said, advised = complaint(gpubench("pipe-infer", *CPU, results=tmp_path / inside))
    assert said.startswith(f"cannot create a run directory under {tmp_path / inside}")
    assert advised == "choose another --results"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["--scheduler", "DPMSolverMultistepScheduler", "--sampling.options=algorithm_type=odd"],
            "DPMSolverMultistepScheduler does not take these options: odd is not implemented for "
            "<class 'diffusers.schedulers.scheduling_dpmsolver_multistep.DPMSolverMultistepScheduler'>",
        ),
    ],
)
def test_what_only_diffusers_knows_fails_the_run_and_is_recorded(
    tmp_path: Path, arguments: list[str], error: str
) -> None:
    done = gpubench("pipe-infer", *CPU, "--unet", "dummy", "--quiet", *arguments, results=tmp_path)
    said, advised = complaint(done)
    assert said == error
    record = done.document("run.json")
    assert record["status"] == "failed"
    assert (record["error"]["message"], record["error"]["hint"]) == (said, advised)


def refused(command_line: CommandLine, arguments: list[str], error: str, hint: str) -> None:
    """That is what is said, and nothing is left behind."""
    done = command_line("pipe-infer", *CPU, *arguments)
    said, advised = complaint(done)
    assert error in said
    assert hint in advised
    assert done.stdout == ""
    assert not done.results.exists()


def write(file: Path, content: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
