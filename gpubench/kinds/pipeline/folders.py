"""Checks pipeline folders and files of prompts without loading diffusers."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubench import foreign_files
from gpubench.errors import DataError, ModelError, SettingsError
from gpubench.kinds.pipeline.schedulers import OwnScheduler
from gpubench.settings.keys import about


@about("work.prompts")
def read_prompts(path: Path | None) -> list[str]:
    """The lines of a text file that are not blank; none if `path` is None.

    Raises DataError for a file that cannot be read or has no such line.
    """
    if path is None:
        return []
    try:
        text = foreign_files.content(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(
            f"the file {path} cannot be read: {reason}", "give a text file with one prompt per line"
        ) from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise DataError(f"the file {path} is empty", "write one prompt per line")
    return prompts


INDEX = "model_index.json"
SCHEDULER_CONFIG = "scheduler/scheduler_config.json"
HALF = "fp16"
"""The one variant that published weights come in: `diffusion_pytorch_model.fp16.safetensors`."""


@dataclass(frozen=True)
class PipelineKind:
    """The components of a pipeline that are loaded, which leaves out safety checkers and image encoders."""

    denoiser: str
    """The component that is evaluated at every step."""
    denoiser_class: str
    others: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """The components that may be null."""
    older_class: str | None = None
    """The class of the denoiser in folders of older versions of diffusers."""


_IMAGE = ("scheduler", "vae")
_TEXT = ("text_encoder", "tokenizer")
_TEXT_2 = ("text_encoder_2", "tokenizer_2")
_PIXART = PipelineKind("transformer", "PixArtTransformer2DModel", (*_IMAGE, *_TEXT), older_class="Transformer2DModel")
SUPPORTED: Mapping[str, PipelineKind] = {
    "DDPMPipeline": PipelineKind("unet", "UNet2DModel", ("scheduler",)),
    "FluxPipeline": PipelineKind("transformer", "FluxTransformer2DModel", (*_IMAGE, *_TEXT, *_TEXT_2)),
    "PixArtAlphaPipeline": _PIXART,
    "PixArtSigmaPipeline": _PIXART,
    "StableDiffusionPipeline": PipelineKind("unet", "UNet2DConditionModel", (*_IMAGE, *_TEXT)),
    "StableDiffusionXLPipeline": PipelineKind("unet", "UNet2DConditionModel", (*_IMAGE, *_TEXT, *_TEXT_2)),
    "StableDiffusion3Pipeline": PipelineKind(
        "transformer",
        "SD3Transformer2DModel",
        (*_IMAGE, *_TEXT, *_TEXT_2),
        optional=("text_encoder_3", "tokenizer_3"),
    ),
}
"""The supported pipelines by the name of their class in diffusers."""


def schedule_keywords(pipeline: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The keywords that a pipeline passes to `set_timesteps` of such a scheduler, besides steps and device."""
    if pipeline == "FluxPipeline":
        return ("mu",) if config.get("use_flow_sigmas") else ("mu", "sigmas")
    return ("mu",) if pipeline == "StableDiffusion3Pipeline" and config.get("use_dynamic_shifting") else ()


def check_negative_prompt(pipeline: str, prompt: str | None) -> None:
    """Raises SettingsError for a negative prompt that the pipeline cannot take."""
    if prompt and pipeline == "FluxPipeline":
        message = "work.negative_prompt is given, and Flux is guided without one"
        raise SettingsError(message, "leave it out", keys=["work.negative_prompt"])


@dataclass(frozen=True)
class PipelineFolder:
    """A folder as `save_pretrained()` of a supported pipeline writes it, with every file that will be read."""

    path: Path
    pipeline: str
    kind: PipelineKind
    absent: tuple[str, ...]
    """The optional components that are null."""
    variant: str | None
    """HALF if the denoiser's weights exist only in this variant."""
    scheduler: OwnScheduler


