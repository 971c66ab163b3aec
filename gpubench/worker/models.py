"""Builds the model under test, with a function that draws random batches and one that computes the loss of a batch.

A model of the user is `module:callable`; the module is looked up in the current directory first. The callable gets
`model.arguments` by name. It returns either an nn.Module, which is trained with `supervised_loss` on the data source,
or a triple (module, make_batch, loss): `make_batch(batch_size)` returns nested tuples, lists and dicts of CPU tensors,
and `loss(module, batch)` runs the forward pass and returns a scalar tensor. The module passed to `loss` may be a
wrapper (DistributedDataParallel, torch.compile) of the module that was returned; the batch is on the same device. A
fourth element may be `optimizer(parameters)`, which returns a torch.optim.Optimizer or (optimizer, scheduler).

For inference the callable may return (module, make_batch). A tuple or list is passed to the module as `*args`, a dict
as `**kwargs`. If it returns a loss as well, the loss is called instead, because it knows how to call the module.
"""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpubench import foreign_files
from gpubench.errors import ModelError
from gpubench.settings.data_sources import SYNTHETIC
from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.worker.callables import find_callable
from gpubench.worker.tasks import (
    call,
    denoising_forward,
    denoising_loss,
    labelled_images,
    language_forward,
    language_loss,
    masked_tokens,
    no_loss,
    noise,
    supervised_forward,
    supervised_loss,
    tokens,
)
from gpubench.zoo import LONGEST, MODELS, TASK_OF_SUFFIX, ModelSpec, Task, find

_TASK_OF_UNET = {"UNet2DModel": Task.image_denoising, "UNet2DConditionModel": Task.latent_denoising}
_UNET_CONDITIONS = ("class_embed_type", "num_class_embeds", "addition_embed_type", "encoder_hid_dim")


@dataclass(frozen=True)
class Workload:
    """A module on the CPU, in training mode unless it is built for inference, with its batches and its loss.

    The sizes are None if they do not apply or are unknown.
    """

    module: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    """Runs the forward pass of the module, which may be wrapped or compiled, and returns a scalar."""
    forward: Callable[[nn.Module, Any], object]
    """Runs the forward pass as inference does; without the loss, unless only the user's loss can call the module."""
    make_batch: Callable[[int], Any] | None
    """Draws a batch of random CPU tensors from torch's default generator; None if only the data gives the inputs.

    It can be pickled for built-in models and folders.
    """
    task: Task | None
    """None for a model of the user."""
    sample_shape: str
    """The shape of a sample as text for reports."""
    image_size: int | None = None
    """The side of a square image, in pixels or latent pixels."""
    classes: int | None = None
    sequence_length: int | None = None
    """The number of tokens in one sample."""
    vocabulary: int | None = None
    optimizer: Callable[[list[nn.Parameter]], Any] | None = None
    """Returns the user's own optimizer, or (optimizer, scheduler), of parameters; None for that of the settings."""


def build(model: ModelSettings, data: DataSettings, seed: int, *, inference: bool = False) -> Workload:
    """Builds the workload that `model.name` names, with random weights from `seed`.

    The name is that of a built-in model, or else a folder with a config.json of transformers or diffusers, of which
    neither weights nor code are used, or else `module:callable`. The sizes are `data.image_size` and
    `data.sequence_length`, or else those of the model. For `inference` it is in evaluation mode, and needs neither a
    loss nor parameters to train.

    Raises ModelError if there is no such model, if it cannot be built, or if gpubench cannot make batches for it.
    """
    if model.name is None:
        raise ModelError("model.name is not set", f"use a built-in model ({', '.join(MODELS)})")
    if model.name not in MODELS and Path(model.name).is_dir():
        workload = _from_folder(Path(model.name), data, seed)
    elif ":" in model.name:
        workload = _from_callable(model.name, model.arguments, seed, inference)
        if workload.make_batch is None and data.source in SYNTHETIC:
            raise ModelError(
                f"model {model.name!r} returned a module alone, whose inputs gpubench does not know, "
                f"and data.source is {data.source}",
                f"return (module, make_batch{'' if inference else ', loss'}): make_batch(n) gives a batch of n random "
                f"samples{'' if inference else ', and loss(module, batch) a scalar'}; or set data.source to "
                "module:callable, which returns a dataset",
            )
    else:
        workload = _from_spec(find(model.name), data, seed)
    if inference:
        workload.module.eval()
        return workload
    if not any(parameter.requires_grad for parameter in workload.module.parameters()):
        raise ModelError(
            f"model {model.name!r} has no parameters to train", "return a module with trainable parameters"
        )
    workload.module.train()
    return workload


