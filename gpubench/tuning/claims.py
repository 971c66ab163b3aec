"""What settings claim about the numbers that a program computes."""

from collections.abc import Iterable

from gpubench.compare.losses import CLAIMS, Claim
from gpubench.tuning.treatments import numbers_of

COMPILED = ("performance.compile", "performance.compile_mode")
"""The settings whose losses are judged as those of another type, because compiled code draws other random numbers."""


def claim_of(keys: Iterable[str]) -> Claim:
    """Returns the loosest claim of the settings with these dot-keys, none of which may change the batch."""
    known = {"type" if key in COMPILED else numbers_of(key) for key in keys}
    return next((claim for claim in reversed(CLAIMS) if claim in known), "same")
