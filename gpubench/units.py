"""Formats numbers with units for reports, and reads whole ones."""

import math
from collections.abc import Callable, Iterable, Sequence

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
MIB = 2**20
SMALLEST_PERCENT = 0.5e-4  # smaller shares round to 0 in four decimals


def seconds(value: float) -> str:
    """Formats a duration in the unit that gives one to three digits before the decimal point."""
    size = abs(value)
    if size >= 120:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s"
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if size >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-9)} ns" if value else "0 s"


def about(value: float) -> str:
    """Formats an estimated duration in whole seconds below two minutes, and else in whole minutes or hours."""
    if value < 120:
        return f"{max(1, round(value))} s"
    return f"{round(value / 60)} min" if value < 7200 else f"{value / 3600:.1f} h"


def count(value: float, unit: str = "") -> str:
    """Formats a number with an SI prefix, such as "25.6 M"."""
    for scale, prefix in _SI:
        if abs(value) >= scale:
            return f"{digits(value / scale)} {prefix}{unit}"
    return f"{digits(value)} {unit}".rstrip()


def rate(value: float, unit: str) -> str:
    """Formats a rate without an SI prefix, such as "12,345 samples/s"."""
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{digits(value)} {unit}"


def counted(number: int, noun: str) -> str:
    """Formats a number with its noun: "1 repeat", "2 repeats", "12,000 runs"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(names: Iterable[str]) -> str:
    """Joins names as "a, b and c". `names` must not be empty."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def words(name: str) -> str:
    """Formats an internal name as words: "data_wait" becomes "data wait". A path, or a file's name, stays as it is."""
    return name if "/" in name or "." in name else name.replace("_", " ")


def size(value: float) -> str:
    """Formats a number of bytes with a binary prefix, such as "1.50 GiB"."""
    for scale, unit in _BINARY:
        if abs(value) >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def percent(value: float) -> str:
    """Formats a fraction in percent, with two digits and at most tenths, never in exponential notation."""
    if 0 < abs(value) < 1e-6:
        return "<0.0001 %"
    return f"{value * 100:.1f} %" if abs(value) >= 0.0995 else f"{value * 100:.2g} %"


def whole_percent(value: float) -> str:
    """Formats a fraction in percent without decimals."""
    return f"{value * 100:.0f} %"


def difference(fraction: float) -> str:
    """Formats a relative difference in percent, or as a factor if it is 100 % or more."""
    if fraction < 1:
        return percent(fraction)
    factor = 1 + fraction
    return f"{factor:.1f} x" if factor < 10 else f"{factor:,.0f} x"


def times(excess: float) -> str:
    """Formats how long something takes, by the fraction by which it exceeds another time: "1.34 times"."""
    return f"{digits(1 + excess, 3 if excess < 1 else 2)} times"


def signed_percent(fraction: float, places: int | None = None) -> str:
    """Formats a change in percent with `places` decimals, or else with two digits and at least tenths."""
    change = fraction * 100
    if places is None:
        if abs(change) < SMALLEST_PERCENT:
            return "+0 %"
        places = min(4, max(1, 1 - math.floor(math.log10(abs(change)))))
    return f"{change:+.{places}f} %"


def signed_seconds(value: float) -> str:
    """Formats a change of a time with its sign."""
    return f"{'-' if value < 0 else '+'}{seconds(abs(value))}"


def digits(value: float, significant: int = 3) -> str:
    """Formats a number with three significant digits, or as many as are asked for; a whole number stays whole."""
    size_ = abs(value)
    if size_ < 1 and value != int(value):
        return f"{value:.{significant}g}"
    before = 1 if size_ < 10 else 2 if size_ < 100 else 3
    return f"{value:,.0f}" if value == int(value) else f"{value:,.{max(0, significant - before)}f}"


def factors(ratio: float, ends: Sequence[float]) -> tuple[str, list[str]]:
    """Formats a ratio and the ends of its interval, with two significant digits where the ends differ by a factor of
    two, and with three elsewhere.
    """
    significant = 2 if ends and max(ends) > 2 * min(ends) else 3
    return digits(ratio, significant), [digits(end, significant) for end in ends]


def span(low: float, high: float, unit: str) -> str:
    """Formats a range such as "13.4 to 331 samples/s". If the units of the ends differ, both are given."""
    first, second = (quantity(end, unit) for end in (low, high))
    figure, _, named = first.partition(" ")
    if first == second:
        return first
    one_unit = second.endswith(f" {named}") and second.count(" ") == 1  # "2 min 3 s" has two
    return f"{figure if one_unit else first} to {second}"


_FORMATS: dict[str, Callable[[float], str]] = {
    "s": seconds,
    "B": size,
    "fraction": percent,
    "FLOP": lambda value: count(value, "FLOP"),
    "FLOP/s": lambda value: count(value, "FLOP/s"),
    "x": lambda value: f"{value:.2f} x",
}


def quantity(value: float, unit: str) -> str:
    """Formats the value of a metric in its unit."""
    if unit in _FORMATS:
        return _FORMATS[unit](value)
    return rate(value, unit).strip()


def whole(text: str) -> int | None:
    """Returns a whole number of at most nine digits; None for any other text. Python refuses thousands."""
    return int(text) if text.isdecimal() and len(text) < 10 else None
