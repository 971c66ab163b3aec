"""The project's two extra log levels, and how one record becomes one structured line.

NOTIMPORTANT (5) is chatter below DEBUG. MODIFIABLE (25) names a setting that the user could change, with its key: it
is shown by default, above INFO, because it is what a reader of a benchmark wants to know first.
"""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

NOTIMPORTANT = 5
MODIFIABLE = 25

logging.addLevelName(NOTIMPORTANT, "NOTIMPORTANT")
logging.addLevelName(MODIFIABLE, "MODIFIABLE")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """What the caller attached with `extra={"fields": {...}}`."""
    fields = getattr(record, "fields", None)
    return dict(fields) if isinstance(fields, Mapping) else {}


def render_logfmt(
    when: float, level: int, rank: int | None, logger: str, message: str, fields: Mapping[str, Any]
) -> str:
    """One line of run.log: `time=... level=... rank=... logger=... msg="..." key=value ...`, JSON-quoted where needed.

    `when` is in seconds since the epoch; `rank` is None for the host process.
    """
    stamp = datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    pairs = {
        "time": stamp,
        "level": logging.getLevelName(level),
        "rank": "host" if rank is None else rank,
        "logger": logger,
        "msg": message,
        **fields,
    }
    return " ".join(f"{key}={_quote(value)}" for key, value in pairs.items())


def _quote(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    plain = text and all(c.isprintable() and c not in ' "=' for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


class LogfmtFormatter(logging.Formatter):
    """Formats the host's own records like the workers'."""

    def format(self, record: logging.LogRecord) -> str:
        rank = getattr(record, "rank", None)
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return render_logfmt(record.created, record.levelno, rank, record.name, message, fields_of(record))
