"""Local pipeline folders: what is loaded of them, that the result is diffusers' own, what is said of copy ones."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pipelines_made
import pytest
import torch
from cases_made import completed_pipeline
from denoised import SCHEDULERS, assert_as_reference, run, sampler_of
from PIL.Image import Image

from gpubench.errors import ModelError, SettingsError
from gpubench.kinds.pipeline import folders
from gpubench.kinds.pipeline.worker import denoiser, models
from gpubench.kinds.pipeline.worker.denoiser import Denoiser
from gpubench.kinds.pipeline.worker.sampler import quiet
from gpubench.settings.keys import flatten

UNETS = ("stable_diffusion", "stable_diffusion_xl")
TRANSFORMERS = ("pixart_alpha", "pixart_sigma", "stable_diffusion_3", "flux")
CPU = torch.device("cpu")
Made = Callable[[str], Path]


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A pipeline folder by its function in `pipelines_made`; each is made once, and not to be written to."""
    folder = tmp_path_factory.mktemp("pipelines")

    def make(kind: str) -> Path:
        path = folder / kind
        if not path.is_dir():
            getattr(pipelines_made, kind)(path)
        return path

    return make


@pytest.fixture
def copied(made: Made, tmp_path: Path) -> Made:
    """A copy of such a folder, to change or take something away from."""
    return lambda kind: Path(shutil.copytree(made(kind), tmp_path / kind))


@pytest.fixture
def copy(copied: Made) -> Path:
    return copied("stable_diffusion")


def load(
    folder: Path,
    *,
    first: bool = True,
    last: bool = True,
    by: Callable[..., Denoiser] | None = None,
    dtype: torch.dtype = torch.float32,
    negative_prompt: str = "",
    height: int | None = None,
    width: int | None = None,
    **sampling: Any,
) -> Denoiser:
    model = {"name": folder, "height": height, "width": width}
    work = {"negative_prompt": negative_prompt}
    settings = completed_pipeline(flatten({"model": model, "sampling": sampling, "work": work}))
    loaded = (by or partial(models.load, first=first, last=last, images=True))(settings, CPU, dtype)
    if first:
        loaded.set_conditioning(loaded.encode(["a cat", "two dogs"]))
    return loaded


@pytest.mark.parametrize(
    ("kind", "scheduler", "guidance_scale"),
    [
        *((UNETS[0], scheduler, 7.5) for scheduler in (None, *SCHEDULERS)),
        (UNETS[0], None, 1.0),
        (UNETS[1], None, 7.5),
        (UNETS[1], None, 1.0),
        *(pytest.param(kind, scheduler, 1.0, marks=pytest.mark.stress) for kind in UNETS for scheduler in SCHEDULERS),
        *(pytest.param(UNETS[1], scheduler, 7.5, marks=pytest.mark.stress) for scheduler in SCHEDULERS),
    ],
)
def test_evaluations_one_by_one_are_those_of_the_pipeline_of_diffusers(
    made: Made, kind: str, scheduler: str | None, guidance_scale: float
) -> None:
    loaded = load(made(kind), scheduler=scheduler, guidance_scale=guidance_scale)
    assert loaded.reference_name.endswith("Pipeline.__call__")
    for samples in ([1], [1, 2]):
        assert_as_reference(loaded, samples)


@pytest.mark.parametrize(
    ("scheduler", "by"),
    [
        (None, "diffusers DDPMPipeline.__call__"),
        ("DDIMScheduler", "diffusers DDPMPipeline.__call__"),
        ("EulerDiscreteScheduler", denoiser.LOOP),
        ("DPMSolverMultistepScheduler", denoiser.LOOP),
    ],
)
def test_an_unconditional_pipeline_needs_no_prompts(made: Made, scheduler: str | None, by: str) -> None:
    loaded = load(made("ddpm"), scheduler=scheduler)
    assert loaded.encode(["a cat"]) == []
    assert loaded.reference_name == by
    for samples in ([1], [1, 2]):
        assert_as_reference(loaded, samples)


def test_an_unconditional_pipeline_makes_other_sizes_than_its_own(made: Made) -> None:
    loaded = load(made("ddpm"), height=32, width=24)
    assert loaded.latent_shape == (3, 32, 24)
    assert_as_reference(loaded, [0])
    with pytest.raises(SettingsError, match=r"model\.height 31 is not a multiple of 2"):
        load(made("ddpm"), height=31)


def test_a_model_that_does_not_know_its_size_is_told_to_be_given_one(copy: Path) -> None:
    config = copy / "unet/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sample_size": None}))
    with pytest.raises(SettingsError, match="does not give the height"):
        load(copy)
    assert_as_reference(load(copy, height=32, width=32), [0])