def _from_spec(spec: ModelSpec, data: DataSettings, seed: int) -> Workload:
    image_size = data.image_size or spec.image_size
    sequence_length = data.sequence_length or spec.sequence_length
    if spec.config_class is None:
        return _diffusers(spec.model_class, spec.config, image_size, sequence_length, seed)
    import transformers

    config = getattr(transformers, spec.config_class)(**spec.config)
    return _transformers(spec.model_class, config, image_size, sequence_length, seed)


def _from_folder(folder: Path, data: DataSettings, seed: int) -> Workload:
    try:
        raw = json.loads(foreign_files.content(folder / "config.json"))
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model folder {str(folder)!r}: cannot read config.json: {error}",
            "set model.name to a folder that save_pretrained() wrote",
        ) from error
    try:
        if unet := raw.get("_class_name"):
            return _diffusers(unet, raw, data.image_size, data.sequence_length, seed)
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        architecture = (config.architectures or ["none"])[0]
        return _transformers(architecture, config, data.image_size, data.sequence_length, seed)
    except ModelError:
        raise
    except Exception as error:  # a config.json can make the libraries raise any exception
        raise ModelError(
            f"model folder {str(folder)!r} cannot be built: {error}",
            "check its config.json against the installed transformers and diffusers; code in a folder is never run",
        ) from error


def _from_callable(name: str, arguments: Mapping[str, Any], seed: int, inference: bool) -> Workload:
    build = find_callable("model", name, ModelError, arguments)
    torch.manual_seed(seed)
    returned = build()
    match returned:
        case nn.Module():
            return Workload(returned, supervised_loss, supervised_forward, None, None, "as in the data")
        case (nn.Module() as module, make_batch) | (nn.Module() as module, make_batch, None) if inference and callable(
            make_batch
        ):
            return Workload(module, no_loss, call, make_batch, None, "as in make_batch")
        case (nn.Module() as module, make_batch, loss) if callable(make_batch) and callable(loss):
            return Workload(module, loss, loss, make_batch, None, "as in make_batch")
        case (nn.Module() as module, make_batch, loss, optimizer) if all(map(callable, (make_batch, loss, optimizer))):
            return Workload(module, loss, loss, make_batch, None, "as in make_batch", optimizer=optimizer)
    kinds = (
        ", ".join(type(part).__name__ for part in returned) if isinstance(returned, tuple) else type(returned).__name__
    )
    accepted = "(nn.Module, make_batch, loss) or (nn.Module, make_batch, loss, optimizer)"
    accepted = f"(nn.Module, make_batch), {accepted}" if inference else f"{accepted}; --inference needs no loss"
    raise ModelError(f"model {name!r} returned {kinds}", f"return an nn.Module, {accepted}")


