"""Reads the samples that an earlier run finished, so that a new run makes only the others."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubench import foreign_files
from gpubench.errors import RunDirectoryError, RunFailed, SettingsError, UsageError
from gpubench.events import Sample
from gpubench.kinds.pipeline import folders
from gpubench.kinds.pipeline.requests import Requests
from gpubench.kinds.pipeline.settings import CompletedPipeSettings, PipeSettings
from gpubench.runs.directory import (
    COMPLETED,
    CONFIG,
    ENVIRONMENT,
    IMAGE,
    LATENT,
    RUN,
    SAMPLES,
    is_sample_file,
    sample_file,
)
from gpubench.runs.reader import Run
from gpubench.settings.keys import flatten, in_words, is_empty

FREE = (
    "distributed",
    "pipeline",
    "measurement",
    "logging",
    "experiment",
    "results",
    "inject",
    "verify",
    "work.samples",
)
"""Settings, or sections of settings, that do not affect the samples."""
DIGITS = 16
"""The number of digits of a digest in run.json."""
PROMPTS = "prompts"
"""The name of the prompts' digest in run.json."""
PROMPT_LIST = "list of prompts"
"""The same in messages."""
ANEW = "restore the earlier one, or start a new run without --resume"
RESTORE = "restore it from a copy, or start a new run without --resume"


@dataclass(frozen=True)
class Finished:
    path: Path
    samples: dict[int, Sample]
    suffixes: tuple[str, ...]
    """Those of each sample's files."""
    damaged: list[str]
    """Why other finished samples are made again."""
    made_with: dict[str, Any]
    """The model and the software behind them, by name; see `made_with`."""

    def missing(self, total: int) -> list[int]:
        return [sample for sample in range(total) if sample not in self.samples]

    def files(self, sample: int) -> dict[str, bytes]:
        """The contents of the sample's files by their names, which are the same in every run directory.

        Raises RunFailed if a file has been damaged since it was checked.
        """
        try:
            return _intact(self.path, self.samples[sample], self.suffixes)
        except _Damaged as error:
            raise RunFailed(f"sample {sample} of {self.path} cannot be taken over: {error}", "try again") from error


def run_at(path: Path) -> Run:
    """Opens a run.

    Raises RunDirectoryError if `path` is not a run directory, or the configuration in it is not that of the run, and
    UsageError for a run of another command.
    """
    run = Run.open(path)
    if run.record.command != "pipe-infer":
        raise UsageError(f"{path} is a run of {run.record.command}, which has no samples", "give a run of pipe-infer")
    config = path / CONFIG
    try:
        content = foreign_files.content(config)
    except OSError as error:
        raise RunDirectoryError(f"{config} cannot be read: {error.strerror}", RESTORE) from None
    if run.record.config_sha256 not in (None, hashlib.sha256(content).hexdigest()):
        raise RunDirectoryError(f"{config} has changed since the run", RESTORE)
    return run


def finished(run: Run, settings: CompletedPipeSettings, samples: int | None = None) -> Finished:
    """Returns the samples of a run that have all files that `settings` request, as they were written.

    Samples of one micro-batch are all taken or none. If the run was to make another number of samples, that number is
    `samples`; the micro-batch that was or is incomplete is then made again. Raises RunDirectoryError if the files of
    the run do not say how its samples were made, and SettingsError if `settings` would make a sample from another
    prompt or seed.
    """
    path, kept = run.path, _suffixes(settings)
    requests = Requests.of(settings)
    found: dict[int, Sample] = {}
    damaged: dict[int, str] = {}
    for sample in run.samples:
        if sample.sample in found or sample.sample not in range(settings.work.samples):
            continue
        try:
            _intact(path, sample, kept)
        except _Damaged as error:
            damaged[sample.sample] = str(error)
            continue
        then, now = ((sample.prompt, sample.seed), (requests.prompt(sample.sample), requests.seed(sample.sample)))
        if then != now:
            raise SettingsError(
                f"sample {sample.sample} of {path} was made of {_made_of(*then)}, and would now be made of "
                f"{_made_of(*now)}",
                "restore the prompts file, or start a new run without --resume",
            )
        found[sample.sample] = sample
    if run.status == COMPLETED:
        unlisted = set(range(samples or settings.work.samples)) - found.keys() - damaged.keys()
        damaged |= dict.fromkeys(unlisted & {*range(settings.work.samples)}, f"{SAMPLES} does not list it")
    total, size = settings.work.samples, settings.work.micro_batch
    whole = {
        number: one
        for number, one in found.items()
        if (mates := _mates(number, size, total)) == _mates(number, size, samples or total)
        and all(mate in found for mate in mates)
    }
    reasons = [f"{number} ({why})" for number, why in sorted(damaged.items()) if number not in found]
    made = made_with(run.record.workload or {}, run.environment)
    if whole:
        _refuse_unknown(run, made)
    return Finished(path, whole, kept, [*reasons, *_unread(run)], made)


def _made_of(prompt: str | None, seed: int) -> str:
    return f"{'no prompt' if prompt is None else repr(prompt)} and seed {seed}"


def _suffixes(settings: CompletedPipeSettings) -> tuple[str, ...]:
    kept = ((LATENT, settings.output.latents), (IMAGE, settings.output.images))
    return tuple(suffix for suffix, wanted in kept if wanted)


