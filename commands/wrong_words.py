"""What the words of a command line that cannot be run may have meant.

A user who comes from other tools types their words, options and file names. The functions here are called only for a
word that was refused, or that cannot have any other meaning. So no word loses a meaning that it has.
"""

import os
import re
import shlex
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any, NamedTuple

from gpubench.configs import presets
from gpubench.errors import alike, did_you_mean, offer
from gpubench.foreign_files import RUN as RUN_FILE
from gpubench.foreign_files import opened
from gpubench.git import is_commit
from gpubench.registry import STARTERS
from gpubench.units import listed
from gpubench.zoo import MODELS

HELP = "help"
LISTING = ("list", "ls")
"""Words for the list of all runs, which other tools have as a subcommand."""

COMMANDS = {
    **dict.fromkeys(("train", "bench", "run", "exec", "measure", "time", "benchmark", "start"), "train-bench"),
    **dict.fromkeys(("infer", "pipe", "pipeline", "sample", "generate", "diffusers"), "pipe-infer"),
    **dict.fromkeys(("prof", "trace", "analyze", "analyse", "diagnose", "record"), "profile"),
    **dict.fromkeys(("mem", "memory-profile", "vram", "predict"), "memory"),
    **dict.fromkeys(("diff", "cmp", "vs"), "compare"),
    **dict.fromkeys(("optimize", "optimise", "search", "sweep", "autotune", "tuning"), "tune"),
    **dict.fromkeys(("log", "trend", "trends", "timeline"), "history"),
    **dict.fromkeys((*LISTING, "results", "ps"), "runs"),
    **dict.fromkeys(("version", "-V"), "--version"),
    "completion": "--install-completion",
}
"""Words of other tools for commands of gpubench."""
OF_RUNS = {
    **dict.fromkeys(("rm", "delete", "del", "erase"), "remove"),
    **dict.fromkeys(("info", "view", "cat", "get", "describe", "inspect", "print", "report"), "show"),
    **dict.fromkeys(("browse", "html", "page"), "open"),
    **dict.fromkeys(("clean", "clear", "gc", "purge"), "prune"),
    **dict.fromkeys(("label", "rename", "mv", "name"), "tag"),
}
"""Words of other tools for subcommands of gpubench runs."""

OF_OUTPUT = ("o", "out", "output")
"""Options of other tools for the folder of the results, or for the page of a command that makes no run."""
_MEANT = (
    ("results", (*OF_OUTPUT, "output_dir", "out_dir", "outdir", "dir", "save_dir", "logdir")),
    ("batch_size micro_batch", ("b", "bs", "batchsize", "batch", "train_batch_size")),
    ("steps limit", ("n", "iter", "iters", "iterations", "num_steps", "max_steps", "num_inference_steps")),
    ("limit", ("last", "top", "head", "tail", "max")),
    ("runs repeats", ("r", "repeat", "repetitions", "reps", "runs", "trials", "rounds")),
    ("budget", ("time", "timeout", "duration", "max_time", "time_limit")),
    ("training.warmup_steps", ("warmup", "warmups", "warmup_iters")),
    ("training.learning_rate", ("lr",)),
    ("data.workers", ("j", "num_workers", "data_workers")),
    ("device_model device", ("gpu", "cuda", "gpu_model", "target")),
    ("world_size", ("gpus", "num_gpus", "nproc", "np", "nproc_per_node", "n_gpus", "ranks")),
    ("device_memory memory", ("vram", "gpu_memory", "max_memory", "mem")),
    ("precision", ("dtype", "amp", "bf16", "fp16", "fp32", "tf32", "half", "mixed_precision")),
    ("guidance_scale", ("cfg", "guidance")),
    ("samples", ("num_images", "images")),
    ("print_config", ("dry_run", "show_config", "list_settings", "dump_config")),
    ("profiling.enabled", ("profile", "profiler", "with_profile")),
    ("quiet", ("no_progress", "silent", "s")),
    ("verbose", ("debug", "full", "details")),
    ("against vs", ("compare", "versus", "against", "baseline", "ab")),
    ("vs_ref", ("ref", "commit", "branch", "git_ref", "rev")),
    ("vs_args", ("extra_args", "args")),
    ("tag", ("label", "labels")),
    ("margin", ("threshold", "tolerance")),
    ("fail_on", ("fail_on_regression", "fail_if")),
    ("config", ("preset", "settings", "c")),
    ("trace snapshot", ("file", "f", "input", "i")),
    ("format json", ("format", "as_json")),
    ("yes", ("y", "no_input")),
    ("where", ("filter", "w")),
)
OPTIONS = {word: meant.split() for meant, words in _MEANT for word in words}
"""Options of other tools, and those of gpubench that do the same. Of several, a command offers the first it has."""
VALUES = {
    **{name: ("precision", name) for name in ("amp", "bf16", "fp32", "tf32")},
    **{name: ("format", name) for name in ("csv", "markdown", "terminal")},
    "fp16": ("precision", "amp"),
    "md": ("format", "markdown"),
}
"""Options of other tools that have a value with gpubench."""
WHICH_GPU = "the variable CUDA_VISIBLE_DEVICES chooses the GPU: CUDA_VISIBLE_DEVICES=0 gpubench ..."
PAGE = "the page of a run is report.html in its directory: gpubench runs open latest"

