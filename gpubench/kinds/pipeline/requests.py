"""Which prompt and which seed each sample of a run is made from, by the number of the sample."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpubench.kinds.pipeline.folders import read_prompts
from gpubench.kinds.pipeline.settings import CompletedPipeSettings
from gpubench.runs.directory import sample_file


def prompt_index(sample: int, prompts: int, seeds: int) -> int:
    """The index of a sample's prompt among `prompts`, each of which is made with `seeds` seeds in a row.

    The order is that of `num_images_per_prompt` of diffusers' pipelines: first all samples of the first prompt. Without
    a list of seeds, `seeds` is 0 and the prompts take turns.
    """
    return sample // max(1, seeds) % max(1, prompts)


@dataclass(frozen=True)
class Requests:
    prompts: Sequence[str]
    """Empty without a file of prompts."""
    first_seed: int
    """The seed of sample 0, of which each further sample has the next one, if there is no list of seeds."""
    seeds: Sequence[int] = ()
    """Every prompt is made with each of them, in this order."""

    @classmethod
    def of(cls, settings: CompletedPipeSettings) -> "Requests":
        """Reads the file of prompts. Raises DataError."""
        return cls(read_prompts(settings.work.prompts), settings.seed, settings.work.seed_list)

    def seed(self, sample: int) -> int:
        return self.seeds[sample % len(self.seeds)] if self.seeds else self.first_seed + sample

    def prompt(self, sample: int) -> str | None:
        return self.prompts[self._index(sample)] if self.prompts else None

    def file(self, sample: int, suffix: str) -> str:
        """The path of a sample's file, relative to the run directory, with prompt and seed if those are listed."""
        made_of = f"-prompt{self._index(sample) + 1}-seed{self.seed(sample)}" if self.seeds else ""
        return sample_file(sample, suffix, made_of)

    def _index(self, sample: int) -> int:
        return prompt_index(sample, len(self.prompts), len(self.seeds))
