"""The edits that findings about a program lead to where no setting can try their advice."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from gpubench.patches import diff
from gpubench.patches.attention import written_out
from gpubench.patches.edits import Edit, Patch, Program, file_and_line, read, script
from gpubench.patches.evaluation import evaluations
from gpubench.patches.idioms import Found
from gpubench.patches.loops import blocking_copies, moved_tensors, summed_values, zeroed_gradients
from gpubench.patches.source import NotEdited, SourceFile

IDIOMS: Mapping[str, Callable[[SourceFile], Iterator[Found]]] = {
    "zeroed-gradients": zeroed_gradients,
    "synchronisation": summed_values,
    "host-tensors": moved_tensors,
    "blocking-copies": blocking_copies,
    "unused-gradients": evaluations,
    "unfused-attention": written_out,
}
"""What each finding is about in the source, by the name of its rule."""


def add(patch: Patch, finding: str, lines: Sequence[str], program: Program) -> None:
    """Adds to a patch the edits for a finding, which is about these lines; without any, about the program's loop.

    What is not certain becomes the sentences of `left`.
    """
    said: list[str] = []
    for name, wanted in _files(lines, program).items():
        try:
            said += _add_to_file(patch, finding, name, wanted, program)
        except NotEdited as reason:
            said.append(str(reason))
    if said:
        patch.left[finding] = "; ".join(dict.fromkeys(said))


def _add_to_file(patch: Patch, finding: str, name: str, lines: set[int], program: Program) -> list[str]:
    """Adds the edits of one file, and returns what is not certain. Raises NotEdited if it cannot be edited."""
    content = patch.files[name].after if name in patch.files else read(program.directory, name)
    before = patch.files[name].before if name in patch.files else content
    source = SourceFile(name, content, before)
    there = {diff.moved(line, before, content) for line in lines}
    found = [one for one in IDIOMS[finding](source) if not there or _is_at(source, one, there)]
    new = {node: changed for one in found for node, changed in one.changed.items()}
    if new:
        edited = SourceFile(name, source.with_all_changed(new))  # which raises NotEdited if it is no Python
        patch.files[name] = diff.Versions(before, edited.content)
        changed = {diff.moved(source.line(node), content, before) for node in new}
        patch.edits += [Edit(finding, name, line) for line in sorted(changed)]
    return [one.why for one in found if one.why]


def _files(lines: Sequence[str], program: Program) -> Mapping[str, set[int]]:
    """The files in which a finding is, with the lines that are known."""
    places = lines or [
        *([f"{name}:1"] if (name := script(program)) else []),
        *program.places.values(),
        *(line for made in program.optimizers.values() for line in made),
    ]
    found: dict[str, set[int]] = {}
    for place in places:
        with suppress(NotEdited):  # it is in a package, of which only the advice can be followed
            name, line = file_and_line(place, program)
            found.setdefault(name, set()).update({line} if lines else ())
    return found


def _is_at(source: SourceFile, found: Found, lines: set[int]) -> bool:
    return any(source.line(found.at) <= line <= source.end(found.at)[0] for line in lines)
