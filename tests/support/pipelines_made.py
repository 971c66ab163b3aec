"""Small pipeline folders with random weights, as diffusers itself saves them: nothing is downloaded."""

import string
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDPMPipeline,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    PNDMScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

_TOKENS = 16
_WIDTH = 8
_T5_WIDTH = 32
_NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def stable_diffusion(folder: Path, **unet: Any) -> Path:
    """Images of 32 x 32 from latents of 16 x 16, with a scheduler configured as in Stable Diffusion 1.5."""
    torch.manual_seed(1)
    StableDiffusionPipeline(
        unet=_unet(**unet),
        vae=_vae(),
        text_encoder=CLIPTextModel(_text_config()),
        tokenizer=_tokenizer(),
        scheduler=PNDMScheduler(**_NOISE, skip_prk_steps=True, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def stable_diffusion_xl(folder: Path) -> Path:
    """Two text encoders, and a UNet that is told their pooled text and the image's size."""
    torch.manual_seed(2)
    time_width = 8
    StableDiffusionXLPipeline(
        unet=_unet(
            cross_attention_dim=2 * _WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=time_width,
            projection_class_embeddings_input_dim=_WIDTH + 6 * time_width,
        ),
        vae=_vae(),
        text_encoder=CLIPTextModel(_text_config()),
        text_encoder_2=CLIPTextModelWithProjection(_text_config()),
        tokenizer=_tokenizer(),
        tokenizer_2=_tokenizer(),
        scheduler=EulerDiscreteScheduler(**_NOISE, steps_offset=1, timestep_spacing="leading"),
        add_watermarker=False,
    ).save_pretrained(folder)
    return folder


def ddpm(folder: Path) -> Path:
    """Unconditional images of 16 x 16."""
    torch.manual_seed(3)
    unet = UNet2DModel(
        sample_size=16,
        block_out_channels=(4, 8),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=2,
    )
    DDPMPipeline(unet=unet, scheduler=DDPMScheduler()).save_pretrained(folder)
    return folder


def pixart_alpha(folder: Path, **transformer: Any) -> Path:
    """A transformer that predicts the variance as well."""
    torch.manual_seed(4)
    PixArtAlphaPipeline(**_pixart(**transformer)).save_pretrained(folder)
    return folder


def pixart_sigma(folder: Path) -> Path:
    torch.manual_seed(5)
    PixArtSigmaPipeline(**_pixart()).save_pretrained(folder)
    return folder


def stable_diffusion_3(folder: Path, *, third_encoder: bool = True) -> Path:
    """Three text encoders, or two of them."""
    torch.manual_seed(6)
    StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            caption_projection_dim=16,
            joint_attention_dim=_T5_WIDTH,
            pooled_projection_dim=2 * _WIDTH,
        ),
        vae=_vae(shift_factor=0.1),
        text_encoder=CLIPTextModelWithProjection(_text_config()),
        tokenizer=_tokenizer(),
        text_encoder_2=CLIPTextModelWithProjection(_text_config()),
        tokenizer_2=_tokenizer(),
        text_encoder_3=T5EncoderModel(_t5_config()) if third_encoder else None,
        tokenizer_3=_t5_tokenizer() if third_encoder else None,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder)
    return folder


def flux(folder: Path) -> Path:
    """Latents in a row of patches, timesteps that depend on the image's size, and guidance as a number."""
    torch.manual_seed(7)
    FluxPipeline(
        transformer=FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=_T5_WIDTH,
            pooled_projection_dim=_WIDTH,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
        vae=_vae(shift_factor=0.1),
        text_encoder=CLIPTextModel(_text_config()),
        tokenizer=_tokenizer(),
        text_encoder_2=T5EncoderModel(_t5_config()),
        tokenizer_2=_t5_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
    ).save_pretrained(folder)
    return folder


def _pixart(**transformer: Any) -> dict[str, Any]:
    return {
        "transformer": PixArtTransformer2DModel(
            **{
                "sample_size": 16,
                "patch_size": 2,
                "in_channels": 4,
                "out_channels": 8,
                "num_layers": 1,
                "attention_head_dim": 8,
                "num_attention_heads": 3,
                "caption_channels": _T5_WIDTH,
                "cross_attention_dim": 24,
            }
            | transformer
        ),
        "vae": _vae(),
        "text_encoder": T5EncoderModel(_t5_config()),
        "tokenizer": _t5_tokenizer(),
        "scheduler": DPMSolverMultistepScheduler(),
    }


def _unet(**config: Any) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        **{
            "sample_size": 16,
            "block_out_channels": (4, 8),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": _WIDTH,
            "norm_num_groups": 2,
        }
        | config
    )


def _vae(**config: Any) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(4, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=2,
        **config,
    )


def _text_config() -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(_vocabulary()),
        hidden_size=_WIDTH,
        intermediate_size=16,
        projection_dim=_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )


def _tokenizer() -> CLIPTokenizer:
    return CLIPTokenizer(vocab=_vocabulary(), merges=[], model_max_length=_TOKENS)


def _t5_config() -> T5Config:
    return T5Config(
        vocab_size=len(_pieces()), d_model=_T5_WIDTH, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0
    )


def _t5_tokenizer() -> T5Tokenizer:
    return T5Tokenizer(vocab=_pieces(), extra_ids=0, model_max_length=_TOKENS)


def _pieces() -> list[tuple[str, float]]:
    """One token a letter, each as likely as any."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return special + [(piece, -1.0) for piece in ("\u2581", *string.ascii_lowercase)]


def _vocabulary() -> dict[str, int]:
    """One token a letter, within a word and at its end."""
    words = ["<|startoftext|>", "<|endoftext|>"]
    words += [letter + end for letter in string.ascii_lowercase for end in ("", "</w>")]
    return {word: index for index, word in enumerate(words)}
