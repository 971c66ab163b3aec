"""Builds the model under test, with a function that draws random batches and one that computes the loss of a batch.

These are the batches of each task. The first dimension of every tensor is the sample; B is the number of samples:

    image-classification   (images (B, C, H, W) float, labels (B,) int64)
    causal-lm              {"input_ids": (B, T) int64}
    masked-lm              {"input_ids": (B, T) int64, "labels": (B, T) int64, -100 for tokens that are not predicted}
    image-denoising        {"clean", "noise": (B, C, H, W), "timesteps": (B,) int64, "alpha_bar": (B,) float}
    latent-denoising       the same, and {"text": (B, T, width) float}

Random values, such as noise and masked positions, are part of the batch, so that the step itself draws none.

A model of the user is `module:callable`; the module is looked up in the current directory first. The callable gets
`model.arguments` by name. It returns either an nn.Module, which is trained with `supervised_loss` on the data source,
or a triple (module, make_batch, loss): `make_batch(batch_size)` returns nested tuples, lists and dicts of CPU tensors,
and `loss(module, batch)` runs the forward pass and returns a scalar tensor. The module passed to `loss` may be a
wrapper (DistributedDataParallel, torch.compile) of the module that was returned; the batch is on the same device. A
fourth element may be `optimizer(parameters)`, which returns a torch.optim.Optimizer or (optimizer, scheduler).
Inference needs no loss: it takes (module, make_batch), and passes the batch to the module, a tuple or a list as several
arguments and a dict as arguments by name. It still calls a loss that it is given, which knows how to call the module.
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
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gpubench import foreign_files, units
from gpubench.errors import GpubenchError, ModelError, did_you_mean
from gpubench.settings.callables import check_arguments
from gpubench.settings.data_sources import SYNTHETIC
from gpubench.settings.sections import DataSettings, ModelSettings
from gpubench.zoo import LONGEST, MODELS, TASK_OF_SUFFIX, ModelSpec, Task, find

SETTING = "model.activation_checkpointing"
SUGGESTIONS = 3
"""The largest number of similar names in an error message."""


def blocks(module: nn.Module) -> list[nn.Module]:
    """Returns the repeated parts of a network: transformer layers, ResNet blocks, levels of a UNet.

    FSDP2 shards block by block, and activation checkpointing recomputes block by block. Blocks are the members of the
    outermost nn.ModuleLists, and of nn.Sequentials with several members that have parameters. A block that only
    contains such a list, such as a stage of a ResNet, is replaced by the members of the list. No block contains another
    one, and modules without parameters are left out.
    """
    if isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(_with_parameters(module)) > 1):
        return [block for member in _with_parameters(module) for block in _members(member)]
    return [block for child in module.children() for block in blocks(child)]


def _members(block: nn.Module) -> list[nn.Module]:
    children = list(block.children())
    return (len(children) == 1 and blocks(children[0])) or [block]


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if next(child.parameters(), None) is not None]


def checkpoint_activations(module: nn.Module, which: bool | int | str = True) -> Callable[[], None]:
    """Makes parts of `module` recompute their activations in the backward pass. Returns a function that undoes it.

    `which` is True for all of `blocks(module)`, k for every k-th of them (k, 2k, ...), or comma-separated patterns of
    module names such as "layers.*.mlp", in which a wildcard does not match a dot. If a matching module contains
    another one, only the outer one is checkpointed. Gradients stay bit-identical if the kernels are deterministic. The
    running statistics of batch norm are updated twice per step. Call this before the module is compiled, sharded or
    wrapped.

    Raises ModelError with the names of the existing blocks if nothing matches.
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
            f"put its blocks into an nn.ModuleList or nn.Sequential, name its modules, or set {SETTING}=false",
        )
    if step > len(known):
        raise ModelError(
            f"{SETTING}={step}: {type(module).__name__} has {units.counted(len(known), 'block')}, {_blocks_of(module)}",
            f"use a number up to {len(known)}, or true for all",
        )
    return known[step - 1 :: step]


def _named(module: nn.Module, patterns: str) -> list[nn.Module]:
    """Returns the modules whose path matches one of the comma-separated patterns."""
    paths = _paths(module)
    found: dict[str, nn.Module] = {}
    for pattern in map(str.strip, patterns.split(",")):
        matching = [path for path in paths if _matches(path, pattern)]
        if not matching:
            raise _no_such(module, pattern)
        found |= {path: paths[path] for path in matching}
    return [part for path, part in found.items() if not any(path.startswith(f"{outer}.") for outer in found)]


