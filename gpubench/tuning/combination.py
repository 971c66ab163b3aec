"""What a search combines: a level of each factor."""

from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

LevelNumber = Annotated[int, Meta(ge=0, le=1000)]
Runs = Annotated[int, Meta(ge=0, le=10**6)]
Combination = tuple[LevelNumber, ...]
"""The level of each factor; 0 is what it is now."""
Level = tuple[int, int]
"""A level of a factor, as (place, level)."""
Array = NDArray[np.float64]
