"""UNets of published shapes with random weights, and random text to guide them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpubench.diffusion.scheduler_names import RANDOM_WEIGHTS
from gpubench.diffusion.settings import PipeSettings
from gpubench.pipeline.base import DenoiserBase
from gpubench.pipeline.quiet import quiet
from gpubench.pipeline.stable_diffusion import StableDiffusion, StableDiffusionXL
from gpubench.pipeline.unconditional import Unconditional

TEXT_TOKENS = 77
"""CLIP's, whose text encoder is that of Stable Diffusion."""

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


def load(settings: PipeSettings, device: torch.device, dtype: torch.dtype) -> DenoiserBase:
    """The denoiser `settings.model.unet`. Weights are drawn in fp32 on the CPU: the same whatever runs them."""
    unet = settings.model.unet
    if unet is None:
        raise ValueError("model.unet has not been filled in")
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
    """The same embeddings on every machine and in every run, one set for each prompt's place in the list."""

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
