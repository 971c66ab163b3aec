"""What is installed: one name, with everything in it, and a command that runs."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
from places import ROOT, SUPPORT
from running import SMALL, environment

SOURCES = ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "gpubench", "commands", "configs", "tests")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel that was built from it."""
    copy, dist = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")  # nothing is built in the checkout
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy)
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "would be ignored" not in done.stdout + done.stderr
    (source,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return source, wheel


def run(*command: str, **known: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment() | known)


def test_a_wheel_holds_the_commands_the_presets_and_one_name(built: tuple[Path, Path]) -> None:
    names = set(ZipFile(built[1]).namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"gpubench"}
    folders = ("commands/*.py", "configs/*.yaml", "gpubench/worker/*.py")
    for source in (path for folder in folders for path in ROOT.glob(folder)):
        assert f"gpubench/{source.parent.name}/{source.name}" in names
    inside = [*ROOT.glob("gpubench/**/*.py"), *ROOT.glob("gpubench/report/templates/*"), ROOT / "gpubench/py.typed"]
    assert {str(path.relative_to(ROOT)) for path in inside} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_a_source_distribution_holds_the_layout_of_the_repository_and_no_half_of_the_tests(
    built: tuple[Path, Path],
) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "commands/compare.py", "configs/tiny.yaml"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_what_is_installed_runs_from_anywhere(built: tuple[Path, Path], tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site))
    done = run(*pip, str(built[1]))
    assert done.returncode == 0, done.stderr

    def gpubench(*arguments: str) -> subprocess.CompletedProcess[str]:
        paths = os.pathsep.join([str(site), str(SUPPORT)])
        return run("sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(elsewhere), *arguments, PYTHONPATH=paths)

    where = gpubench(
        sys.executable, "-c", "import gpubench, gpubench.commands as c; print(gpubench.__file__, c.__file__)"
    )
    assert all(Path(name).is_relative_to(site) for name in where.stdout.split()), where
    command = str(site / "bin" / "gpubench")
    assert gpubench(command, "--version").stdout.startswith("gpubench 0")
    quick = ("--steps=2", "--training.warmup_steps=1", "--repeats=1", "--quiet")
    done = gpubench(command, "train-bench", *SMALL, *quick)
    assert done.returncode == 0, done.stderr
    (report,) = elsewhere.glob("results/train-bench/*/report.html")
    warning = "one repeat only, so the variation between processes is unknown"
    assert warning not in done.stderr, "it stands below the figures"
    assert warning in report.with_name("run.log").read_text()


def test_a_checkout_that_lost_its_links_says_so(tmp_path: Path) -> None:
    package = tmp_path / "gpubench"
    ignored = shutil.ignore_patterns("__pycache__", "commands", "configs")
    shutil.copytree(ROOT / "gpubench", package, symlinks=True, ignore=ignored)
    for name in ("commands", "configs"):
        (package / name).write_text(f"../{name}")  # as git leaves it with core.symlinks=false
    # Without site-packages, where an editable installation would know better.
    script = ("sh", "-c", 'cd "$1" && exec "$2" -S -m gpubench --help', "sh", str(tmp_path), sys.executable)
    done = run(*script, PYTHONPATH="")
    assert (done.returncode, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: gpubench/commands must be a symbolic link")
    assert hint.startswith("hint: ")
