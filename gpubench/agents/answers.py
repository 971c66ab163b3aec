"""Makes an answer of what a command printed with --json, short enough to be read by a model.

The document is shortened and not written anew: its keys and values stay those of --json, numbers are rounded, and what
is unknown or empty is left out. What matters most comes first, and what does not fit is named with its size, so that it
can be asked for.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from gpubench.errors import UsageError

MOST = 8_000
"""The characters of an answer, which are about 2,000 tokens."""
CHARACTERS_A_TOKEN = 4
NAMED = 8
"""The number of parts that an answer names as left out, each in at most a line of `LINE` characters."""
LINE = 110
SHARE = 2 / 3
"""The share of what room is left that one value may take, so that those after it have some too."""
LEAST = 120
"""The characters below which no part of a value is given."""
DIGITS = 4
FIRST = (
    *("error", "decision", "verdict", "answer", "reasons", "headline", "metric", "name", "title", "code"),
    *("fix", "expected", "measured", "evidence", "advice", "cause", "estimate", "ratio", "interval", "unit"),
    *("findings", "comparisons", "conclusion", "codes", "comparability", "verdicts", "explanation", "keep"),
    *("warnings", "metrics", "runs"),
)
"""The keys that come first, in this order. The others follow as they are; if room is short, the shortest are kept."""
OF_A_METRIC = ("name", "estimate", "low", "high", "interval", "unit")
OF_AN_ENTRY = ("run_id", "path", "command", "model", "variant", "name", "tags", "status", "started", "error")
LEADING = 2
"""The number of metrics of a run in a list. The first ones are those that lead."""
MOST_SUGGESTED = 12


def of_runs(document: Mapping[str, Any]) -> Any:
    """Returns what a command printed that made runs: its only run, or how two compare and the first figures of each."""
    runs = [run | {"metrics": [_metric(one) for one in run["metrics"]]} for run in document["runs"]]
    if len(runs) == 1:
        return runs[0]
    brief = [
        {key: run[key] for key in ("path", "status", "error", "warnings")} | {"metrics": run["metrics"][:LEADING]}
        for run in runs
    ]
    return {**document, "runs": brief}


def of_listing(document: Mapping[str, Any]) -> Any:
    """Returns the list of runs with what identifies each, and its first figures."""
    return {"runs": [_entry(run) for run in document["runs"]]}


def of_shown(document: Mapping[str, Any]) -> Any:
    """Returns the only run of a list with all its results."""
    (run,) = document["runs"]
    shown = run["documents"]
    figures = {"metrics": [_metric(one) for one in shown["metrics"]]} if "metrics" in shown else {}
    return {key: run[key] for key in OF_AN_ENTRY} | shown | figures


def _entry(run: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {name: _metric(one) for name, one in list((run["metrics"] or {}).items())[:LEADING]}
    return {key: run[key] for key in OF_AN_ENTRY} | {"metrics": metrics}


def _metric(metric: Mapping[str, Any]) -> dict[str, Any]:
    return {key: metric[key] for key in OF_A_METRIC if key in metric}


def written(value: Any, more: str, part: str = "", first: int = 0) -> str:
    """Returns a part of a document as JSON in at most `MOST` characters.

    `part` is a path in it, such as findings.findings.0; of a list, the items before `first` are skipped. `more` says
    how to ask for another part. Raises UsageError for a part that there is not.
    """
    whole = _concise(value)
    found = _at(whole, part)
    if isinstance(found, list):
        found = found[first:]
    omitted: dict[str, str] = {}
    room = MOST - NAMED * LINE - len(more) - len(part) - LEAST
    answer = _fitted(found, room, _Path(part, omitted, first))
    if part:
        answer = {"part": part, **({"first": first} if first else {}), "value": answer}
    elif not isinstance(answer, dict):
        answer = {"value": answer}
    if omitted:
        named = {name: said for name, said in omitted.items() if len(name) + len(said) < LINE - 6}
        answer = {**answer, "omitted": dict(list(named.items())[:NAMED]), "more": more}
    return _text(answer)


class _Path:
    """Where a value is in the document, and what is left out of it. `first` is the number of its first item."""

    def __init__(self, name: str, omitted: dict[str, str], first: int = 0) -> None:
        self.name = name
        self.omitted = omitted
        self.first = first

    def at(self, key: object) -> "_Path":
        return _Path(f"{self.name}.{key}".lstrip("."), self.omitted)

    def leave_out(self, value: Any, what: str = "") -> None:
        self.omitted[self.name] = f"{what}about {max(1, len(_text(value)) // CHARACTERS_A_TOKEN):,} tokens"


def _fitted(value: Any, room: int, path: _Path) -> Any:
    """Returns what of a value takes at most `room` characters as JSON, and names the rest in the path."""
    if len(_text(value)) <= room:
        return value
    if isinstance(value, dict):
        return _fitted_dict(value, room, path)
    if isinstance(value, list):
        return _fitted_list(value, room, path)
    path.leave_out(value)
    return _shortened(str(value), room)


def _fitted_dict(value: dict[str, Any], room: int, path: _Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    room -= len("{}")
    for key in sorted(value, key=lambda key: (_rank(key), len(_text(value[key])))):
        item = value[key]
        around = len(_text(key)) + len(":,")
        may = int(room * SHARE) - around
        size = len(_text(item))
        if size > may and (may < LEAST or not isinstance(item, (dict, list, str))):
            path.at(key).leave_out(item)
            continue
        found[key] = _fitted(item, may, path.at(key))
        room -= around + len(_text(found[key]))
    return {key: found[key] for key in value if key in found}


def _fitted_list(value: list[Any], room: int, path: _Path) -> list[Any]:
    found: list[Any] = []
    room -= len("[]")
    for number, item in enumerate(value, path.first):
        size = len(_text(item)) + len(",")
        if size <= room:
            found.append(item)
            room -= size
            continue
        if not found and room > LEAST:  # otherwise there would be nothing of the list
            found.append(_fitted(item, room, path.at(number)))
            number += 1
        if rest := value[number - path.first :]:
            path.leave_out(rest, f"items from {number} to {path.first + len(value) - 1}, ")
        break
    return found


def _concise(value: Any) -> Any:
    """Returns a value with rounded numbers, without what is unknown or empty, and with what matters most first."""
    if isinstance(value, dict):
        kept = {key: _concise(item) for key, item in value.items() if key != "schema_version"}
        known = {key: item for key, item in kept.items() if item not in (None, "", [], {})}
        return {key: known[key] for key in sorted(known, key=_rank)}
    if isinstance(value, list):
        return [_concise(item) for item in value]
    return _rounded(value) if isinstance(value, float) else value


def _rounded(number: float) -> float:
    """Returns a number with `DIGITS` significant digits, and with all of those before its decimal point."""
    has_all = 10 ** (DIGITS - 1) <= abs(number) < math.inf
    return round(number) if has_all else float(f"{number:.{DIGITS}g}")


def _rank(key: str) -> int:
    return FIRST.index(key) if key in FIRST else len(FIRST)


def _at(value: Any, part: str) -> Any:
    """Returns the part of a document with this path. Raises UsageError if there is none."""
    found, rest = value, f"{part}." if part else ""
    while rest:
        key = _key(found, rest)
        if key is None:
            raise UsageError(f"there is no part {part!r}: {rest.partition('.')[0]!r} is not there", _parts(found))
        found, rest = found[int(key) if isinstance(found, list) else key], rest[len(key) + 1 :]
    return found


def _key(value: Any, rest: str) -> str | None:
    """Returns the longest key of `value`, as keys may contain dots, with which a path begins; None if it has none."""
    if isinstance(value, list):
        key = rest.partition(".")[0]
        is_number = key.isdecimal() and len(key) <= len(str(len(value)))  # Python refuses very long ones
        return key if is_number and int(key) < len(value) else None
    known = value if isinstance(value, dict) else {}
    return max((key for key in known if rest.startswith(f"{key}.")), key=len, default=None)


def _parts(value: Any) -> str:
    if isinstance(value, dict):
        return f"its parts are {', '.join(list(value)[:MOST_SUGGESTED])}"
    return f"its items are 0 to {len(value) - 1}" if isinstance(value, list) and value else "it has no parts"


def _shortened(text: str, room: int) -> str:
    """Returns the beginning of a text that takes at most `room` characters as JSON."""
    while text and len(_text(text)) + 1 > room:
        text = text[: min(len(text) - 1, len(text) * max(room, 0) // len(_text(text)))]
    return f"{text}…"


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="backslashreplace").decode()  # the escapes of lone surrogates are those of JSON
