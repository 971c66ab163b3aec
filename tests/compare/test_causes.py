"""What two profiles name as causes: which findings are gone, which work changed, and when neither can be said."""

from pathlib import Path
from typing import Any

import msgspec
import profiles_made as made
import pytest
from recorded_runs import side, write_run
from reports import HOSTILE, Page, compare_page

from gpubench.compare.causes import MOST, diagnosis, finding_changes
from gpubench.compare.compare import compare
from gpubench.compare.result import Causes
from gpubench.findings import Findings, Unanswered
from gpubench.runs.directory import CONFIG, FINDINGS, PROFILE
from gpubench.trace.profile import Kernel, Profile, RankProfile

BATCH = "batch_size: 8"


def run(
    results: Path, rank: RankProfile | None = None, findings: Findings | None = None, *, profiled: bool = True
) -> Path:
    """The directory of a run that was profiled, if at all, with these results."""
    path = write_run(results, steps=12)
    if profiled:
        (path / FINDINGS).write_bytes(msgspec.json.encode(findings or made.findings()))
        (path / PROFILE).write_bytes(msgspec.json.encode(Profile([rank or made.device_rank()], [])))
    return path


def causes(*paths: Path, **options: Any) -> Causes | None:
    (comparison,) = compare([side(path) for path in paths], **options).comparisons
    return comparison.causes


def known(*paths: Path, **options: Any) -> Causes:
    found = causes(*paths, **options)
    assert found
    return found


def kernel(name: str, milliseconds: int, calls: int = made.STEPS) -> Kernel:
    return Kernel(name, "compute", calls, milliseconds * made.STEPS * made.MS, 1, 1, 1, "")


def test_runs_that_were_not_profiled_have_no_causes(tmp_path: Path) -> None:
    assert causes(run(tmp_path, profiled=False), run(tmp_path, profiled=False)) is None


def test_findings_are_gone_still_there_or_new() -> None:
    loading, unfused, layout = made.findings().findings
    milder = msgspec.structs.replace(unfused, severity="low", expected=None, title="reworded")
    before, after = made.findings(findings=[loading, unfused]), made.findings(findings=[milder, layout])
    gone, stayed, new = finding_changes(before, after)
    assert (gone.id, gone.fate, gone.baseline, gone.candidate) == ("data-loading", "gone", "high", None)
    assert (gone.baseline_saving, gone.candidate_saving) == (0.333, None)
    assert (stayed.title, stayed.fate, stayed.baseline, stayed.candidate) == (
        "reworded",
        "still there",
        "medium",
        "low",
    )
    assert (stayed.baseline_saving, stayed.candidate_saving) == (0.05, None)
    assert (new.id, new.fate, new.baseline, new.candidate) == ("layout", "new", None, "low")


def test_a_finding_is_neither_new_nor_gone_where_the_other_side_could_not_be_judged() -> None:
    lacking = Findings("?", [], [Unanswered("data-loading", "stacks", "profiling.with_stack")])
    for before, after in ((made.findings(), lacking), (lacking, made.findings())):
        fates = {change.id: change.fate for change in finding_changes(before, after)}
        assert fates["data-loading"] is None
        assert fates["optimizer"] in ("gone", "new")
    assert {change.fate for change in finding_changes(None, made.findings())} == {None}


def test_a_finding_whose_details_are_unanswered_was_judged_all_the_same() -> None:
    both = made.findings(unanswered=[Unanswered("data-loading", "file and line", "profiling.with_stack")])
    assert finding_changes(both, both)[0].fate == "still there"


def test_a_side_without_a_profile_leaves_the_other_sides_findings(tmp_path: Path) -> None:
    found = known(run(tmp_path, profiled=False), run(tmp_path))
    assert found.baseline is None
    assert found.candidate
    assert found.candidate.headline == made.findings().headline
    assert [change.fate for change in found.findings] == [None] * 3
    assert (found.of, found.work, found.obstacle) == (None, [], None)


def test_a_group_speaks_through_its_first_run_with_a_profile(tmp_path: Path) -> None:
    paths = [run(tmp_path, profiled=False), run(tmp_path), run(tmp_path)]
    found = diagnosis(side(*paths))
    assert found
    assert found.run == paths[1].name


def test_kernels_are_told_in_seconds_a_step_and_those_that_stayed_are_left_out(tmp_path: Path) -> None:
    before = made.device_rank(kernels=[kernel("gemm", 30), kernel("same", 5), kernel("add", 1, 2 * made.STEPS)])
    after = made.device_rank(kernels=[kernel("gemm", 18), kernel("same", 5), kernel("fused", 2)])
    found = known(run(tmp_path, before), run(tmp_path, after))
    assert found.of == "kernel"
    assert [(one.name, one.before, one.after) for one in found.work] == [
        ("gemm", 0.03, 0.018), ("fused", 0.0, 0.002), ("add", 0.001, 0.0),
    ]  # fmt: skip
    assert (found.work[2].calls_before, found.work[2].calls_after) == (2, 0)


