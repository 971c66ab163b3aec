"""What reads foreign input, and how it is called: a copy of something valid, mutated, and arguments that name it."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fuzzing.mutations import ESCAPES, HOSTILE, YAMLS, mutate
from fuzzing.seeds import Seeds
from gpubench.settings.commands import COMMANDS
from gpubench.settings.field import aliases, fields

FORMATS = ("terminal", "json", "html", "markdown", "csv")
SKIPPED = {"tensorboard", "profiler_traces", "report.html", "run.log", "wandb"}
"""Of a run directory: what nothing reads."""
TEXTS = [
    "", " ", "0", "-1", "1e999", "nan", "inf", "9" * 5000, "true", "null", "None", "x", "a" * 5000, "..", ".", "/", "~",
    "../../etc", "/dev/null", "/dev/zero", "/proc/self/mem", HOSTILE, ESCAPES, "\ud800", "a\nb", "{}", "[]", "{{7*7}}",
    "%s", "$(touch owned)", "`touch owned`", "; touch owned", "os:system", "http://u:p@h/x", "1,2", "1:2", "a=b", "=",
    "--help", "-h", "é", "💥", "\x00"[:0], *YAMLS[3:12],
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    arguments: list[str]
    """`{page}` stands for a page to be written, out of the input's folder."""
    about: str
    kind: str = "text"
    """What stdout is to hold."""


Target = Callable[[Seeds, Path, Random], Case]


def configs(seeds: Seeds, folder: Path, random: Random) -> Case:
    path = _copy(random.choice(seeds.configs), folder)
    about = _damage([path], random)
    return Case([random.choice(list(COMMANDS)), "--config", str(path), "--print-config"], about)


def dotkeys(seeds: Seeds, folder: Path, random: Random) -> Case:
    command = random.choice(list(COMMANDS))
    keys = [*fields(COMMANDS[command]), *aliases(COMMANDS[command]), "config", "vs", "x", "training", "__class__", ""]
    arguments = [command]
    for _ in range(random.choice([1, 1, 2, 4])):
        key, text = random.choice(keys), random.choice(TEXTS)
        arguments += [f"--{key}={text}"] if random.random() < 0.7 else [f"--{key}", text]
    return Case([*arguments, "--print-config"], "")


def options(seeds: Seeds, folder: Path, random: Random) -> Case:
    """Of compare, beside runs that are whole."""
    names = [str(run) for run in random.choices(seeds.runs, k=2)]
    arguments = ["compare", *names, *_format(random)]
    for _ in range(random.choice([1, 1, 2])):
        option = random.choice(["metric", "margin", "fail-on", "unit", "column", "better", "results", "format"])
        arguments.append(f"--{option}={random.choice([*TEXTS, 'throughput>2%', 'step_time', '5%', 'phase_*', 'ms'])}")
    if random.random() < 0.3:
        arguments[random.randrange(1, 3)] = random.choice([*TEXTS, "latest", "latest~99999999999", "../latest"])
    return Case(arguments, "")


def runs(seeds: Seeds, folder: Path, random: Random) -> Case:
    """A damaged run beside one that is whole, or gone on with."""
    pristine = random.choice(seeds.runs)
    path = folder / pristine.name
    shutil.copytree(pristine, path, ignore=shutil.ignore_patterns(*SKIPPED))
    files = sorted(file for file in path.rglob("*") if file.is_file())
    about = _damage(random.sample(files, min(len(files), random.choice([1, 1, 1, 2, 3]))), random)
    if pristine in seeds.pipelines and random.random() < 0.5:
        return Case(["pipe-infer", "--resume", str(path), "--print-config"], about)
    kin = [run for run in seeds.runs if run.parent == pristine.parent]
    sides = [str(path), str(random.choice(kin if random.random() < 0.7 else seeds.runs))]
    random.shuffle(sides)
    if random.random() < 0.1:
        return Case(["compare", "--null", str(path), "--format", random.choice(["terminal", "json"])], about)
    shown = _format(random)
    extra = ["--skip-invalid"] * (random.random() < 0.1) + ["--force"] * (random.random() < 0.5)
    extra += ["--html", "{page}"] * (random.random() < 0.3)
    return Case(["compare", *sides, *shown, *extra], about, shown[-1])


def csv(seeds: Seeds, folder: Path, random: Random) -> Case:
    paths = [_copy(path, folder) for path in random.choices(seeds.logs, k=2)]
    about = _damage([paths[0]], random, waits=True)
    shown = _format(random)
    arguments = ["compare", *map(str, paths), "--column", "step_ms", "--unit", "ms", *shown]
    return Case(arguments, about, shown[-1])


def traces(seeds: Seeds, folder: Path, random: Random) -> Case:
    path = _copy(random.choice(seeds.traces), folder)
    about = _damage([path], random, waits=True)
    given = ["--trace", str(path)]
    shown = ["--json"] * (random.random() < 0.5)
    page = ["--html", "{page}"] * (random.random() < 0.5)
    if random.random() < 0.3:
        return Case(["memory", *given, *shown, *page], about, "json" if shown else "text")
    if random.random() < 0.3:
        given += [random.choice(["--trace", "--against"]), str(random.choice(seeds.traces))]
    return Case(["profile", *given, *shown, *page], about, "json" if shown else "text")


def snapshots(seeds: Seeds, folder: Path, random: Random) -> Case:
    path = _copy(random.choice(seeds.snapshots), folder)
    about = _damage([path], random, waits=True)
    shown = ["--json"] * (random.random() < 0.5)
    page = ["--html", "{page}"] * (random.random() < 0.5)
    return Case(["memory", "--snapshot", str(path), *shown, *page], about, "json" if shown else "text")


def ledgers(seeds: Seeds, folder: Path, random: Random) -> Case:
    path = _copy(random.choice(seeds.ledgers), folder)
    about = _damage([path], random)
    shown = ["--json"] * (random.random() < 0.5)
    return Case(["judge", "--ledger", str(path), *shown], about, "json" if shown else "text")


def shown(seeds: Seeds, folder: Path, random: Random) -> Case:
    """The report of a search, or of a run with documents of a kind."""
    pristine = random.choice(seeds.shown)
    path = folder / pristine.name
    shutil.copytree(pristine, path, ignore=shutil.ignore_patterns(*SKIPPED))
    about = _damage([random.choice(sorted(file for file in path.rglob("*") if file.is_file()))], random)
    extra = random.choice([[], [], ["--json"], ["-v"], ["-vv"]])
    return Case(["runs", "show", str(path), *extra], about, "json" if extra == ["--json"] else "text")


TARGETS: dict[str, Target] = {
    "configs": configs,
    "dotkeys": dotkeys,
    "options": options,
    "runs": runs,
    "csv": csv,
    "traces": traces,
    "snapshots": snapshots,
    "ledgers": ledgers,
    "shown": shown,
}


def _copy(path: Path, folder: Path) -> Path:
    copy = folder / path.name
    while copy.exists():
        copy = copy.with_name(f"2{copy.name}")
    shutil.copyfile(path, copy)
    return copy


def _damage(paths: list[Path], random: Random, *, waits: bool = False) -> str:
    """Where a pipe may be read (`waits`) one that nobody writes to is waited for, as by cat: it is left out."""
    return "; ".join([mutate(path, random, pipes=not waits) for path in paths])


def _format(random: Random) -> list[str]:
    return ["--format", random.choice(FORMATS)]
