"""The code that does in a program what a fix does from outside, and where it belongs."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gpubench import units
from gpubench.errors import SettingsError
from gpubench.findings import Finding
from gpubench.kinds.program.source_names import UNNAMED, Names, renamed
from gpubench.settings.field import Place
from gpubench.settings.loading import apply_overrides
from gpubench.settings.programs import CompletedProgramSettings, from_outside

AT: Mapping[Place, str] = {
    "loader": "at {}",
    "ddp": "at {}",
    "model": "for the model that is called at {}",
}
"""How the place of a fix in the program is called."""
NUMBERS = {
    "same": "",
    "rounding": "",
    "type": "; another type changes the losses: compare them",
}
"""What to say about the numbers that a fix changes."""


def addressed(
    finding: Finding,
    settings: CompletedProgramSettings,
    places: Mapping[str, str],
    optimizers: Mapping[str, Sequence[str]],
    names: Names = UNNAMED,
) -> Finding:
    """Adds the code for its fix to a finding; removes the fix if the probe cannot make the change.

    `places` and `optimizers` are those of `events.ModelBuilt`, and `names` those of `source_names`.
    """
    known = from_outside()
    by_hand = msgspec.structs.replace(finding, fix={}, code=_concerned(finding.place, places, optimizers))
    try:
        apply_overrides(settings, finding.fix)
    except SettingsError:
        return by_hand
    if not finding.fix or not finding.fix.keys() <= known.keys():
        return by_hand
    numbers = "".join(dict.fromkeys(NUMBERS[known[key].numbers] for key in finding.fix))
    code = in_code(finding.fix, places, optimizers, names)
    return msgspec.structs.replace(finding, advice=finding.advice + numbers, code=code)


def _concerned(place: Place | None, places: Mapping[str, str], optimizers: Mapping[str, Sequence[str]]) -> str:
    """The calls of the program that advice without a fix is about; an empty string if they are unknown."""
    if place is None or not (optimizers if place == "optimizer" else place in places):
        return ""
    if place == "model":
        return f"the model that is called at {places[place]}"
    return "; ".join(_located("DataLoader", "(...)", place, places, optimizers))


def in_code(
    fix: Mapping[str, Any],
    places: Mapping[str, str],
    optimizers: Mapping[str, Sequence[str]],
    names: Names = UNNAMED,
) -> str:
    """The code that does the same as a fix, with its place in the program as far as it is known.

    `places` and `optimizers` are those of `events.ModelBuilt`, and `names` those of `source_names`. Arguments of the
    same call are combined.
    """
    known = from_outside()
    calls: dict[tuple[str, Place], list[str]] = {}
    for key, value in fix.items():
        code = renamed(known[key].in_code(value), names)
        call, _, arguments = code.partition("(") if code.endswith(")") else (code, "", "")
        found = calls.setdefault((call, known[key].place), [])
        found += [each for each in arguments.removesuffix(")").split(", ") if each and each not in found]
    return "; ".join(
        one
        for (call, place), given in calls.items()
        for one in _located(call, f"({', '.join(given)})" if given else "", place, places, optimizers)
    )


def _located(
    call: str, arguments: str, place: Place, places: Mapping[str, str], optimizers: Mapping[str, Sequence[str]]
) -> list[str]:
    """The call with its place in the program if it is known, or that of every class of optimizers."""
    if place == "optimizer" and optimizers:
        return [
            f"{name}{arguments}" + (f" at {units.listed(lines)}" if lines else "") for name, lines in optimizers.items()
        ]
    if place not in AT or place not in places:
        return [f"{call}{arguments}"]
    others = {kind.removeprefix(f"{place} "): line for kind, line in places.items() if kind.startswith(f"{place} ")}
    if place == "loader":
        return [f"{call}{arguments} {AT[place].format(units.listed([places[place], *others.values()]))}"]
    likewise = "".join(f", and likewise {name}" for name in list(others)[1:] if not name.isdigit())
    return [f"{call}{arguments} {AT[place].format(places[place])}{likewise}"]
