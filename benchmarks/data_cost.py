"""Does `gpubench loader` say where the time of a sample goes? Programs with costs of known size know it themselves.

.venv/bin/python benchmarks/data_cost.py [--cases 60] [--jobs 1] [--rounds 8]

stages    A program has a small cost in each stage of its samples and a large one in one of them: sleeping, computing,
          memory, reading files, decoding. Its own clock times each of them around what it does (planted_data.py), in
          the run that gpubench measures, and without the transfer between processes, which a program cannot time.
          Bars: the share of each large cost within 3 points of its share by that clock; it is named first, and under
          its right name; all shares together are 100 %.
alone     the throughput of the loader beside that of a bare loop over the same loader, in fresh processes, in turns.
          Bar: within 5 %.
cost      the CPU time that the stopwatches of the stages add to a sample of 1 ms: batches with and without them, by
          turns in one process. Bar: at most 1 %.
cached    training with --vs data.cached=true beside a program edited to use its first batches again, in turns.
          Bar: within 5 %.
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import bars
from planted_truth import Case
from processes import reason, without_settings
from ratios import Ratio
from tables import table

HERE = Path(__file__).resolve().parent
POINTS = 0.03
THROUGHPUT = 0.05
COST = 0.01
STEPS = 24
LONG = 120
"""The batches of a run of which shares are judged, and of one whose throughput is."""
PATIENCE = 600.0  # seconds that one process may take
NAMES = {
    "index": "index",
    "getitem": "dataset",
    "method": "dataset Making.load",
    "helper": "dataset prepare",
    "transform": "transform Blur",
    "function": "transform sharpen",
    "first": "transform First",
    "second": "transform Second",
    "read": "read",
    "packed": "decode zlib.decompress",
    "picture": "decode PIL",
    "collate": "collate",
    "collator": "collate",
    "transfer": "transfer",
}
"""What gpubench calls the stages of the program."""
OF_STREAM = {"getitem": "dataset Making.make"}
COSTS = ("sleep", "burn", "touch")
WAYS = (
    *((0, "", "map"), (2, "fork", "map"), (1, "fork", "map"), (0, "", "iterable"), (2, "spawn", "map")),
    *((2, "fork", "iterable"), (1, "spawn", "iterable")),
)
"""The workers, how they are started, and the style of the dataset."""
DATASET = """
import zlib

DATA = memoryview(bytes(2**24))

class Blur:
    def __call__(self, sample):
        return sample + work(300)

class Both:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, sample):
        for each in self.transforms:
            sample = each(sample)
        return sample

def work(times):
    return zlib.crc32(DATA[: times * SCALE])

class Photos:
    def __init__(self):
        self.transform = Both([Blur()])

    def load(self, index):
        return index + work(300)

    def __getitem__(self, index):
        return self.transform(self.load(index)) + work(300)
