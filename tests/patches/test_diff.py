"""Diffs: what is written is read again, git and patch agree, and damaged or foreign ones are refused."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpubench.patches.diff import NotApplicable, Versions, applied, is_nameable, lines_changed, moved, written

LINES = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"\n", b"c\r\n", b"\td\n", b"--- x\n", b"+++ b/y\n", b"@@ -1 +1 @@\n"])
)
END = st.sampled_from([b"", b"last", b"\\ No newline at end of file", b"x\r"])
CONTENT = st.builds(lambda lines, end: b"".join(lines) + end, LINES, END)


def patch_of(**files: Versions) -> bytes:
    named = {f"{name}.py": versions for name, versions in files.items()}
    return written(named, ["--- what", "*** 1,2 ****", "12c"], lambda name, lines: f"{name}: {lines.start}\n@@")


@given(CONTENT, CONTENT)
def test_what_is_written_is_applied(before: bytes, after: bytes) -> None:
    versions = Versions(before, after)
    if before == after:
        return  # a patch without a hunk changes nothing, and is never written
    assert applied(patch_of(x=versions), lambda _: before) == {"x.py": versions}
    assert lines_changed(versions) > 0


@settings(max_examples=15, deadline=None)
@given(CONTENT.filter(bool), CONTENT.filter(bool))
def test_git_and_patch_make_the_same_of_it(
    tmp_path_factory: pytest.TempPathFactory, before: bytes, after: bytes
) -> None:
    if before == after:
        return
    for command in (["git", "apply", "--whitespace=nowarn"], ["patch", "-p1", "--binary", "--fuzz=0", "-s", "-i"]):
        folder = tmp_path_factory.mktemp("patched")
        (folder / "x.py").write_bytes(before)
        (folder / "best.patch").write_bytes(patch_of(x=Versions(before, after)))
        done = subprocess.run([*command, "best.patch"], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        assert (folder / "x.py").read_bytes() == after


@given(CONTENT, CONTENT, st.integers(1, 30))
def test_a_line_is_moved_to_one_of_the_other_version(before: bytes, after: bytes, line: int) -> None:
    assert moved(line, before, before) == line
    assert moved(line, before, after) >= 1


def test_a_line_is_found_after_lines_were_added_above() -> None:
    assert moved(2, b"a\nb\nc\n", b"x\ny\na\nb\nc\n") == 4
    assert moved(2, b"a\nb\nc\n", b"a\nwith x:\n    b\n    c\n") == 3
    assert moved(4, b"x\ny\na\nb\nc\n", b"a\nb\nc\n") == 2


def test_files_that_have_changed_are_named() -> None:
    patch = patch_of(x=Versions(b"a\n", b"b\n"), y=Versions(b"a\n", b"b\n"))
    with pytest.raises(NotApplicable, match=r"x.py and y.py have changed since"):
        applied(patch, lambda _: b"A\n")
    with pytest.raises(NotApplicable, match=r"y.py has changed since"):
        applied(patch, lambda name: b"A\n" if name == "y.py" else b"a\n")


GOOD = patch_of(x=Versions(b"a\nb\nc\n", b"a\nB\nc\n"))


@pytest.mark.parametrize(
    "patch",
    [
        b"",
        b"hello\n",
        GOOD.replace(b"# sha256", b"# sha1"),
        GOOD.replace(b"x.py", b"../x.py"),
        GOOD.replace(b"x.py", b"/etc/x.py"),
        GOOD.replace(b"-b\n", b""),
        GOOD.replace(b"-b\n", b"-q\n"),
        GOOD.replace(b"-b\n", b"?b\n"),
        GOOD.replace(b"+++ b/x.py\n", b""),
        GOOD + GOOD[GOOD.index(b"--- a") :],
        GOOD[:-4],
        GOOD.replace(b"@@ -1,3", b"@@ -7,3"),
        GOOD.replace(b"-1,3", b"-%b,3" % (b"9" * 5000)),
        GOOD.replace(b"-1,3", b"-1,%b" % (b"9" * 5000)),
        GOOD.replace(b"+1,3", b"+%b,3" % (b"9" * 5000)),
        GOOD.replace(b"+1,3", b"+1,%b" % (b"9" * 5000)),
    ],
)
def test_a_damaged_patch_changes_nothing(patch: bytes) -> None:
    with pytest.raises(NotApplicable):
        applied(patch, lambda _: b"a\nb\nc\n")


@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(noise: bytes) -> None:
    for patch in (noise, GOOD[: len(noise)] + noise, GOOD.replace(b"-b\n", noise)):
        try:
            found = applied(patch, lambda _: b"a\nb\nc\n")
        except NotApplicable:
            continue
        assert found.keys() == {"x.py"}


@pytest.mark.parametrize(
    "name", ["", "/x.py", "../x.py", "a/../x.py", "a//x.py", "./x.py", 'a"b.py', "a\nb.py", "a\\b.py", "x.sh"]
)
def test_such_a_file_is_not_named(name: str) -> None:
    assert not is_nameable(name)
    assert is_nameable(f"{Path('a') / 'b c.py'}")
