"""Builds the model under test with what training needs: the module, random batches, and the loss of a batch.

The batches of each task are as follows. The first dimension of every tensor is the sample, of B samples:

    image-classification   (images (B, C, H, W) float, labels (B,) int64)
    causal-lm              {"input_ids": (B, T) int64}
    masked-lm              {"input_ids": (B, T) int64, "labels": (B, T) int64, -100 where nothing is to be predicted}
    image-denoising        {"clean", "noise": (B, C, H, W), "timesteps": (B,) int64, "alpha_bar": (B,) float}
    latent-denoising       the same, and {"text": (B, T, width) float}

Random values, such as noise and masked positions, are part of the batch, so that the step itself draws none.

The user's own model is `module:callable`, looked up in the current directory first. The callable takes no arguments
and returns either an nn.Module, which is trained on what `data` reads with `supervised_loss`; or a triple
(module, make_batch, loss), where `make_batch(batch_size)` returns nested tuples, lists and dicts of CPU tensors and
`loss(module, batch)` runs the forward pass and returns a scalar tensor. The module given to `loss` may be a wrapper
(DistributedDataParallel, torch.compile) of the one returned; the batch is on its device.
"""

import difflib
import functools
import importlib
import inspect
import json
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpubench import units
from gpubench.errors import GpubenchError, ModelError, did_you_mean
from gpubench.settings.schema import DataSettings, ModelSettings
from gpubench.zoo import LONGEST, MODELS, TASK_OF_SUFFIX, ModelSpec, Task, find

SETTING = "model.activation_checkpointing"
NEAR = 3
"""How many similar names an error message offers."""


def blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the repeated parts of a network: transformer layers, ResNet blocks, levels of a UNet.

    FSDP2 shards, and activation checkpointing recomputes, block by block. Blocks are the members of the outermost
    nn.ModuleLists, and of nn.Sequentials with more than one part that has parameters. A block that is only such a
    container, as a stage of a ResNet, is replaced by its members. No block contains another; parts without parameters
    are left out.
    """
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(_weighted(module)) > 1):
        return [block for member in _weighted(module) for block in _members(member)]
    return [block for child in module.children() for block in blocks(child)]


def _members(block: nn.Module) -> list[nn.Module]:
    children = list(block.children())
    return (len(children) == 1 and blocks(children[0])) or [block]


def _weighted(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if next(child.parameters(), None) is not None]


def checkpoint_activations(module: nn.Module, which: bool | int | str = True) -> Callable[[], None]:
    """Makes parts of `module` recompute their activations in the backward pass. Returns a function that undoes it.

    `which` is True for all of `blocks(module)`, k for every k-th of them (k, 2k, ...), or comma-separated patterns of
    names such as "layers.*.mlp", in which a wildcard matches no dot. If one named module contains another, only the
    outer one counts. Gradients stay bit-identical if the kernels are deterministic. The running statistics of batch
    norm are updated twice per step. Call this before the module is compiled, sharded or wrapped.

    Raises ModelError, which names the existing blocks, if nothing would be recomputed.
    """
    wrapped = _named(module, which) if isinstance(which, str) else _every(module, int(which))
    before = [block.__dict__.get("forward") for block in wrapped]
    for block in wrapped:
        plain = block.forward
        block.__dict__["forward"] = functools.wraps(plain)(functools.partial(checkpoint, plain, use_reentrant=False))

    def undo() -> None:
        for block, forward in zip(wrapped, before, strict=True):
            if forward is None:
                del block.__dict__["forward"]
            else:
                block.__dict__["forward"] = forward

    return undo


def _every(module: nn.Module, step: int) -> list[nn.Module]:
    known = blocks(module)
    if not known:
        raise ModelError(
            f"{SETTING}: {type(module).__name__} has no repeated blocks",
            f"hold its blocks in an nn.ModuleList or nn.Sequential, name its modules, or set {SETTING}=false",
        )
    if step > len(known):
        raise ModelError(
            f"{SETTING}={step}: {type(module).__name__} has {units.counted(len(known), 'block')}, {_blocks_of(module)}",
            f"use a number up to {len(known)}, or true for all",
        )
    return known[step - 1 :: step]


def _named(module: nn.Module, patterns: str) -> list[nn.Module]:
    """Returns the modules whose path matches a pattern, except torch's containers, which are never called."""
    paths = _paths(module)
    found: dict[str, nn.Module] = {}
    for pattern in map(str.strip, patterns.split(",")):
        matching = [path for path in paths if _matches(path, pattern)]
        if not matching:
            raise _no_such(module, pattern)
        found |= {path: paths[path] for path in matching}
    return [part for path, part in found.items() if not any(path.startswith(f"{outer}.") for outer in found)]


