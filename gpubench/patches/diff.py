"""Unified diffs: written as `git apply` and `patch` accept them, and applied without either.

A diff starts with comments, which both programs skip. They have what each change gains, and the digest of each file as
it was, by which a file that has changed since is recognised. Names are relative to the program's directory.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

CONTEXT = 3
_DIGEST = re.compile(rb"# sha256 ([0-9a-f]{64})  (.+)")
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@.*")
DAMAGED = "a hunk of it is damaged"
APPLIED = "it is applied already"
_NO_NEWLINE = b"\\ No newline at end of file\n"
_UNNAMEABLE = re.compile(r'[\x00-\x1f\x7f"\\]')
"""The characters that the two programs read in different ways in the name of a file."""


class NotApplicable(ValueError):
    """A patch that is damaged, or that does not belong to the files as they are."""


@dataclass(frozen=True)
class Versions:
    """A file as it was and as it is to be."""

    before: bytes
    after: bytes


def is_nameable(name: str) -> bool:
    """Whether a diff can name a file: one of Python, by a path without `..` that stays below a folder."""
    parts = name.split("/")
    return name.endswith(".py") and not _UNNAMEABLE.search(name) and not {"", ".", ".."}.intersection(parts)


def written(files: Mapping[str, Versions], comments: Sequence[str], heading: Callable[[str, range], str]) -> bytes:
    """The diff of files. `heading` says what stands behind the range of lines that a hunk changes in a file as it was.

    The lines count from 1.
    """
    found = [f"# {line}".rstrip().encode(errors="backslashreplace") + b"\n" for line in comments]
    for name, versions in files.items():
        found.append(b"# sha256 %s  %s\n" % (_digest(versions.before), name.encode(errors="surrogateescape")))
    return b"".join([*found, changes(files, heading)])


def changes(files: Mapping[str, Versions], heading: Callable[[str, range], str] = lambda *_: "") -> bytes:
    """The diff of files without its comments; see `written`."""
    found = []
    for name, versions in files.items():
        named = name.encode(errors="surrogateescape")
        end = b"\t\n" if b" " in named else b"\n"  # by which both programs find the end of such a name
        found += [b"--- a/" + named + end, b"+++ b/" + named + end]
        found += _hunks(versions, lambda lines, name=name: heading(name, lines))  # type: ignore[misc]
    return b"".join(found)


def _hunks(versions: Versions, heading: Callable[[range], str]) -> Iterator[bytes]:
    before, after = (_lines(one) for one in (versions.before, versions.after))
    for group in SequenceMatcher(None, before, after, autojunk=False).get_grouped_opcodes(CONTEXT):
        (_, start, _, new_start, _), (_, _, end, _, new_end) = group[0], group[-1]
        said = " ".join(heading(range(start + 1, end + 1)).split())
        place = f"@@ -{_span(start, end)} +{_span(new_start, new_end)} @@ {said}".rstrip()
        yield place.encode(errors="backslashreplace") + b"\n"
        for kind, old, old_end, new, new_end_ in group:
            if kind == "equal":
                yield from (_line(b" ", line) for line in before[old:old_end])
            else:
                yield from (_line(b"-", line) for line in before[old:old_end])
                yield from (_line(b"+", line) for line in after[new:new_end_])


def lines_changed(versions: Versions) -> int:
    """The number of lines of the new version that are not in the one before."""
    before, after = (_lines(one) for one in (versions.before, versions.after))
    opcodes = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(end - start, new_end - new) for kind, start, end, new, new_end in opcodes if kind != "equal")


def moved(line: int, before: bytes, after: bytes) -> int:
    """The number in `after` of a line of `before`, or of the one that has replaced it; lines count from 1.

    A line that is indented in another way is the same one: an edit may have put it into a block. Of several lines that
    have replaced some, it is the one that is most like it.
    """
    ours, theirs = ([line.strip().decode("latin-1") for line in _lines(content)] for content in (before, after))
    for kind, start, end, new, new_end in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if not start < line <= end:
            continue
        if kind == "equal" or new == new_end:
            return min(new + line - start, max(new + 1, new_end))
        alike = SequenceMatcher(None, b=ours[line - 1], autojunk=False)
        ratios = []
        for each in theirs[new:new_end]:
            alike.set_seq1(each)
            ratios.append(alike.ratio())
        return new + 1 + ratios.index(max(ratios))
    return line


def applied(patch: bytes, read: Callable[[str], bytes]) -> dict[str, Versions]:
    """The files that a patch changes, before and after it. `read` returns the content of a file.

    Raises NotApplicable for a damaged patch, and for files that are not as they were; it names all of these.
    """
    digests = {_text(match[2]): match[1] for line in _lines(patch) if (match := _DIGEST.fullmatch(line.rstrip()))}
    changes = _parsed(patch)
    if not changes or changes.keys() != digests.keys():
        raise NotApplicable("it is not a patch of gpubench")
    before = {name: read(name) for name in changes}
    if changed := [name for name, content in before.items() if _digest(content) != digests[name]]:
        if all(_is_patched(content, changes[name], digests[name]) for name, content in before.items()):
            raise NotApplicable(APPLIED)
        raise NotApplicable(f"{' and '.join(changed)} {'has' if len(changed) == 1 else 'have'} changed since")
    return {name: Versions(content, _patched(content, changes[name])) for name, content in before.items()}


@dataclass(frozen=True)
class _Hunk:
    start: int
    """The number of its first line in the file as it was, from 0."""
    before: Sequence[bytes]
    after: Sequence[bytes]


def _parsed(patch: bytes) -> dict[str, list[_Hunk]]:
    found: dict[str, list[_Hunk]] = {}
    lines, number, name = _lines(patch), 0, ""
    while number < len(lines):
        line, number = lines[number], number + 1
        if line.startswith(b"+++ b/"):
            name = _text(line[6:].rstrip(b"\n").removesuffix(b"\t"))
            if not is_nameable(name) or name in found:
                raise NotApplicable(f"it names the file {name!r}")
            found[name] = []
        elif line.startswith(b"@@"):
            match = _HUNK.fullmatch(line.rstrip(b"\n"))
            if not name or not match:
                raise NotApplicable(DAMAGED)
            hunk, number = _hunk(lines, number, match)
            found[name].append(hunk)
    return found


def _hunk(lines: Sequence[bytes], number: int, heading: re.Match[bytes]) -> tuple[_Hunk, int]:
    """The hunk whose first line has this number, and the number of the line after it."""
    start, old, new = int(heading[1]), int(heading[2] or 1), int(heading[4] or 1)
    before: list[bytes] = []
    after: list[bytes] = []
    sides = {b" ": (before, after), b"-": (before,), b"+": (after,)}
    last: tuple[list[bytes], ...] = ()
    while number < len(lines) and (len(before) < old or len(after) < new or lines[number] == _NO_NEWLINE):
        kind, content, number = lines[number][:1], lines[number][1:], number + 1
        if kind == b"\\":
            for side in last:
                side[-1] = side[-1].removesuffix(b"\n")
            continue
        if kind not in sides:
            raise NotApplicable(DAMAGED)
        last = sides[kind]
        for side in last:
            side.append(content)
    if len(before) != old or len(after) != new:
        raise NotApplicable(DAMAGED)
    return _Hunk(start - bool(old), before, after), number


def _patched(content: bytes, hunks: Sequence[_Hunk]) -> bytes:
    lines = _lines(content)
    for hunk in sorted(hunks, key=lambda one: one.start, reverse=True):
        end = hunk.start + len(hunk.before)
        if lines[hunk.start : end] != list(hunk.before):
            raise NotApplicable("its lines are not those of the file")
        lines[hunk.start : end] = hunk.after
    return b"".join(lines)


def _is_patched(content: bytes, hunks: Sequence[_Hunk], digest: bytes) -> bool:
    """Whether a file is as a patch leaves it, by the digest of the file before."""
    shift, reverse = 0, []
    for hunk in sorted(hunks, key=lambda one: one.start):
        reverse.append(_Hunk(hunk.start + shift, hunk.after, hunk.before))
        shift += len(hunk.after) - len(hunk.before)
    try:
        return _digest(_patched(content, reverse)) == digest
    except NotApplicable:
        return False


def _lines(content: bytes) -> list[bytes]:
    """Splits at line feeds only, as both programs do."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    lines[-1] = lines[-1].removesuffix(b"\n")
    return lines if lines[-1] else lines[:-1]


def _line(sign: bytes, line: bytes) -> bytes:
    return sign + line if line.endswith(b"\n") else sign + line + b"\n" + _NO_NEWLINE


def _span(start: int, end: int) -> str:
    return f"{start + (end > start)},{end - start}"


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")