def _unread(run: Run) -> list[str]:
    """The problems of samples.jsonl, without the path of the run."""
    file = str(run.path / SAMPLES)
    return [problem.replace(file, SAMPLES) for problem in run.problems if problem.startswith(file)]


def _refuse_unknown(run: Run, made: Mapping[str, Any]) -> None:
    """Raises RunDirectoryError if the other samples might be made in another way than those of the run."""
    for name, file in (("weights", RUN), ("scheduler", RUN), ("torch", ENVIRONMENT), ("diffusers", ENVIRONMENT)):
        if name not in made:
            what = "version of " if file == ENVIRONMENT else ""
            raise RunDirectoryError(f"{run.path / file} does not give the {what}{name} of its samples", RESTORE)


def made_with(workload: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The facts besides the settings that determine a sample's bits, from run.json and environment.json.

    `environment` is by dot-key.
    """
    known = {
        "weights": workload.get("weights"),
        "scheduler": workload.get("scheduler"),
        **_named(workload.get("files") or {}),
        "torch": environment.get("torch.version"),
        "diffusers": environment.get("packages.diffusers"),
        "transformers": environment.get("packages.transformers"),
    }
    return {name: value for name, value in known.items() if value is not None}


def files_of(settings: CompletedPipeSettings, samples: int | None = None) -> dict[str, str]:
    """Digests of the files that samples are made from, for run.json: of each component, and of all samples' prompts.

    Random weights have no components, and without a file of prompts there is no digest of them. `samples` replaces the
    number of samples in the settings.
    """
    name, requests = settings.model.name, Requests.of(settings)
    found = folders.digests(folders.check(name)) if name else {}
    if requests.prompts:
        used = [requests.prompt(sample) for sample in range(samples or settings.work.samples)]
        found |= {PROMPTS: hashlib.sha256(json.dumps(used).encode()).hexdigest()}
    return {part: digest[:DIGITS] for part, digest in found.items()}


def refuse_other_files(done: "Finished", settings: CompletedPipeSettings, samples: int | None = None) -> None:
    """Raises SettingsError if a file of the model or a prompt changed after the finished samples were made.

    If the run was to make another number of samples, that number is `samples`.
    """
    if changed := change(done.made_with, _named(files_of(settings, samples))):
        raise SettingsError(changed, ANEW)


def change(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """A sentence on the first fact that both have and that differs; None if there is none."""
    for name, value in then.items():
        if now.get(name, value) != value:
            return f"{name} changed after the finished samples were made: {value} then, {now[name]} now"
    return None


def _named(files: Mapping[str, str]) -> dict[str, str]:
    """The digests under the names that messages use."""
    known = {folders.INDEX: folders.INDEX, PROMPTS: PROMPT_LIST}
    return {known.get(name, f"{name} folder"): digest for name, digest in files.items()}


def _mates(sample: int, size: int, total: int) -> range:
    """The samples of the same micro-batch, of `size` samples, in a run of `total`."""
    first = sample // size * size
    return range(first, min(first + size, total))


def refuse_changes(before: PipeSettings, after: PipeSettings) -> None:
    """Raises SettingsError naming a setting on which the samples depend and that is no longer the same.

    Their number may change: see `finished`.
    """
    old, new = (flatten(settings.model_dump(mode="json")) for settings in (before, after))
    for key, value in old.items():
        if key not in FREE and key.partition(".")[0] not in FREE and new[key] != value:
            now = f"{key} without a value" if is_empty(new[key]) else f"{key}={new[key]}"
            was = f"it was {in_words(value)}"
            raise SettingsError(
                f"--resume makes the rest of the same samples, and {now} would change them",
                f"leave it out ({was}), or start a new run without --resume",
                keys=[key],
            )


class _Damaged(Exception):
    """A sample cannot be taken over, for the reason in the message."""


def _intact(path: Path, sample: Sample, suffixes: Sequence[str]) -> dict[str, bytes]:
    """The contents of a sample's files by name. Raises _Damaged if one is not as it was written.

    Runs of gpubench 0.2.0 and older have no digests of files, but one of the latents themselves.
    """
    named = {LATENT: sample.latent, IMAGE: sample.image}
    contents: dict[str, bytes] = {}
    for suffix in suffixes:
        name = named[suffix]
        if name is None or not is_sample_file(name, sample.sample, suffix):  # such as a path to another directory
            raise _Damaged(f"{SAMPLES} does not name {sample_file(sample.sample, suffix)}")
        try:
            content = foreign_files.content(path / name)
        except FileNotFoundError:
            raise _Damaged(f"{name} is missing") from None
        except OSError as error:
            raise _Damaged(f"{name} cannot be read: {error.strerror}") from None
        if suffix == LATENT and _sha256_of_tensor(content) != sample.sha256:
            raise _Damaged(f"{name} has changed since it was written")
        if name not in sample.digests and (sample.digests or suffix == IMAGE):
            raise _Damaged(f"{SAMPLES} has no digest of {name}")
        if sample.digests.get(name, digest := hashlib.sha256(content).hexdigest()) != digest:
            raise _Damaged(f"{name} has changed since it was written")
        contents[name] = content
    if not contents:
        raise _Damaged("the run kept no files of its samples")
    return contents


def _sha256_of_tensor(content: bytes) -> str:
    """The digest of the tensor in a safetensors file with one tensor.

    The file has the header's length in eight little-endian bytes, the header, and the tensor.
    """
    start = 8 + min(int.from_bytes(content[:8], "little"), len(content))
    return hashlib.sha256(content[start:]).hexdigest()
