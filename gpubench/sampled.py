"""What a program's own code did in a repeat that was sampled: samples of stacks, by function and line."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Text = Annotated[str, Meta(max_length=200)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]


class SampledFunction(Struct, frozen=True):
    """A function of the program, with the samples in which it was the innermost one of the program.

    It may have called a package or what is written in C.
    """

    phase: Text
    """The phase of the loop; empty in a worker of a DataLoader."""
    file: Text
    """Its file; empty for a function of a package that makes a batch without code of the program."""
    function: Text
    first_line: Count
    samples: Count
    line: Count
    """The line with most of the samples."""
    on_line: Count
    """The samples on that line."""
    source: Text = ""
    """The text of that line; empty if it could not be read."""
    within: Text = ""
    """The function of a package in which it was in at least half of the samples; empty for none in Python."""

    @property
    def place(self) -> str:
        """Where it begins, as "data.py:14"."""
        return f"{self.file}:{self.first_line}" if self.file else ""


class Sampled(Struct, frozen=True):
    """The samples of the thread that trains, or of the workers of its DataLoaders."""

    processes: Count
    """The number of worker processes; 0 for the thread that trains."""
    samples: Count
    waiting: Count
    """The samples in which a worker waits for its next batch to make."""
    functions: Annotated[list[SampledFunction], Meta(max_length=1000)]
    """The functions with most samples, most first."""


class SeenCall(Struct, frozen=True):
    """A call of PyTorch that a line of the program makes, itself or through a package, in one step."""

    kind: Literal["read", "float64", "softmax", "autocast"]
    """Whether it reads a value of a tensor, makes numbers of float64, computes a softmax as attention does, or enters a
    context of autocast."""
    name: Text
    """The function, such as "item"."""
    phase: Text
    """The phase of the loop; "set-up" for what is called before any step."""
    file: Text
    """Its file; empty where a package makes a batch without code of the program."""
    function: Text
    line: Count
    calls: Count
    source: Text = ""
    """The text of the line; empty if it could not be read."""
    within: Text = ""
    """The function of a package that the line calls, and that makes the call; empty for none."""

    @property
    def place(self) -> str:
        """The line, as "train.py:31"."""
        return f"{self.file}:{self.line}" if self.file else ""


Calls = Annotated[list[SeenCall], Meta(max_length=1000)]


class SampledCode(Struct, frozen=True):
    """The samples of one rank, and the calls of one of its steps, those made most first."""

    main: Sampled
    workers: Sampled
    calls: Calls = []
