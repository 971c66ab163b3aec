"""Text with lone surrogates: names of files that are not UTF-8, which no format of a file can hold."""

from pathlib import Path
from typing import Any


def without_surrogates(value: Any) -> Any:
    """Replaces lone surrogates by escapes, also inside of dictionaries, lists and tuples."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {without_surrogates(key): without_surrogates(each) for key, each in value.items()}
    return [without_surrogates(each) for each in value] if isinstance(value, list | tuple) else value


def is_text(value: str | Path) -> bool:
    try:
        str(value).encode()
    except UnicodeEncodeError:
        return False
    return True