STARTED_WITH = {".py": ["python"], ".sh": ["bash"], ".ipynb": ["jupyter", "nbconvert", "--to", "notebook", "--execute"]}
"""What starts a file that is not a program by itself, by its suffix."""
EXAMPLE = ("python", "train.py")
"""A program, where the user has given none."""
OF_COMMITS = {"train-bench": "--vs-ref", "judge": "--base"}
"""The options that take a commit, by command."""
TRACES, SNAPSHOTS, CONFIGS = (".json", ".json.gz"), (".pickle", ".pkl"), (".yaml", ".yml")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
SETTING = re.compile(r"[a-z_]+(\.[a-z_]+)*=.*", re.DOTALL)
VS_ARGS = "--vs-args"
OPERATORS = re.compile(r"&&|\|\||[|;<>&]")
RUN = re.compile(r"(.+/)?latest\b.*|\d{8}-\d{6}.*")
ONE_DASH = re.compile(r"-[A-Za-z?][\w.-]*(=.*)?", re.DOTALL)

DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe63\uff0d"
QUOTES = "\u201c\u201d\u201e\u201f\u2018\u2019\u201a\u00ab\u00bb"
SPACES = "\u00a0\u2007\u202f\u200b\ufeff"
_TYPED = re.compile(f"^[{DASHES}-]+")

BETWEEN = ("vs", "vs.", "versus", "and", "with", "to", "against", "from")
PRINTED = {".json": "--json", ".html": "--html", ".md": "--format=markdown", ".csv": "--format=csv"}


Owners = Callable[[str], Sequence[str]]
"""Returns the commands of gpubench that have an option."""


class Complaint(NamedTuple):
    """What is wrong, and what to do about it."""

    message: str
    hint: str


def is_there(word: str) -> bool:
    """Tells whether there is a file or a folder of this name, which may be any word."""
    return os.path.exists(word)  # noqa: PTH110 - Path's own raises for a name too long


def is_folder(word: str) -> bool:
    return os.path.isdir(word)  # noqa: PTH112 - as above


def typed(words: Sequence[str]) -> list[str]:
    """The words as a keyboard types them: without the quotes and dashes of a word processor."""
    return [_as_typed(word) for word in words]


def _as_typed(word: str) -> str:
    word = word.translate(dict.fromkeys(map(ord, SPACES + QUOTES)))
    begin = _TYPED.match(word)
    if not begin or set(begin[0]) == {"-"}:
        return word.translate(dict.fromkeys(map(ord, DASHES), "-"))
    rest = word[begin.end() :].translate(dict.fromkeys(map(ord, DASHES), "-"))
    return f"{'-' if len(rest.partition('=')[0]) == 1 else '--'}{rest}"


def typography(argv: Sequence[str]) -> str | None:
    """The hint for a command line that was pasted from a formatted text; None for any other."""
    if (plain := typed(argv)) == list(argv):
        return None
    odd = dict.fromkeys(char for word in argv for char in word if char in DASHES + QUOTES + SPACES)
    named = " and ".join(f"{char} (U+{ord(char):04X})" for char in list(odd)[:2])
    return f"{named} {'come' if len(odd) > 1 else 'comes'} from a formatted text; type: {line(filter(None, plain))}"


def line(words: Any) -> str:
    """`gpubench` and the words as one command line for a shell."""
    return " ".join(["gpubench", *map(quoted, words)])


def quoted(word: str) -> str:
    """Quotes a word for a shell. A ~ needs no quotes unless a word begins with it."""
    return (
        word if "~" in word[1:] and shlex.quote(word.replace("~", "")) == word.replace("~", "") else shlex.quote(word)
    )


