"""Starts the command line, and says in one line what stands in the way of every command: no memory, no directory."""

import errno
import mmap
import os
import resource
import sys
from collections.abc import Iterator

NO_LINK = (
    "gpubench/commands must be a symbolic link to ../commands, and is not one in this checkout",
    "set git config core.symlinks true and check out again, or run pip install . and then gpubench",
)
NO_MEMORY = (
    "there is not enough memory for gpubench",
    "end other programs, or raise the limit: ulimit -v, that of the batch job or that of the container",
)
NO_THREAD = (
    "no further thread can be started",
    "end other programs, or raise the limit on memory or on processes: ulimit -v, ulimit -u, that of the container",
)
NO_DIRECTORY = ("the current directory does not exist any more", 'change to one that does: cd "$PWD", or cd ~')
BESIDE_NUMPY = 96 * 2**20
"""The bytes of memory that the modules of a command take beside numpy."""
STANDARD_ERROR = 2
UNLOADED = ("failed to map segment", "Cannot allocate memory")
"""What the loader of libraries says if there is no memory for one."""


def main() -> None:
    try:
        if not _loads_numpy():
            raise MemoryError
        from gpubench.commands import main as command_line

        command_line()
    except KeyboardInterrupt:  # while the modules are imported
        sys.exit(130)
    except Exception as error:
        said = _explanation(error)
        if not said:
            raise
        print("error: {}\nhint: {}".format(*said), file=sys.stderr)
        sys.exit(1 if said in (NO_MEMORY, NO_THREAD) else 2)


def _loads_numpy() -> bool:
    """Whether there is memory for numpy, which ends the process without an exception if there is not.

    It is tried in a child if the memory is limited, which it rarely is.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return True
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), STANDARD_ERROR)  # the parent says it
        with mmap.mmap(-1, BESIDE_NUMPY):
            import numpy  # noqa: F401
        os._exit(0)
    finally:
        os._exit(1)


def _explanation(error: BaseException) -> tuple[str, str] | None:
    """The message and the hint for an error that says nothing about gpubench; None for any other."""
    if isinstance(error, ModuleNotFoundError) and error.name == "gpubench.commands":
        return NO_LINK
    if any(map(_is_of_memory, _with_causes(error))):
        return NO_MEMORY
    if isinstance(error, RuntimeError) and str(error) == "can't start new thread":
        return NO_THREAD
    if isinstance(error, FileNotFoundError) and not _has_directory():
        return NO_DIRECTORY
    return None


def _is_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, ImportError) and any(words in str(error) for words in UNLOADED))
    )


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _has_directory() -> bool:
    """Whether the current directory exists."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