@pytest.mark.parametrize("guidance_scale", [4.5, 1.0])
@pytest.mark.parametrize("kind", TRANSFORMERS)
def test_transformers_are_evaluated_as_by_their_pipelines(made: Made, kind: str, guidance_scale: float) -> None:
    loaded = load(made(kind), guidance_scale=guidance_scale, height=48, width=32)
    assert loaded.reference_name.endswith("Pipeline.__call__")
    for samples in ([1], [1, 2]):
        assert_as_reference(loaded, samples)


def users_pipeline(folder: Path, dtype: torch.dtype) -> Any:
    import diffusers
    from diffusers.utils import is_accelerate_available

    with quiet(transformers=True):
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    if folder.name.startswith("stable_diffusion_3") and not is_accelerate_available():
        pipe.transformer.to(dtype)  # without accelerate, diffusers leaves it in fp32, in which it cannot run
    return pipe


@pytest.mark.parametrize(
    ("kind", "negative_prompt"),
    [(kind, "") for kind in (*UNETS, *TRANSFORMERS)]
    + [(kind, "dull colours") for kind in (*UNETS, *TRANSFORMERS) if kind != "flux"],
)
def test_prompts_give_the_image_that_diffusers_makes_of_them(made: Made, kind: str, negative_prompt: str) -> None:
    loaded = load(made(kind), negative_prompt=negative_prompt, height=32, width=48)
    batch, _ = run(loaded, sampler_of(loaded), [1])
    [ours] = loaded.decode(batch)

    pipe = users_pipeline(made(kind), torch.float32)
    arguments: dict[str, Any] = {"negative_prompt": negative_prompt} if negative_prompt else {}
    if kind.startswith("pixart"):
        arguments["use_resolution_binning"] = False
    theirs: Image = pipe(
        "two dogs",
        height=32,
        width=48,
        num_inference_steps=4,
        guidance_scale=7.5,
        generator=torch.Generator().manual_seed(101),
        **arguments,
    ).images[0]
    assert ours.size == (48, 32)
    assert ours.tobytes() == theirs.tobytes()


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


QUICK_HALVES = {"stable_diffusion": "fp16", "pixart_alpha": "bf16", "stable_diffusion_3": "fp16", "flux": "bf16"}
"""One case of each family that loads in a way of its own."""


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        pytest.param(kind, precision, marks=() if QUICK_HALVES.get(kind) == precision else pytest.mark.stress)
        for kind in (*UNETS, *TRANSFORMERS, "ddpm")
        for precision in HALVES
    ],
)
def test_half_precision_is_loaded_as_users_load_it_and_gives_their_image(made: Made, kind: str, precision: str) -> None:
    dtype = HALVES[precision]
    given: dict[str, Any] = {} if kind == "ddpm" else {"height": 32, "width": 32}  # whose positions PixArt holds
    loaded: Any = load(made(kind), dtype=dtype, **given)
    pipe = users_pipeline(made(kind), dtype)
    for name, component in pipe.components.items():
        if isinstance(component, torch.nn.Module):
            own = getattr(loaded.pipe, name)
            assert own.training is component.training is False
            assert types(own) == types(component), name
    batch, _ = run(loaded, sampler_of(loaded), [1])
    assert batch.latents.dtype == dtype
    [ours] = loaded.decode(batch)
    if kind != "ddpm":
        given |= {"prompt": "two dogs", "guidance_scale": 7.5}
        given |= {"use_resolution_binning": False} if kind.startswith("pixart") else {}
    elif dtype == torch.bfloat16:
        return  # in which diffusers itself makes no image
    with quiet():
        theirs = pipe(**given, num_inference_steps=4, generator=torch.Generator().manual_seed(101)).images[0]
    assert ours.tobytes() == theirs.tobytes()


def types(module: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*module.named_parameters(), *module.named_buffers())}


@pytest.mark.parametrize("kind", ["stable_diffusion", "pixart_alpha"])
def test_a_reference_is_loaded_apart_from_what_it_checks(made: Made, kind: str) -> None:
    given: dict[str, Any] = {"dtype": torch.bfloat16}
    loaded, reference = load(made(kind), **given), load(made(kind), by=models.load_reference, **given)
    assert_as_reference(loaded, [0, 1], reference=reference)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.5)
    with pytest.raises(AssertionError):
        assert_as_reference(loaded, [0], reference=reference)


def test_the_xl_vae_decodes_in_single_precision_where_half_would_overflow(made: Made) -> None:
    loaded: Any = load(made("stable_diffusion_xl"), dtype=torch.float16)
    batch, _ = run(loaded, sampler_of(loaded), [0])
    assert len(loaded.decode(batch)) == 1
    assert loaded.pipe.vae.dtype == torch.float32


