"""Does `profile` name a fault that was put into a program, and none of them in the program without?"""

import sys
from collections.abc import Iterator, Mapping

import bars
from bars import Bar

from first_checks.here import PROGRAMS, Failed, Here

NAMED: Mapping[str, tuple[str, ...]] = {
    "item": ("synchronisation",),
    "pageable": ("pinning", "blocking-copies"),
    "loader": ("too-few-workers", "data-loading"),
    "float64": ("float64",),
    "launches": ("launch-bound", "python-bound"),
}
"""By fault of faulty.py: the ids of findings of which one has to be there."""
OF_ANY_SIZE = {"pageable"}
"""The faults that are named by what is copied, and not by what the device waits for."""
SHOWN = {
    "none": "a program without these faults",
    "item": "the loss is read in each step",
    "pageable": "batches are copied from pageable memory",
    "loader": "a slow data set has no workers",
    "float64": "matrix products are in float64",
    "launches": "kernels are shorter than their launches",
}
OPTIONS = ("--repeats=1", "--steps=20", "--training.warmup_steps=10")


def check(here: Here) -> Iterator[Bar]:
    for fault in ("none", *NAMED):
        if here.tiny and not here.parts and fault not in OF_ANY_SIZE:
            yield bars.skipped(shown(fault), "programs as small as these are bound by Python, whatever their fault")
        elif here.wants(fault):
            yield planted(here, fault)


def shown(fault: str) -> str:
    return f"profile, {SHOWN[fault]}"


def planted(here: Here, fault: str) -> Bar:
    what = shown(fault)
    program = [sys.executable, str(PROGRAMS / "faulty.py"), fault, *(("256",) if here.tiny else ())]
    try:
        run = here.run("profile", *OPTIONS, program=program)
    except Failed as failed:
        return bars.holds(what, str(failed), "the run completes", good=False)
    found = {one["id"]: one["severity"] for one in run.document("findings.json")["findings"]}
    return judged(what, fault, found)


def judged(what: str, fault: str, found: Mapping[str, str]) -> Bar:
    """Judges the findings, which are severities by id."""
    named = ", ".join(f"{name} ({severity})" for name, severity in found.items()) or "nothing"
    if fault == "none":
        false = [name for names in NAMED.values() for name in names if found.get(name) == "high"]
        return bars.holds(what, named, "none of them is of high severity", good=not false)
    return bars.holds(what, named, " or ".join(NAMED[fault]), good=any(name in found for name in NAMED[fault]))