def test_without_a_device_operators_are_told_whatever_their_shapes(tmp_path: Path) -> None:
    first, second = made.host_rank().operators[:2]
    slow = msgspec.structs.replace(second, name=first.name, host=10 * made.MS)
    before, after = made.host_rank(operators=[first, second]), made.host_rank(operators=[first, slow])
    found = known(run(tmp_path, before), run(tmp_path, after))
    (change,) = found.work
    assert found.of == "operator"
    assert change.before == pytest.approx((first.host + second.host) / 4e9)
    assert change.after == pytest.approx((first.host + 10 * made.MS) / 4e9)
    assert change.calls_before == (first.calls + second.calls) / 4


def test_the_largest_changes_come_first_and_the_rest_is_counted(tmp_path: Path) -> None:
    many = made.device_rank(kernels=[kernel(f"k{number}", number + 1) for number in range(MOST + 5)])
    found = known(run(tmp_path, made.device_rank(kernels=[])), run(tmp_path, many))
    assert [change.name for change in found.work] == [f"k{number}" for number in reversed(range(5, MOST + 5))]
    assert found.others == 5


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (made.device_rank(steps=[], step_numbers=[]), "a trace marks no steps"),
        (made.host_rank(), "only one side's trace has work of a device"),
    ],
)
def test_traces_that_are_not_alike_have_no_work_side_by_side(tmp_path: Path, rank: RankProfile, said: str) -> None:
    found = known(run(tmp_path, made.device_rank()), run(tmp_path, rank))
    assert (found.of, found.work, found.obstacle) == (None, [], said)
    assert found.findings


@pytest.mark.parametrize(
    ("before", "after", "force", "said"),
    [
        (BATCH, "batch_size: 16", False, "a step is not as much work on both sides"),
        (BATCH, "optimizer: sgd", False, None),
        ("optimizer: adam", "optimizer: sgd", False, "the sides did not do the same work"),
        ("optimizer: adam", "optimizer: sgd", True, None),
    ],
)
def test_work_is_set_side_by_side_only_where_a_step_is_the_same_work(
    tmp_path: Path, before: str, after: str, force: bool, said: str | None
) -> None:
    paths = [run(tmp_path), run(tmp_path)]
    for path, setting in zip(paths, (before, after), strict=True):
        text = (path / CONFIG).read_text()
        both = setting if setting.startswith("batch") else f"{BATCH}\n  {setting}"
        (path / CONFIG).write_text(text.replace(BATCH, both + "\n  grad_accumulation: 1"))
    assert known(*paths, force=force).obstacle == said


def test_a_damaged_profile_is_a_warning_and_no_cause(tmp_path: Path) -> None:
    paths = [run(tmp_path), run(tmp_path)]
    (paths[1] / PROFILE).write_text('{"ranks": [{}], "stragglers": []}')
    (comparison,) = compare([side(path) for path in paths]).comparisons
    assert comparison.causes
    assert comparison.causes.candidate is None
    assert any(PROFILE in warning for warning in comparison.warnings)
    (paths[0] / PROFILE).write_text('{"ranks": [], "stragglers": []}')
    assert causes(*paths) is None


def test_the_page_has_both_sides_findings_and_obeys_none_of_their_names(tmp_path: Path) -> None:
    bad = msgspec.structs.replace(made.findings().findings[0], title=HOSTILE, evidence=[HOSTILE], cause=HOSTILE)
    findings = made.findings(headline=HOSTILE, findings=[bad])
    sides = [side(run(tmp_path)), side(run(tmp_path, made.device_rank(kernels=[kernel(HOSTILE, 3)]), findings))]
    page = Page(compare_page(compare(sides), sides))
    assert "img" not in page.tags
    assert page.tags.count("script") == 1  # its own
    order = [
        "What explains it", "What the profiles show", "GPU idle 43.5 %", HOSTILE, "Gone: Layouts are changed",
        "Kernels that changed most", "proportions, not speed",
        "Findings of the baseline", "Findings of the candidate", "Warnings",
    ]  # fmt: skip
    places = [page.words.find(part) for part in order]
    assert -1 not in places, [part for part, place in zip(order, places, strict=True) if place < 0]
    assert places == sorted(places)


def test_the_page_without_profiles_does_not_speak_of_them(tmp_path: Path) -> None:
    sides = [side(run(tmp_path, profiled=False)) for _ in range(2)]
    assert "What the profiles show" not in compare_page(compare(sides), sides)