"""


def cases() -> list[Case]:
    """Return every planted stage with every cost that it can have, each in another way, and some in more of them."""
    ways = cycle(WAYS)
    found = []
    for stage in ("transform", "function", "second", "method", "helper", "getitem", "collate", "collator"):
        found += [Case(stage, cost, *next(ways)) for cost in COSTS * 2]
    of_maps = cycle([way for way in WAYS if way[2] == "map"])
    found += [Case("index", cost, *next(of_maps)) for cost in COSTS]
    found += [Case(stage, "work", *next(ways)) for stage in ("read", "packed", "picture") for _ in range(3)]
    return found


@dataclass(frozen=True)
class Judged:
    """A case, as gpubench sees it and as the program does."""

    case: Case
    share: float
    """Of the planted stage, among all stages but the transfer, by gpubench; `truth` is by the clock of the program."""
    truth: float
    largest: str
    """The stage that gpubench names first, and the one that is the largest by the clock of the program."""
    really: str
    total: float
    """The sum of the shares of all stages."""

    @property
    def error(self) -> float:
        return abs(self.share - self.truth)

    @property
    def right(self) -> bool:
        return called(self.really, self.case) == self.largest


def called(stage: str, case: Case) -> str:
    """Return what gpubench calls a stage of the program."""
    return (OF_STREAM if case.style == "iterable" else {}).get(stage) or NAMES[stage]


class Programs:
    """Runs the planted program, each time in a folder of its own."""

    def __init__(self, place: Path) -> None:
        self._place = place
        packages = place / "site-packages"  # what is in a folder of this name is no code of the program
        packages.mkdir()
        shutil.copy(HERE / "planted_truth.py", packages)
        shutil.copy(HERE / "planted_data.py", place / "train.py")
        self._environment = without_settings(packages, HERE.parent, OMP_NUM_THREADS="1")

    def judge(self, case: Case) -> Judged:
        folder = self._folder()
        self.gpubench("loader", "--alone", "--steps", str(STEPS), case=case, folder=folder)
        (path,) = folder.glob("results/loader/*/loader.json")
        found = json.loads(path.read_text())["stages"]
        shares = {" ".join(filter(None, (one["kind"], one["name"]))): one["share"] for one in found}
        total = sum(shares.values())
        shares.pop("transfer", None)
        real = truth(folder)
        return Judged(
            case,
            shares.get(called(case.stage, case), 0.0) / sum(shares.values()),
            real[case.stage],
            max(shares, key=lambda stage: shares[stage]),
            max(real, key=lambda stage: real[stage]),
            total,
        )

    def gpubench(self, command: str, *options: str, case: Case, folder: Path, reuse: bool = False) -> dict[str, Any]:
        """Run a command of gpubench on the program, and return what it prints."""
        own = ("-q", "--json", "--repeats", "1", "--results", str(folder / "results"))
        program = self._program(case, folder, *(["--reuse"] if reuse else []))
        printed = self._run([sys.executable, "-m", "gpubench", command, *own, *options, "--", *program], folder)
        found: dict[str, Any] = json.loads(printed)
        return found

    def rates(self, case: Case) -> tuple[float, float]:
        """Return the throughput of the loader by gpubench, and that of a bare loop."""
        folder = self._folder()
        found = self.gpubench("loader", "--alone", "--steps", str(LONG), case=case, folder=folder)
        bare = float(self._run(self._program(case, folder, "--bare", str(LONG)), folder))
        return metric(found["runs"][0], "throughput"), bare

    def cached(self, case: Case) -> tuple[float, float]:
        """Return the steps in a second of training with data.cached, and of the edited program."""
        folder = self._folder()
        steps = ("--steps", str(LONG), "--training.warmup_steps", "16")
        found = self.gpubench("train-bench", *steps, "--vs", "data.cached=true", case=case, folder=folder)
        edited = self.gpubench("train-bench", *steps, case=case, folder=folder, reuse=True)
        return 1 / metric(found["runs"][1], "step_time"), 1 / metric(edited["runs"][0], "step_time")

    def _program(self, case: Case, folder: Path, *options: str) -> list[str]:
        return [sys.executable, str(self._place / "train.py"), json.dumps(asdict(case)), str(folder), *options]

    def _run(self, command: Sequence[str], folder: Path) -> str:
        done = subprocess.run(
            command, env=self._environment, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        return done.stdout

    def _folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._place))


def truth(folder: Path) -> dict[str, float]:
    """Return the shares of the stages by the clock of the program, without the first batch of each process."""
    seconds: dict[str, float] = {}
    for what in ("made", "drawn"):
        batches = [
            json.loads(line) for path in folder.glob(f"{what}-*.jsonl") for line in path.read_text().splitlines()[1:]
        ]
        for stage in {stage for batch in batches for stage in batch}:
            seconds[stage] = sum(batch.get(stage, 0.0) for batch in batches) / len(batches)
    return {stage: spent / sum(seconds.values()) for stage, spent in seconds.items()}


def metric(run: dict[str, Any], name: str) -> float:
    (found,) = (each["estimate"] for each in run["metrics"] if each["name"] == name)
    return float(found)


def added(pairs: int) -> tuple[float, float]:
    """Return the CPU seconds that the stopwatches add to a sample, and those of the sample without them."""
    import torch
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    from gpubench.probe.observed import SourcePlaces
    from gpubench.probe.stages import Fetching, StageFinder, Stages

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gpubench-data-cost-") as name:
        path = Path(name, "photos.py")
        path.write_text(DATASET)
        scale = 100 * _scale(_photos(path, "first", 100))
        datasets = [_photos(path, each, scale) for each in ("plain", "timed")]
        fetchers = [_MapDatasetFetcher(dataset, True, torch.tensor, False) for dataset in datasets]
    plain, timed = fetchers
    stages = Stages()
    StageFinder(stages, SourcePlaces()).look_at(timed.dataset, timed.collate_fn)
    Fetching(timed, stages, lambda record: None)
    indices = list(range(8))
    spent: dict[Any, list[float]] = {plain: [], timed: []}
    for number in range(pairs):
        for fetcher in (plain, timed) if number % 2 else (timed, plain):
            began = time.thread_time()
            fetcher.fetch(indices)
            spent[fetcher].append((time.thread_time() - began) / len(indices))
    return median(b - a for a, b in zip(spent[plain], spent[timed], strict=True)), median(spent[plain])


def _photos(path: Path, name: str, scale: int) -> Any:
    """Return a dataset of the module in a file, which is imported anew."""
    spec = importlib.util.spec_from_file_location(f"photos_{name}", path)
    assert spec
    assert spec.loader
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    module.SCALE = scale
    return module.Photos()


def _scale(dataset: Any) -> int:
    """Return the factor of the work with which a sample takes about 1 ms."""
    seconds = []
    for index in range(100):
        began = time.thread_time()
        dataset[index]
        seconds.append(time.thread_time() - began)
    return max(1, round(1e-3 / median(seconds)))


def row(found: Judged) -> list[str]:
    shares = (f"{100 * found.share:.1f} %", f"{100 * found.truth:.1f} %", f"{100 * found.error:.2f}")
    return [str(found.case), *shares, found.largest]


def judge(found: Sequence[Judged]) -> Iterator[bars.Bar]:
    off = max(found, key=lambda one: one.error)
    yield bars.at_most(
        f"error of the share of a planted stage, the largest of {len(found)}",
        100 * off.error,
        100 * POINTS,
        "{:.2f} points",
        str(off.case),
    )
    yield bars.every("largest stages named first", sum(one.right for one in found), len(found))
    whole = sum(abs(one.total - 1) < 1e-9 for one in found)
    yield bars.every("samples whose shares together are 100 %", whole, len(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=len(cases()), help="only so many of the planted programs")
    parser.add_argument("--jobs", type=int, default=1, help="planted programs at a time, of which shares are judged")
    parser.add_argument("--rounds", type=int, default=8, help="fresh processes whose throughput is compared")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of batches with and without stopwatches")
    return parser.parse_args()


def main() -> int:
    options = parse()
    chosen = cases()[:: max(1, len(cases()) // options.cases)][: options.cases]
    with tempfile.TemporaryDirectory(prefix="gpubench-data-cost-") as folder:
        programs = Programs(Path(folder))
        try:
            with ThreadPoolExecutor(options.jobs) as pool:
                found = []
                for judged in pool.map(programs.judge, chosen):
                    found.append(judged)
                    print(f"{len(found)} of {len(chosen)}: {judged.case}", file=sys.stderr, flush=True)
            print(table([["program", "share", "by its clock", "points apart", "named first"], *map(row, found)]))
            alone, cached = [], []
            for number in range(options.rounds):
                print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
                alone.append(programs.rates(Case("method", "sleep", 2, "fork")))
                cached.append(programs.cached(Case("method", "sleep")))
        except (subprocess.SubprocessError, OSError, LookupError, ValueError) as error:
            print(f"error: {reason(error)}", file=sys.stderr)
            return 1
    extra, sample = added(options.pairs)
    return bars.conclude(
        [
            *judge(found),
            Ratio.of_pairs(alone).bar("loader alone / bare loop, throughput", THROUGHPUT),
            bars.at_most(
                "cost of the stopwatches, of a sample",
                max(0.0, extra / sample),
                COST,
                "{:.2%}",
                f"{extra * 1e6:.1f} us of {sample * 1e3:.2f} ms, by turns in one process",
            ),
            Ratio.of_pairs(cached).bar(
                "data.cached / a program that uses its batches again, steps in a second", THROUGHPUT
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
