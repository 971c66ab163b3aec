"""Runs whose memory was followed, side by side: what changed in it, what is said of counts, and what is refused."""

import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli import complaint
from compared import comparisons
from damages import DAMAGES, Damage
from footprints_made import GIB, MIB, level, of_phases, of_snapshot, on_cpu, phase, predicted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_runs import edit, memory_metric, side, write_run
from recorded_runs import write_memory_run as run
from reports import Page, compare_page
from rich.console import Console
from running import Finished

from gpubench.compare import result
from gpubench.compare.compare import compare, null
from gpubench.compare.evidence import open_run
from gpubench.compare.footprints import Followed, against, followed, size_changes
from gpubench.compare.gate import parse_condition
from gpubench.compare.inputs import find
from gpubench.compare.result import Comparison, Memory, Verdict
from gpubench.errors import RunDirectoryError, UsageError
from gpubench.memory.footprint import CATEGORIES, Amounts, Footprint, Footprints
from gpubench.report import comparison, markdown, terminal
from gpubench.report.after_run import page as run_report
from gpubench.report.memory_figures import category
from gpubench.report.phrases import headline
from gpubench.runs.directory import MEMORY, SUMMARY

MEASURED: dict[str, Any] = {"memory": {"predict": False, "device_model": None}}
AMOUNTS = st.dictionaries(st.sampled_from(CATEGORIES), st.integers(0, 2**40))


def checkpointed(**changes: Any) -> Footprint:
    """With fewer activations in the passes, and some more temporaries in the optimizer step."""
    made = predicted()
    step: Amounts = {**made.peak.amounts, "temporaries": made.peak.amounts["temporaries"] + 1_024 * MIB}
    step["gradients"] -= 10_240 * MIB
    found = [*made.phases]
    for place, one in enumerate(made.phases):
        if one.phase in ("forward", "backward"):
            found[place] = phase(one.stage, one.phase, {**one.peak, "activations": 2_000 * MIB})
        elif one.phase == "optimizer":
            found[place] = phase(one.stage, one.phase, step)
    return of_phases(made, found, "first", "optimizer", **changes)


def compared(*paths: Path, **options: Any) -> Comparison:
    return compare([side(path) for path in paths], **options).comparisons[0]


def memory(*paths: Path, **options: Any) -> Memory:
    found = compared(*paths, **options).memory
    assert found
    return found


def verdict(found: Comparison, name: str = "peak_memory_total") -> Verdict:
    return next(one for one in found.verdicts if one.metric == name)


def shown(found: Comparison, width: int = 110) -> str:
    file = io.StringIO()
    terminal.show(comparison.document(comparisons(found)), Console(file=file, width=width))
    return file.getvalue()


# What changed


def test_the_peak_is_told_in_bytes_and_by_what_moved_it_largest_first(tmp_path: Path) -> None:
    found = memory(run(tmp_path, predicted()), run(tmp_path, checkpointed()))
    assert found.change == -9_216 * MIB
    assert [(one.category, one.change) for one in found.categories[:2]] == [
        ("gradients", -10_240 * MIB), ("temporaries", 1_024 * MIB),
    ]  # fmt: skip
    assert {one.change for one in found.categories[2:]} == {0}
    assert [(one.stage, one.phase, one.change) for one in found.phases[:6]] == [
        ("first", "optimizer", -9_216 * MIB), ("steady", "optimizer", -9_216 * MIB),
        ("first", "forward", -7_000 * MIB), ("steady", "forward", -7_000 * MIB),
        ("first", "backward", -5_000 * MIB), ("steady", "backward", -5_000 * MIB),
    ]  # fmt: skip
    assert {one.change for one in found.phases[6:]} == {0}
    assert found.phases[2].categories[0].category == "activations"
    assert comparison.sentence(found) == "peak 9 GiB lower (-14 %): gradients -10 GiB, temporaries +1 GiB"


def test_a_phase_of_one_side_alone_has_no_size_on_the_other(tmp_path: Path) -> None:
    found = memory(run(tmp_path, on_cpu()), run(tmp_path, of_snapshot()))
    sizes = {(one.stage, one.phase): (one.baseline, one.candidate, one.change) for one in found.phases}
    assert sizes == {
        ("first", "forward"): (10 * MIB, None, -10 * MIB), ("steady", "unknown"): (None, 13_800 * MIB, 13_800 * MIB),
    }  # fmt: skip


