"""The option --loss-margin: the largest change of the loss that does not matter."""

from typing import TYPE_CHECKING

from gpubench.errors import UsageError

if TYPE_CHECKING:
    from gpubench.compare.losses import Margin


def parse(text: str | None) -> "Margin":
    """Returns a change of the loss, such as 1% of the final one, or 0.02, or the default one for None.

    Raises UsageError if it is neither.
    """
    from gpubench.compare.losses import DEFAULT, Margin  # not loaded for a command that compares nothing

    if text is None:
        return DEFAULT
    is_share = text.endswith("%")
    try:
        size = float(text.removesuffix("%")) / (100 if is_share else 1)
    except ValueError:
        size = 0.0
    if not 0 < size < (1 if is_share else 1e9):
        raise UsageError(
            f"--loss-margin {text!r} is not a change of a loss",
            "write a share of the final loss, such as 1%, or a number in its own unit, such as 0.02",
        )
    return Margin(size, is_share, is_set=True)


def of_comparison(text: str | None, *, compared: bool) -> "Margin | None":
    """Returns the --loss-margin of a command that may compare two sides; None if it is not given.

    Raises UsageError if it is not one, or if nothing is compared.
    """
    if text is not None and not compared:
        raise UsageError(
            "--loss-margin judges a comparison, and nothing is compared",
            "add --vs-ref COMMIT, --vs-args ARGUMENTS or --vs KEY=VALUE",
        )
    return None if text is None else parse(text)
