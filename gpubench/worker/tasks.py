"""The random batches of each task, and the loss of a batch.

The first dimension of every tensor is the sample; B is the number of samples:

    image-classification   (images (B, C, H, W) float, labels (B,) int64)
    causal-lm              {"input_ids": (B, T) int64}
    masked-lm              {"input_ids": (B, T) int64, "labels": (B, T) int64, -100 for tokens that are not predicted}
    image-denoising        {"clean", "noise": (B, C, H, W), "timesteps": (B,) int64, "alpha_bar": (B,) float}
    latent-denoising       the same, and {"text": (B, T, width) float}

Random values, such as noise and masked positions, are part of the batch, so that the step itself draws none.
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
    """A random masked-lm batch, in which 15 % of each sequence, but at least one token, are to be predicted.

    The last id of the vocabulary is the mask token, which replaces all of them; BERT's 80/10/10 split would not change
    any shape. Every sequence has the same number of masked tokens, so that every batch has a loss.
    """
    tokens = torch.randint(vocabulary - 1, (batch_size, length))
    chosen = torch.rand(batch_size, length).argsort(dim=1) < max(1, round(MASKED_FRACTION * length))
    return {"input_ids": tokens.masked_fill(chosen, vocabulary - 1), "labels": tokens.masked_fill(~chosen, -100)}


def alpha_bar() -> Tensor:
    """The share of the signal in the variance of a noisy image at each timestep, float32 [DIFFUSION_STEPS].

    Source: the linear schedule of Ho, Jain and Abbeel 2020, "Denoising Diffusion Probabilistic Models", section 4.
    """
    betas = torch.linspace(1e-4, 0.02, DIFFUSION_STEPS, dtype=torch.float64)  # float32 would accumulate rounding errors
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
    """The loss of `module(inputs)`, or of its `.logits`, against the targets.

    The loss is cross-entropy for integer targets and mean squared error for floating targets. Raises ModelError if
    floating targets do not have the output's shape, because broadcasting would give a wrong loss.
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


def call(module: nn.Module, batch: Any) -> object:
    """Calls the module with a batch: with its parts, by their names if it has names, or with a single tensor."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def supervised_forward(module: nn.Module, batch: Any) -> object:
    """Calls the module with the inputs of a pair (inputs, targets), or with a batch that has no targets."""
    return module(batch[0]) if isinstance(batch, tuple | list) else call(module, batch)


def language_forward(module: nn.Module, batch: Mapping[str, Tensor]) -> object:
    """Computes the logits of all tokens, without a cache: what generation calls the prefill."""
    return module(input_ids=batch["input_ids"])


def denoising_forward(module: nn.Module, batch: Mapping[str, Tensor]) -> object:
    """Predicts the noise in an image once, as each step of a sampler does."""
    text = (batch["text"],) if "text" in batch else ()
    return module(batch["clean"], batch["timesteps"], *text).sample


def no_loss(module: nn.Module, batch: Any) -> Tensor:
    """Stands for the loss of a model that only inference takes."""
    raise ModelError("the model came without a loss", "return (module, make_batch, loss), or use --inference")


def language_loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The cross-entropy for the labels of the batch, or for each next token if it has no labels.

    transformers shifts the labels and converts the logits to float32.
    """
    tokens = batch["input_ids"]
    loss: Tensor = module(input_ids=tokens, labels=batch.get("labels", tokens)).loss
    return loss


def denoising_loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The mean squared error of the predicted noise in sqrt(alpha_bar) clean + sqrt(1 - alpha_bar) noise.

    Source: Ho, Jain and Abbeel 2020, "Denoising Diffusion Probabilistic Models", equation 14.
    """
    signal = batch["alpha_bar"].view(-1, 1, 1, 1)
    noisy = signal.sqrt() * batch["clean"] + (1 - signal).sqrt() * batch["noise"]
    text = (batch["text"],) if "text" in batch else ()
    return functional.mse_loss(module(noisy, batch["timesteps"], *text).sample, batch["noise"])
