"""benchmarks/suite.py: what becomes of a benchmark that passes, misses, fails or hangs, and of the page."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from places import BENCHMARKS
from running import PATIENCE, environment

PASSES = """
import bars, sys
print("| a | table |")
sys.exit(bars.conclude([bars.at_most("time", 0.8, 1.0, "{:.1f} s")]))
"""
MISSES = """
import bars, sys
sys.exit(bars.conclude([bars.at_most("time", 1.2, 1.0, "{:.1f} s"), bars.every("exact", 3, 3)]))
"""
UNDECIDED = """
import bars, sys
sys.exit(bars.conclude([bars.near_one("cost", 1.0, (0.98, 1.02), 0.01)]))
"""
NOT_JUDGED = "print('figures alone')"
FAILS = "import sys; print('half a table'); sys.exit('error: no such thing')"
BREAKS = "import sys; print('nothing was judged'); sys.exit(3)"
HANGS = "import time; print('begun', flush=True); time.sleep(600)"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of the benchmarks, which import each other as scripts do."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def suite(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Runs made benchmarks, by name their program, and returns the exit code and the page."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent))))
    module = load("suite")
    machine = load("records").Machine("a CPU", "1 GiB", "none", "Linux", "Python 3", "commit 1")
    monkeypatch.setattr(module.Machine, "here", classmethod(lambda _: machine))
    monkeypatch.setattr(module, "REFERENCES", tmp_path / "reference")
    before = signal.getsignal(signal.SIGTERM)

    def call(programs: dict[str, str], *arguments: str, needs: str | None = None) -> tuple[int, str]:
        page = tmp_path / "page.md"
        made = [made_of(load, tmp_path, name, program, needs) for name, program in programs.items()]
        code = module.main([*arguments, "--measured", str(tmp_path / "measured"), "--page", str(page)], made)
        return code, page.read_text()

    yield call
    signal.signal(signal.SIGTERM, before)


def made_of(load: Callable[[str], Any], folder: Path, name: str, program: str, needs: str | None) -> Any:
    path = folder / f"{name}.py"
    path.write_text(program)
    return load("listing").Benchmark(name, f"Is it {name}?", (str(path),), "at most 1 s", 0.1, needs)


def line_of(page: str, name: str) -> str:
    """The verdict in the page's first table."""
    (line,) = (line for line in page.splitlines() if line.startswith(f"| [{name}]"))
    return line.split("|")[-2].strip()


def test_each_benchmark_has_its_verdict_by_its_bars_and_what_it_printed(suite: Callable[..., tuple[int, str]]) -> None:
    code, page = suite({"quick": PASSES, "slow": MISSES, "noisy": UNDECIDED, "told": NOT_JUDGED})
    assert code == 0
    verdicts = [line_of(page, name) for name in ("quick", "slow", "noisy", "told")]
    assert verdicts == ["met", "1 of 2 missed", "undecided", "not judged"]
    assert "| a | table |" in page
    assert "missed by 20.0%" in page
    assert "1.2 s" in page
    assert "figures alone" in page


def test_one_that_fails_is_shown_and_the_others_go_on(suite: Callable[..., tuple[int, str]]) -> None:
    code, page = suite({"broken": FAILS, "silent": BREAKS, "quick": PASSES})
    assert code == 1
    assert line_of(page, "broken") == "failed: error: no such thing"
    assert line_of(page, "silent") == "failed: nothing was judged"  # an exit code of a bar, and no bar
    assert line_of(page, "quick") == "met"
    assert "half a table" in page


def test_one_that_hangs_is_stopped_and_keeps_what_it_printed(suite: Callable[..., tuple[int, str]]) -> None:
    code, page = suite({"stuck": HANGS}, "--limit", "3")
    assert code == 1
    assert line_of(page, "stuck") == "stopped"
    assert "begun" in page
    assert "stopped after 3 s" in page