def _paths(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that have a name and are called, by path. Lists of modules are never called."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return {path: part for path, part in module.named_modules() if path and not isinstance(part, lists)}


def _matches(path: str, pattern: str) -> bool:
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _no_such(module: nn.Module, pattern: str) -> ModelError:
    there = _blocks_of(module)
    near = difflib.get_close_matches(pattern, dict.fromkeys(map(_family, _paths(module))), n=NEAR, cutoff=0)
    return ModelError(
        f"{SETTING}: {type(module).__name__} has no module {pattern}" + (f"; its blocks are {there}" if there else ""),
        f"the nearest names are {units.listed(near)}" if near else f"set {SETTING}=false",
    )


def _blocks_of(module: nn.Module) -> str:
    """Returns the paths of the module's blocks with the number of each, as "transformer.h.* (12)"."""
    known = set(map(id, blocks(module)))
    families = Counter(_family(path) for path, part in module.named_modules() if id(part) in known)
    return ", ".join(f"{family} ({count})" for family, count in families.items())


def _family(path: str) -> str:
    return ".".join("*" if name.isdecimal() else name for name in path.split("."))


DIFFUSION_STEPS = 1000
MASKED_FRACTION = 0.15


def labelled_images(batch_size: int, *, channels: int, classes: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, channels, size, size), torch.randint(classes, (batch_size,))


def tokens(batch_size: int, *, vocabulary: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(vocabulary, (batch_size, length))}


def masked_tokens(batch_size: int, *, vocabulary: int, length: int) -> dict[str, Tensor]:
    """Returns a random masked-lm batch: 15 % of each sequence, at least one token, is to be predicted.

    The last id of the vocabulary is the mask token, which replaces every hidden token; BERT's 80/10/10 split would
    change no shape. Every sequence has the same number of hidden tokens, so that every batch has a loss.
    """
    tokens = torch.randint(vocabulary - 1, (batch_size, length))
    chosen = torch.rand(batch_size, length).argsort(dim=1) < max(1, round(MASKED_FRACTION * length))
    return {"input_ids": tokens.masked_fill(chosen, vocabulary - 1), "labels": tokens.masked_fill(~chosen, -100)}


def alpha_bar() -> Tensor:
    """Returns the remaining share of the signal's variance at each timestep, float32 [DIFFUSION_STEPS].

    Source: Ho, Jain and Abbeel 2020, "Denoising Diffusion Probabilistic Models", section 4: the linear schedule.
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
    """Returns the loss of `module(inputs)`, or of its `.logits`, against the targets.

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


def language_loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the cross-entropy of the labels, or of each next token if there are none.

    transformers shifts the labels and upcasts the logits.
    """
    tokens = batch["input_ids"]
    loss: Tensor = module(input_ids=tokens, labels=batch.get("labels", tokens)).loss
    return loss


def denoising_loss(module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the mean squared error of the predicted noise in sqrt(alpha_bar) clean + sqrt(1 - alpha_bar) noise.

    Source: Ho, Jain and Abbeel 2020, "Denoising Diffusion Probabilistic Models", equation 14.
    """
    signal = batch["alpha_bar"].view(-1, 1, 1, 1)
    noisy = signal.sqrt() * batch["clean"] + (1 - signal).sqrt() * batch["noise"]
    text = (batch["text"],) if "text" in batch else ()
    return functional.mse_loss(module(noisy, batch["timesteps"], *text).sample, batch["noise"])


USERS = (Exception, SystemExit)
"""The exceptions that importing and calling the user's code may raise."""


def find_callable(setting: str, name: str, refused: type[GpubenchError]) -> Callable[[], Any]:
    """Returns the callable that `setting` names. Its module may be in the current directory.

    Raises `refused` if it cannot be imported or called without arguments. The returned function raises `refused` if the
    user's code raises, with that exception's message and with it as the cause, so that run.log has the traceback.
    """
    module, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except USERS as error:
        raise refused(
            f"{setting} {name!r} cannot be imported: {type(error).__name__}: {error}",
            f"write package.module:callable, without .py; the current directory, {here}, is searched first",
        ) from error
    try:
        found = operator.attrgetter(attribute)(imported)
    except AttributeError as error:
        hint = did_you_mean(error.name or "", dir(error.obj)) or "name a class or function of it"
        raise refused(f"{setting} {name!r}: {error}", hint) from None
    if not callable(found):
        raise refused(
            f"{setting} {name!r} is of type {type(found).__name__}, not a callable", "name a function or a class"
        )
    try:
        inspect.signature(found).bind()
    except ValueError:  # some builtins have no signature
        pass
    except TypeError as error:
        raise refused(f"{setting} {name!r} cannot be called without arguments: {error}", "give them defaults") from None

    def made() -> Any:
        try:
            return found()
        except USERS as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise  # the caller adds the hint on memory
            said = f"{setting} {name!r} raised {type(error).__name__}: {error}"
            raise refused(said, "fix it there; run.log has the traceback") from error

    return made


_TASK_OF_UNET = {"UNet2DModel": Task.image_denoising, "UNet2DConditionModel": Task.latent_denoising}
_UNET_CONDITIONS = ("class_embed_type", "num_class_embeds", "addition_embed_type", "encoder_hid_dim")


@dataclass(frozen=True)
class Workload:
    """A module on the CPU in training mode, with its batches and its loss.

    `loss(module, batch)` runs the forward pass and returns a scalar; its first argument may be a wrapped or compiled
    module. `make_batch(batch_size)` draws random CPU tensors from torch's default generator and can be pickled for
    built-in models and folders. It is None if only the data determines the module's inputs. `task` is None for a
    callable. `sample_shape` is text for reports. The sizes after it are None if they do not apply or are unknown.
    """

    module: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    make_batch: Callable[[int], Any] | None
    task: Task | None
    sample_shape: str
    image_size: int | None = None
    """The side of a square image, in pixels or latent pixels."""
    classes: int | None = None
    sequence_length: int | None = None
    """The number of tokens in one sample."""
    vocabulary: int | None = None


def build(model: ModelSettings, data: DataSettings, seed: int) -> Workload:
    """Builds the workload that `model.name` names, with random weights from `seed`.

    A built-in name takes precedence, then a folder with a config.json of transformers or diffusers (its weights are not
    read and its code is never run), then `module:callable`. `data.image_size` and `data.sequence_length` set the sizes;
    otherwise the model does.

    Raises ModelError if there is no such model, or if it cannot be built or gpubench cannot make batches for it.
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
    except Exception as error:  # a config.json can make the libraries raise any exception
        raise ModelError(
            f"model folder {str(folder)!r} cannot be built: {error}",
            "check its config.json against the installed transformers and diffusers; code in a folder is never run",
        ) from error


def _from_callable(name: str, seed: int) -> Workload:
    build = find_callable("model", name, ModelError)
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
            config.image_size = size  # the number of position embeddings depends on it
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
    text.use_cache = False  # keys and values are needed for generation only
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
    """Returns one side of an image from a configuration's size: a number or (height, width). Images are square."""
    return size if isinstance(size, int) else int(max(size))
