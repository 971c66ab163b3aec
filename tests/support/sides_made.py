"""Runs of the two sides of a pull request, of which one may be slower."""

from pathlib import Path

import msgspec
import pytest
import recorded_runs

from gpubench.events import Step

PACES = (1.0, 1.001, 0.999, 1.0005)  # of four runs of one thing


def make_runs(results: Path, side: str, slower: float) -> None:
    """Writes four runs to the folder `side` of `results`, each step `slower` times as long."""
    usual = recorded_runs.step
    for pace in PACES:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(recorded_runs, "step", lambda *given, by=slower * pace: slowed(usual(*given), by))
            recorded_runs.write_run(results, side, repeats=1)


def slowed(step: Step, by: float) -> Step:
    phases = {name: seconds * by for name, seconds in step.phases.items()}
    return msgspec.structs.replace(step, time=step.time * by, total=step.total * by, phases=phases)
