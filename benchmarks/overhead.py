"""How much does gpubench slow down training, and is the throughput that it reports correct?

    .venv/bin/python benchmarks/overhead.py [--peers trainer,lightning,optimum-benchmark] [--rounds 6]

The same training runs in a bare loop, in `gpubench train-bench`, and in the requested other programs, each in a fresh
process and the other programs in their own virtual environments. One stopwatch, which is independent of the program,
times the same steps of all. Two ratios are measured for every program:

    cost    the measured throughput divided by that of the bare loop.   Bar for gpubench: 1 within 1 %.
    claim   the reported throughput divided by the measured one.        Bar for gpubench: 1 within 0.5 %.

The order alternates between rounds (A B C, C B A, ...), and ratios are computed within a round; the 95 % interval is
that of Student's t for the logarithms of the ratios. If processes differ among themselves by more than the bar, this
interval is too wide to decide. Therefore gpubench's loop and the bare loop also alternate inside one process
(peers/alternation.py).
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import bars
import environments
from environments import Environment
from processes import reason, without_settings
from ratios import Ratio
from subject import CLAIM, STOPWATCH, Subject
from tables import table

HERE = Path(__file__).resolve().parent
COST_BAR = 0.01
CLAIM_BAR = 0.005
PATIENCE = 1800.0  # seconds that one process may take


@dataclass
class Contender:
    """A program that trains the subject, and its results."""

    name: str
    script: str | None
    note: str
    environment: Environment | None = None
    python: Path = Path(sys.executable)
    rates: list[float] = field(default_factory=list)
    """The stopwatch's samples per second in each round."""
    claims: list[float] = field(default_factory=list)
    claim_logs: list[float] = field(default_factory=list)
    """log(claim / stopwatch), over the window of the claim if the contender states it."""
    trouble: str | None = None

    def race(self, subject: Subject) -> None:
        """Run a fresh process. Raises subprocess.SubprocessError or OSError if it fails."""
        if self.script is None:
            self._race_gpubench(subject)
            return
        run([str(self.python), str(HERE / "peers" / self.script)], subject)
        rate = rate_of(subject, subject.warmup, subject.steps)
        self.rates.append(rate)
        claim = subject.path / CLAIM
        if claim.exists():
            self._claim(json.loads(claim.read_text()), rate)

    def _race_gpubench(self, subject: Subject) -> None:
        run([str(self.python), "-m", "gpubench", "train-bench", *arguments(subject)], subject)
        (path,) = subject.path.glob("results/overhead/*/summary.json")
        summary = json.loads(path.read_text())
        (window,) = summary["steady"]
        (claimed,) = (metric["estimate"] for metric in summary["metrics"] if metric["name"] == "throughput")
        self.rates.append(rate_of(subject, subject.warmup, subject.steps))
        self._claim(claimed, rate_of(subject, window["first"], window["steps"]))

    def _claim(self, claimed: float, measured: float) -> None:
        self.claims.append(claimed)
        self.claim_logs.append(math.log(claimed / measured))


