"""Virtual environments of the peers, which are created once and kept."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
PLACE = Path.home() / ".cache" / "gpubench-benchmarks"
READY = "ready.txt"  # the recipe, written once all of it is installed


@dataclass(frozen=True)
class Environment:
    """What is installed for a peer, and how much of the project's own environment it shares."""

    requirements: tuple[str, ...]
    constrained: bool = True
    """Whether all of the project's constraints hold, and not only its version of torch."""
    torch: bool = True
    """Whether torch and what gpubench needs to build its models are installed, too."""

    def create(self, folder: Path) -> Path:
        """Return the interpreter of the environment in `folder`, which is kept if it is complete.

        Raises subprocess.CalledProcessError if something does not install.
        """
        python, pins = folder / "bin" / "python", self._pins()
        recipe = "\n".join((*self.requirements, pins))
        if _made(folder, recipe):
            return python
        print(f"installing {', '.join(self.requirements)} in {folder}", file=sys.stderr)
        run([sys.executable, "-m", "venv", "--clear", str(folder)])
        constraints = folder / "constraints.txt"
        constraints.write_text(pins)
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        if self.torch:
            run([*install, "torch"])  # alone and first, so that pip keeps this build later on
            run([*install, "numpy", "pydantic", "msgspec"])
        run([*install, *self.requirements])
        (folder / READY).write_text(recipe)
        return python

    def _pins(self) -> str:
        if not self.torch:
            return ""
        pins = CONSTRAINTS.read_text()
        return pins if self.constrained else next(line for line in pins.splitlines() if line.startswith("torch=="))


def create_beside(requirements: Sequence[str], folder: Path) -> Path:
    """Return a folder for PYTHONPATH with `requirements` alone; their own requirements are in this environment.

    Raises subprocess.CalledProcessError if one does not install.
    """
    recipe = "\n".join(requirements)
    if not _made(folder, recipe):
        print(f"installing {', '.join(requirements)} in {folder}", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        run([*pip, f"--constraint={CONSTRAINTS}", f"--target={folder}", *requirements])
        (folder / READY).write_text(recipe)
    return folder


def versions(folder: Path, requirements: Sequence[str]) -> str:
    """Return the versions of `requirements` in `folder`, as "transformers 5.23.0, accelerate 1.15.0"."""
    places = [str(folder), *map(str, folder.glob("lib/python*/site-packages"))]
    found = {one.name.lower(): one.version for one in distributions(path=places)}
    names = [requirement.partition("<")[0].partition("=")[0] for requirement in requirements]
    return ", ".join(f"{name} {found[name]}" for name in names if name in found)


def add_options(parser: argparse.ArgumentParser, known: Sequence[str], default: str) -> None:
    """Add --peers, which becomes a list of names, and --environments."""
    parser.add_argument(
        "--peers",
        type=partial(_chosen, known=known),
        default=default,
        help=f"none, all, or some of {','.join(known)}; default: {default}",
    )
    parser.add_argument("--environments", type=_folder, default=PLACE, metavar="DIR")


def run(command: Sequence[str]) -> None:
    """Run a command. Raises subprocess.CalledProcessError, with its output, if it fails."""
    subprocess.run(command, capture_output=True, text=True, check=True)


def _made(folder: Path, recipe: str) -> bool:
    ready = folder / READY
    return ready.is_file() and ready.read_text() == recipe


def _folder(text: str) -> Path:
    return Path(text).expanduser().resolve()


def _chosen(text: str, known: Sequence[str]) -> list[str]:
    names = {"none": [], "all": list(known)}.get(text, text.split(","))
    if unknown := set(names) - set(known):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is not among {', '.join(known)}")
    return names
