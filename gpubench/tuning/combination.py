"""What a search combines: a level of each factor."""

import numpy as np
from numpy.typing import NDArray

Combination = tuple[int, ...]
"""The level of each factor; 0 is what it is now."""
Level = tuple[int, int]
"""A level of a factor, as (place, level)."""
Array = NDArray[np.float64]
