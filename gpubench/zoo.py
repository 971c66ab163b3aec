"""The built-in models: published architectures with random weights, and a tiny model of each family for tests.

Dropout is 0 everywhere, even where the published recipe has 0.1, so that a run is deterministic for a given seed, fused
attention is available on every device, and FLOPs are comparable. No model needs a network connection.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Literal

from gpubench.errors import ModelError, did_you_mean


class Task(StrEnum):
    """The task of a model, which determines the content of its batches (see `worker/tasks.py`)."""

    image_classification = "image-classification"
    causal_lm = "causal-lm"
    masked_lm = "masked-lm"
    image_denoising = "image-denoising"
    """A UNet2DModel predicts the noise in an image."""
    latent_denoising = "latent-denoising"
    """A UNet2DConditionModel predicts the noise in a latent, given text embeddings."""


TASK_OF_SUFFIX = {
    "ForImageClassification": Task.image_classification,
    "ForCausalLM": Task.causal_lm,
    "LMHeadModel": Task.causal_lm,
    "ForMaskedLM": Task.masked_lm,
}
"""The tasks of transformers' model classes, by the end of the class name."""
LONGEST = {Task.causal_lm: 1024, Task.masked_lm: 512}
"""The default number of tokens in a sequence; the model's own limit if that is smaller."""


