"""Prompts for a diffusion model: one a line."""

from collections.abc import Sequence
from pathlib import Path

from gpubench import foreign_files
from gpubench.errors import DataError


def read_prompts(path: Path | None) -> list[str]:
    """The lines of a text file that are not blank; none where there is no file.

    Raises DataError for a file that cannot be read or holds none.
    """
    if path is None:
        return []
    try:
        text = foreign_files.content(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(
            f"work.prompts: the file {path} cannot be read: {reason}", "give a text file, one prompt a line"
        ) from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise DataError(f"work.prompts: the file {path} is empty", "write one prompt a line")
    return prompts


def prompt_of(sample: int, prompts: Sequence[str]) -> str | None:
    """Prompts are used in turn; None where there are none."""
    return prompts[sample % len(prompts)] if prompts else None
