"""Prompts for a diffusion model: one a line."""

from pathlib import Path

from gpubench.errors import DataError

WITHOUT_FILE = [""]


def read_prompts(path: Path | None) -> list[str]:
    """The lines of a text file that are not blank; one empty prompt where there is no file.

    Raises DataError for a file that cannot be read or holds none.
    """
    if path is None:
        return WITHOUT_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise DataError(
            f"the prompts file {path} cannot be read: {reason}", "give a text file, one prompt a line"
        ) from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise DataError(f"the prompts file {path} is empty", "write one prompt a line")
    return prompts
