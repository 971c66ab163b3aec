"""What becomes of trials that the user ends: what was known until then is kept."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gpubench.commands.trying import _keep
from gpubench.errors import Interrupted, RunFailed
from gpubench.findings import Findings

FOUND = Findings(headline="before", findings=[], unanswered=[])
TRIED = Findings(headline="after", findings=[], unanswered=[])


class Keeping:
    def __init__(self, path: Path) -> None:
        self.findings = FOUND
        self.writer = SimpleNamespace(path=path)

    def conclude(self, findings: Findings) -> None:
        self.findings = findings


def ending(error: BaseException) -> Iterator[Findings]:
    yield TRIED
    raise error


@pytest.mark.parametrize("error", [Interrupted("interrupted"), KeyboardInterrupt()])
def test_what_was_tried_before_an_interrupt_is_kept_and_marked(tmp_path: Path, error: BaseException) -> None:
    recorder = Keeping(tmp_path)
    ended = _keep(ending(error), recorder.conclude, cast("Any", recorder))
    assert isinstance(ended, Interrupted)
    assert recorder.findings == msgspec.structs.replace(TRIED, interrupted=True)


def test_what_was_tried_before_a_failure_is_kept_as_it_is(tmp_path: Path) -> None:
    recorder, error = Keeping(tmp_path), RunFailed("the disk is full")
    assert _keep(ending(error), recorder.conclude, cast("Any", recorder)) is error
    assert recorder.findings == TRIED
