"""A local folder of a diffusers pipeline: each rank loads of it what it needs."""

from collections.abc import Mapping
from typing import Any

import torch

from gpubench.diffusion import pipelines
from gpubench.diffusion.pipelines import PipelineFolder
from gpubench.diffusion.settings import PipeSettings
from gpubench.errors import ModelError
from gpubench.pipeline.base import DenoiserBase
from gpubench.pipeline.diffusion_transformers import Flux, PixArt, PixArtAlpha, StableDiffusion3
from gpubench.pipeline.quiet import quiet
from gpubench.pipeline.stable_diffusion import StableDiffusion, StableDiffusionXL
from gpubench.pipeline.unconditional import Unconditional

_ADAPTERS: Mapping[str, Any] = {
    "DDPMPipeline": Unconditional,
    "FluxPipeline": Flux,
    "PixArtAlphaPipeline": PixArtAlpha,
    "PixArtSigmaPipeline": PixArt,
    "StableDiffusionPipeline": StableDiffusion,
    "StableDiffusionXLPipeline": StableDiffusionXL,
    "StableDiffusion3Pipeline": StableDiffusion3,
}
_IMAGE_PROMPTS = {"feature_extractor": None, "image_encoder": None}
_NOT_LOADED: Mapping[str, Mapping[str, Any]] = {
    "FluxPipeline": _IMAGE_PROMPTS,
    "StableDiffusionPipeline": {**_IMAGE_PROMPTS, "safety_checker": None, "requires_safety_checker": False},
    "StableDiffusionXLPipeline": {**_IMAGE_PROMPTS, "add_watermarker": False},
    "StableDiffusion3Pipeline": _IMAGE_PROMPTS,
}
"""What a pipeline class can do without, as arguments of it."""


def load(
    settings: PipeSettings, device: torch.device, dtype: torch.dtype, *, encoders: bool, vae: bool
) -> DenoiserBase:
    """The denoiser of the folder `settings.model.name`, on `device`; see `gpubench.pipeline.denoiser.load`.

    Weights are read from safetensors only, code in the folder is never run, and nothing is downloaded.

    Raises ModelError if the folder is not whole, or the libraries cannot make a pipeline of it.
    """
    if settings.model.name is None:
        raise ValueError("model.name is not set")
    folder = pipelines.check(settings.model.name)
    try:
        with quiet(transformers=True):
            pipe = _pipeline(folder, dtype, encoders=encoders, vae=vae)
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # whatever foreign configurations make the libraries do
        raise ModelError(
            f"pipeline folder {folder.path} cannot be loaded: {' '.join(str(error).split())}",
            "check its configurations against the installed diffusers and transformers",
        ) from error
    with quiet(transformers=True):
        pipe.to(device)
    own_scheduler = (type(pipe.scheduler).__name__, dict(pipe.scheduler.config))
    adapter: DenoiserBase = _ADAPTERS[folder.pipeline](
        pipe, folder.path.resolve().name, settings, device, dtype, own_scheduler
    )
    return adapter


def _pipeline(folder: PipelineFolder, dtype: torch.dtype, *, encoders: bool, vae: bool) -> Any:
    import diffusers

    source: dict[str, Any] = {
        "torch_dtype": dtype,
        "variant": folder.variant,
        "use_safetensors": True,
        "local_files_only": True,
    }
    given: dict[str, Any] = {**_NOT_LOADED.get(folder.pipeline, {}), **dict.fromkeys(folder.absent)}
    if not encoders:
        names = (*folder.kind.others, *folder.kind.optional)
        given |= dict.fromkeys(name for name in names if name.startswith(("text_encoder", "tokenizer")))
    if not vae and "vae" in folder.kind.others:
        given["vae"] = None
    given[folder.kind.denoiser] = _denoiser(folder, source)
    pipe = getattr(diffusers, folder.pipeline).from_pretrained(folder.path, **source, **given)
    if given.get("vae", pipe) is None:
        # The pipeline asks its VAE how many pixels a latent stands for.
        config = diffusers.AutoencoderKL.load_config(folder.path / "vae", local_files_only=True)
        pipe.vae_scale_factor = 2 ** (len(config["block_out_channels"]) - 1)
    return pipe


def _denoiser(folder: PipelineFolder, source: Mapping[str, Any]) -> torch.nn.Module:
    """Loaded by itself, as a pipeline gives random values to weights that a file lacks, and only logs it."""
    import diffusers

    model: torch.nn.Module
    model, report = getattr(diffusers, folder.kind.denoiser_class).from_pretrained(
        folder.path / folder.kind.denoiser, output_loading_info=True, **source
    )
    missing = report["missing_keys"]
    if missing:
        raise ModelError(
            f"pipeline folder {folder.path}: {len(missing)} weights of its {folder.kind.denoiser} are not in the file",
            f"among them {sorted(missing)[0]}",
        )
    return model.to(source["torch_dtype"])  # where accelerate is not installed, some are left in the type of the file
