"""The jobs of the GPU suite, in the order in which they have their turn."""

from gpu_jobs.comparisons import PIPED, TRAINED
from gpu_jobs.memories import memories
from gpu_jobs.pipelines import pipelines
from gpu_jobs.profiles import planted, profiles
from gpu_jobs.training import TRAINING

JOBS = (*TRAINING[:2], TRAINED, *TRAINING[2:], *pipelines(), PIPED, *planted(), *profiles(), *memories())