def _paths(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the submodules by path, without torch's containers of modules, which are never called."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return {path: part for path, part in module.named_modules() if path and not isinstance(part, lists)}


def _matches(path: str, pattern: str) -> bool:
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _no_such(module: nn.Module, pattern: str) -> ModelError:
    existing = _blocks_of(module)
    near = difflib.get_close_matches(pattern, dict.fromkeys(map(_family, _paths(module))), n=SUGGESTIONS, cutoff=0)
    return ModelError(
        f"{SETTING}: {type(module).__name__} has no module {pattern}"
        + (f"; its blocks are {existing}" if existing else ""),
        f"the nearest names are {units.listed(near)}" if near else f"set {SETTING}=false",
    )


def _blocks_of(module: nn.Module) -> str:
    """Returns the paths of the module's blocks with the number of each, such as "transformer.h.* (12)"."""
    known = set(map(id, blocks(module)))
    families = Counter(_family(path) for path, part in module.named_modules() if id(part) in known)
    return ", ".join(f"{family} ({count})" for family, count in families.items())


def _family(path: str) -> str:
    """Returns the path with a wildcard for each number."""
    return ".".join("*" if name.isdecimal() else name for name in path.split("."))


DIFFUSION_STEPS = 1000
MASKED_FRACTION = 0.15


def labelled_images(batch_size: int, *, channels: int, classes: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, channels, size, size), torch.randint(classes, (batch_size,))


def tokens(batch_size: int, *, vocabulary: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(vocabulary, (batch_size, length))}


def masked_tokens(batch_size: int, *, vocabulary: int, length: int) -> dict[str, Tensor]:
    """Returns a random masked-lm batch, in which 15 % of each sequence, but at least one token, are to be predicted.

    The last id of the vocabulary is the mask token, which replaces all of them; BERT's 80/10/10 split would not change
    any shape. Every sequence has the same number of masked tokens, so that every batch has a loss.
    """
    tokens = torch.randint(vocabulary - 1, (batch_size, length))
    chosen = torch.rand(batch_size, length).argsort(dim=1) < max(1, round(MASKED_FRACTION * length))
    return {"input_ids": tokens.masked_fill(chosen, vocabulary - 1), "labels": tokens.masked_fill(~chosen, -100)}


def alpha_bar() -> Tensor:
    """Returns the share of the signal in the variance of a noisy image at each timestep, float32 [DIFFUSION_STEPS].

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
    """Returns the cross-entropy for the labels of the batch, or for each next token if it has no labels.

    transformers shifts the labels and converts the logits to float32.
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


USER_ERRORS = (Exception, SystemExit)
"""The exceptions that code of the user may raise."""


def find_callable(
    setting: str, name: str, refused: type[GpubenchError], arguments: Mapping[str, Any] | None = None
) -> Callable[[], Any]:
    """Returns a function that calls the callable with the name `name`, the value of `setting`, with `arguments`.

    Its module may be in the current directory. Raises `refused` if it cannot be imported, or not be called with these
    arguments. The returned function also raises `refused` if the user's code raises an exception; that exception is the
    cause, so that run.log has the traceback.
    """
    found, arguments = _imported(setting, name, refused), arguments or {}
    try:
        signature = inspect.signature(found)
        if refused is ModelError:
            check_arguments(name, signature, arguments)
        signature.bind(**arguments)
    except ValueError:  # some builtins have no signature
        pass
    except TypeError as error:
        raise refused(f"{setting} {name!r} cannot be called without arguments: {error}", "give them defaults") from None

    def call() -> Any:
        try:
            return found(**arguments)
        except USER_ERRORS as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise  # the caller adds the hint on memory
            message = f"{setting} {name!r} raised {type(error).__name__}: {error}"
            raise refused(message, "fix the error in that code; run.log has the traceback") from error

    return call


def _imported(setting: str, name: str, refused: type[GpubenchError]) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except USER_ERRORS as error:
        raise refused(
            f"{setting} {name!r} cannot be imported: {type(error).__name__}: {error}",
            f"write package.module:callable, without .py; the current directory {here} is searched first",
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
    return cast("Callable[..., Any]", found)


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
    """Returns the side of a square image that holds the size in a configuration: a number or (height, width)."""
    return size if isinstance(size, int) else int(max(size))
