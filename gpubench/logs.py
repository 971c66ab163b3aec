"""Two additional log levels, and the format of structured log lines.

NOTIMPORTANT (5) is for details below DEBUG. MODIFIABLE (25), above INFO and shown by default, is for what gpubench
chose and the user can change. A terminal shows such a line without the name of its level.
"""

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

NOTIMPORTANT = 5
MODIFIABLE = 25
CHOICES = "gpubench.choices"
"""The logger of the settings that were chosen for a run. The console shows the line of a command's first run only."""
WORKER_OUTPUT = "gpubench.worker.output"
"""The logger of what workers print."""
PROGRAM_OUTPUT = "gpubench.program.output"
"""The logger of what a program of the user prints. Its lines go to the console only."""

logging.addLevelName(NOTIMPORTANT, "NOTIMPORTANT")
logging.addLevelName(MODIFIABLE, "MODIFIABLE")


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields that the caller passed with `extra={"fields": {...}}`."""
    fields = getattr(record, "fields", None)
    return dict(fields) if isinstance(fields, Mapping) else {}


def render_logfmt(
    when: float, level: int, rank: int | None, logger: str, message: str, fields: Mapping[str, Any]
) -> str:
    """Formats a line of run.log: `time=... level=... rank=... logger=... msg="..." key=value ...`.

    Values are quoted as in JSON where needed. `when` is in seconds since the epoch; `rank` is None for the host.
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
    """Formats the host's log records like the records that workers send."""

    def format(self, record: logging.LogRecord) -> str:
        rank = getattr(record, "rank", None)
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self.formatException(record.exc_info)
        return render_logfmt(record.created, record.levelno, rank, record.name, message, fields_of(record))
