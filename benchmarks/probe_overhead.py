"""How much does the probe of `gpubench train-bench -- PROGRAM` slow the program down, and does the run say so itself?

    .venv/bin/python benchmarks/probe_overhead.py [--milliseconds 2,5,20] [--rounds 6] [--seconds 3]

A model is made deep enough for steps of 2, 5 and 20 ms on one thread of this machine, in each round anew. It trains
with batches from a DataLoader and from a list, alone and with the probe, in fresh processes in turns (A B, B A).

    cost        the step time with the probe divided by that without it, by the program's own stopwatch, and the CPU
                time that the process takes more in a step.             Bar: at most 1.02 in steps of 5 ms.
    statement   that CPU time divided by what the run says that gpubench took (`probe_time`).
                                                                        Bar: 1 within 30 %, in the shortest steps.
    claim       the step time that gpubench reports divided by that of the stopwatch over the same steps.
                                                                        Bar: 1 within 0.5 %.

Processes differ among themselves, in longer steps by more than the probe takes. The statement is therefore judged in
the shortest steps, where it is the largest part. A bar that the 95 % interval crosses is undecided.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import bars
from processes import without_settings
from ratios import Ratio
from tables import table

from gpubench.runs.stats import student_interval

COST_BAR, JUDGED = 1.02, 5.0
"""The bar of the cost, and the milliseconds of the steps that it is for."""
STATEMENT_BAR = 0.3
CLAIM_BAR = 0.005
PATIENCE = 600.0  # seconds that one process may take
WARMUP = 50
SOURCES = "DataLoader", "list"

PROGRAM = """
import json, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
ROWS, WIDTH, BATCHES = 32, 256, 25

