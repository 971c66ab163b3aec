"""What a pipeline was made of and how it went: the part of a summary that no other command has."""

from msgspec import Struct

from gpubench.diffusion.timeline import Times
from gpubench.events import Divergence


class Stage(Struct, frozen=True):
    """One rank and its part of the work."""

    rank: int
    start: int
    end: int
    """Its evaluations are [start, end) of each sample's."""
    times: Times | None
    """Mean over the repeats that were completed; None where none was."""
    evaluation_time: float | None
    """Mean seconds of one evaluation, over all repeats."""
    peak_allocated: int | None
    """Most bytes held by tensors on its device; None on a CPU."""
    peak_rss: int | None
    sent: int
    """Hand-overs, over all repeats."""
    received: int

    @property
    def peak_memory(self) -> int | None:
        """On its device, or on the host where that is the device."""
        return self.peak_rss if self.peak_allocated is None else self.peak_allocated


class Handover(Struct, frozen=True):
    """Mean bytes of what one rank sends the next, by part."""

    header: float
    latent: float
    state: float
    """Of the scheduler, and what its caller holds for it."""
    generator: float


class Digest(Struct, frozen=True):
    """One sample, as the first repeat that finished it made it."""

    sample: int
    seed: int
    sha256: str
    """Of its final latent."""
    identical: bool | None
    """To the reference, bit for bit; None where it was not compared."""
    reproduced: bool | None
    """In every other repeat that finished it; None where none did."""


class Verification(Struct, frozen=True):
    """Samples beside those that single-process diffusers made."""

    reference: str
    """What made them, in words."""
    samples: int
    identical: int
    divergence: Divergence | None


class Pipeline(Struct, frozen=True):
    model: str
    parameters: int
    """Of the denoiser, which every rank holds whole."""
    scheduler: str
    evaluations: int
    """Of one sample."""
    latent_shape: list[int]
    """Of one sample."""
    carried: list[str]
    """Attributes of the scheduler that travel with a sample, and what else does."""
    assignment: str
    """How many evaluations each rank has and what the remainder costs, in a sentence."""
    stages: list[Stage]
    handover: Handover | None
    steady: tuple[float, float] | None
    """First and last finish of a sample, in seconds from the start of the makespan; of the first completed repeat."""
    samples: list[Digest]
    verification: Verification | None
    verdict: str | None
    """Whether splitting the steps was worth it, in a sentence; None where that cannot be said."""
    threads: int | None = None
    """In each rank's process, that of the references among them: the last bits of what a CPU computes depend on it.
    None on a GPU."""
