"""The project's own tests that need a GPU."""

from pathlib import Path

from gpu_jobs.job import Job

ROOT = Path(__file__).resolve().parents[2]


def testing() -> tuple[Job, ...]:
    """First those that only a real device can judge, then those that a simulated one has judged before."""
    tests = (path for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text())
    files = sorted(str(path.relative_to(ROOT)) for path in tests)
    return tuple(
        Job(
            f"tests-{mark}",
            ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", f"gpu and {mark}", *files),
            shows,
            seconds,
        )
        for mark, shows, seconds in (
            ("device", "tests that only a real device can judge: speeds, kernels, compilation", 240.0),
            ("simulated", "the other tests that need a GPU", 170.0),
        )
    )
