"""What is installed: one name, with everything in it."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "gpubench", "commands", "configs")


@pytest.mark.slow
def test_a_wheel_holds_the_commands_the_presets_and_one_name(tmp_path: Path) -> None:
    copy = tmp_path / "copy"  # so that nothing is built in the checkout
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    (wheel,) = tmp_path.glob("*.whl")
    names = set(ZipFile(wheel).namelist())
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"gpubench"}
    for source in (*ROOT.glob("commands/*.py"), *ROOT.glob("configs/*.yaml"), *ROOT.glob("gpubench/data/*.py")):
        assert f"gpubench/{source.parent.name}/{source.name}" in names
    assert {f"gpubench/{path.name}" for path in ROOT.glob("gpubench/*.py")} <= names
    assert {
        "gpubench/commands/train_bench.py",
        "gpubench/configs/resnet50.yaml",
        "gpubench/data/feed.py",
        "gpubench/py.typed",
    } <= names