def test_a_rank_in_the_middle_holds_no_encoder_and_no_vae_and_denoises_alike(made: Made) -> None:
    whole = load(made("stable_diffusion"))
    bare: Any = load(made("stable_diffusion"), first=False, last=False)
    assert bare.pipe.text_encoder is bare.pipe.tokenizer is bare.pipe.vae is None
    assert bare.latent_shape == whole.latent_shape == (4, 16, 16)
    assert bare.weights_digest() == whole.weights_digest()
    bare.set_conditioning(whole.encode(["a cat"]))
    assert_as_reference(bare, [0])


def test_a_unet_that_embeds_its_guidance_is_not_asked_twice(tmp_path: Path) -> None:
    folder = pipelines_made.stable_diffusion(tmp_path / "lcm", time_cond_proj_dim=8)
    loaded = load(folder, scheduler="LCMScheduler")
    assert set(loaded.encode(["a cat"])[0]) == {"prompt_embeds"}
    assert_as_reference(loaded, [0, 1])


def test_a_transformer_that_is_told_the_image_size_is_told_it(tmp_path: Path) -> None:
    folder = pipelines_made.pixart_alpha(tmp_path / "large", sample_size=128)
    assert_as_reference(load(folder, height=32, width=64), [0, 1])


def test_a_third_text_encoder_may_be_missing(tmp_path: Path) -> None:
    folder = pipelines_made.stable_diffusion_3(tmp_path / "two", third_encoder=False)
    assert folders.check(folder).absent == ("text_encoder_3", "tokenizer_3")
    assert_as_reference(load(folder), [0])


def test_timesteps_that_depend_on_the_image_size_are_the_same_in_the_reference(copied: Made) -> None:
    folder = copied("stable_diffusion_3")
    config = folder / "scheduler/scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dynamic_shifting": True}))
    small, large = load(folder, height=32, width=32), load(folder, height=64, width=64)
    assert not torch.equal(sampler_of(small).timesteps, sampler_of(large).timesteps)
    assert_as_reference(large, [0])


def test_a_scheduler_that_flow_matching_pipelines_do_not_run_is_checked_by_a_plain_loop(made: Made) -> None:
    options = "stochastic_sampling=true"
    loaded = load(made("stable_diffusion_3"), options=options)
    assert loaded.reference_name == denoiser.LOOP
    assert_as_reference(loaded, [0, 1])


def test_flux_has_no_negative_prompt(made: Made) -> None:
    with pytest.raises(SettingsError, match=r"work\.negative_prompt"):
        load(made("flux"), negative_prompt="dull colours")


def test_a_size_that_does_not_divide_into_patches_is_refused_with_the_nearest(made: Made) -> None:
    with pytest.raises(SettingsError, match=r"model\.height 33 is not a multiple of 4") as refused:
        load(made("flux"), height=33)
    assert refused.value.hint == "use 32 or 36"


def test_a_model_that_predicts_velocity_keeps_its_scheduler_configuration(copy: Path) -> None:
    config = copy / "scheduler/scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"prediction_type": "v_prediction"}))
    loaded = load(copy, scheduler="DPMSolverMultistepScheduler")
    assert loaded.scheduler().config.prediction_type == "v_prediction"
    assert_as_reference(loaded, [0])


def test_an_outdated_scheduler_configuration_is_corrected_as_the_pipeline_corrects_it(copy: Path) -> None:
    config = copy / "scheduler/scheduler_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"steps_offset": 0}))
    assert load(copy).scheduler().config.steps_offset == 1


def test_a_folder_of_half_precision_weights_only_is_loaded(copy: Path) -> None:
    for name in ("unet", "vae"):
        weights = copy / name / "diffusion_pytorch_model.safetensors"
        weights.rename(weights.with_suffix(".fp16.safetensors"))
    assert folders.check(copy).variant == "fp16"
    assert_as_reference(load(copy), [0])


def test_weights_that_are_damaged_are_an_error_of_the_model(copy: Path) -> None:
    header = json.dumps({"conv_in.weight": {"dtype": "F31", "shape": [], "data_offsets": [0, 0]}}).encode()
    weights = len(header).to_bytes(8, "little") + header
    (copy / "unet/diffusion_pytorch_model.safetensors").write_bytes(weights)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(copy)


def test_weights_that_the_file_lacks_are_not_made_up(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = copy / "unet/diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    del weights["conv_in.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"conv_in\.weight|1 weights of its unet"):
        load(copy)
