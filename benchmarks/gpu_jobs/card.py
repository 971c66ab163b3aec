"""The GPU that the suite runs on, and how large a batch it holds."""

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from gpubench.devices import visible_gpus
from gpubench.hardware import AMPERE, Accelerator, find_accelerator

SIMULATED = "(simulated)"  # how the name of the device of tests/fake_cuda ends
PATIENCE = 60.0  # seconds in which torch tells how large the memory is
ROOM = 0.88  # of the memory: cuDNN's workspaces and fragmentation are in no prediction
GIB = 2**30

NEEDS: Mapping[str, tuple[float, float]] = {
    "resnet50": (0.94e9, 50.6e6),
    "gpt2": (1.9e9, 1.89e9),
    "bert-large": (4.4e9, 0.192e9),
    "sd15-unet": (13.7e9, 1.29e9),
}
"""By model: bytes of any batch, and of each sample, as `gpubench memory --predict --find-batch-size` fits them for the
presets, with the precision that takes most of those used here (AMP for ResNet-50, fp32 for GPT-2, bf16 for others)."""


@dataclass(frozen=True)
class Card:
    """The device that torch calls cuda:0."""

    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    """The compute capability; None for GPUs of other vendors than NVIDIA."""

    @classmethod
    def here(cls) -> "Card | None":
        """None where no GPU is visible, or nothing says how large its memory is."""
        found = next(iter(visible_gpus()), None)
        memory = found and (found.memory_bytes or _by_torch())
        return cls(found.name, memory, found.compute_capability) if found and memory else None

    @property
    def listed(self) -> Accelerator | None:
        """What is published about it."""
        return find_accelerator(self.name, self.memory_bytes)

    @property
    def simulated(self) -> bool:
        return self.name.endswith(SIMULATED)

    @property
    def modern(self) -> bool:
        """Whether it computes in bfloat16 and TF32, which gpubench refuses on older GPUs."""
        return (self.capability or AMPERE) >= AMPERE

    @property
    def half(self) -> str:
        """The setting of precision for training with 16 bits."""
        return "bf16" if self.modern else "amp"

    @property
    def slug(self) -> str:
        """A name for its folder."""
        return self.listed.key if self.listed else re.sub(r"[^a-z0-9]+", "-", self.name.casefold()).strip("-")

    def batch(self, model: str, most: int) -> int:
        """The largest batch of at most `most` samples that fits by prediction, rounded down to three binary digits.

        0 where not even one sample fits.
        """
        constant, each = NEEDS[model]
        fits = max(0, min(most, int((ROOM * self.memory_bytes - constant) / each)))
        step = 1 << max(0, fits.bit_length() - 4)
        return fits // step * step

    def __str__(self) -> str:
        return f"{self.name}, {self.memory_bytes / GIB:.1f} GiB"


ASSUMED = Card("an assumed GPU", 80 * GIB)
"""For what is only printed or rehearsed where there is no GPU."""


def _by_torch() -> int | None:
    """The bytes of cuda:0, which only HIP tells of an AMD GPU; None if torch finds no GPU."""
    asked = "import torch; print(torch.cuda.get_device_properties(0).total_memory)"
    try:
        done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 else None