def train(layers, steps, source):
    torch.manual_seed(0)
    made = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(layers)]
    model = torch.nn.Sequential(*made, torch.nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    samples = torch.randn(ROWS * BATCHES, WIDTH)
    data = DataLoader(TensorDataset(samples), ROWS) if source == "DataLoader" else [(x,) for x in samples.split(ROWS)]
    times, cpu = [], []
    while len(times) < steps:
        for (batch,) in data:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            times.append(time.monotonic())
            if len(times) in (WARMUP, steps):
                cpu.append(time.process_time())
            if len(times) == steps:
                break
    return times, (cpu[-1] - cpu[0]) / (steps - WARMUP)

def layers_for(seconds):
    few, many = 4, 20
    took = {}
    for layers in (few, many, few, many):
        times, _ = train(layers, 3 * WARMUP, "list")
        took[layers] = min(took.get(layers, 1e9), (times[-1] - times[WARMUP]) / (2 * WARMUP - 1))
    each = (took[many] - took[few]) / (many - few)
    return [max(1, few + round((one - took[few]) / each)) for one in seconds]

if sys.argv[1] == "calibrate":
    print(json.dumps(layers_for(json.loads(sys.argv[2]))))
else:
    times, cpu = train(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    json.dump({"times": times, "cpu": cpu}, open(sys.argv[4], "w"))
""".replace("WARMUP", str(WARMUP))


@dataclass
class Case:
    """One length of a step with one source of batches, and what was measured, once in each round."""

    milliseconds: float
    source: str
    steps: int
    layers: list[int] = field(default_factory=list)
    """Those of the model in each round."""
    with_probe: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    """The seconds of a step by the program's stopwatch."""
    more: list[float] = field(default_factory=list)
    """The CPU seconds that the process took more in a step with the probe."""
    stated: list[float] = field(default_factory=list)
    """The CPU seconds in a step that gpubench took, as the run says."""
    claims: list[tuple[float, float]] = field(default_factory=list)
    """The step time by gpubench, and by the stopwatch over the same steps."""

    def measure(self, folder: Path, layers: int, *, probed_first: bool) -> None:
        """Runs the program alone and with the probe."""
        folder.mkdir()
        self.layers.append(layers)
        if probed_first:
            cpu, alone = self._probed(folder), self._alone(folder)
        else:
            alone, cpu = self._alone(folder), self._probed(folder)
        self.more.append(cpu - alone)

    def _program(self, written: Path) -> list[str]:
        return [sys.executable, "-c", PROGRAM, str(self.layers[-1]), str(self.steps), self.source, str(written)]

    def _alone(self, folder: Path) -> float:
        written = folder / "alone"
        subprocess.run(self._program(written), check=True, timeout=PATIENCE)
        found = json.loads(written.read_text())
        self.without.append(mean_step(found["times"]))
        return float(found["cpu"])

    def _probed(self, folder: Path) -> float:
        written = folder / "probed"
        options = ["--steps=all", "--repeats=1", f"--training.warmup_steps={WARMUP}", f"--results={folder / 'results'}"]
        command = [sys.executable, "-m", "gpubench", "train-bench", "-q", *options, "--", *self._program(written)]
        subprocess.run(command, check=True, timeout=PATIENCE, env=without_settings(), stdout=subprocess.DEVNULL)
        found = json.loads(written.read_text())
        times = found["times"]
        (path,) = (folder / "results").glob("*/*/summary.json")
        summary = json.loads(path.read_text())
        first, steps = (summary["steady"][0][name] for name in ("first", "steps"))
        lines = (path.parent / "steps.jsonl").read_text().splitlines()
        claimed = fmean(json.loads(line)["total"] for line in lines[first : first + steps])
        self.claims.append((claimed, (times[first + steps - 1] - times[first - 1]) / steps))
        self.with_probe.append(mean_step(times))
        self.stated.append(next(one["estimate"] for one in summary["metrics"] if one["name"] == "probe_time"))
        return float(found["cpu"])

    @property
    def name(self) -> str:
        return f"steps of {self.milliseconds:g} ms, batches from a {self.source}"

    @property
    def cost(self) -> Ratio:
        return Ratio.of_pairs(list(zip(self.with_probe, self.without, strict=True)))

    def judged(self) -> bars.Bar:
        return bars.not_above(f"probed / alone, {self.name}", self.cost.estimate, self.cost.interval, COST_BAR)

    def row(self) -> tuple[str, ...]:
        alone, stated = fmean(self.without), fmean(self.stated)
        return (
            self.name,
            "-".join(map(str, dict.fromkeys((min(self.layers), max(self.layers))))),
            f"{1e3 * alone:.2f} ms",
            str(self.cost),
            in_microseconds(self.more),
            in_microseconds(self.stated),
            f"{stated / fmean(self.with_probe):.2%}",
        )


def layers_for(milliseconds: list[float]) -> dict[float, int]:
    """Returns the layers of models whose steps take so long on this machine now."""
    command = [sys.executable, "-c", PROGRAM, "calibrate", json.dumps([length / 1e3 for length in milliseconds])]
    found = subprocess.run(command, check=True, timeout=PATIENCE, stdout=subprocess.PIPE).stdout
    return dict(zip(milliseconds, json.loads(found), strict=True))


def mean_step(times: list[float]) -> float:
    """Returns the seconds of a step after the warm-up."""
    return (times[-1] - times[WARMUP]) / (len(times) - 1 - WARMUP)


def in_microseconds(seconds: list[float]) -> str:
    """Returns a mean with its 95 % interval."""
    interval = student_interval(seconds)
    shown = f"{1e6 * fmean(seconds):.0f} us"
    return f"{shown} [{1e6 * interval[0]:.0f}, {1e6 * interval[1]:.0f}]" if interval else shown


def statement(cases: list[Case]) -> bars.Bar:
    """Judges what the runs say by the CPU time that the processes took more."""
    stated = fmean(value for case in cases for value in case.stated)
    more = [value / stated for case in cases for value in case.more]
    what = f"CPU time found from outside / as the runs say, {cases[0].milliseconds:g} ms"
    return bars.near_one(what, fmean(more), student_interval(more), STATEMENT_BAR)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--milliseconds", default="2,5,20", help="lengths of a step without the probe")
    parser.add_argument("--rounds", type=int, default=6, help="fresh processes with and without the probe")
    parser.add_argument("--seconds", type=float, default=3.0, help="time of the steps in each process")
    options = parser.parse_args()
    lengths = sorted(float(one) for one in options.milliseconds.split(","))
    cases = [
        Case(length, source, WARMUP + max(2 * WARMUP, round(1e3 * options.seconds / length)))
        for length in lengths
        for source in SOURCES
    ]
    with tempfile.TemporaryDirectory(prefix="gpubench-probe-") as folder:
        for number in range(options.rounds):
            layers = layers_for(lengths)
            for place, case in enumerate(cases):
                probed_first = bool(number % 2)
                case.measure(Path(folder, f"{number}-{place}"), layers[case.milliseconds], probed_first=probed_first)
    head = "program", "layers", "alone", "probed / alone", "CPU time from outside", "as the run says", "of a step"
    print(table([head, *(case.row() for case in cases)]))
    print(f"{options.rounds} rounds; [95 % interval]")
    return bars.conclude(
        [
            *(case.judged() for case in cases if case.milliseconds == JUDGED),
            statement([case for case in cases if case.milliseconds == lengths[0]]),
            Ratio.of_pairs([pair for case in cases for pair in case.claims]).bar(
                "step time / the program's stopwatch", CLAIM_BAR
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
