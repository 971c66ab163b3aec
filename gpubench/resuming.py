"""Samples that an earlier run finished, to be taken over by one that makes the rest."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from gpubench.errors import SettingsError, UsageError
from gpubench.events import Sample
from gpubench.pipe_settings import PipeSettings
from gpubench.runs import CONFIG, IMAGE, LATENT, SAMPLES, Run, sample_file

FREE = ("distributed", "pipeline", "measurement", "logging", "experiment", "results", "inject", "verify")
"""Settings, or sections of them, that leave the samples what they are."""


@dataclass(frozen=True)
class Finished:
    """What is whole in a run directory."""

    path: Path
    samples: dict[int, Sample]
    images: bool

    def missing(self, total: int) -> list[int]:
        return [sample for sample in range(total) if sample not in self.samples]

    def files(self, sample: int) -> dict[str, bytes]:
        """The sample's files, by their names in any run directory."""
        names = [sample_file(sample, suffix) for suffix in ((LATENT, IMAGE) if self.images else (LATENT,))]
        return {name: (self.path / name).read_bytes() for name in names}


def finished(path: Path, images: bool) -> Finished:
    """The samples of a run whose latents are there to the bit, and with `images` their images too.

    Raises RunDirectoryError if `path` is no run directory, and UsageError if it is another command's.
    """
    run = Run.open(path)
    if run.record.command != "pipe-infer":
        raise UsageError(f"{path} is a run of {run.record.command}, which has no samples", "give a run of pipe-infer")
    found: dict[int, Sample] = {}
    for sample in run.lines(SAMPLES, Sample):
        if sample.sample not in found and _whole(path, sample, images):
            found[sample.sample] = sample
    return Finished(path, found, images)


def config_of(path: Path) -> str:
    return str(path / CONFIG)


def refuse_changes(before: PipeSettings, after: PipeSettings) -> None:
    """Raises SettingsError naming a setting on which the samples depend and that is no longer the same."""
    for name in type(before).model_fields:
        if name not in FREE and getattr(before, name) != getattr(after, name):
            raise SettingsError(
                f"--resume makes the rest of the same samples, and {name} would change them",
                f"leave it out, or start anew without --resume ({name} was {getattr(before, name)})",
            )


def _whole(path: Path, sample: Sample, images: bool) -> bool:
    latent, image = sample_file(sample.sample, LATENT), sample_file(sample.sample, IMAGE) if images else None
    if (sample.latent, sample.image if images else None) != (latent, image):  # names that lead elsewhere among others
        return False
    try:
        content = _tensor_bytes((path / latent).read_bytes())
        drawn = image is None or (path / image).stat().st_size > 0
    except OSError:
        return False
    return drawn and hashlib.sha256(content).hexdigest() == sample.sha256


def _tensor_bytes(file: bytes) -> bytes:
    """Of a safetensors file with one tensor: all behind the header, and the eight little-endian bytes of its length."""
    return file[8 + int.from_bytes(file[:8], "little") :]
