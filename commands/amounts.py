"""Times and sizes of memory, as the options of several commands take them."""

import re

from gpubench.errors import UsageError, offer
from gpubench.units import whole

UNITS = {
    "s": 1,
    "sec": 1,
    "second": 1,
    "m": 60,
    "min": 60,
    "minute": 60,
    "h": 3600,
    "hr": 3600,
    "hour": 3600,
    "d": 86400,
}
"""The units of a time in seconds; those that are words may end in s."""
PART = re.compile(r"(\d+(?:\.\d+)?|\.\d+) *([a-z]+) *")


def seconds(text: str, option: str) -> float:
    """Returns a time such as "30m" or "1h 30min" in seconds. Raises UsageError if it is not a time, or has no unit."""
    plain = text.strip().lower()
    parts = PART.findall(plain)
    units = [UNITS.get(unit) or UNITS.get(unit.removesuffix("s")) for _, unit in parts]
    found = sum(float(number) * (unit or 0) for (number, _), unit in zip(parts, units, strict=True))
    if "".join(PART.split(plain)[::3]) or not all(units) or not 0 < found < 1e9:
        if whole(plain):
            raise UsageError(f"{option} {text!r} has no unit", offer([f"{option} {plain}m", f"{option} {plain}h"]))
        raise UsageError(f"{option} {text!r} is not a time", "write 90s, 30m, 2h or 1h30m")
    return found


def memory(text: str, option: str) -> float:
    """Returns a size such as "22GiB" in bytes. Raises UsageError if it is not a size, or is 0."""
    from gpubench.settings.sections import size_in_bytes

    try:
        found = float(size_in_bytes(text))
    except ValueError as error:
        message, _, meant = str(error).partition(": did you mean ")
        hint = offer([f"{option} {meant.rstrip('?')}"]) if meant else f"for example {option} 22GiB"
        raise UsageError(f"{option}: {message}", hint) from None
    if found == 0:
        raise UsageError(f"{option} 0 leaves no memory", f"for example {option} 22GiB")
    return found
