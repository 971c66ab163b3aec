"""Loads the denoiser that the settings name: a pipeline folder, a UNet with random weights, or a dummy."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gpubench.errors import ModelError
from gpubench.kinds.pipeline import folders
from gpubench.kinds.pipeline.folders import PipelineFolder
from gpubench.kinds.pipeline.schedulers import RANDOM_WEIGHTS
from gpubench.kinds.pipeline.settings import CompletedPipeSettings
from gpubench.kinds.pipeline.worker import denoiser
from gpubench.kinds.pipeline.worker.denoiser import Denoiser, PipelineDenoiser, Scale, image_size
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler, quiet
from gpubench.kinds.pipeline.worker.text_to_image import (
    Flux,
    PixArt,
    PixArtAlpha,
    StableDiffusion,
    StableDiffusion3,
    StableDiffusionXL,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_CHANNELS = 4
_SIDE = 64
_PIXELS = 8  # image pixels per latent pixel in each direction
BUSY_WAIT = 5e-4  # seconds of busy waiting at the end of a sleep
_SPIN = 50_000_000  # cycles; tens of milliseconds, long beside the events that time them


class Dummy(Denoiser):
    """A denoiser whose evaluations take `model.step_ms` for any number of samples, with bounded arithmetic on them."""

    def __init__(self, settings: CompletedPipeSettings, device: torch.device, dtype: torch.dtype) -> None:
        height, width = image_size(settings, _SIDE, scale=_PIXELS, multiple=_PIXELS)
        super().__init__(
            "dummy",
            nn.Module(),
            settings,
            device=device,
            dtype=dtype,
            latent_shape=(_CHANNELS, height // _PIXELS, width // _PIXELS),
            scheduler=RANDOM_WEIGHTS["dummy"],
        )
        self._seconds = settings.model.step_ms / 1000
        self._cycles = round(self._seconds * _cycles_per_second(device)) if device.type == "cuda" else 0

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        latents = scale(latents)
        return latents / (1 + latents.abs()) * (0.5 + timestep.to(latents.dtype) / 2000)

    @torch.no_grad()
    def predict(self, batch: Batch, sampler: Sampler) -> Tensor:
        deadline = time.perf_counter() + self._seconds
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        output = super().predict(batch, sampler)
        if self.device.type == "cpu":
            _sleep_until(deadline)
        return output


def _sleep_until(deadline: float) -> None:
    """Waits until `deadline` of `time.perf_counter`, at the end by busy waiting, because a sleep ends late."""
    time.sleep(max(0.0, deadline - BUSY_WAIT - time.perf_counter()))
    while time.perf_counter() < deadline:
        pass


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """The frequency of the clock that `torch.cuda._sleep` counts."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(_SPIN)  # wakes the device
    begin.record()
    torch.cuda._sleep(_SPIN)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return _SPIN / milliseconds * 1000


_RUN_BY_PIPELINE = ("DDPMScheduler", "DDIMScheduler")
"""The schedulers that DDPMPipeline can run, because they scale neither noise nor input."""


class Unconditional(PipelineDenoiser):
    """The denoiser of a DDPMPipeline, whose latents are images.

    It also supports schedulers that scale noise or input.
    """

    scale = 1  # no VAE

    @property
    def multiple(self) -> int:
        return int(2 ** (len(self.config.block_out_channels) - 1))

    def is_run_by_pipeline(self, scheduler: Any) -> bool:
        own, size = self.config.sample_size, (self.height, self.width)
        own_size = size == (tuple(own) if isinstance(own, list | tuple) else (own, own))
        return own_size and type(scheduler).__name__ in _RUN_BY_PIPELINE and not self.sampling.eta

    def output(self, latents: Tensor, timestep: Tensor, samples: Sequence[int], scale: Scale) -> Tensor:
        output: Tensor = self.model(scale(latents), timestep).sample
        return output

    def run_pipeline(self, scheduler: Any, samples: Sequence[int], generators: list[torch.Generator]) -> Tensor:
        """The latents of the pipeline's last step, because the pipeline itself returns clipped images."""
        latents: list[Tensor] = []
        denoiser.watch(scheduler, lambda step, made: latents.append(made))
        self.pipe.scheduler = scheduler
        self.pipe.set_progress_bar_config(disable=True)
        with quiet():
            self.pipe(batch_size=len(samples), generator=generators, num_inference_steps=self.steps, output_type="pt")
        return latents[-1]

    @torch.no_grad()
    def decode(self, batch: Batch) -> "list[Image]":
        pixels = (batch.latents / 2 + 0.5).clamp(0, 1).cpu().permute(0, 2, 3, 1)
        pixels = pixels.float() if pixels.dtype == torch.bfloat16 else pixels  # numpy has no bf16
        images: list[Image] = self.pipe.numpy_to_pil(pixels.numpy())
        return images


