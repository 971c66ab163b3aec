"""Reads the samples that an earlier run finished, so that a new run makes only the others."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpubench import foreign_files
from gpubench.errors import SettingsError, UsageError
from gpubench.events import Sample
from gpubench.pipeline import folders
from gpubench.pipeline.folders import prompt_of, read_prompts
from gpubench.runs.directory import IMAGE, LATENT, sample_file
from gpubench.runs.reader import Run
from gpubench.settings.keys import flatten
from gpubench.settings.schema import CompletedPipeSettings, PipeSettings

FREE = ("distributed", "pipeline", "measurement", "logging", "experiment", "results", "inject", "verify")
"""Settings, or sections of settings, that do not affect the samples."""
DIGITS = 16
"""The number of digits of a digest in run.json."""
PROMPTS = "prompts"
"""The name of the prompts' digest in run.json."""
ANEW = "restore the earlier one, or start a new run without --resume"


@dataclass(frozen=True)
class Finished:
    """The intact samples in a run directory."""

    path: Path
    samples: dict[int, Sample]
    images: bool
    made_with: dict[str, Any]
    """The model and the software behind them, by name; see `made_with`."""

    def missing(self, total: int) -> list[int]:
        return [sample for sample in range(total) if sample not in self.samples]

    def files(self, sample: int) -> dict[str, bytes]:
        """Returns the contents of the sample's files by their names, which are the same in every run directory."""
        names = [sample_file(sample, suffix) for suffix in ((LATENT, IMAGE) if self.images else (LATENT,))]
        return {name: (self.path / name).read_bytes() for name in names}


def run_at(path: Path) -> Run:
    """Opens a run. Raises RunDirectoryError if `path` is no run directory, UsageError for a run of another command."""
    run = Run.open(path)
    if run.record.command != "pipe-infer":
        raise UsageError(f"{path} is a run of {run.record.command}, which has no samples", "give a run of pipe-infer")
    return run


def finished(run: Run, settings: CompletedPipeSettings) -> Finished:
    """Returns the samples of a run with intact latents, and with their images if `settings` request images.

    Samples of one micro-batch are all taken or none. Raises SettingsError if `settings` would make a sample of another
    prompt or seed.
    """
    path = run.path
    prompts = read_prompts(settings.work.prompts)
    found: dict[int, Sample] = {}
    for sample in run.samples:
        if sample.sample not in found and _whole(path, sample, settings.output.images):
            now = (prompt_of(sample.sample, prompts), settings.seed + sample.sample)
            if (sample.prompt, sample.seed) != now:
                raise SettingsError(
                    f"sample {sample.sample} of {path} was made of {sample.prompt!r} and seed {sample.seed}, and would "
                    f"now be made of {now[0]!r} and seed {now[1]}",
                    "restore the prompts file, or start a new run without --resume",
                )
            found[sample.sample] = sample
    whole = {number: one for number, one in found.items() if all(mate in found for mate in _mates(number, settings))}
    return Finished(path, whole, settings.output.images, made_with(run.record.workload or {}, run.environment))


def made_with(workload: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts besides the settings that determine a sample's bits, from run.json and environment.json.

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


def files_of(settings: CompletedPipeSettings) -> dict[str, str]:
    """Returns digests of what samples are made with, for run.json: of each component, and of all samples' prompts.

    Random weights have no components, and without a file of prompts there is no digest of them.
    """
    name, prompts = settings.model.name, read_prompts(settings.work.prompts)
    found = folders.digests(folders.check(name)) if name else {}
    if prompts:
        used = [prompt_of(sample, prompts) for sample in range(settings.work.samples)]
        found |= {PROMPTS: hashlib.sha256(json.dumps(used).encode()).hexdigest()}
    return {part: digest[:DIGITS] for part, digest in found.items()}


def refuse_other_files(done: "Finished", settings: CompletedPipeSettings) -> None:
    """Raises SettingsError if a file of the model or a prompt changed after the finished samples were made."""
    if changed := change(done.made_with, _named(files_of(settings))):
        raise SettingsError(changed, ANEW)


def change(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Returns a sentence on the first fact that both have and that differs, or None."""
    for name, value in then.items():
        if now.get(name, value) != value:
            return f"{name} changed after the finished samples were made: {value} then, {now[name]} now"
    return None


def _named(files: Mapping[str, str]) -> dict[str, str]:
    """Returns the digests by the names that messages use."""
    known = {folders.INDEX: folders.INDEX, PROMPTS: "list of prompts"}
    return {known.get(name, f"{name} folder"): digest for name, digest in files.items()}


def _mates(sample: int, settings: CompletedPipeSettings) -> range:
    """Returns the samples of the same micro-batch."""
    size = settings.work.micro_batch
    first = sample // size * size
    return range(first, min(first + size, settings.work.samples))


def refuse_changes(before: PipeSettings, after: PipeSettings) -> None:
    """Raises SettingsError naming a setting on which the samples depend and that is no longer the same."""
    old, new = (flatten(settings.model_dump(mode="json")) for settings in (before, after))
    for key, value in old.items():
        if key not in FREE and key.partition(".")[0] not in FREE and new[key] != value:
            raise SettingsError(
                f"--resume makes the rest of the same samples, and {key}={new[key]} would change them",
                f"leave it out (it was {value}), or start a new run without --resume",
            )


def _whole(path: Path, sample: Sample, images: bool) -> bool:
    latent, image = sample_file(sample.sample, LATENT), sample_file(sample.sample, IMAGE) if images else None
    # for example paths that lead outside the run directory
    if (sample.latent, sample.image if images else None) != (latent, image):
        return False
    try:
        drawn = image is None or ((path / image).is_file() and (path / image).stat().st_size > 0)
        return drawn and _sha256_of_tensor(path / latent) == sample.sha256
    except OSError:
        return False


def _sha256_of_tensor(path: Path) -> str:
    """Returns the digest of the tensor in a safetensors file with one tensor.

    The file has the header's length in eight little-endian bytes, the header, and the tensor.
    """
    with foreign_files.opened(path) as file:
        file.seek(8 + min(int.from_bytes(file.read(8), "little"), path.stat().st_size))
        return hashlib.file_digest(file, "sha256").hexdigest()