@given(before=AMOUNTS, after=AMOUNTS)
def test_the_changes_of_the_categories_add_up_to_that_of_all(before: Amounts, after: Amounts) -> None:
    found = size_changes(before, after)
    assert sum(one.change for one in found) == sum(after.values()) - sum(before.values())
    assert {one.category for one in found} == {*before, *after}
    assert all(abs(one.change) >= abs(other.change) for one, other in pairwise(found))


@given(before=AMOUNTS, after=AMOUNTS)
def test_a_table_adds_up_whatever_is_folded(before: Amounts, after: Amounts) -> None:
    found = against(*(Followed("run", holding(amounts)) for amounts in (before, after)))
    rows = [row[0].text for row in comparison.categories(found).rows]
    told = [change for change in found.categories if category(change.category) in rows]
    folded = [change for change in found.categories if change not in told]
    assert all(abs(change.change) < max(1, 0.001 * sum(before.values())) for change in folded)
    assert rows[len(told) :] == ["the rest"] * bool(folded and told) + ["all of it"] * bool(told)


def holding(amounts: Amounts) -> Footprint:
    found = [phase("steady", "forward", amounts, counted=level(amounts))]
    return of_phases(predicted(), found, "steady", "forward")


def test_small_changes_are_told_together(tmp_path: Path) -> None:
    nearly = checkpointed()
    nearly.peak.amounts["inputs"] = MIB
    found = memory(run(tmp_path, predicted()), run(tmp_path, nearly))
    table = comparison.categories(found)
    assert [row[0].text for row in table.rows] == ["gradients", "temporaries", "the rest", "all of it"]
    assert dict(zip(table.columns, table.rows[2], strict=True))["change"].text == "+1 MiB"
    phases = comparison.phases(found)
    assert [row[0].text for row in phases.rows] == [
        "first step, optimizer", "steady step, optimizer", "first step, forward", "steady step, forward",
        "first step, backward", "steady step, backward",
    ]  # fmt: skip
    assert phases.rest == "4 others, changed by less than 0.1 % of the peak each"


def test_the_peak_of_equal_runs_is_the_same_and_has_no_tables(tmp_path: Path) -> None:
    found = memory(run(tmp_path, predicted()), run(tmp_path, predicted()))
    assert comparison.sentence(found) == "the same peak of 64.7 GiB"
    assert comparison.tables(found) == []


def test_a_peak_that_moved_to_another_phase_says_so() -> None:
    before = holding({"activations": 4 * GIB})
    amounts: Amounts = {"activations": GIB, "gradients": 4 * GIB}
    found = [phase("first", "backward", amounts)]
    after = of_phases(predicted(), found, "first", "backward")
    assert comparison.sentence(against(Followed("1", before), Followed("2", after))) == (
        "peak 1 GiB higher (+25 %), in the backward pass and no longer in the forward pass: "
        "gradients +4 GiB, activations -3 GiB"
    )


def test_of_several_ranks_the_fullest_speaks_and_is_named(tmp_path: Path) -> None:
    small, large = checkpointed(rank=0), predicted(rank=1)
    path = run(tmp_path, small, large)
    found = followed(side(path))
    assert found
    assert found.footprint.rank == 1
    other = run(tmp_path, small)
    assert "predicted for h200, rank 1)" in comparison.peaks(memory(path, other))[0]
    assert memory(path, other).change == -9_216 * MIB


# Verdicts


def test_a_count_that_differs_is_more_or_less_from_one_repeat_on_each_side(tmp_path: Path) -> None:
    paths = run(tmp_path, predicted()), run(tmp_path, checkpointed())
    for name in ("peak_memory_allocated", "peak_memory_reserved", "peak_memory_total"):
        assert verdict(compared(*paths), name).verdict == "less"
        assert verdict(compared(*reversed(paths)), name).verdict == "more"
    found = verdict(compared(*paths))
    assert found.reason == "counted, not timed"
    assert found.ratio == checkpointed().peak.level.total / predicted().peak.level.total
    assert (found.interval, found.level, found.resolvable, found.more_repeats) == (None, None, None, None)


def test_equal_counts_are_equivalent_at_any_margin(tmp_path: Path) -> None:
    found = compared(run(tmp_path, predicted()), run(tmp_path, predicted()), margin=0.0)
    assert {one.verdict for one in found.verdicts} == {"equivalent"}


def test_a_difference_within_the_margin_does_not_matter(tmp_path: Path) -> None:
    paths = run(tmp_path, holding({"activations": 1000 * MIB})), run(tmp_path, holding({"activations": 1003 * MIB}))
    assert verdict(compared(*paths)).verdict == "equivalent"
    assert verdict(compared(*paths, margin=0.0)).verdict == "more"