TEXT_TOKENS = 77
"""The context length of CLIP, whose text encoder Stable Diffusion uses."""

CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "sample_size": 32,
        "block_out_channels": (4, 8),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "cross_attention_dim": 8,
        "norm_num_groups": 2,
    },
    "unet2d": {"sample_size": 64},
    "sd15": {"sample_size": 64, "cross_attention_dim": 768},
    "sdxl": {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "attention_head_dim": (5, 10, 20),
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}
"""Arguments of UNet2DConditionModel, and of UNet2DModel for unet2d; the rest are its defaults."""


def build(unet: str) -> nn.Module:
    """The network with random weights from torch's default generator, on the default device."""
    if unet == "unet2d":
        from diffusers.models.unets.unet_2d import UNet2DModel

        model: nn.Module = UNet2DModel(**CONFIGS[unet])
    else:
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

        model = UNet2DConditionModel(**CONFIGS[unet])
    return model


def load_unet(settings: CompletedPipeSettings, device: torch.device, dtype: torch.dtype) -> Denoiser:
    unet = settings.model.unet
    if unet is None:
        raise ValueError("model.unet is not set")
    with quiet():
        torch.manual_seed(settings.seed)
        model = build(unet).to(device, dtype)
        if unet == "unet2d":
            from diffusers import DDPMPipeline

            pipe = DDPMPipeline(unet=model, scheduler=None)
            return Unconditional(pipe, unet, settings, device, dtype, RANDOM_WEIGHTS[unet])
        if unet == "sdxl":
            from diffusers import StableDiffusionXLPipeline

            absent = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"))
            pipe = StableDiffusionXLPipeline(unet=model, add_watermarker=False, **absent)
            return _RandomTextXL(pipe, unet, settings, device, dtype, RANDOM_WEIGHTS[unet])
        from diffusers import StableDiffusionPipeline

        absent = dict.fromkeys(("vae", "text_encoder", "tokenizer", "scheduler", "safety_checker", "feature_extractor"))
        pipe = StableDiffusionPipeline(unet=model, requires_safety_checker=False, **absent)
        return _RandomText(pipe, unet, settings, device, dtype, RANDOM_WEIGHTS[unet])


class _RandomText(StableDiffusion):
    """Random embeddings for each index of a prompt, equal on every machine and in every run."""

    def encode(
        self, prompts: Sequence[str], before_each: Callable[[int], None] = lambda index: None
    ) -> list[dict[str, Tensor]]:
        return [self._draw(torch.Generator().manual_seed(index)) for index in range(max(1, len(prompts)))]

    def _draw(self, generator: torch.Generator) -> dict[str, Tensor]:
        names = [name for name in self.embeddings if self.guided or not name.startswith("negative_")]
        return {name: torch.randn(self._shape(name), generator=generator).to(self.dtype) for name in names}

    def _shape(self, name: str) -> tuple[int, ...]:
        return (1, TEXT_TOKENS, self.model.config.cross_attention_dim)


class _RandomTextXL(_RandomText, StableDiffusionXL):
    def _shape(self, name: str) -> tuple[int, ...]:
        if "pooled" not in name:
            return super()._shape(name)
        config = self.model.config
        size_and_crop = 6 * config.addition_time_embed_dim
        return (1, config.projection_class_embeddings_input_dim - size_and_crop)


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
"""The optional components of each pipeline class, as keyword arguments."""


def load_folder(
    settings: CompletedPipeSettings, device: torch.device, read: Callable[[PipelineFolder], Any], dtype: torch.dtype
) -> Denoiser:
    """Returns the denoiser of the folder `settings.model.name`. `read` loads the folder's pipeline.

    Weights are read from safetensors only, code in the folder is never run, and nothing is downloaded. Raises
    ModelError if the folder is incomplete, or if the libraries cannot load it.
    """
    if settings.model.name is None:
        raise ValueError("model.name is not set")
    folder = folders.check(settings.model.name)
    try:
        with quiet(transformers=True):
            pipe = read(folder)
    except (ModelError, MemoryError):
        raise
    except Exception as error:  # configurations can make the libraries raise any exception
        raise ModelError(
            f"pipeline folder {folder.path} cannot be loaded: {' '.join(str(error).split())}",
            "check its configurations against the installed diffusers and transformers",
        ) from error
    with quiet(transformers=True):
        pipe.to(device)
    own_scheduler = (type(pipe.scheduler).__name__, dict(pipe.scheduler.config))
    adapter: Denoiser = _ADAPTERS[folder.pipeline](
        pipe, folder.path.resolve().name, settings, device, dtype, own_scheduler
    )
    return adapter