def _transformers(
    model_class: str, config: Any, image_size: int | None, sequence_length: int | None, seed: int
) -> Workload:
    import transformers

    cls = getattr(transformers, model_class, None)
    task = next((task for suffix, task in TASK_OF_SUFFIX.items() if model_class.endswith(suffix)), None)
    if task is None or not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ModelError(
            f"gpubench cannot make batches for the architecture {model_class!r}",
            f"it supports the transformers classes *{', *'.join(TASK_OF_SUFFIX)}; wrap others as module:callable",
        )
    module: Any
    if task is Task.image_classification:
        size = image_size or _side(getattr(config, "image_size", 224))
        patch = getattr(config, "patch_size", 1)
        if isinstance(patch, int) and size < patch:
            raise ModelError(
                f"data.image_size {size} is smaller than a patch of {model_class}",
                f"set data.image_size to {patch} or more",
            )
        if hasattr(config, "image_size"):
            config.image_size = size  # the number of position embeddings depends on it
        torch.manual_seed(seed)
        channels, classes = config.num_channels, config.num_labels
        images = functools.partial(labelled_images, channels=channels, classes=classes, size=size)
        shape = f"{channels}x{size}x{size}"
        module = cls(config)
        return Workload(
            module, supervised_loss, supervised_forward, images, task, shape, image_size=size, classes=classes
        )
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or sys.maxsize
    length = sequence_length or min(positions, LONGEST[task])
    if length > positions:
        raise ModelError(
            f"data.sequence_length {length} exceeds the {positions} positions of {model_class}",
            f"set data.sequence_length to {positions} or less",
        )
    if length < 2 and task is Task.causal_lm:
        raise ModelError(f"data.sequence_length {length} leaves no next token to predict", "use 2 or more")
    text.use_cache = False  # keys and values are needed for generation only
    torch.manual_seed(seed)
    random_tokens = tokens if task is Task.causal_lm else masked_tokens
    draw = functools.partial(random_tokens, vocabulary=text.vocab_size, length=length)
    module = cls(config)
    if task is Task.causal_lm:
        module.loss_type = "ForCausalLM"  # transformers does not infer it from *LMHeadModel, and warns
    return Workload(
        module,
        language_loss,
        language_forward,
        draw,
        task,
        f"{length} tokens",
        sequence_length=length,
        vocabulary=text.vocab_size,
    )


def _diffusers(
    model_class: str, config: Mapping[str, Any], image_size: int | None, text_length: int | None, seed: int
) -> Workload:
    if model_class not in _TASK_OF_UNET:
        raise ModelError(
            f"gpubench cannot make batches for the diffusers model {model_class!r}",
            f"it supports {' and '.join(_TASK_OF_UNET)}; wrap others as module:callable",
        )
    import diffusers

    torch.manual_seed(seed)
    module = getattr(diffusers, model_class).from_config(dict(config))
    complete = module.config
    conditions = [key for key in _UNET_CONDITIONS if complete.get(key) is not None]
    if conditions or complete.in_channels != complete.out_channels:
        raise ModelError(
            f"gpubench cannot make batches for {model_class} with "
            + (conditions[0] if conditions else "different in_channels and out_channels"),
            "its batches have a noisy sample, a timestep and text embeddings; wrap the model as module:callable",
        )
    task, channels = _TASK_OF_UNET[model_class], complete.in_channels
    if task is Task.image_denoising:
        size = side = image_size or _side(complete.sample_size or 64)
        multiple = 2 ** (len(complete.block_out_channels) - 1)  # each level halves the image
        text_shape, shape = None, f"{channels}x{size}x{size}"
    else:
        size = image_size or 8 * _side(complete.sample_size or 64)
        multiple, side = 8, size // 8  # pixels per latent, each way
        text_shape = (text_length or 77, complete.cross_attention_dim)
        shape = f"{channels}x{side}x{side} latent, {text_shape[0]}x{text_shape[1]} text embedding"
    if size % multiple:
        raise ModelError(f"data.image_size {size} does not suit {model_class}", f"use a multiple of {multiple}")
    draw = functools.partial(noise, channels=channels, size=side, text_shape=text_shape)
    return Workload(module, denoising_loss, denoising_forward, draw, task, shape, image_size=side)


def _side(size: Any) -> int:
    """The side of a square image that holds the size in a configuration: a number or (height, width)."""
    return size if isinstance(size, int) else int(max(size))