def arguments(subject: Subject) -> list[str]:
    """Return options for gpubench with all choices fixed, and without its work after the last step."""
    settings = {
        "model": "subject:gpubench_model",
        "device": subject.device,
        "precision": "fp32",
        "batch-size": subject.batch_size,
        "steps": subject.steps,
        "training.warmup_steps": subject.warmup,
        "performance.cpu_threads": 1,
        "measurement.repeats": 1,
        "measurement.count_flops": "false",
        "logging.graph": "false",
        "experiment": "overhead",
        "results": subject.path / "results",
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def rate_of(subject: Subject, first: int, steps: int) -> float:
    """Return the measured samples per second over `steps` steps, beginning with `first`."""
    times = json.loads((subject.path / STOPWATCH).read_text())
    return subject.batch_size * steps / float(times[first + steps - 1] - times[first - 1])


def contenders() -> list[Contender]:
    return [
        Contender("bare loop", "bare.py", "the reference"),
        Contender("gpubench", None, "reports the throughput of its steady window"),
        Contender(
            "trainer",
            "hugging_face_trainer.py",
            "reports the throughput of all of train(), including start-up",
            Environment(("transformers", "accelerate")),
        ),
        Contender(
            "lightning",
            "lightning_trainer.py",
            "ThroughputMonitor reports the throughput of the last steps, and synchronises after each",
            Environment(("lightning", "transformers")),
        ),
        Contender(
            "optimum-benchmark",
            "optimum_training.py",
            "reports samples of all steps / mean step time, without data loading; loads its own data",
            Environment(("optimum-benchmark==0.6.0", "transformers<5", "datasets<5"), constrained=False),
        ),
    ]


def run(command: Sequence[str], subject: Subject) -> str:
    """Return the output of `command`, which runs without settings of gpubench in the environment."""
    environment = without_settings(HERE.parent, HERE, **subject.environment())
    done = subprocess.run(
        command, env=environment, cwd=subject.path, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return done.stdout


def prepare(entered: Sequence[Contender], place: Path) -> None:
    for contender in entered:
        if contender.environment:
            try:
                contender.python = contender.environment.create(place / contender.name)
            except (subprocess.SubprocessError, OSError) as error:
                contender.trouble = f"does not install: {reason(error)}"


def versions(entered: Sequence[Contender], place: Path) -> Iterator[str]:
    for contender in entered:
        if contender.environment and not contender.trouble:
            wanted = (*contender.environment.requirements, "torch")
            yield f"{contender.name}: {environments.versions(place / contender.name, wanted)}"


def race(entered: Sequence[Contender], subject: Subject, rounds: int) -> None:
    """Run every program once per round, in alternating order; a program that fails is left out of later rounds."""
    for number in range(rounds):
        for contender in entered if number % 2 == 0 else reversed(entered):
            if contender.trouble:
                continue
            print(f"round {number + 1} of {rounds}: {contender.name}", file=sys.stderr)
            try:
                contender.race(subject.inside(subject.path / f"{number}-{contender.name.replace(' ', '-')}"))
            except (subprocess.SubprocessError, OSError, LookupError, ValueError) as error:
                if contender.environment is None:
                    raise
                contender.trouble = f"does not run: {reason(error)}"


def alternate(subject: Subject, units: int, steps: int) -> list[float]:
    """Return log(speed of gpubench's loop / speed of the bare loop) for each unit of blocks in one process."""
    print(f"alternating in one process: {units} units of 4 blocks of {steps} steps", file=sys.stderr)
    command = [sys.executable, str(HERE / "peers" / "alternation.py"), str(units), str(steps)]
    found: list[float] = json.loads(run(command, subject.inside(subject.path / "alternation")))
    return found


def row(contender: Contender, bare: Contender) -> list[str]:
    if contender.trouble:
        return [contender.name, "-", "-", "-", "-", contender.trouble]
    logs = [math.log(own / reference) for own, reference in zip(contender.rates, bare.rates, strict=True)]
    cost = "1" if contender is bare else str(Ratio.of(logs))
    claim = [f"{fmean(contender.claims):.2f}", str(Ratio.of(contender.claim_logs))] if contender.claims else ["-", "-"]
    return [contender.name, f"{fmean(contender.rates):.2f}", cost, *claim, contender.note]


def parse() -> argparse.Namespace:
    known = [contender.name for contender in contenders() if contender.environment]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    environments.add_options(parser, known, "none")
    parser.add_argument("--model", default="resnet18", help="built-in image classification model")
    parser.add_argument("--image-size", type=int, default=64, help="pixels each way")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--warmup", type=int, default=10, help="steps before the stopwatch's window")
    parser.add_argument("--steps", type=int, default=60, help="steps in the stopwatch's window")
    parser.add_argument("--rounds", type=int, default=6, help="fresh processes of each contender")
    parser.add_argument("--units", type=int, default=100, help="units of four blocks in the alternation")
    parser.add_argument("--block", type=int, default=2, help="steps in one of its blocks")
    parser.add_argument("--quick", action="store_true", help="smoke test: 2 rounds of 20 steps and 6 units")
    options = parser.parse_args()
    if options.warmup < 1:
        parser.error("--warmup: the window opens with the end of a step, so at least 1")
    if options.quick:
        options.rounds, options.steps, options.units = 2, 20, 6
    return options


def main() -> int:
    options = parse()
    entered = [one for one in contenders() if one.environment is None or one.name in options.peers]
    bare, ours, *_ = entered
    prepare(entered, options.environments)
    with tempfile.TemporaryDirectory(prefix="gpubench-overhead-") as folder:
        work = (options.model, options.image_size, options.batch_size, options.device, options.warmup, options.steps)
        subject = Subject(*work, folder)
        try:
            race(entered, subject, options.rounds)
            alternation = Ratio.of(alternate(subject, options.units, options.block))
        except (subprocess.SubprocessError, OSError) as error:
            print(f"error: {reason(error)}", file=sys.stderr)
            return 1

    print(
        f"{options.model}, {options.image_size} px, batch {options.batch_size}, fp32 on {options.device}, one thread; "
        f"steps {options.warmup} to {options.warmup + options.steps}, {options.rounds} rounds; [95 % interval]\n"
    )
    head = ["contender", "samples/s", "of the bare loop", "claims", "claim / stopwatch", "note"]
    print(table([head, *(row(contender, bare) for contender in entered)]))
    if options.peers:
        print(f"\n{'; '.join(versions(entered, options.environments))}")
    logs = [math.log(own / reference) for own, reference in zip(ours.rates, bare.rates, strict=True)]
    return bars.conclude(
        [
            Ratio.of(logs).bar("cost, fresh processes: gpubench / bare loop", COST_BAR),
            alternation.bar("cost, alternating in one process: gpubench / bare loop", COST_BAR),
            Ratio.of(ours.claim_logs).bar("claim: gpubench / stopwatch", CLAIM_BAR),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