def _source(folder: PipelineFolder, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "torch_dtype": dtype,
        "variant": folder.variant,
        "use_safetensors": True,
        "local_files_only": True,
    }


def _part(folder: PipelineFolder, dtype: torch.dtype, *, encoders: bool, vae: bool) -> Any:
    import diffusers

    given: dict[str, Any] = {**_NOT_LOADED.get(folder.pipeline, {}), **dict.fromkeys(folder.absent)}
    if not encoders:
        names = (*folder.kind.others, *folder.kind.optional)
        given |= dict.fromkeys(name for name in names if name.startswith(("text_encoder", "tokenizer")))
    if not vae and "vae" in folder.kind.others:
        given["vae"] = None
    given[folder.kind.denoiser] = _denoiser(folder, dtype)
    pipe = getattr(diffusers, folder.pipeline).from_pretrained(folder.path, **_source(folder, dtype), **given)
    if given.get("vae", pipe) is None:
        # The pipeline reads the number of pixels per latent from its VAE.
        config = diffusers.AutoencoderKL.load_config(folder.path / "vae", local_files_only=True)
        pipe.vae_scale_factor = 2 ** (len(config["block_out_channels"]) - 1)
    return pipe


def _whole(folder: PipelineFolder, dtype: torch.dtype) -> Any:
    """Loads all components in the call that users of diffusers make."""
    import diffusers

    given: dict[str, Any] = {**_NOT_LOADED.get(folder.pipeline, {}), **dict.fromkeys(folder.absent)}
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder.path, **_source(folder, dtype), **given)
    _convert(getattr(pipe, folder.kind.denoiser), dtype)
    return pipe


def _denoiser(folder: PipelineFolder, dtype: torch.dtype) -> torch.nn.Module:
    """Loads the denoiser alone: a pipeline gives missing weights random values, and only logs that."""
    import diffusers

    model: torch.nn.Module
    model, report = getattr(diffusers, folder.kind.denoiser_class).from_pretrained(
        folder.path / folder.kind.denoiser, output_loading_info=True, **_source(folder, dtype)
    )
    missing = report["missing_keys"]
    if missing:
        raise ModelError(
            f"pipeline folder {folder.path}: {len(missing)} weights of its {folder.kind.denoiser} are not in the file",
            f"among them {sorted(missing)[0]}",
        )
    _convert(model, dtype)
    return model


def _convert(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Converts what the file of a model contains to `dtype`, as `from_pretrained` does if accelerate is installed.

    Without accelerate, `from_pretrained` may leave weights in the data type of the file, and the model then cannot run.
    `model.to(dtype)` would also convert the buffers that the file does not contain, such as the positions of PixArt,
    which `from_pretrained` keeps in fp32.
    """
    from diffusers.utils import is_accelerate_available

    if is_accelerate_available():
        return
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def load(
    settings: CompletedPipeSettings, device: torch.device, dtype: torch.dtype, *, first: bool, last: bool, images: bool
) -> Denoiser:
    """Loads the denoiser that `settings.model` names, in evaluation mode, on `device`.

    Text encoders are loaded if `first`, and the VAE if `last` and `images`. Random weights depend on `settings.seed`
    alone, so that all ranks have the same.

    Raises ModelError if a pipeline folder cannot be loaded, SettingsError if the sizes do not suit the model.
    """
    if settings.model.name is not None:
        read = functools.partial(_part, dtype=dtype, encoders=first, vae=last and images)
        return load_folder(settings, device, read, dtype)
    if settings.model.unet == "dummy":
        return Dummy(settings, device, dtype)
    return load_unet(settings, device, dtype)


def load_reference(settings: CompletedPipeSettings, device: torch.device, dtype: torch.dtype) -> Denoiser:
    """Loads the model again, to make the reference samples: a pipeline folder in the call that users of diffusers make.

    Raises what `load` raises.
    """
    if settings.model.name is None:
        return load(settings, device, dtype, first=True, last=False, images=False)
    return load_folder(settings, device, functools.partial(_whole, dtype=dtype), dtype)
