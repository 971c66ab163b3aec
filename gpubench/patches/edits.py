"""The edit of the program's source that does what each setting does from outside, and where it belongs."""

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import libcst as cst

from gpubench import foreign_files, units
from gpubench.patches import calls, contexts, diff, models, set_up
from gpubench.patches.calls import Arguments, Changed
from gpubench.patches.source import AlreadySo, NotEdited, SourceFile

LOADER = (
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory"),
    *("drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
)
ADAGRAD = ("params", "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "foreach")
DDP = (
    *("module", "device_ids", "output_device", "dim", "broadcast_buffers", "init_sync", "process_group"),
    *("bucket_cap_mb", "find_unused_parameters", "check_reduction", "gradient_as_bucket_view"),
)
PARAMETERS: Mapping[str, Sequence[str]] = {"DataLoader": LOADER, "Adagrad": ADAGRAD, "DistributedDataParallel": DDP}
"""The parameters of a class that may be given by their place, in their order."""
OF_LOADERS: Mapping[str, str] = {
    "data.workers": "num_workers",
    "data.pin_memory": "pin_memory",
    "data.prefetch": "prefetch_factor",
    "data.persistent_workers": "persistent_workers",
}
OF_WORKERS = ("data.prefetch", "data.persistent_workers")
"""The settings that a DataLoader takes with workers only."""
OF_DDP: Mapping[str, str] = {
    "distributed.bucket_mb": "bucket_cap_mb",
    "distributed.gradient_as_bucket_view": "gradient_as_bucket_view",
}
OF_OPTIMIZERS: Mapping[str, Arguments] = {
    "fused": {"fused": "True", "foreach": None},
    "foreach": {"foreach": "True", "fused": None},
    "loop": {"foreach": "False", "fused": None},
}
CHANNELS_LAST: Mapping[bool, str] = {True: "torch.channels_last", False: "torch.contiguous_format"}
OPTIM = {"fused": "adamw_torch_fused"}


def literal(value: Any) -> str:
    """A value as Python source, whatever a file of settings has put into it."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


TRAINING_ARGUMENTS: Mapping[str, Callable[[Any], Arguments | None]] = {
    "data.workers": lambda value: {"dataloader_num_workers": repr(value)},
    "data.pin_memory": lambda value: {"dataloader_pin_memory": repr(value)},
    "data.prefetch": lambda value: {"dataloader_prefetch_factor": repr(value)},
    "data.persistent_workers": lambda value: {"dataloader_persistent_workers": repr(value)},
    "training.optimizer_impl": lambda value: {"optim": f'"{OPTIM[value]}"'} if value in OPTIM else None,
    "precision": lambda value: {"bf16": "True"} if value == "bf16" else None,
    "performance.compile": lambda value: {"torch_compile": repr(value)},
    "performance.compile_mode": lambda value: {"torch_compile_mode": literal(value)},
}
BF16_TRAINER: Mapping[str, Callable[[Any], Arguments | None]] = {
    "precision": lambda value: {"precision": '"bf16-mixed"'} if value == "bf16" else None
}
FRAMEWORKS: Mapping[str, Mapping[str, Callable[[Any], Arguments | None]]] = {
    "transformers.TrainingArguments": TRAINING_ARGUMENTS,
    "transformers.Seq2SeqTrainingArguments": TRAINING_ARGUMENTS,
    "lightning.Trainer": BF16_TRAINER,
    "lightning.pytorch.Trainer": BF16_TRAINER,
    "pytorch_lightning.Trainer": BF16_TRAINER,
    "accelerate.Accelerator": {
        "precision": lambda value: {"mixed_precision": '"bf16"'} if value == "bf16" else None,
    },
}
"""The arguments of what frameworks make, by the full name of what is called and by dot-key."""
OF_TORCH: Mapping[str, Callable[[SourceFile, Any], Changed]] = {
    "performance.cpu_threads": lambda source, value: set_up.called(source, "set_num_threads", repr(value)),
    "performance.matmul_precision": lambda source, value: set_up.called(
        source, "set_float32_matmul_precision", literal(value)
    ),
    "performance.cudnn_benchmark": lambda source, value: set_up.assigned(
        source, "backends.cudnn.benchmark", repr(value)
    ),
}
"""The change of the start of the program."""
NO_EDIT: Mapping[str, str] = {
    "performance.expandable_segments": "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:{} in the environment",
    "performance.sdpa": "remove what restricts the kernels of attention: {}",
    "seed": "a seed is no edit",
}
"""The sentence for a setting whose place in the source is not known."""
COMPILE, COMPILE_MODE = "performance.compile", "performance.compile_mode"


Change = Callable[[SourceFile, int], Changed]
"""Changes a source at a line."""


@dataclass(frozen=True)
class Program:
    """A program of the user, and what a run of it has shown about its source."""

    directory: Path
    words: Sequence[str]
    """Its command line."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Where its fixes belong, as `events.ModelBuilt.places`."""
    optimizers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The lines that make its optimizers, as `events.ModelBuilt.optimizers`."""
    device: str | None = None
    """The type of its device."""


@dataclass(frozen=True)
class Edit:
    """A change of one file by one setting."""

    key: str
    """The dot-key of the setting."""
    file: str
    line: int
    """The line that it changes in the file as it was; that after which it adds one."""


@dataclass
class Patch:
    """Edits of the program's files, and the settings for which there is none."""

    files: dict[str, diff.Versions] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    """Why a setting has no edit, or what to write by hand, by dot-key."""


def edited(settings: Mapping[str, Any], program: Program) -> Patch:
    """The patch that makes a program run with these settings, which are by dot-key."""
    patch = Patch()
    without_workers = False
    for key in sorted(settings, key=OF_WORKERS.__contains__):
        value = settings[key]
        try:
            if key in OF_WORKERS and without_workers:  # a DataLoader without workers refuses it
                raise NotEdited(f"it needs workers: set it to {value} with them")
            _edit(patch, key, value, settings, program)
        except NotEdited as reason:
            patch.left[key] = str(reason)
            without_workers = without_workers or (key == "data.workers" and not isinstance(reason, AlreadySo))
    return patch


def _edit(patch: Patch, key: str, value: Any, settings: Mapping[str, Any], program: Program) -> None:
    """Adds the edits of a setting to a patch: all of them, or none. Raises NotEdited without one."""
    if key in NO_EDIT:
        raise NotEdited(NO_EDIT[key].format(value))
    before = dict(patch.files), list(patch.edits)
    unchanged: list[AlreadySo] = []
    try:
        for place, change in _changes(key, value, settings, program):
            try:
                _change(patch, key, place, change, program)
            except AlreadySo as reason:  # where it is one of several optimizers, the others may not be
                unchanged.append(reason)
        if unchanged and len(patch.edits) == len(before[1]):
            raise unchanged[0]
    except NotEdited:
        patch.files, patch.edits = before
        raise


def _change(patch: Patch, key: str, place: str, change: Change, program: Program) -> None:
    """Adds the edit of one place. Raises AlreadySo if it changes nothing."""
    name, line = file_and_line(place, program)
    content = patch.files[name].after if name in patch.files else read(program.directory, name)
    original = patch.files[name].before if name in patch.files else content
    found = change(SourceFile(name, content, original), diff.moved(line, original, content))
    if found.content == content:
        raise AlreadySo(f"{name}:{found.line} does that already")
    patch.files[name] = diff.Versions(original, found.content)
    patch.edits.append(Edit(key, name, diff.moved(found.line, content, original)))


def _changes(key: str, value: Any, settings: Mapping[str, Any], program: Program) -> Sequence[tuple[str, Change]]:
    """The changes that a setting takes, each with its place as "file:line".

    Raises NotEdited where none is certain. There are none for what the edit of another setting has.
    """
    places, words = program.places, program.words
    if found := _of_framework(key, value, program):
        return [found]
    if key in OF_LOADERS:
        change = _calling(("DataLoader",), {OF_LOADERS[key]: repr(value)}, words)
        others = [place for kind, place in places.items() if kind.startswith("loader ")]
        return [(place, change) for place in (_place(places, "loader", key), *others)]
    if key in OF_DDP:
        given = {OF_DDP[key]: repr(int(value) if value == int(value) and value is not True else value)}
        return [(_place(places, "ddp", key), _calling(("DistributedDataParallel",), given, words))]
    if key == "training.optimizer_impl":
        lines = {name.rpartition(".")[2]: made for name, made in program.optimizers.items()}
        if not lines or not all(lines.values()):
            raise NotEdited("it is not known where the program makes an optimizer that has this")
        return [(line, _calling((name,), OF_OPTIMIZERS[value], words)) for name, made in lines.items() for line in made]
    if key in OF_TORCH:
        return [(_start(program), lambda source, _: OF_TORCH[key](source, value))]
    return _of_model(key, value, settings, program)


def _of_model(key: str, value: Any, settings: Mapping[str, Any], program: Program) -> Sequence[tuple[str, Change]]:
    """The changes of the models by a setting. Raises NotEdited where none is certain."""
    places = program.places
    if key == COMPILE_MODE and settings.get(COMPILE):
        return []  # the edit of that has the mode too
    place = _place(places, "model", key)
    if key == COMPILE and value:
        mode = settings.get(COMPILE_MODE)
        given = f"mode={literal(mode)}".replace("{", "{{").replace("}", "}}") if mode else ""
        return _of_models(f"{{}}.compile({given})", program)
    if key == "performance.channels_last":
        if "ddp" in places:
            raise NotEdited(f"before {places['ddp']}, move the model to {CHANNELS_LAST[value]}")
        if " (by " in place:
            raise NotEdited(f"before {place}, which has a package call the model, move it to {CHANNELS_LAST[value]}")
        return _of_models(f"{{}}.to(memory_format={CHANNELS_LAST[value]})", program)
    if key == "precision" and value == "bf16" and program.device:
        context, called = f"torch.autocast({literal(program.device)}, torch.bfloat16)", _called(program)
        name, alone = next((name for name in called if called[name] == place), ""), len(called) < 2
        name = "" if name.isdigit() else name
        return [(place, lambda source, line: contexts.within_context(source, line, context, name, alone=alone))]
    raise NotEdited(f"there is no edit for {key}={value} at {place}")


def _of_models(code: str, program: Program) -> Sequence[tuple[str, Change]]:
    """The statement after the making of each model, which has the model's name as {}."""
    called = _called(program)
    if not called or (len(called) == 1 and next(iter(called)).isdigit()):
        return [(program.places["model"], lambda source, line: models.after_made(source, line, code))]
    for name, place in called.items():
        if name.isdigit():
            wanted = f"after each of its models is made, write {code.format('model')}"
            raise NotEdited(f"{place} calls one of several models by no name: {wanted}")
    return [
        (place, lambda source, line, name=name: models.after_made(source, line, code, name))  # type: ignore[misc]
        for name, place in called.items()
    ]


def _called(program: Program) -> Mapping[str, str]:
    """The models that the program calls, by their names, each with the first line; see `SourcePlaces.model`."""
    return {key.removeprefix("model "): place for key, place in program.places.items() if key.startswith("model ")}


def _of_framework(key: str, value: Any, program: Program) -> tuple[str, Change] | None:
    """The change of what a framework is given, in the file that calls it; None without one."""
    if key == "training.optimizer_impl":
        lines = [line for made in program.optimizers.values() for line in made]
    elif key in OF_LOADERS:
        lines = [program.places.get("loader", "")]
    elif key in ("precision", COMPILE, COMPILE_MODE):
        lines = [program.places.get("model", "")]
    else:
        return None
    place = next(iter(lines), "")
    by_package = " (by " in place
    for file in dict.fromkeys([place.partition(" (")[0], script(program) or ""]):
        with suppress(NotEdited):
            name, _ = file_and_line(file if ":" in file else f"{file}:1", program)
            source = SourceFile(name, read(program.directory, name))
            for call in source.all_of(cst.Call):
                table = FRAMEWORKS.get(source.full_name(call.func), {})
                arguments = table[key](value) if key in table else None
                if arguments and (by_package or key == "precision"):
                    called = source.full_name(call.func).rpartition(".")[2]
                    return source.place(call), _calling((called,), arguments, program.words)
    if by_package:
        raise NotEdited(f"{place} calls a package that does it: set {key} by an argument of that package")
    return None


def _calling(names: Sequence[str], arguments: Arguments, words: Collection[str]) -> Change:
    """The change of the arguments of the only call at a line of one of these classes."""

    def change(source: SourceFile, line: int) -> Changed:
        found = [one for one in source.calls_at(line) if source.full_name(one.func).rpartition(".")[2] in names]
        if len(found) != 1:
            what = "several times" if found else "by another name"
            raise NotEdited(f"{source.at(line)} calls {names[0]} {what}: give it {calls.in_words(arguments)}")
        own = source.full_name(found[0].func)
        parameters = PARAMETERS.get(own.rpartition(".")[2], ())
        return calls.changed(source, found[0], arguments, parameters, words)

    return change


def _place(places: Mapping[str, str], kind: str, key: str) -> str:
    if kind not in places:
        raise NotEdited(f"it is not known where the program does what {key} changes")
    return places[kind]


def script(program: Program) -> str | None:
    """The file of the program that its command starts, relative to its directory; None if it is not one there."""
    words = list(program.words)
    for place, word in enumerate(words):
        if word == "-m" and place + 1 < len(words):
            module = words[place + 1].replace(".", os.sep)
            names = [f"{module}.py", os.path.join(module, "__main__.py")]  # noqa: PTH118
            if found := next((name for name in names if (program.directory / name).is_file()), None):
                return found
        if word.endswith(".py"):
            return os.path.relpath(program.directory / word, program.directory)
    return None


def _start(program: Program) -> str:
    """The place at which the program starts. Raises NotEdited if its command does not show it."""
    if name := script(program):
        return f"{name}:1"
    for place in program.places.values():
        with suppress(NotEdited):
            name, _ = file_and_line(place, program)
            if set_up.is_script(SourceFile(name, read(program.directory, name))):
                return f"{name}:1"
    raise NotEdited(f"{program.words[0] if program.words else 'the command'} does not show which file starts it")


def file_and_line(place: str, program: Program) -> tuple[str, int]:
    """The file of a place, relative to the program's directory, and the line. Raises NotEdited for another file."""
    name, _, line = place.partition(" (")[0].rpartition(":")
    top = program.directory.resolve()
    path = _near_script(name, program) or program.directory / name
    number = units.whole(line)
    if number is None or not path.resolve().is_relative_to(top):
        raise NotEdited(f"{place} is not below {program.directory.absolute()}, and is not edited")
    relative = os.path.relpath(path.resolve(), top)  # of a link, what it is to
    if not diff.is_nameable(relative):
        raise NotEdited(f"{place} is not a file that a diff of Python source can name")
    if {"site-packages", "dist-packages"}.intersection(path.parts):
        raise NotEdited(f"{place} is an installed package, and is not edited")
    return relative, number


def _near_script(name: str, program: Program) -> Path | None:
    """The file that a name may mean beside a script from elsewhere, by which the probe names what is there."""
    started = script(program) or ""
    folder = program.directory / os.path.dirname(started)  # noqa: PTH120
    is_there = folder.resolve().is_relative_to(program.directory.resolve())
    path = folder / name
    return path if not is_there and not os.path.isabs(name) and path.exists() else None  # noqa: PTH117


def read(directory: Path, name: str) -> bytes:
    try:
        return foreign_files.content(directory / name)
    except OSError as error:
        raise NotEdited(f"{name} cannot be read: {error.strerror}") from None