def test_repeats_that_vary_have_an_interval_and_those_that_agree_none(tmp_path: Path) -> None:
    before = run(tmp_path, predicted(), repeats=3, reserved=[60e9, 61e9, 62e9])
    after = run(tmp_path, predicted(), repeats=3, reserved=[61e9, 60e9, 62e9])
    found = compared(before, after)
    varying = verdict(found, "peak_memory_reserved")
    assert varying.verdict == "inconclusive"
    assert varying.interval
    assert varying.reason is None
    assert verdict(found).interval is None
    assert verdict(found).reason == "counted, not timed"


def test_what_is_only_doubtful_of_times_is_not_said_of_counts(tmp_path: Path) -> None:
    found = compared(run(tmp_path, predicted()), run(tmp_path, checkpointed()))
    assert found.warnings == []
    assert found.comparability.reasons == []
    assert (found.explanation.waterfall, found.explanation.notes, found.causes) == (None, [], None)


def test_the_headline_is_of_all_memory_where_no_step_was_timed(tmp_path: Path) -> None:
    found = compared(run(tmp_path, predicted()), run(tmp_path, checkpointed()))
    assert "less peak memory total than" in headline(found)
    assert found.baseline.headline == "gpt2, bf16, batch 16 on h200, predicted"
    assert found.baseline.repeats == 1


def test_a_memory_run_and_a_timed_run_without_a_common_metric_are_told_apart(tmp_path: Path) -> None:
    recorded, timed = run(tmp_path, predicted()), write_run(tmp_path)
    with pytest.raises(
        UsageError, match=r"recorded its memory \(.*\), .* timed \(throughput, step time and \d+ more\)"
    ):
        compared(recorded, timed)


def test_the_gate_fails_on_more_memory_and_passes_on_less(tmp_path: Path) -> None:
    paths = run(tmp_path, predicted()), run(tmp_path, checkpointed())
    condition = [parse_condition("peak_memory_total>2%")]
    for order, outcome in ((paths, "passed"), (tuple(reversed(paths)), "regressed")):
        (result,) = compare([side(path) for path in order], conditions=condition).gate
        assert (result.outcome, result.reason) == (outcome, None)
    with pytest.raises(UsageError, match="step_time is a metric, but none that was compared"):
        compare([side(path) for path in paths], conditions=[parse_condition("step_time>2%")])


def test_noise_on_record_of_counts_is_none_at_all(tmp_path: Path) -> None:
    group = side(*(run(tmp_path, predicted()) for _ in range(4)))
    assert {one.noise_floor for one in null(group).metrics} == {0.0}


def test_a_run_that_ended_before_its_peak_is_neither_the_smaller_nor_equal(tmp_path: Path) -> None:
    whole, failed = run(tmp_path, predicted()), run(tmp_path, checkpointed())
    edit(failed / "run.json", status="failed", error={"kind": "OutOfMemory", "message": "too little", "hint": None})
    condition = [parse_condition("peak_memory_total>2%")]
    found = compare([side(whole), side(failed)], conditions=condition)
    said = f"{failed.name}: the run failed, so its true peak is unknown"
    judged = verdict(found.comparisons[0])
    assert (judged.verdict, judged.reason) == ("rejected", said)
    assert found.comparisons[0].warnings == [said, f"{failed.name}: the run failed: too little"]
    assert found.gate[0].outcome == "inconclusive"
    assert verdict(compared(failed, whole)).verdict == "rejected"
    edit(failed / SUMMARY, metrics=json.loads((whole / SUMMARY).read_text())["metrics"])
    assert verdict(compared(whole, failed)).verdict == "rejected"


# Sides that are not alike


def test_a_prediction_beside_a_measurement_says_whose_error_is_in_the_difference(tmp_path: Path) -> None:
    measured = msgspec.structs.replace(predicted(), source="measured", device="NVIDIA H200", corrections=[])
    found = compared(run(tmp_path, measured, **MEASURED), run(tmp_path, checkpointed()))
    (said,) = found.comparability.reasons
    assert said.endswith("measured: the difference includes the error of the prediction")
    assert said.startswith(f"the memory of {found.candidate.label} was predicted")
    assert [one.key for one in found.comparability.differences] == ["memory.predict", "memory.device_model"]
    assert found.memory
    assert (found.memory.baseline.source, found.memory.candidate.source) == ("measured", "predicted")
    assert found.baseline.headline == "gpt2, bf16, batch 16 on cuda"


