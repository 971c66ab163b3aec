"""What models are trained to do: random batches, and the loss of a batch.

Batches by task, every tensor with the sample as its first dimension, B samples:

    image-classification   (images (B, C, H, W) float, labels (B,) int64)
    causal-lm              {"input_ids": (B, T) int64}
    masked-lm              {"input_ids": (B, T) int64, "labels": (B, T) int64, -100 where nothing is to be predicted}
    image-denoising        {"clean", "noise": (B, C, H, W), "timesteps": (B,) int64, "alpha_bar": (B,) float}
    latent-denoising       the same, and {"text": (B, T, width) float}

What is random, such as noise and masked positions, is part of the batch, so that the step itself draws nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpubench.errors import ModelError

DIFFUSION_STEPS = 1000
MASKED_FRACTION = 0.15


def labelled_images(batch_size: int, *, channels: int, classes: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, channels, size, size), torch.randint(classes, (batch_size,))


def tokens(batch_size: int, *, vocabulary: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(vocabulary, (batch_size, length))}


def masked_tokens(batch_size: int, *, vocabulary: int, length: int) -> dict[str, Tensor]:
    """15 % of each sequence, at least one token, is to be predicted; the last id of the vocabulary serves as [MASK].

    The same number in every sequence, so that no batch is without a loss, and all of them [MASK] (BERT's 80/10/10
    split changes no shape).
    """
    tokens = torch.randint(vocabulary - 1, (batch_size, length))
    chosen = torch.rand(batch_size, length).argsort(dim=1) < max(1, round(MASKED_FRACTION * length))
    return {"input_ids": tokens.masked_fill(chosen, vocabulary - 1), "labels": tokens.masked_fill(~chosen, -100)}


def alpha_bar() -> Tensor:
    """What remains of the signal's variance at each of DIFFUSION_STEPS timesteps, float32.

    Source: Ho, Jain and Abbeel 2020, "Denoising Diffusion Probabilistic Models", section 4: the linear schedule.
    """
    betas = torch.linspace(1e-4, 0.02, DIFFUSION_STEPS, dtype=torch.float64)  # in float32 the product drifts
    return (1 - betas).cumprod(0).float()


def noise(batch_size: int, *, channels: int, size: int, text_shape: tuple[int, int] | None) -> dict[str, Tensor]:
    timesteps = torch.randint(DIFFUSION_STEPS, (batch_size,))
    batch = {
        "clean": torch.randn(batch_size, channels, size, size),
        "noise": torch.randn(batch_size, channels, size, size),
        "timesteps": timesteps,
        "alpha_bar": alpha_bar()[timesteps],
    }
    return batch if text_shape is None else batch | {"text": torch.randn(batch_size, *text_shape)}


def supervised_loss(module: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """Of `module(inputs)`, or its `.logits`, against targets: cross-entropy for integers, mean squared error otherwise.

    ModelError if floating targets do not have the output's shape, which would broadcast into a wrong loss.
    """
    inputs, targets = batch
    output = module(inputs)
    output = getattr(output, "logits", output)
    if not targets.is_floating_point():
        return functional.cross_entropy(output, targets)
    if output.shape != targets.shape:
        raise ModelError(
            f"the model's output is {tuple(output.shape)} and its targets are {tuple(targets.shape)}",
            "make them equal, or return (module, make_batch, loss) from your callable",
        )
    return functional.mse_loss(output, targets)


def language_loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of the labels, or without them of each next token; transformers shifts them and upcasts logits."""
    tokens = batch["input_ids"]
    loss: Tensor = module(input_ids=tokens, labels=batch.get("labels", tokens)).loss
    return loss


def denoising_loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean squared error of the predicted noise in sqrt(alpha_bar) clean + sqrt(1 - alpha_bar) noise.

    Source: Ho, Jain and Abbeel 2020, "Denoising Diffusion Probabilistic Models", equation 14.
    """
    signal = batch["alpha_bar"].view(-1, 1, 1, 1)
    noisy = signal.sqrt() * batch["clean"] + (1 - signal).sqrt() * batch["noise"]
    text = (batch["text"],) if "text" in batch else ()
    return functional.mse_loss(module(noisy, batch["timesteps"], *text).sample, batch["noise"])