def digests(folder: PipelineFolder) -> dict[str, str]:
    """Returns the sha256 of the files of each component, over their names and contents.

    It leaves out the denoiser's weights, which every rank hashes in memory, and formats that are never loaded. Raises
    ModelError for a file that cannot be read.
    """
    kind = folder.kind
    names = (kind.denoiser, *kind.others, *(name for name in kind.optional if name not in folder.absent))
    parts = {INDEX: [folder.path / INDEX]} | {name: _loaded(folder, name) for name in names}
    try:
        with ThreadPoolExecutor() as pool:  # reading and hashing release the GIL
            return {name: _digest(folder, files, pool.map(_sha256, files)) for name, files in parts.items()}
    except OSError as error:
        raise ModelError(f"pipeline folder {folder.path}: cannot read {error.filename}: {error.strerror}") from error


def _digest(folder: PipelineFolder, files: Sequence[Path], each: Iterable[str]) -> str:
    lines = [f"{file.relative_to(folder.path)} {digest}\n" for file, digest in zip(files, each, strict=True)]
    return hashlib.sha256("".join(lines).encode(errors="surrogateescape")).hexdigest()


def _loaded(folder: PipelineFolder, name: str) -> list[Path]:
    """The files of a component that affect its results, in the order of their names."""
    return [file for file in sorted((folder.path / name).rglob("*")) if file.is_file() and _is_read(folder, name, file)]


def _is_read(folder: PipelineFolder, name: str, file: Path) -> bool:
    if file.suffix == ".safetensors" and (name == folder.kind.denoiser or _of_other_variant(folder, file)):
        return False
    return file.suffix not in _UNREAD and not file.name.startswith(".")


def _of_other_variant(folder: PipelineFolder, file: Path) -> bool:
    return folder.variant is None and f".{HALF}." in file.name


def _sha256(file: Path) -> str:
    with foreign_files.opened(file) as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def check(path: Path) -> PipelineFolder:
    """Raises ModelError if `path` contains no complete supported pipeline."""
    if not path.exists():
        raise ModelError(f"there is no pipeline folder {path}", _download(path) or _SAVED)
    index = _read(path, INDEX)
    pipeline = index.get("_class_name")
    kind = SUPPORTED.get(str(pipeline))
    if kind is None:
        raise ModelError(
            f"pipeline folder {path} is for {pipeline}, which gpubench does not run", f"it runs {', '.join(SUPPORTED)}"
        )
    absent = tuple(name for name in kind.optional if not any(index.get(name) or ()))
    present = (kind.denoiser, *kind.others, *(name for name in kind.optional if name not in absent))
    libraries = {name: _library(path, index, name) for name in present}
    denoiser_class = index[kind.denoiser][1]
    if denoiser_class not in (kind.denoiser_class, kind.older_class):
        raise ModelError(
            f"pipeline folder {path}: its {kind.denoiser} is a {denoiser_class}",
            f"the {kind.denoiser} of a {pipeline} is a {kind.denoiser_class}",
        )
    stem = _WEIGHTS["diffusers"]
    whole = _weights(path / kind.denoiser, stem, None)
    variant = HALF if not whole and _weights(path / kind.denoiser, stem, HALF) else None
    for name, library in libraries.items():
        _check_component(path, name, library, variant)
    scheduler = (index["scheduler"][1], _read(path, SCHEDULER_CONFIG))
    return PipelineFolder(path, str(pipeline), kind, absent, variant, scheduler)


_FETCH_AGAIN = "copy or download the file again"
_LONGEST_HEADER = 100_000_000
"""The limit of safetensors for the header of a file, in bytes."""
_AGAIN = "write the folder again with the pipeline's save_pretrained()"
_SAVED = "give the folder that save_pretrained() of a diffusers pipeline wrote"
_WEIGHTS = {"diffusers": "diffusion_pytorch_model", "transformers": "model"}
_UNREAD = (".bin", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".pb", ".pt", ".pth", ".md", ".png", ".jpg")
_VOCABULARIES = ("tokenizer.json", "vocab.json", "spiece.model")