def test_another_batch_is_judged_as_it_is(tmp_path: Path) -> None:
    found = compared(run(tmp_path, predicted()), run(tmp_path, checkpointed(), training={"batch_size": 8}))
    (said,) = found.comparability.reasons
    assert said == "training.batch_size 16 against 8: the peaks of a device are compared without division"
    assert verdict(found).verdict == "less"


def test_of_another_model_nothing_is_said_unless_forced(tmp_path: Path) -> None:
    paths = run(tmp_path, predicted()), run(tmp_path, checkpointed(), model={"name": "resnet18"})
    found = compared(*paths)
    assert found.memory is None
    assert {one.verdict for one in found.verdicts} == {"withheld"}
    assert memory(*paths, force=True).change == -9_216 * MIB


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    """A run of train-bench with two repeats that counted its peak too."""
    path = write_run(tmp_path / "timed")
    peak = memory_metric("peak_memory_allocated", [50.0 * GIB] * 2)
    summary = json.loads((path / SUMMARY).read_text())
    edit(path / SUMMARY, metrics=[*summary["metrics"], msgspec.to_builtins(peak)])
    return path


def test_beside_a_timed_run_the_peaks_that_both_have_are_judged(tmp_path: Path, timed: Path) -> None:
    followed_run = run(tmp_path, predicted(), training={"batch_size": 8}, **MEASURED)
    for paths in ((timed, followed_run), (followed_run, timed)):
        found = compared(*paths)
        assert [one.metric for one in found.verdicts] == ["peak_memory_allocated"]
        assert verdict(found, "peak_memory_allocated").verdict in ("more", "less")
        assert found.comparability.reasons == [
            f"{followed_run.name} counted memory and timed nothing: only peaks of memory are comparable"
        ]
        assert not [one for one in found.comparability.differences if one.key.startswith("memory.")]
        assert found.memory is None
        assert found.warnings == []
        assert compare_page(compare([side(path) for path in paths]), [side(path) for path in paths])
        assert shown(found)


def test_two_timed_runs_of_one_repeat_still_have_nothing_that_tells_their_noise(tmp_path: Path) -> None:
    paths = [write_run(tmp_path, repeats=1) for _ in range(2)]
    for path, size in zip(paths, (1e9, 2e9), strict=True):
        summary = json.loads((path / SUMMARY).read_text())
        own = msgspec.to_builtins(memory_metric("peak_memory_allocated", [size]))
        edit(path / SUMMARY, metrics=[*summary["metrics"], own])
    found = verdict(compared(*paths), "peak_memory_allocated")
    assert found.verdict == "inconclusive"
    assert "its noise is unknown" in str(found.reason)


# What people see


@pytest.mark.parametrize("width", [40, 60, 80, 110])
def test_the_terminal_shows_the_changes_at_any_width(tmp_path: Path, width: int) -> None:
    text = shown(compared(run(tmp_path, predicted()), run(tmp_path, checkpointed())), width)
    for line in (
        "peak 9 GiB lower (-14 %): gradients -10 GiB, temporaries +1 GiB",
        "first step",
        "optimizer",
        "all of it",
    ):
        assert line in text
    rows = [line for line in text.splitlines() if line.startswith(("gradients", "first step, ", "the rest"))]
    assert all(len(row) <= width for row in rows)
    assert "-10 GiB" in next(row for row in rows if row.startswith("gradients"))


def test_markdown_json_and_page_have_the_same_section(tmp_path: Path) -> None:
    paths = run(tmp_path, predicted()), run(tmp_path, checkpointed())
    sides = [side(path) for path in paths]
    found = compare(sides)
    text = markdown.render(comparison.document(found))
    assert "- peak 9 GiB lower (-14 %): gradients -10 GiB, temporaries +1 GiB" in text
    assert "| first step, forward | -6.84 GiB |" in text
    document = json.loads(result.to_json(found))["comparisons"][0]["memory"]
    assert document["change"] == -9_216 * MIB
    assert document["baseline"]["level"]["total"] == predicted().peak.level.total
    page = Page(compare_page(found, sides))
    assert "What fills the memory" in page.words
    assert "Peak 9 GiB lower (\u221214 %): gradients \u221210 GiB, temporaries +1 GiB" in page.words
    assert "counted, not timed" in page.words
    for absent in ("Steps are not recorded", "Telemetry is not recorded", "Phases of a step are not recorded"):
        assert absent not in page.words


