"""How the command line shows a setting that has an option of its own, beside the one by its dotted name."""

from typing import NamedTuple

MODEL, MEASUREMENT, YOUR_PROGRAM, OUTPUT = "Model and data", "Measurement", "Your program", "Output"
SAMPLING, PIPELINE = "Sampling", "Pipeline"


class Option(NamedTuple):
    """How the command line shows a setting by its alias, or by its name if it is in no section.

    A declaration leaves out what its field says already: the words of the type, and the description.
    """

    panel: str
    """The heading that it stands under in the help."""
    metavar: str = ""
    """The placeholder of its value; by default the words that the type consists of. A switch has none."""
    help: str = ""
    """A sentence; by default the description without its default."""
    several: str = ""
    """How the sentence goes on in a command that measures several values in one table."""
    found_by: str = ""
    """The function of `commands.completion` that finds what shells offer; by default the words of the metavar."""
    is_open: bool = False
    """Whether a switch that is not set is neither on nor off, and has an option for each."""
