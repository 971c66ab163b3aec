"""The model under test and all it takes to train it: the module, batches to feed it, and the loss (see `tasks.py`).

A model of one's own is `module:callable`, looked up in the current directory first. The callable takes no arguments
and returns either an nn.Module, which is trained on what `data` reads with `supervised_loss`; or a triple
(module, make_batch, loss), where `make_batch(batch_size)` returns nested tuples, lists and dicts of CPU tensors and
`loss(module, batch)` runs the forward pass and returns a scalar tensor. The module given to `loss` may be a wrapper
(DistributedDataParallel, torch.compile) of the one returned; the batch is on its device.
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

from gpubench import callables
from gpubench.errors import ModelError
from gpubench.settings import DataSettings, ModelSettings
from gpubench.tasks import denoising_loss, labelled_images, language_loss, masked_tokens, noise, supervised_loss, tokens
from gpubench.zoo import LONGEST, MODELS, TASK_OF_SUFFIX, ModelSpec, Task, find

_TASK_OF_UNET = {"UNet2DModel": Task.image_denoising, "UNet2DConditionModel": Task.latent_denoising}
_UNET_CONDITIONS = ("class_embed_type", "num_class_embeds", "addition_embed_type", "encoder_hid_dim")


@dataclass(frozen=True)
class Workload:
    """A module on the CPU in training mode, and how to feed it.

    `loss(module, batch)` runs the forward pass and returns a scalar; it takes the module so that a wrapped or compiled
    one can be passed. `make_batch(batch_size)` draws random CPU tensors from torch's default generator and can be
    pickled for built-in models and folders; None if only the data can tell what the module eats. `task` is None for a
    callable. `sample_shape` is for people; the sizes after it are None where they mean nothing or are not known.
    """

    module: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    make_batch: Callable[[int], Any] | None
    task: Task | None
    sample_shape: str
    image_size: int | None = None
    """Pixels, or latent pixels, each way."""
    classes: int | None = None
    sequence_length: int | None = None
    """Tokens in one sample."""
    vocabulary: int | None = None


def build(model: ModelSettings, data: DataSettings, seed: int) -> Workload:
    """The workload that `model.name` stands for, with random weights from `seed`.

    A built-in name comes first, then a folder holding config.json of transformers or diffusers (weights in it are not
    read, code in it is never run), then `module:callable`. Sizes come from `data.image_size` and
    `data.sequence_length`, else from the model.

    Raises ModelError if there is no such model, or it cannot be built or fed.
    """
    if model.name is None:
        raise ModelError("model.name is not set", f"name a built-in model ({', '.join(MODELS)})")
    if model.name not in MODELS and Path(model.name).is_dir():
        workload = _from_folder(Path(model.name), data, seed)
    elif ":" in model.name:
        workload = _from_callable(model.name, seed)
    else:
        workload = _from_spec(find(model.name), data, seed)
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
        raw = json.loads((folder / "config.json").read_text())
        if not isinstance(raw, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model folder {str(folder)!r}: cannot read config.json: {error}",
            "point model.name at a folder that save_pretrained() wrote",
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
    except Exception as error:  # whatever a foreign config.json makes the libraries do
        raise ModelError(
            f"model folder {str(folder)!r} cannot be built: {error}",
            "check its config.json against the installed transformers and diffusers; code in a folder is never run",
        ) from error


def _from_callable(name: str, seed: int) -> Workload:
    build = callables.find("model", name, ModelError)
    torch.manual_seed(seed)
    made = build()
    match made:
        case nn.Module():
            return Workload(made, supervised_loss, None, None, "as in the data")
        case (nn.Module() as module, make_batch, loss) if callable(make_batch) and callable(loss):
            return Workload(module, loss, make_batch, None, "as in make_batch")
    kinds = ", ".join(type(part).__name__ for part in made) if isinstance(made, tuple) else type(made).__name__
    raise ModelError(
        f"model {name!r} returned {kinds}", "return an nn.Module, or a triple (nn.Module, make_batch, loss)"
    )


def _transformers(
    model_class: str, config: Any, image_size: int | None, sequence_length: int | None, seed: int
) -> Workload:
    import transformers

    cls = getattr(transformers, model_class, None)
    task = next((task for suffix, task in TASK_OF_SUFFIX.items() if model_class.endswith(suffix)), None)
    if task is None or not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ModelError(
            f"architecture {model_class!r} is not one that gpubench can feed",
            f"it feeds the transformers classes *{', *'.join(TASK_OF_SUFFIX)}; wrap others as module:callable",
        )
    if task is Task.image_classification:
        size = image_size or _side(getattr(config, "image_size", 224))
        patch = getattr(config, "patch_size", 1)
        if isinstance(patch, int) and size < patch:
            raise ModelError(
                f"data.image_size {size} does not hold one patch of {model_class}",
                f"set data.image_size to {patch} or more",
            )
        if hasattr(config, "image_size"):
            config.image_size = size  # position embeddings are made for it
        torch.manual_seed(seed)
        channels, classes = config.num_channels, config.num_labels
        images = functools.partial(labelled_images, channels=channels, classes=classes, size=size)
        shape = f"{channels}x{size}x{size}"
        return Workload(cls(config), supervised_loss, images, task, shape, image_size=size, classes=classes)
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
    text.use_cache = False  # keys and values are kept for generation only
    torch.manual_seed(seed)
    random_tokens = tokens if task is Task.causal_lm else masked_tokens
    draw = functools.partial(random_tokens, vocabulary=text.vocab_size, length=length)
    module: Any = cls(config)
    if task is Task.causal_lm:
        module.loss_type = "ForCausalLM"  # transformers does not infer it from *LMHeadModel, and warns
    return Workload(
        module, language_loss, draw, task, f"{length} tokens", sequence_length=length, vocabulary=text.vocab_size
    )


def _diffusers(
    model_class: str, config: Mapping[str, Any], image_size: int | None, text_length: int | None, seed: int
) -> Workload:
    if model_class not in _TASK_OF_UNET:
        raise ModelError(
            f"diffusers model {model_class!r} is not one that gpubench can feed",
            f"it feeds {' and '.join(_TASK_OF_UNET)}; wrap others as module:callable",
        )
    import diffusers

    torch.manual_seed(seed)
    module = getattr(diffusers, model_class).from_config(dict(config))
    made = module.config
    conditions = [key for key in _UNET_CONDITIONS if made.get(key) is not None]
    if conditions or made.in_channels != made.out_channels:
        raise ModelError(
            f"{model_class} with {conditions[0] if conditions else 'in_channels unlike out_channels'} cannot be fed",
            "gpubench feeds a noisy sample, its timestep and text embeddings; wrap the model as module:callable",
        )
    task, channels = _TASK_OF_UNET[model_class], made.in_channels
    if task is Task.image_denoising:
        size = side = image_size or _side(made.sample_size or 64)
        multiple = 2 ** (len(made.block_out_channels) - 1)  # each level halves the image
        text_shape, shape = None, f"{channels}x{size}x{size}"
    else:
        size = image_size or 8 * _side(made.sample_size or 64)
        multiple, side = 8, size // 8  # pixels per latent, each way
        text_shape = (text_length or 77, made.cross_attention_dim)
        shape = f"{channels}x{side}x{side} latent, {text_shape[0]}x{text_shape[1]} text embedding"
    if size % multiple:
        raise ModelError(f"data.image_size {size} does not suit {model_class}", f"use a multiple of {multiple}")
    draw = functools.partial(noise, channels=channels, size=side, text_shape=text_shape)
    return Workload(module, denoising_loss, draw, task, shape, image_size=side)


def _side(size: Any) -> int:
    """Configurations give an image's size as one number or as (height, width); gpubench feeds squares."""
    return size if isinstance(size, int) else int(max(size))