def test_hostile_names_are_shown_and_not_obeyed(tmp_path: Path) -> None:
    hostile = "<script>alert(1)</script>\x1b[2J"
    path = run(tmp_path, holding({hostile: GIB}))
    sides = [side(run(tmp_path, predicted(device=hostile))), side(path)]
    found = compare(sides)
    for text in (compare_page(found, sides), shown(found.comparisons[0]), markdown.render(comparison.document(found))):
        assert "\x1b" not in text
    assert compare_page(found, sides).count("<script>") == 1  # its own


def test_the_page_of_a_run_sets_it_against_the_one_before_it(tmp_path: Path) -> None:
    before, after = (open_run(run(tmp_path, made)) for made in (predicted(), checkpointed()))
    assert "less peak memory total than the previous run" in Page(run_report(after, before)).words


# Damage


def damaged(path: Path, content: bytes | None) -> Path:
    if content is None:
        (path / MEMORY).unlink()
    else:
        (path / MEMORY).write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is missing"),
        (b"", "cannot be read: Input data was truncated"),
        (b'{"ranks": [{}]}', "cannot be read: Object missing required field"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"ranks": []}', "is damaged: it has no rank"),
    ],
)
def test_a_damaged_document_is_refused_by_name(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = damaged(run(tmp_path, predicted()), content)
    with pytest.raises(RunDirectoryError) as refused:
        find([str(path)], tmp_path)
    assert refused.value.message.startswith(f"{path / MEMORY} {said}")
    assert "\n" not in refused.value.message


def test_sizes_beyond_all_memory_are_refused(tmp_path: Path) -> None:
    content = msgspec.json.encode(Footprints([predicted()])).replace(
        str(predicted().peak.level.total).encode(), b"9" * 400
    )
    with pytest.raises(RunDirectoryError, match="impossible number of bytes"):
        find([str(damaged(run(tmp_path, predicted()), content))], tmp_path)


def test_a_run_that_was_cut_off_is_compared_without_its_torn_document(tmp_path: Path) -> None:
    whole, torn = run(tmp_path, predicted()), damaged(run(tmp_path, predicted()), b'{"ranks"')
    edit(torn / "run.json", status="interrupted")
    sides, _ = find([str(whole), str(torn)], tmp_path)
    (found,) = compare(sides).comparisons
    assert found.memory is None
    assert verdict(found).verdict == "rejected"
    assert any(str(torn / MEMORY) in warning for warning in found.warnings)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=DAMAGES)
def test_whatever_happens_to_the_document_it_is_compared_or_refused_by_name(tmp_path: Path, damage: Damage) -> None:
    whole, other = run(tmp_path, predicted()), run(tmp_path, checkpointed())
    damage(other / MEMORY)
    sides = refused = None
    try:
        sides, _ = find([str(whole), str(other)], tmp_path)
    except RunDirectoryError as error:
        refused = error
    if sides:
        found = compare(sides)
        assert shown(found.comparisons[0])
        assert markdown.render(comparison.document(found))
        assert compare_page(found, sides)
    else:
        assert refused
        assert refused.message.startswith(str(other / MEMORY))
        assert "\n" not in refused.message


@pytest.mark.parametrize("repeats", [[[]], [[1.0], [1.0, 2.0]]])
def test_a_summary_whose_repeats_do_not_agree_is_refused(tmp_path: Path, repeats: list[list[float]]) -> None:
    path = run(tmp_path, predicted())
    names = ["peak_memory_allocated", "peak_memory_total"]
    metrics = [memory_metric(name, [1.0]) for name in names[: len(repeats)]]
    own = [msgspec.to_builtins(metric) | {"repeats": of} for metric, of in zip(metrics, repeats, strict=True)]
    edit(path / SUMMARY, metrics=own)
    with pytest.raises(RunDirectoryError, match=r"is damaged: peak_memory_\w+ has \d repeats"):
        open_run(path)


def test_a_run_that_followed_nothing_has_nothing_to_compare(tmp_path: Path) -> None:
    path = run(tmp_path, predicted())
    edit(path / SUMMARY, metrics=[])
    with pytest.raises(RunDirectoryError, match="nothing was measured"):
        open_run(path)


def test_the_command_names_the_damaged_file_and_exits_with_2(
    tmp_path: Path, command_line: Callable[..., Finished]
) -> None:
    whole, torn = run(tmp_path, predicted()), damaged(run(tmp_path, predicted()), b"{")
    done = command_line("compare", str(whole), str(torn))
    assert str(torn / MEMORY) in complaint(done)[0]
