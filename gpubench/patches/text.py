"""The comments at the start of a patch, and the text for a pull request that proposes it."""

from collections.abc import Sequence

from gpubench.patches.result import PatchEdit, ProvedPatch
from gpubench.settings.keys import in_words


def comments(edits: Sequence[PatchEdit]) -> list[str]:
    """What each edit contributes, one line each."""
    return [
        "Each change was measured in the program before it was made together with the others:",
        *(f"{one.file}:{one.line} {said(one)}" for one in edits),
    ]


def heading(edits: Sequence[PatchEdit], file: str, lines: range) -> str:
    """What the edits in these lines of a file contribute, to stand behind the range of a hunk."""
    return "; ".join(said(one) for one in edits if one.file == file and one.line in lines)


def said(edit: PatchEdit) -> str:
    return changed(edit) + (f": {edit.contribution}" if edit.contribution else "")


def changed(edit: PatchEdit) -> str:
    """The setting with its value, or the finding."""
    return edit.key if edit.value is None else f"{edit.key}={in_words(edit.value)}"


def pull_request(patch: ProvedPatch, subject: str, machine: str, again: str) -> str:
    """The text for a pull request: what changed, the gain, the machine, and how to repeat it."""
    gain = f"{patch.gain} as fast" if patch.gain else "faster settings"
    lines = [f"# {subject}: {gain}", "", f"{patch.where}; {patch.found}.", "", "| change | where | measured |"]
    lines += ["|---|---|---|"]
    lines += [f"| `{changed(one)}` | {one.file}:{one.line} | {one.contribution} |" for one in patch.edits]
    lines += ["", f"Measured on {machine}."]
    if patch.gain:
        lines[-1] += f" {patch.rounds} interleaved runs each, before and after; the interval is 95 %."
    lines += [f"{remark[0].upper()}{remark[1:]}." for remark in patch.remarks]
    if patch.left:
        lines += ["", "Not in this change:", ""]
        lines += [f"- `{key}`: {sentence}" for key, sentence in patch.left.items()]
    return "\n".join([*lines, "", "To repeat the measurement before it is applied:", "", f"    {again}", ""])