_POSITIONS = {"BertConfig": 512, "GPT2Config": 1024}
"""The number of positions by configuration class, for configurations that do not give it."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """How to build a model, and the default sizes of its samples and batches.

    `config_class` is None for diffusers, whose model classes take the configuration as keywords. `image_size` is the
    height and width in pixels; a latent is an eighth of it. `sequence_length` counts the tokens of a language model,
    or the text embeddings of latent denoising. Batch sizes are samples per rank.
    """

    name: str
    library: Literal["transformers", "diffusers"]
    config_class: str | None
    model_class: str
    config: Mapping[str, Any]
    task: Task
    image_size: int | None = None
    sequence_length: int | None = None
    batch_size_cpu: int
    batch_size_cuda: int
    description: str

    @property
    def positions(self) -> int | None:
        """The largest number of tokens in a sequence; None for a model without a limit."""
        own = self.config.get("max_position_embeddings") or self.config.get("n_positions")
        return own or _POSITIONS.get(self.config_class or "")


_RESNET = partial(
    ModelSpec,
    library="transformers",
    config_class="ResNetConfig",
    model_class="ResNetForImageClassification",
    task=Task.image_classification,
)
_VIT = partial(
    ModelSpec,
    library="transformers",
    config_class="ViTConfig",
    model_class="ViTForImageClassification",
    task=Task.image_classification,
)
_BERT = partial(
    ModelSpec,
    library="transformers",
    config_class="BertConfig",
    model_class="BertForMaskedLM",
    task=Task.masked_lm,
)
_GPT2 = partial(
    ModelSpec,
    library="transformers",
    config_class="GPT2Config",
    model_class="GPT2LMHeadModel",
    task=Task.causal_lm,
)
_LLAMA = partial(
    ModelSpec,
    library="transformers",
    config_class="LlamaConfig",
    model_class="LlamaForCausalLM",
    task=Task.causal_lm,
)
_UNET = partial(
    ModelSpec,
    library="diffusers",
    config_class=None,
    model_class="UNet2DModel",
    task=Task.image_denoising,
)
_SD_UNET = partial(
    ModelSpec,
    library="diffusers",
    config_class=None,
    model_class="UNet2DConditionModel",
    task=Task.latent_denoising,
    sequence_length=77,
)

_ENCODER_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_TINY_TRANSFORMER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}

_SPECS = (
    _RESNET(
        name="resnet18",
        config={"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic", "num_labels": 1000},
        image_size=224,
        batch_size_cpu=16,
        batch_size_cuda=256,
        description="ResNet-18, ImageNet shape: 11.7M parameters",
    ),
    _RESNET(
        name="resnet50",
        config={"num_labels": 1000},
        image_size=224,
        batch_size_cpu=8,
        batch_size_cuda=128,
        description="ResNet-50 v1.5, ImageNet shape: 25.6M parameters",
    ),
    _RESNET(
        name="resnet-tiny",
        config={
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [1, 1],
            "layer_type": "basic",
            "num_labels": 10,
        },
        image_size=32,
        batch_size_cpu=8,
        batch_size_cuda=64,
        description="two ResNet blocks",
    ),
    _VIT(
        name="vit-b16",
        config=_ENCODER_NO_DROPOUT | {"num_labels": 1000},
        image_size=224,
        batch_size_cpu=8,
        batch_size_cuda=128,
        description="ViT-B/16, ImageNet shape: 86.6M parameters",
    ),
    _VIT(
        name="vit-tiny",
        config=_ENCODER_NO_DROPOUT | _TINY_TRANSFORMER | {"patch_size": 8, "num_labels": 10},
        image_size=32,
        batch_size_cpu=8,
        batch_size_cuda=64,
        description="two ViT layers of width 32",
    ),
    _BERT(
        name="bert-base",
        config=_ENCODER_NO_DROPOUT,
        sequence_length=128,
        batch_size_cpu=8,
        batch_size_cuda=64,
        description="BERT-base with its masked-token head: 110M parameters",
    ),
    _BERT(
        name="bert-large",
        config=_ENCODER_NO_DROPOUT
        | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        sequence_length=128,
        batch_size_cpu=2,
        batch_size_cuda=32,
        description="BERT-large with its masked-token head: 335M parameters",
    ),
    _BERT(
        name="bert-tiny",
        config=_ENCODER_NO_DROPOUT | _TINY_TRANSFORMER | {"vocab_size": 257, "max_position_embeddings": 64},
        sequence_length=32,
        batch_size_cpu=8,
        batch_size_cuda=64,
        description="two BERT layers of width 32; one token per byte, plus [MASK] as the last token",
    ),
    _GPT2(
        name="gpt2",
        config=_GPT2_NO_DROPOUT,
        sequence_length=1024,
        batch_size_cpu=1,
        batch_size_cuda=16,
        description="GPT-2 small: 124M parameters",
    ),
    _GPT2(
        name="gpt2-tiny",
        config=_GPT2_NO_DROPOUT
        | {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
        | {"bos_token_id": None, "eos_token_id": None},
        sequence_length=32,
        batch_size_cpu=8,
        batch_size_cuda=64,
        description="two GPT-2 layers of width 32; one token per byte",
    ),
    _LLAMA(
        name="llama-3.2-1b",
        config={
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
            "attention_dropout": 0.0,
        },
        sequence_length=2048,
        batch_size_cpu=1,
        batch_size_cuda=2,
        description="the architecture of Llama 3.2 1B: 1.24B parameters, tied embeddings",
    ),
    _LLAMA(
        name="llama-tiny",
        config=_TINY_TRANSFORMER
        | {"vocab_size": 256, "num_key_value_heads": 2, "max_position_embeddings": 64}
        | {"tie_word_embeddings": True, "attention_dropout": 0.0},
        sequence_length=32,
        batch_size_cpu=8,
        batch_size_cuda=64,
        description="two Llama layers of width 32; one token per byte",
    ),
    _SD_UNET(
        name="sd15-unet",
        config={"sample_size": 64, "cross_attention_dim": 768, "dropout": 0.0},
        image_size=512,
        batch_size_cpu=1,
        batch_size_cuda=8,
        description="the UNet of Stable Diffusion 1.5: 860M parameters",
    ),
    _SD_UNET(
        name="sd15-unet-tiny",
        config={
            "sample_size": 8,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "attention_head_dim": 2,
            "cross_attention_dim": 16,
            "norm_num_groups": 4,
            "dropout": 0.0,
        },
        image_size=64,
        batch_size_cpu=4,
        batch_size_cuda=32,
        description="the UNet of Stable Diffusion with two levels of width 8 and 16",
    ),
    _UNET(
        name="unet2d",
        config={"dropout": 0.0},
        image_size=64,
        batch_size_cpu=1,
        batch_size_cuda=16,
        description="UNet2DModel with the default configuration of diffusers: 274M parameters",
    ),
    _UNET(
        name="unet2d-tiny",
        config={
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "block_out_channels": (8, 16),
            "layers_per_block": 1,
            "norm_num_groups": 4,
            "dropout": 0.0,
        },
        image_size=16,
        batch_size_cpu=4,
        batch_size_cuda=32,
        description="UNet2DModel with two levels of width 8 and 16",
    ),
)

MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in _SPECS}


def is_builtin(name: str) -> bool:
    return name in MODELS


def find(name: str) -> ModelSpec:
    """Raises ModelError for a name that is not a built-in model's."""
    if name in MODELS:
        return MODELS[name]
    guess = did_you_mean(name.lower(), MODELS) or f"choose one of {', '.join(MODELS)};"
    if name.endswith(".py"):
        guess = f"for a function in that file, give {Path(name).stem}:FUNCTION;"
    raise ModelError(
        f"model.name: there is no built-in model, and no folder, called {name!r}",
        f"{guess} a model of your own is module:callable, or a folder holding config.json",
        keys=["model.name"],
    )
