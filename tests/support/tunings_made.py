"""A search for the fastest settings that nobody has run: one setting is kept, one is not, and one does not run."""

import math

from gpubench.gain import Gain
from gpubench.tuning.conclusion import Conclusion, Contribution, Dropped, Rung, Spread, TriedCombination
from gpubench.tuning.durations import Limit
from gpubench.tuning.result import RunBlock, SearchRun, Tuning
from gpubench.tuning.treatments import Treatment, Untried

RATES = {(0, 0, 0): 100.0, (1, 0, 0): 125.0, (0, 1, 0): 99.0, (1, 1, 0): 124.0, (0, 0, 1): None}
_RUNS = [
    SearchRun(
        combination=combination,
        path=None,
        throughput=rate,
        peak=(2.0 + combination[1]) * 2**30,
        error="" if rate else "it does not compile",
        seconds=10.0,
    )
    for combination, rate in RATES.items()
]
_GAIN = Gain(1.25, 1.22, 1.28)

TUNED = Tuning(
    status="completed",
    command="train-bench",
    argv=["gpubench", "tune", "--model", "gpt2-tiny"],
    started="2026-11-24T10:00:00.000Z",
    seconds=60.0,
    settings={"model.name": "gpt2-tiny", "training.batch_size": 8},
    device="cpu",
    precision="fp32",
    treatments=[
        Treatment("data.workers", [{"data.workers": 2}], "same"),
        Treatment("training.optimizer_impl", [{"training.optimizer_impl": "fused"}], "rounding"),
        Treatment("performance.compile", [{"performance.compile": True}], "rounding"),
    ],
    untried=[Untried("precision", "this CPU has no arithmetic in 16 bits")],
    most_peak=None,
    budget=60.0,
    most_runs=None,
    look=None,
    blocks=[RunBlock(stage="alone", why="each setting alone", limit=Limit(), runs=_RUNS)],
    conclusion=Conclusion(
        best=(1, 0, 0),
        proved=True,
        gain=_GAIN,
        contributions=[Contribution("data.workers", 1, _GAIN, _GAIN)],
        pairs=[],
        interactions=[],
        ladder=[Rung("data.workers", 1, _GAIN)],
        dropped=[
            Dropped("training.optimizer_impl", 1, "no gain", Gain(0.99, 0.97, 1.01)),
            Dropped("performance.compile", 1, "does not run", None, "it does not compile"),
        ],
        tried=[
            TriedCombination(run.combination, 1, math.log(run.throughput) if run.throughput else None, run.peak, "")
            for run in _RUNS
        ],
        noise=Spread(0.01, 4.0),
    ),
    keep={"data.workers": 2},
)
