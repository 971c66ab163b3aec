"""Download the packages that are missing on a GPU machine without a network.

    python3 -m pip list --format=freeze > image.txt             # on that machine, which has PyTorch and its CUDA
    .venv/bin/python benchmarks/gpu_wheels.py image.txt --python 3.12 --into wheels     # on one with a network
    python3 -m pip install --no-index --no-deps wheels/*.whl    # on that machine again
    export PYTHONPATH=$PWD                                      # there, in the checkout, from which gpubench runs

The requirements of gpubench and its tests are read from the packages installed beside this script, recursively. A
package of the image stays if its version satisfies all requirements; for the others the wheels of the versions in
constraints.txt are downloaded. PyTorch and its own requirements are never replaced: they belong to the machine's
driver. `--list` prints what is missing, with the reason, and downloads nothing.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
WANTED = ("gpubench", "pytest", "hypothesis")
THEIRS = frozenset({"torch", "triton"})
"""Packages that the image must have. What PyTorch needs besides comes with it."""
PLATFORMS = (
    "2_39",
    "2_35",
    "2_34",
    "2_31",
    "2_28",
    "2_27",
    "2_24",
    "2_17",
    "2_12",
    "2_5",
)  # glibc, as wheels name them


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    found = lacking(installed(options.image.read_text()) if options.image else {}, options.python)
    for name, (version, reason) in found.items():
        print(f"{name}=={version}  # {reason}")
    if options.list or not found:
        return 0
    return subprocess.run(download([f"{name}=={version}" for name, (version, _) in found.items()], options)).returncode


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Download the wheels that are missing on a GPU machine without a network."
    )
    parser.add_argument(
        "image",
        type=Path,
        nargs="?",
        help="output of `pip list --format=freeze` on that machine; by default it has only PyTorch",
    )
    parser.add_argument(
        "--python", default="3.12", metavar="X.Y", help="that machine's version of Python; default: %(default)s"
    )
    parser.add_argument(
        "--machine", default="x86_64", help="that machine's architecture, x86_64 or aarch64; default: %(default)s"
    )
    parser.add_argument(
        "--into", type=Path, default=ROOT / "wheels", metavar="DIR", help="folder for the wheels; default: wheels"
    )
    parser.add_argument("--list", action="store_true", help="print the missing packages, and download nothing")
    return parser.parse_args(arguments)


def installed(listing: str) -> dict[str, str]:
    """Return versions by canonical name, from lines such as "numpy==2.4.6"; other lines, as paths, are ignored."""
    pairs = (line.split("==", 1) for line in listing.splitlines() if "==" in line and not line.startswith(("#", "-")))
    return {canonicalize_name(name.strip()): version.strip() for name, version in pairs}


def lacking(image: Mapping[str, str], python: str) -> dict[str, tuple[str, str]]:
    """Return what is missing: by name the version and the reason."""
    needed = needs(python)
    found = {}
    for name, by in sorted(needed.items()):
        has = image.get(name)
        unmet = [str(one) for one in by if has is not None and not one.specifier.contains(has, prereleases=True)]
        if has is None:
            found[name] = (metadata.version(name), "absent")
        elif unmet:
            found[name] = (metadata.version(name), f"{has} is installed, {' and '.join(unmet)} is needed")
    return found


def needs(python: str) -> dict[str, list[Requirement]]:
    """Return all packages needed beside PyTorch, with the requirements on each."""
    surroundings = {name: str(value) for name, value in default_environment().items()}
    surroundings |= {"python_version": python, "python_full_version": f"{python}.0"}
    found: dict[str, list[Requirement]] = {}
    ahead = [Requirement(name) for name in WANTED]
    while ahead:
        requirement = ahead.pop()
        name = canonicalize_name(requirement.name)
        if name in THEIRS:
            continue
        if name not in found:
            ahead += _needs_of(name, requirement.extras, surroundings)
        found.setdefault(name, []).append(requirement)
    del found["gpubench"]  # which runs from the checkout
    return found


def _needs_of(name: str, extras: set[str], surroundings: Mapping[str, str]) -> Iterator[Requirement]:
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        asked = [{**surroundings, "extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(requirement.marker.evaluate(one) for one in asked):
            yield requirement


def download(requirements: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Return the command that downloads wheels for another machine."""
    platforms = [f"--platform=manylinux_{glibc}_{options.machine}" for glibc in PLATFORMS]
    older = [f"--platform=manylinux2014_{options.machine}"]
    target = (f"--python-version={options.python}", "--implementation=cp", *platforms, *older, "--only-binary=:all:")
    return [sys.executable, "-m", "pip", "download", "--no-deps", *target, f"--dest={options.into}", *requirements]


if __name__ == "__main__":
    sys.exit(main())
