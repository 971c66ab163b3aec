"""A ratio of throughputs with its interval, in the words in which every screen, page and patch says it."""

from typing import Annotated, NamedTuple

from msgspec import Meta

from gpubench import units
from gpubench.metrics import TOO_WIDE

Ratio = Annotated[float, Meta(ge=0, le=1e100)]


class Gain(NamedTuple):
    """A ratio of throughputs with its 95 % interval."""

    ratio: Ratio
    low: Ratio
    high: Ratio

    @property
    def too_wide(self) -> bool:
        """Whether the interval is so wide that only its ends are shown."""
        return self.high > TOO_WIDE * self.low

    def __str__(self) -> str:
        if self.too_wide:
            return f"{units.digits(self.low, 2)} to {units.digits(self.high, 2)} x"
        return f"{self.ratio:.2f} x [{self.low:.2f}, {self.high:.2f}]"
