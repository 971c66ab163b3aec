"""What the command line says when it refuses."""

from running import Finished


def complaint(done: Finished) -> tuple[str, str]:
    """The error and the hint of a refusal, which is exactly one line of each, exit code 2, and no traceback."""
    assert done.code == 2, done
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    hints = [line for line in done.stderr.splitlines() if line.startswith("hint: ")]
    assert (len(errors), len(hints)) == (1, 1), done.stderr
    return errors[0].removeprefix("error: "), hints[0].removeprefix("hint: ")