def behind(program: Sequence[str] | None) -> list[str]:
    """The end of a command line with a program: `--` and its words; nothing without one."""
    return [] if program is None else ["--", *program]


def own_options(command: Any) -> dict[str, Any]:
    """The options of a command by each of their names."""
    parameters = (one for one in command.params if one.param_type_name != "argument")
    return {name: one for one in parameters for name in (*one.opts, *one.secondary_opts)}


def positions(command: Any, args: Sequence[str], *, takes_settings: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Yields the index of each word that is not a value of an option, the word, and whether it is an option.

    With `takes_settings`, an unknown option with two dashes has a value too. Ends at `--`.
    """
    known, at = own_options(command), 0
    while at < len(args) and (word := args[at]) != "--":
        is_option = len(word) > 1 and word.startswith("-")
        yield at, word, is_option
        name, equals, _ = word.partition("=")
        if not is_option or equals:
            at += 1
        elif option := known.get(name):
            at += 1 if option.is_flag or option.count else 2
        else:
            following = args[at + 1 : at + 2]
            negated = ".no" in name or name.startswith("--no-")
            valued = takes_settings and word.startswith("--") and not negated
            at += 2 if valued and following and not following[0].startswith("--") else 1


def one_dash(
    command: Any,
    path: str,
    args: Sequence[str],
    *,
    owners: Owners,
    help_options: Sequence[str],
    takes_settings: bool = False,
    program: Sequence[str] | None = None,
) -> Complaint | None:
    """What to say about a long option with one dash, such as -steps, or an unknown letter; None without one.

    `help_options` are the options that every command has for its help, and `program` are the words after `--`.
    """
    known = own_options(command)
    short = {name[1:] for name in (*known, *help_options) if len(name) == 2}
    for at, word, is_option in positions(command, args, takes_settings=takes_settings):
        whole, rest = path.split()[1:], [*args[at + 1 :], *behind(program)]
        if word.startswith("-- "):
            return Complaint(
                f"{word!r} is one word, because it is quoted", line([*whole, *args[:at], *_split(word), *rest])
            )
        if not is_option or not ONE_DASH.fullmatch(word) or set(word[1:]) <= short:
            continue
        name = word.partition("=")[0]
        if f"-{name}" in known:
            fixed = line([*whole, *args[:at], f"-{word}", *rest])
            return Complaint(f"there is no option {name}, but one with two dashes", fixed)
        hint = unknown_option(command, path, name, owners)
        return Complaint(f"there is no option {name}", hint or usage(path))
    return None


def usage(path: str) -> str:
    return f"{path} --help shows the usage"


def unknown_option(
    command: Any,
    path: str,
    name: str,
    owners: Owners,
    settings: Container[str] = (),
    closest: str | None = None,
    refused: Mapping[str, str] | None = None,
) -> str:
    """The hint for an option that a command does not have; "" if nothing is like it.

    `owners` says which commands have it. In a command that takes `settings` as options too, `closest` is the setting
    whose name is most like it. Options in `refused` cannot be given here; these are the hints that say what to do
    instead.
    """
    refused = refused or {}
    own = {option.lstrip("-").replace("-", "_"): option for option in own_options(command) if option.startswith("--")}
    bare = name.lstrip("-").replace("-", "_").casefold()
    if bare == "html" and settings:
        return PAGE
    if bare == "gpu" and "device" in own and "device_model" not in own:
        return WHICH_GPU
    if bare == "metric" and any(one.metavar == "[METRIC]" for one in command.params):
        return f"the metric is not an option: {path} step_time"
    if bare in VALUES and VALUES[bare][0] in own:
        return offer([f"--{' '.join(VALUES[bare])}"])
    for meant in (*(["html"] if bare in OF_OUTPUT and not settings else ()), *OPTIONS.get(bare, ())):
        if meant in own or meant in settings:
            return refused.get(meant, offer([own.get(meant, f"--{meant}")]))
    if elsewhere := owners(name):
        return f"it is an option of {listed(elsewhere)}"
    close = alike(bare, [*own, *([closest] if closest else [])])
    if closest and not close:
        close = [closest]
    found = offer([own.get(one) or f"--{one if '.' in one else one.replace('_', '-')}" for one in close[:1]])
    return refused.get(close[0], found) if close else found


def unknown_command(
    word: str, rest: Sequence[str], known: Sequence[str], of_runs: Sequence[str], of_programs: Container[str]
) -> str:
    """The hint for a word that is not a command of gpubench.

    `of_runs` are the subcommands of gpubench runs, and `of_programs` the commands that a program can follow.
    """
    meant = alike(word, known, cutoff=0.75)
    if word.casefold() == "run" and rest and rest[0] in (*of_runs, *OF_RUNS):
        return line(["runs", *rest])
    if word.casefold() not in COMMANDS and not meant:
        if word in of_runs:
            return line(["runs", word, *rest])
        if started := as_program([word, *rest]):
            return line(["train-bench", "--", *started])
    meant = [COMMANDS[word.casefold()]] if word.casefold() in COMMANDS else meant or alike(word, known)
    if meant and rest and meant[0] in of_programs and (started := as_program(rest)):
        return line([*meant, "--", *started])
    if word.casefold() in COMMANDS:
        return line([*meant, *rest])
    return line([*meant, *rest]) if meant and rest else f"{offer(meant)} gpubench --help lists all commands".lstrip()


def unknown_of_runs(word: str, rest: Sequence[str], known: Sequence[str], commands: Sequence[str]) -> str:
    """The hint for a word that is not a subcommand of gpubench runs; `commands` are those of gpubench."""
    if word in OF_RUNS:
        meant = OF_RUNS[word]
        if meant == "tag" and len(rest) == 2 and word != "label":
            return line(["runs", "tag", rest[0], "--name", rest[1]])
        return line(["runs", meant, *rest])
    if word in commands:
        return line([word, *rest])
    if RUN.fullmatch(word) or is_folder(word):
        return line(["runs", "show", word, *rest])
    if near := did_you_mean(word, known):
        return f"{near} gpubench runs --help lists all"
    return f"gpubench runs lists all runs, and gpubench runs show {shlex.quote(word)} shows one"


def as_program(words: Sequence[str]) -> list[str] | None:
    """The command that the words stand for, if they may be the command of a program; None if not."""
    first, *rest = words
    if any(char.isspace() for char in first) and not is_there(first):
        if OPERATORS.search(first):
            return ["bash", "-c", shlex.join([first, *rest]) if rest else first]
        first, *rest = [*_split(first), *rest]
    if ASSIGNMENT.fullmatch(first) and rest and not is_there(first):
        return ["env", first, *rest]
    if (starter := STARTED_WITH.get(Path(first).suffix)) and not _starts_itself(Path(first)):
        return [*starter, near_file(first) or first, *rest]
    if first in STARTERS or which(first) or is_there(first):
        return [first, *rest]
    return None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # of an open quote
        return text.split()


def _starts_itself(path: Path) -> bool:
    """Tells whether a script names what runs it, and may be executed."""
    if not which(str(path if path.is_absolute() else Path.cwd() / path)):
        return False
    try:
        with opened(path) as file:
            return file.read(2) in (b"#!", b"\x7fE")
    except OSError:
        return False


def near_file(name: str, directory: Path = Path()) -> str | None:
    """The file that was perhaps meant by a name that no file has; None if there is none."""
    path = directory / name
    if path.exists() or not path.parent.is_dir():
        return None
    beside = [one.name for one in path.parent.iterdir() if one.suffix == path.suffix and one.is_file()]
    found = alike(path.name, sorted(beside))
    return str(Path(name).with_name(found[0])) if found else None


class Stray(NamedTuple):
    """A word that is neither an option of a command nor a value of one."""

    command: str
    word: str
    before: list[str]
    """The words between the command and this one."""
    after: list[str]
    """The words after it, up to `--`."""
    program: list[str] | None
    """The words after `--`; None without it."""
    takes_program: bool

    @property
    def message(self) -> str:
        return f"unexpected argument {self.word!r}"

    def instead(self, *words: str) -> str:
        """The whole command line with other words in place of this one."""
        return line([self.command, *self.before, *words, *self.after, *behind(self.program)])


def stray(found: Stray) -> Complaint:
    """What to say about a stray word."""
    for guess in (_value_of_vs, _arguments, _file, _name, _program):
        if meant := guess(found):
            return meant
    more = ", and a program comes after --" if found.takes_program and found.program is None else ""
    hint = f"settings are given as --section.key=value{more}; {usage(f'gpubench {found.command}')}"
    return Complaint(found.message, hint)


def _value_of_vs(found: Stray) -> Complaint | None:
    *before, last = found.before or [""]
    if before[-1:] != ["--vs"] or "=" in last:
        return None
    fixed = found._replace(before=before).instead(f"{last}={found.word}")
    return Complaint(f"--vs {last} has no value: it takes KEY=VALUE", fixed)


def _arguments(found: Stray) -> Complaint | None:
    """Explains the second word of arguments that were not quoted, which --vs-args takes as one word."""
    option, _, first = found.before[-1].partition("=") if found.before else ("", "", "")
    before = found.before[:-1]
    if option != VS_ARGS and before[-1:] == [VS_ARGS]:
        option, first, before = VS_ARGS, found.before[-1], before[:-1]
    if option != VS_ARGS or not first.startswith("-"):
        return None
    fixed = found._replace(before=before).instead(VS_ARGS, f"{first} {found.word}")
    return Complaint(f"{VS_ARGS} takes one word, and {first} {found.word} is two: quote them", fixed)


def _file(found: Stray) -> Complaint | None:
    word, suffix = found.word, Path(found.word).suffix.casefold()
    if word.endswith(TRACES) and found.command in ("profile", "memory"):
        return Complaint(f"{found.message}: a trace is given by --trace", found.instead("--trace", word))
    if word.endswith(TRACES):
        return Complaint(found.message, line(["profile", "--trace", word]))
    if suffix in SNAPSHOTS:
        what = f"{found.message}: a snapshot of memory is given by --snapshot"
        return Complaint(what, line(["memory", "--snapshot", word]))
    if suffix in CONFIGS or word in presets():
        return Complaint(f"{found.message}: settings are given by --config", found.instead("--config", word))
    return None


def _name(found: Stray) -> Complaint | None:
    word = found.word
    if word == HELP:
        return Complaint(found.message, line([found.command, "--help"]))
    if word in MODELS and found.command != "pipe-infer":
        return Complaint(f"{found.message}: a model is given by --model", found.instead("--model", word))
    if SETTING.fullmatch(word) and "." in word.partition("=")[0]:
        return Complaint(f"{found.message}: a setting is an option", found.instead(f"--{word}"))
    if RUN.fullmatch(word) or is_there(str(Path(word) / RUN_FILE)):
        return Complaint(f"{found.message}: {found.command} makes a new run", line(["runs", "show", word]))
    if found.command == "pipe-infer" and is_folder(word):
        return Complaint(f"{found.message}: a model is given by --model", found.instead("--model", word))
    if (option := OF_COMMITS.get(found.command)) and is_commit(Path(), word):
        whole = found._replace(program=found.program or [*EXAMPLE])
        return Complaint(f"{found.message}: a commit is given by {option}", whole.instead(option, word))
    if found.command == "memory" and (device := _device(word)):
        what = f"{found.message}: a GPU is given by --device-model"
        return Complaint(what, found.instead("--predict", "--device-model", device))
    return None


def _program(found: Stray) -> Complaint | None:
    started = None if found.program is not None else as_program([found.word, *found.after])
    if not started:
        return None
    if not found.takes_program:
        fixed = line(["train-bench", "--inference", "--", *started])
        return Complaint(f"{found.message}: {found.command} runs no program", fixed)
    fixed = line([found.command, *found.before, "--", *started])
    return Complaint(found.message, f"a program comes after --, for example: {fixed}")


def _device(word: str) -> str | None:
    from gpubench.hardware import ACCELERATORS  # not needed without such a mistake

    return next(iter(alike(word, [one.key for one in ACCELERATORS], cutoff=0.8)), None)


def of_compare(names: Sequence[str], missing: str) -> str | None:
    """The hint for a name that names no run; None if it is like nothing else."""
    others = [name for name in names if name != missing]
    if missing in BETWEEN:
        return line(["compare", *others])
    if (option := PRINTED.get(Path(missing).suffix)) and len(others) > 1:
        return f"{line(['compare', *others, option])} {'' if option == '--html' else '> '}{missing}"
    if is_commit(Path(), missing):
        return line(["train-bench", "--vs-ref", missing, "--", "python", "train.py"])
    return None


def before_command(args: Sequence[str], commands: Mapping[str, Any]) -> Complaint | None:
    """What to say about options of a command that come before it; None if there is no command."""
    at = next((at for at, word in enumerate(args) if word in commands), None)
    if at is None:
        return None
    options = list(args[:at])
    return Complaint(
        f"{options[0]} stands before the command {args[at]}",
        f"options come after the command: {line([args[at], *options, *args[at + 1 :]])}",
    )
