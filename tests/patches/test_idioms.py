"""The edits that findings lead to: each diff is the expected one, applies, and leaves what is computed as it was."""

import subprocess
from pathlib import Path

import pytest
from idiom_programs import CASES, IdiomCase
from test_edits import applies, line_of, losses_of, text_of

from gpubench.patches.by_finding import IDIOMS, add
from gpubench.patches.edits import Patch, Program


def patch_of(folder: Path, case: IdiomCase) -> Patch:
    (folder / "train.py").write_text(case.source)
    lines = [f"train.py:{line_of(case.source, case.line)}"] if case.line else []
    patch = Patch()
    add(patch, case.finding, lines, Program(folder, ("python", "train.py")))
    return patch


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_finding_becomes_the_expected_edit_or_a_sentence(tmp_path: Path, case: IdiomCase) -> None:
    patch = patch_of(tmp_path, case)
    said = patch.left.get(case.finding, "")
    assert case.left in said
    assert bool(case.left) == bool(said), said
    if not case.diff:
        assert not patch.files
        assert not patch.edits
        compile(case.source, "train.py", "exec")
        return
    written = text_of(patch)
    body = written.partition(b"@@")[2].decode()
    assert "".join(line for line in body.splitlines(keepends=True) if line[0] in "-+") == case.diff
    (file := tmp_path / "best.patch").write_bytes(written)
    applies(tmp_path, file)
    before = losses_of(tmp_path / "train.py")
    subprocess.run(["git", "apply", str(file)], cwd=tmp_path, check=True, capture_output=True)
    assert before
    assert losses_of(tmp_path / "train.py") == pytest.approx(before, rel=1e-5)


def test_every_idiom_has_programs_with_an_edit_and_with_none() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for finding in IDIOMS:
        assert {bool(case.diff) for case in CASES if case.finding == finding} == {True, False}
