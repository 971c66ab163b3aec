"""The report of two profiles: what one change did to each part, finding and kernel."""

import profiles_made as made
import pytest
from reports import find, findings, flat, paragraphs, row, titles
from test_report_profile import EMPTY, FASTER, FIXED, REPLACE, compared, of, titles_place

from gpubench.compare.causes import finding_changes
from gpubench.report import profile as report
from gpubench.report.document import Breakdown, Document, Medium, Table
from gpubench.report.profile import Against, differences
from gpubench.trace.profile import Profile, RankProfile


def outcomes(found: Document) -> list[tuple[str, str]]:
    """What became of each finding: (outcome, title)."""
    lines = paragraphs(flat(found)[titles_place(found, "Findings before and after") :][:1])
    return [tuple(line.split(" (")[0].split(": ", 1)) for line in lines]  # type: ignore[misc]


LOADER, TENSORS = "The GPU waits for the data loader", "The optimizer updates one tensor at a time"


def test_two_traces_are_set_side_by_side_by_part_finding_and_kernel() -> None:
    found = compared(FASTER)
    for part in ("177 ms before", "141 ms after", "-20.3 %"):
        assert part in found.headline
    assert row(found, "part", "idle, data wait") == {
        "part": "idle, data wait", "before": "59.0 ms", "after": "1 ms", "change": "-58 ms", "of before": "-98.3 %",
    }  # fmt: skip
    assert row(found, "kernel", "vectorized_elementwise_kernel")["change"] == "-4 ms"
    assert find(found, Table, "kernel").rest == "4 others"
    assert outcomes(found)[:2] == [("gone", LOADER), ("still there", TENSORS)]
    before = Against(made.profile(), EMPTY, [])
    assert ("new", LOADER) in outcomes(of(against=before))


def test_a_terminal_shows_what_changed_and_the_page_also_the_second_profile() -> None:
    found = compared(FASTER)
    after = titles_place(found, "After")
    assert titles(found).index("Kernels that changed most, a step") < titles(found).index("After")
    shown = [block for block in flat(found)[after:] if block.on & Medium.TERMINAL]
    assert not [block for block in shown if isinstance(block, Table | Breakdown)]
    assert findings(shown)
    assert find(flat(found, Medium.PAGE)[after:], Table, "operator")


def other_program() -> RankProfile:
    known = made.device_rank()
    return made.device_rank(
        kernels=[REPLACE(one, name=f"other_{one.name}") for one in known.kernels],
        operators=[REPLACE(one, name="other::op") for one in known.operators],
    )


UNLIKE = {
    "the devices differ: Tesla V100-DGXS-32GB before, NVIDIA L4 after": [made.device_rank(device_name="NVIDIA L4")],
    "the devices differ: Tesla V100-DGXS-32GB before, the CPU alone after": [made.host_rank()],
    "the numbers of ranks differ: 1 before, 2 after": made.profile(2).ranks,
    "the numbers of ranks differ: 1 before, 8 after": [made.device_rank(world_size=8)],
    "only 0 % of the time is in kernels or operators that both have": [other_program()],
}


@pytest.mark.parametrize(("reason", "ranks"), UNLIKE.items())
def test_what_is_not_the_same_work_is_said_and_not_set_against_each_other(
    reason: str, ranks: list[RankProfile]
) -> None:
    found = compared(Profile(ranks, []))
    assert f"not compared: {reason}" in paragraphs(found, "warning")
    assert outcomes(found)[:2] == [("only before", LOADER), ("in both", TENSORS)]
    assert "%" not in found.headline
    assert find(found, Table, "part").columns == ("part", "before", "after")
    assert not [title for title in titles(found) if "changed most" in title]


def test_a_program_that_picks_other_kernels_for_the_same_operators_is_the_same() -> None:
    kernels = other_program().kernels
    assert differences(made.profile(), made.profile(kernels=kernels)) == []


def test_a_program_that_no_longer_does_most_of_what_it_did_is_the_same() -> None:
    large, small = made.device_rank().kernels[:2]
    before = made.profile(operators=[], kernels=[large, small])
    assert differences(before, made.profile(operators=[], kernels=[small])) == []


def test_what_is_not_known_is_no_difference() -> None:
    unknown = made.profile(device_name=None, kernels=[], operators=[])
    assert differences(made.profile(), unknown) == differences(unknown, made.profile()) == []


def test_traces_without_steps_are_not_called_faster_or_slower() -> None:
    said = compared(made.profile(), Profile([made.device_rank(steps=[], step_numbers=[])], [])).headline
    assert "1.06 s and 177 ms" in said
    assert "%" not in said


def test_of_runs_that_did_other_work_no_finding_is_called_gone() -> None:
    changes = finding_changes(made.findings(), FIXED)
    assert [report.outcome(one) for one in changes] == ["gone", "still there", "still there"]
    assert [report.outcome(one, alike=False) for one in changes] == ["only before", "in both", "in both"]