def _download(path: Path) -> str | None:
    """The hint for a path that looks like a model id of the Hugging Face Hub; None for any other path."""
    try:
        owner, name = path.relative_to(Path.cwd()).parts
    except ValueError:  # not below the current directory, or not of two parts
        return None
    if path.parent.exists():
        return None
    return f"nothing is downloaded: fetch {owner}/{name} first, for example with hf download, and give its folder"


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads(foreign_files.content(path / name))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"pipeline folder {path}: cannot read {name}: {reason}", _AGAIN) from error
    if not isinstance(content, dict):
        raise ModelError(f"pipeline folder {path}: {name} is not a JSON object", _AGAIN)
    return content


def _library(path: Path, index: Mapping[str, Any], name: str) -> str:
    match index.get(name):
        case ["diffusers" | "transformers" as library, str()]:
            return str(library)
        case [str() as library, str() as found]:
            raise ModelError(
                f"pipeline folder {path}: its {name} is {library}.{found}", "only diffusers and transformers are loaded"
            )
    raise ModelError(f"pipeline folder {path}: {INDEX} names no {name}", _AGAIN)


def _check_component(path: Path, name: str, library: str, variant: str | None) -> None:
    if name == "scheduler":
        _read(path, SCHEDULER_CONFIG)
        return
    if name.startswith("tokenizer"):
        _read(path, f"{name}/tokenizer_config.json")
        if not any((path / name / file).is_file() for file in _VOCABULARIES):
            raise ModelError(f"pipeline folder {path}: no {' or '.join(_VOCABULARIES)} in {name}", _AGAIN)
        return
    _read(path, f"{name}/config.json")
    stem = _WEIGHTS[library]
    if files := _weights(path / name, stem, variant) or _weights(path / name, stem, None):
        for file in files:
            _refuse_incomplete(path, file)
        return
    if any((path / name).glob("*.bin")) or any((path / name).glob("*.ckpt")):
        raise ModelError(
            f"pipeline folder {path}: {name} has its weights in pickle format, which is not loaded",
            "save the pipeline again with save_pretrained(), which writes safetensors",
        )
    raise ModelError(f"pipeline folder {path}: {name} lacks {stem}.safetensors or a part of it", _AGAIN)


def _weights(folder: Path, stem: str, variant: str | None) -> list[Path]:
    """The files of a component's weights: one, or all parts of an index. Empty if one is missing."""
    ending = f".{variant}" if variant else ""
    whole = folder / f"{stem}{ending}.safetensors"
    if whole.is_file():
        return [whole]
    index = f"{stem}.safetensors.index{ending}.json"
    if not (folder / index).is_file():
        return []
    parts = _read(folder, index).get("weight_map")
    files = [folder / name for name in sorted(set(map(str, parts.values())))] if isinstance(parts, dict) else []
    return files if all(file.is_file() for file in files) else []


def _refuse_incomplete(path: Path, file: Path) -> None:
    """Raises ModelError for a safetensors file that is shorter than its header says.

    The format is that of github.com/huggingface/safetensors: the header's length in eight bytes, the header in JSON,
    and the tensors, whose offsets count from the end of the header.
    """
    name = file.relative_to(path)
    try:
        with foreign_files.opened(file) as content:
            size = os.fstat(content.fileno()).st_size
            length = int.from_bytes(content.read(8), "little")
            header: Any = json.loads(content.read(length)) if length <= min(size - 8, _LONGEST_HEADER) else None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"pipeline folder {path}: cannot read {name}: {error}", _FETCH_AGAIN) from error
    try:
        end = max((tensor["data_offsets"][1] for key, tensor in header.items() if key != "__metadata__"), default=0)
        complete = size >= 8 + length + end
    except (AttributeError, LookupError, TypeError):  # the header is missing or invalid
        complete = False
    if not complete:
        raise ModelError(f"pipeline folder {path}: {name} is incomplete or damaged", _FETCH_AGAIN)