def test_only_refreshes_one_section_and_keeps_the_others(suite: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    suite({"quick": PASSES, "slow": PASSES})
    kept = (tmp_path / "measured" / "quick.json").read_bytes()
    code, page = suite({"quick": FAILS, "slow": MISSES}, "--only", "slow")
    assert code == 0
    assert (tmp_path / "measured" / "quick.json").read_bytes() == kept
    assert line_of(page, "quick") == "met"
    assert line_of(page, "slow") == "1 of 2 missed"


def test_what_needs_a_gpu_is_named_where_there_is_none(
    suite: Callable[..., tuple[int, str]], load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("suite"), "visible_gpus", list)
    code, page = suite({"large": FAILS}, needs="a GPU")
    assert code == 0
    assert line_of(page, "large") == "not run here: needs a GPU"
    assert "No GPU has run the suite yet" in page


def test_the_results_of_gpus_are_on_the_page_where_they_are_kept(
    suite: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    kept = tmp_path / "reference" / "h200"
    kept.mkdir(parents=True)
    (kept / "summary.md").write_text("# GPU suite\n\n| job | throughput |\n|---|---|\n| gpt2 | 100 |\n")
    _, page = suite({"quick": PASSES})
    assert "### h200" in page
    assert "| gpt2 | 100 |" in page
    assert "# GPU suite" not in page


def test_sections_of_several_machines_say_which_is_whose(
    suite: Callable[..., tuple[int, str]], load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite({"quick": PASSES, "slow": PASSES})
    other = load("records").Machine("another CPU", "1 GiB", "none", "Linux", "Python 3", "commit 2")
    monkeypatch.setattr(load("suite").Machine, "here", classmethod(lambda _: other))
    _, page = suite({"quick": PASSES, "slow": PASSES}, "--only", "slow")
    assert "| machine 1 " in page
    assert "another CPU" in page
    assert "Finished on machine 2 at" in page


def test_an_interrupted_suite_ends_its_benchmark_and_keeps_what_has_run(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(PASSES)
    (tmp_path / "stuck.py").write_text(
        f"import os, pathlib; pathlib.Path('{tmp_path}/pid').write_text(str(os.getpid()))\n{HANGS}"
    )
    program = f"""
import sys
from listing import Benchmark
from suite import main
made = [Benchmark(name, "?", (f"{tmp_path}/{{name}}.py",), "", 1) for name in ("quick", "stuck")]
sys.exit(main(["--measured", "{tmp_path}/measured", "--page", "{tmp_path}/page.md"], made))
"""
    paths = os.pathsep.join((str(BENCHMARKS), str(BENCHMARKS.parent)))
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment() | {"PYTHONPATH": paths}, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "pid").is_file() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    page = (tmp_path / "page.md").read_text()
    assert line_of(page, "quick") == "met"
    assert line_of(page, "stuck") == "not run yet"


def test_every_benchmark_in_the_list_is_there_and_explained(load: Callable[[str], Any]) -> None:
    for benchmark in load("listing").BENCHMARKS:
        script = BENCHMARKS.parent / benchmark.command[0]
        assert script.is_file(), benchmark.name
        assert script.name in (BENCHMARKS / "README.md").read_text()


def test_a_ratio_is_met_missed_or_undecided_by_its_whole_interval(load: Callable[[str], Any]) -> None:
    near_one = load("bars").near_one
    intervals = ((0.995, 1.002), (0.97, 0.98), (0.98, 1.005), None)
    found = [near_one("cost", 1.0, interval, 0.01) for interval in intervals]
    assert [bar.verdict for bar in found] == ["met", "missed", "undecided", "undecided"]
    assert [bar.by for bar in found] == [None, "1.0%", None, None]


def test_what_is_missed_says_by_how_much(load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    bars = load("bars")
    assert bars.conclude([bars.at_most("memory", 550, 500, "{:.0f} MB"), bars.every("exact", 4, 5)]) == 3
    printed = capsys.readouterr().out
    assert "missed by 10.0%" in printed
    assert "memory: 550 MB, bar at most 500 MB" in printed
    assert "exact: 4 of 5, bar all" in printed
