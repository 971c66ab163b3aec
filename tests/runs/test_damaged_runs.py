"""Whatever happens to a run directory, reading it works or says which file is at fault."""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from damages import DAMAGES, Damage
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_runs import write_run

from gpubench.compare.evidence import RunEvidence, open_run
from gpubench.errors import GpubenchError
from gpubench.runs.directory import CONFIG, ENVIRONMENT, RUN, STEPS, SUMMARY, TELEMETRY

FILES = st.sampled_from([RUN, SUMMARY, STEPS, TELEMETRY, CONFIG, ENVIRONMENT])


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("pristine"), repeats=2, ranks=2, steps=16)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(damages=st.lists(st.tuples(FILES, DAMAGES), min_size=1, max_size=3, unique_by=lambda damage: damage[0]))
def test_a_damaged_run_reads_or_is_refused_by_name(pristine: Path, damages: list[tuple[str, Damage]]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / pristine.name
        shutil.copytree(pristine, path)
        for name, damage in damages:
            damage(path / name)
        run = refused = None
        try:
            run = open_run(path)
        except GpubenchError as error:
            refused = error
        if run:
            check(run)
        else:
            assert refused
            assert str(path) in refused.message
            assert "\n" not in refused.message


def check(run: RunEvidence) -> None:
    """What holds of everything that opens."""
    assert isinstance(run.telemetry, list)
    assert (run.steps.total > 0).all()
    for metric in run.metrics:
        for series in run.series(metric) or []:
            assert len(series)
            assert np.isfinite(series).all()
    for problem in run.problems:
        assert problem.startswith(str(run.path))
        assert "\n" not in problem
