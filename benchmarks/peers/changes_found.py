"""Where other libraries find change points: in each of the series of a file, with the method that is named."""

import json
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

Method = Callable[[Sequence[float]], Sequence[int]]


def otava(p_value: float) -> Method:
    from otava.analysis import compute_change_points  # type: ignore[import-not-found]

    return lambda values: [
        one.index for one in compute_change_points([math.exp(one) for one in values], max_pvalue=p_value)[0]
    ]


def ruptures(cost: str) -> Method:
    import numpy as np
    import ruptures as rpt  # type: ignore[import-not-found]

    def found(values: Sequence[float]) -> Sequence[int]:
        steps = [abs(one - other) for one, other in pairwise(values)]
        noise = statistics.median(steps) * 1.4826 / math.sqrt(2)
        ends: list[int] = (
            rpt.Pelt(model=cost, min_size=3, jump=1)
            .fit(np.array(values) / noise)
            .predict(pen=3 * math.log(len(values)))
        )
        return ends[:-1]

    return found


METHODS: dict[str, Callable[[], Method]] = {
    "otava": lambda: otava(0.001),
    "otava-strict": lambda: otava(1e-5),
    "pelt": lambda: ruptures("l2"),
    "pelt-rbf": lambda: ruptures("rbf"),
}
method = METHODS[sys.argv[2]]()
print(json.dumps([list(map(int, method(values))) for values in json.loads(Path(sys.argv[1]).read_text())]))
