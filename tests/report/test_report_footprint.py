"""The report of a footprint: its headline, blocks, tables and drawings, and what --json and TensorBoard hold."""

import json
import re
from collections.abc import Callable

import footprints_made as made
import msgspec
import pytest
from footprints_made import GIB, MIB, PARAMETERS
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup
from reports import (
    HOSTILE,
    commands,
    everywhere,
    find,
    findings,
    flat,
    harmless,
    lines_of,
    on_terminal,
    paragraphs,
    row,
    rows,
    titles,
)
from test_plots import parsed, texts

from gpubench.findings import Findings, Saving, Trial
from gpubench.kinds.memory import footprint_report as memory
from gpubench.kinds.memory.footprint_report import document, headline
from gpubench.memory.allocation_log import Counts
from gpubench.memory.footprint import (
    CATEGORIES,
    Amounts,
    Correction,
    Footprint,
    Footprints,
    Holder,
    Level,
    MemoryTimeline,
    TimelineMark,
    peaks,
    scalars,
)
from gpubench.report import charts, page, terminal
from gpubench.report import memory_figures as figures
from gpubench.report.document import Breakdown, Figure, Medium, StackedBar, StackedBars, Table
from gpubench.runs.directory import to_json

ATTACK = f"{HOSTILE}[bold]\x1b[2J\nline[/bold]"
REPLACE = msgspec.structs.replace

amounts = st.dictionaries(st.sampled_from([*CATEGORIES, "of a later version"]), st.integers(0, 2**40), min_size=1)


def needing(total: int, capacity: int) -> Footprint:
    """A prediction of so much memory for a device of so much."""
    found = [made.phase("first", "optimizer", {"parameters": total})]
    return made.of_phases(made.predicted(capacity=capacity), found, "first", "optimizer")


def holding_later(footprint: Footprint, size: int) -> Footprint:
    """The same, but its allocator comes to hold so much when the last phase is over."""
    assert footprint.timeline.reserved is not None
    reserved = [*footprint.timeline.reserved[:-1], size]
    return REPLACE(footprint, timeline=REPLACE(footprint.timeline, reserved=reserved))


def hostile() -> Footprint:
    """Every text of a footprint is an attack."""
    known = made.predicted()
    odd: Amounts = {ATTACK: GIB}
    return REPLACE(
        known,
        device=ATTACK,
        notes=[ATTACK],
        corrections=[Correction(ATTACK, ATTACK, GIB)],
        holders=[Holder(ATTACK, ATTACK, ATTACK, ATTACK, ATTACK, 1, GIB)],
        modules=[REPLACE(known.modules[0], path=ATTACK, amounts=odd)],
        phases=[REPLACE(one, peak=odd, end=odd) for one in known.phases],
        peak=REPLACE(known.peak, amounts=odd),
        timeline=REPLACE(known.timeline, amounts={ATTACK: [GIB, 2 * GIB]}, reserved=None),
    )


def stacks(footprint: Footprint) -> list[StackedBar]:
    (block,) = [block for block in flat(document(footprint, None)) if isinstance(block, StackedBars)]
    return list(block.rows)


REPORTS = {
    "footprint-predicted": document(made.predicted(), made.findings(), "memory.json", ["results/exp/run/memory.json"]),
    "footprint-measured": document(made.on_cpu(rank=3, allocator=Counts(5, 4)), None),
    "footprint-snapshot": document(made.of_snapshot(notes=["out of memory at event 12"]), None, "snap_shot.pickle"),
}


@pytest.mark.parametrize("name", REPORTS)
def test_the_report_of_a_footprint_is_the_golden_one(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.txt", everywhere(REPORTS[name]))


def test_the_headline_names_the_peak_its_phase_and_its_largest_parts_first() -> None:
    told = headline(made.predicted())
    assert told.startswith("peak 64.7 GiB in the optimizer step: 39 % optimizer state, 20 % parameters")
    assert headline(made.of_snapshot()).startswith("peak 13.5 GiB: 65 %"), "no phase is known"


@pytest.mark.parametrize(
    ("total", "capacity", "said"),
    [
        (27 * GIB, 24 * GIB, "does not fit in 24 GiB: 3 GiB too much"),
        (24 * GIB + 1, 24 * GIB, "does not fit in 24 GiB: 1 B too much"),
        (24 * GIB, 24 * GIB, "fits in 24 GiB with 0 %"),
        (20 * GIB, 80 * GIB, "fits in 80 GiB with 75 %"),
        (99 * GIB, 100 * GIB, "fits in 100 GiB with 1 %"),
    ],
)
def test_a_prediction_says_by_how_much_it_fits_or_not(total: int, capacity: int, said: str) -> None:
    assert said in headline(needing(total, capacity))


@pytest.mark.parametrize(
    ("gibibytes", "said"),
    [(10, "fits in 10 GiB with 0 %"), (9, "fits in 9 GiB only if"), (7, "fits in 7 GiB only if"), (6, "does not fit")],
)
def test_what_the_allocator_keeps_unused_is_not_what_a_program_fails_for(gibibytes: int, said: str) -> None:
    held: Amounts = {"parameters": 6 * GIB, "fragmentation": 3 * GIB, "other": GIB}
    known, found = made.predicted(capacity=gibibytes * GIB), [made.phase("first", "optimizer", held)]
    assert memory.fits(made.of_phases(known, found, "first", "optimizer")).startswith(said)


def test_a_phase_after_the_peak_that_has_more_reserved_has_to_fit_too() -> None:
    known = made.predicted()
    grown = made.phase("steady", "zero_grad", {"parameters": PARAMETERS, "fragmentation": 70 * GIB})
    found = REPLACE(known, phases=[*known.phases, grown])
    assert found.most == PARAMETERS + 70 * GIB > known.peak.level.total
    assert "141 GiB with 41 %" in memory.fits(found)
    filled = [sum(part.share for part in stack.parts) for stack in stacks(found)]
    assert max(filled) == filled[-1] == pytest.approx(1)


def test_what_the_allocator_takes_between_the_peaks_of_phases_has_to_fit_too() -> None:
    known = made.predicted()
    found = holding_later(known, 80 * GIB)
    assert known.most == known.peak.level.total
    assert found.most == 80 * GIB + made.CONTEXT
    assert "; 80.5 GiB are held later; fits in 141 GiB with 43 %" in headline(found)
    assert memory.fits(REPLACE(found, capacity=80 * GIB)).startswith("fits in 80 GiB only if")
    assert all(sum(part.share for part in stack.parts) < 1 for stack in stacks(found)), "no phase's peak is the most"


@given(st.integers(0, 40), st.lists(st.integers(0, 2**40), min_size=1))
def test_no_count_is_more_than_the_most(other: int, reserved: list[int]) -> None:
    known = made.on_cpu()
    footprint = REPLACE(
        known,
        peak=REPLACE(known.peak, amounts={**known.peak.amounts, "other": other}),
        timeline=REPLACE(known.timeline, reserved=reserved),
    )
    assert footprint.most == max(10 * MIB, max(reserved) + other)
    assert known.most == 10 * MIB, "a CPU keeps nothing back"


def test_a_little_that_is_held_later_is_not_told() -> None:
    known = needing(1000 * MIB, 2000 * MIB)
    assert "1,005 MiB are held later" in headline(holding_later(known, 1005 * MIB + 1))
    assert "later" not in headline(holding_later(known, 1005 * MIB - 1))
    assert "later" in headline(REPLACE(holding_later(known, 1005 * MIB + 1), source="measured"))


def test_what_was_measured_is_not_asked_whether_it_fits() -> None:
    assert "fit" not in headline(made.predicted(source="measured"))
    assert "fit" not in headline(made.predicted(capacity=None))


def test_a_peak_that_only_the_first_step_has_is_called_the_first() -> None:
    known = made.predicted(source="measured")
    without = [one for one in known.phases if (one.stage, one.phase) != ("steady", "optimizer")]
    said = headline(made.of_phases(known, without, "first", "optimizer"))
    assert "in the first optimizer step (57.6 GiB allocated in a steady step)" in said
    alone = [one for one in known.phases if one.stage != "steady"]
    assert "in the optimizer step:" in headline(made.of_phases(known, alone, "first", "optimizer"))
    early = made.peak_of([made.phase("setup", "data", {"inputs": 90 * GIB})], "setup", "data")
    assert "first" not in headline(REPLACE(known, peak=early)), "it is before the first step"


def test_a_steady_step_for_which_only_more_is_reserved_has_the_same_peak() -> None:
    known = made.predicted(source="measured")
    before = made.row(known, "steady", "optimizer")

    def told(peak: Amounts) -> str:
        found = [made.phase("steady", "optimizer", peak) if one is before else one for one in known.phases]
        return headline(made.of_phases(known, found, "first", "optimizer"))

    spare = before.peak["fragmentation"]
    assert "first" not in told(before.peak)
    more = told({**before.peak, "fragmentation": spare + GIB})
    assert "first" not in more
    assert "65.7 GiB are held later" in more
    less = told({**before.peak, "parameters": PARAMETERS - MIB, "fragmentation": GIB})
    assert "in the first optimizer step (63.5 GiB" in less


def test_a_small_part_is_left_out_of_the_headline_and_a_peak_of_small_parts_names_the_largest() -> None:
    def told(parts: Amounts) -> str:
        one = made.on_cpu()
        return headline(REPLACE(one, peak=REPLACE(one.peak, amounts=parts, level=made.level(parts))))

    assert told({"parameters": 96 * MIB, "buffers": 4 * MIB}).endswith(": 96 % parameters")
    assert told({name: (100 + place) * MIB for place, name in enumerate(map(str, range(25)))}).endswith(": 4.4 % 24")


def test_where_the_figures_come_from_and_doubts_about_them_stand_before_any_table() -> None:
    blocks = document(made.of_snapshot(notes=["a note"]), None, "snap_shot.pickle").blocks
    first_table = next(
        place for place, block in enumerate(blocks) if isinstance(block, Table | Breakdown | StackedBars)
    )
    assert paragraphs(blocks[:first_table], "quiet") == ["snap_shot.pickle: from a CUDA memory snapshot"]
    lost, note = paragraphs(blocks[:first_table], "warning")
    assert lost.startswith("history truncated")
    assert note == "note: a note"
    assert memory.about(made.predicted()) == "predicted, not measured, for h200 with 141 GiB"
    assert (
        memory.about(made.on_cpu(rank=3)) == "measured on cpu, rank 3; tensors only, without Python and its libraries"
    )


@pytest.mark.parametrize(
    ("footprint", "said"),
    [
        (made.of_snapshot(truncation_proven=False), "history probably truncated"),
        (made.of_snapshot(truncated=False, late=True), "recording began late"),
    ],
)
def test_a_history_without_its_beginning_is_a_doubt(footprint: Footprint, said: str) -> None:
    assert memory.beginning(footprint).startswith(said)
    assert memory.beginning(made.on_cpu()) == ""


def test_what_the_allocator_did_is_said_as_far_as_it_is_known() -> None:
    counts = Counts(12_345, 12_000, retries=2, ooms=0, largest_free=3 * made.GIB)
    known = made.predicted(allocator=counts)
    said = memory.allocator(known)
    for part in ("allocations 12,345", "frees 12,000", "retries 2", "errors 0", "3 GiB"):
        assert part in said
    assert said in paragraphs(document(known, None), "quiet")
    assert memory.allocator(made.on_cpu(allocator=Counts(5, 4))) == "tensors: allocations 5, frees 4"
    assert memory.allocator(made.predicted()) == ""
    (rank,) = memory.to_document(known, None)["memory"].ranks
    assert rank.allocator == counts


@given(amounts)
def test_putting_amounts_in_order_loses_no_byte(found: Amounts) -> None:
    told = figures.ordered(found)
    assert sum(size for _, size in told) == sum(found.values())
    known = [CATEGORIES.index(name) for name, _ in told if name in CATEGORIES]
    assert known == sorted(known)
    assert all(name not in CATEGORIES for name, _ in told[len(known) :])


@given(st.lists(st.integers(0, 2**40), min_size=4, max_size=4).map(sorted), st.booleans())
def test_what_the_counts_add_leads_from_the_first_to_the_total(sizes: list[int], has_allocator: bool) -> None:
    requested, allocated, reserved, total = sizes
    peak = REPLACE(made.predicted().peak, level=Level(requested, allocated, reserved if has_allocator else None, total))
    told = memory.counts(peak)
    assert bool(told) == (requested != total)
    if told:
        assert told[0].size + sum(count.adds or 0 for count in told[1:]) == told[-1].size == total
        assert all(count.adds for count in told[1:])


def test_the_counts_of_the_peak_are_told_with_what_each_adds() -> None:
    found = document(made.predicted(), None)
    assert row(found, "The peak by count", "requested")["size"] == "63.4 GiB"
    assert [one.get("adds") for one in rows(find(found, Table, "count"))] == [None, "+131 MiB", "+700 MiB", "+512 MiB"]
    assert not find(document(made.on_cpu(), None), Table, "The peak by count"), "all counts are the same"


def test_corrections_come_by_their_size_whatever_their_sign_and_those_not_looked_at_last() -> None:
    known = made.predicted()
    nothing = Correction("nothing", "", 0)
    shown = rows(find(document(REPLACE(known, corrections=[*known.corrections, nothing]), None), Table, "correction"))
    assert [(one["correction"], one.get("adds")) for one in shown] == [
        ("foreach temporaries", "+12.7 GiB"), ("dropout", "-640 MiB"), ("block rounding", "+131 MiB"),
        ("nothing", "+0 B"), ("autocast", None),
    ]  # fmt: skip


def test_what_no_footprint_has_is_not_there() -> None:
    found = document(made.on_cpu(), None)
    assert not any(find(found, Table, title) for title in ("What corrects the prediction", "What holds the peak"))
    assert "Findings" not in titles(found)


def test_phases_stand_in_their_stages_with_peak_and_end() -> None:
    shown = stacks(made.predicted())
    assert [(stack.group, stack.name) for stack in shown][:3] == [
        ("set-up", "model"), ("set-up", "data"), ("first step", "forward"),
    ]  # fmt: skip
    assert shown[4].figures == {"allocated": "63.5 GiB", "peak": "64.7 GiB", "end": "50.8 GiB"}
    assert [stack.strong for stack in shown].index(True) == 4
    assert "allocated" not in stacks(made.on_cpu())[0].figures


def test_at_the_end_of_a_phase_stands_what_is_allocated_where_an_allocator_keeps_memory_back() -> None:
    end: Amounts = {"parameters": 3 * GIB, "fragmentation": 2 * GIB, "other": GIB}
    found = [made.phase("first", "optimizer", {**end, "temporaries": 4 * GIB}, end)]
    (shown,) = stacks(made.of_phases(made.predicted(), found, "first", "optimizer"))
    assert shown.figures == {"allocated": "7 GiB", "peak": "10 GiB", "end": "3 GiB"}
    alike = Level(10 * GIB, 10 * GIB, None, 10 * GIB)
    without = [made.phase("first", "optimizer", {**end, "temporaries": 4 * GIB}, end, counted=alike)]
    (shown,) = stacks(made.of_phases(made.on_cpu(), without, "first", "optimizer"))
    assert shown.figures == {"peak": "10 GiB", "end": "6 GiB"}


def test_every_category_has_a_letter_and_a_colour_of_its_own() -> None:
    assert set(memory.LETTERS) == set(figures.STYLES) == set(CATEGORIES)
    assert len(set(memory.LETTERS.values())) == len(CATEGORIES)
    assert set(memory.LETTERS.values()) - {"?"} == set(terminal.LETTER_COLOURS)
    assert len(set(terminal.LETTER_COLOURS.values())) == len(CATEGORIES) - 1
    assert len({figures.hue(name) for name in CATEGORIES}) == len(CATEGORIES)
    assert set(figures.STYLES.values()) <= charts.HUES
    assert figures.hue(ATTACK) == "hue-other"


def test_the_parts_of_the_peak_have_letters_sizes_and_shares_and_other_phases_categories_are_named() -> None:
    parts = {part.name: part for part in find(document(made.predicted(), None), Breakdown, "The peak").parts}
    state, context, inputs = parts["optimizer state"], parts["context"], parts["inputs"]
    assert (state.letter, state.size, state.percent) == ("O", "25.4 GiB", "39 %")
    assert (context.letter, context.size, context.percent) == ("C", "512 MiB", "0.77 %")
    assert (inputs.letter, inputs.size, inputs.percent) == ("I", "none", "")


def test_alike_allocations_share_a_row_and_the_rest_is_counted_in_pieces() -> None:
    shown = memory.holders(made.predicted())
    assert shown.columns == ("kind", "size", "share", "pieces", "module", "where", "shapes", "operator")
    first, *_ = rows(shown)
    assert (first["kind"], first["size"], first["share"], first["pieces"]) == (
        "optimizer state", "8.79 GiB", "14 %", "128",
    )  # fmt: skip
    assert len(shown.rows) == memory.HOLDERS
    left = made.predicted().holders[memory.HOLDERS :]
    assert shown.rest.startswith(f"{sum(one.count for one in left):,} ")
    assert f"{sum(one.size for one in left) / GIB:.1f} GiB" in shown.rest


def test_of_a_snapshot_the_line_of_the_program_is_told_instead_of_the_module() -> None:
    assert memory.holders(made.of_snapshot()).columns == ("kind", "size", "share", "pieces", "where", "operator")


def test_a_module_has_a_column_for_each_category_that_occurs_the_largest_first() -> None:
    shown = memory.modules(made.predicted())
    assert shown.columns == ("module", "in all", "optimizer state", "gradients", "parameters", "buffers")
    first = rows(shown)[0]
    assert (first["module"], first["in all"], first["buffers"]) == ("transformer.h.0.mlp", "1.56 GiB", "512 B")
    assert "(others)" not in [one["module"] for one in rows(shown)]
    assert "14.1 GiB" in shown.rest
    assert [one["in all"] for one in rows(memory.modules(made.on_cpu()))] == ["4 MiB"]


def test_the_figures_of_each_phase_are_in_its_row() -> None:
    shown = memory.phase_table(made.predicted())
    assert shown.on == Medium.PAGE | Medium.DETAILS
    told = row([shown], "phase", "first step, backward")
    assert (told["peak"], told["gradients"], told["allocated"]) == ("26.6 GiB", "5.86 GiB", "25.4 GiB")
    assert "temporaries" not in told
    assert "allocated" not in memory.phase_table(made.on_cpu()).columns
    ends = [one["at its end"] for one in rows(shown)]
    assert ends == [stack.figures["end"] for stack in stacks(made.predicted())]


def test_what_no_phase_changes_and_what_is_small_in_all_has_no_column_of_its_own() -> None:
    known = made.predicted()
    held = [{"parameters": (1 + number) * GIB, "inputs": MIB, "buffers": number * MIB} for number in range(2)]
    found = [
        REPLACE(phase, peak=amounts | {"other": GIB}, end=amounts)
        for phase, amounts in zip(known.phases[:2], held, strict=True)
    ]
    shown = memory.phase_table(REPLACE(known, phases=found))
    assert "others" not in shown.columns, "one alone is named"
    assert shown.note == "Throughout: context 1 GiB, inputs 1 MiB."
    found[0] = REPLACE(found[0], peak=found[0].peak | {"inputs": 3 * MIB})
    shown = memory.phase_table(REPLACE(known, phases=found))
    assert shown.columns[-2:] == ("parameters", "others")
    assert [one["others"] for one in rows(shown)] == ["3 MiB", "2 MiB"]
    assert shown.note == "Throughout: context 1 GiB. Others: inputs, buffers."
    alone = memory.phase_table(REPLACE(known, phases=found[:1]))
    assert "Throughout" not in alone.note, "one phase changes nothing"


def test_findings_are_in_parts_of_the_peak_and_files_to_keep_come_last() -> None:
    found = REPORTS["footprint-predicted"]
    assert made.findings().headline in paragraphs(found, "strong")
    (finding,) = findings(found)
    assert finding.severity == "high"
    assert "20.0 % of the peak" in lines_of(finding)["expected"]
    assert lines_of(finding)["set"] == "--training.optimizer_impl=fused"
    assert any("without reserved bytes: fragmentation" in line for line in paragraphs(found))
    assert commands(found) == {"kept": "results/exp/run/memory.json"}


def test_findings_on_a_small_peak_are_withheld_alike_in_every_rendering() -> None:
    found = msgspec.structs.replace(made.findings(), withheld="no advice below a peak of 16 MiB")
    shown = document(made.predicted(), found)
    advice = "use the fused implementation"
    assert found.withheld in on_terminal(shown)
    assert advice not in on_terminal(shown).replace("\n", " ")
    source = page.render(shown).lower()
    assert source.index(found.withheld.lower()) < source.index("what would lower the peak") < source.index(advice)
    measured = msgspec.structs.replace(found.findings[0], measured=Trial("confirmed", Saving(0.2), None, None))
    tried = document(made.predicted(), msgspec.structs.replace(found, findings=[measured]))
    assert found.withheld not in on_terminal(tried)


def test_hostile_names_are_shown_and_not_obeyed() -> None:
    harmless(document(hostile(), made.findings(headline=ATTACK), ATTACK, [ATTACK]), at_least=8)


def test_a_document_holds_the_footprint_as_it_is() -> None:
    footprint, found = made.predicted(), made.findings()
    written = json.loads(to_json(memory.to_document(footprint, found)))
    assert msgspec.convert(written["memory"], Footprints) == Footprints([footprint])
    assert msgspec.convert(written["findings"], Findings) == found
    assert set(memory.to_document(footprint, None)) == {"schema_version", "memory"}


def test_scalars_are_bytes_by_count_by_category_and_by_phase() -> None:
    found = scalars(made.predicted())
    assert found["memory/peak/optimizer_state"] == 2 * PARAMETERS
    assert found["memory/peak/total"] == 5 * PARAMETERS + (41 + 700 + 512) * MIB
    assert found["memory/peak/requested"] == 5 * PARAMETERS + 41 * MIB - made.ROUNDING
    assert found["memory/first/optimizer/peak"] == found["memory/peak/total"]
    assert found["memory/first/optimizer/end"] == found["memory/peak/total"] - PARAMETERS
    assert found["memory/setup/model/peak"] == PARAMETERS + 700 * MIB + 512 * MIB
    assert all(isinstance(value, float) for value in found.values())
    assert "memory/peak/reserved" not in scalars(made.on_cpu())


def test_the_peaks_of_a_run_are_the_most_that_any_rank_comes_to_hold() -> None:
    known = made.predicted()
    level = known.peak.level
    usual = {"peak_memory_allocated": level.allocated, "peak_memory_reserved": level.reserved}
    assert peaks([known]) == {**usual, "peak_memory_total": level.total}
    later = holding_later(known, 80 * GIB)
    expected = {"peak_memory_reserved": 80 * GIB, "peak_memory_total": 80 * GIB + made.CONTEXT}
    assert peaks([known, later]) == peaks([later]) == {"peak_memory_allocated": level.allocated, **expected}
    assert peaks([made.on_cpu()]) == {"peak_memory_allocated": 10 * MIB}


def drawing(footprint: Footprint, title: str = "Over the history") -> Markup:
    return find(document(footprint, None), Figure, title).drawing


def borders(footprint: Footprint) -> dict[str, list[tuple[float, float]]]:
    """The outline of each area by the class that colours it."""
    return {
        path.get("class") or "": [
            (float(x), float(y)) for x, y in re.findall(r"([\d.e+-]+),([\d.e+-]+)", path.get("d") or "")
        ]
        for path in parsed(drawing(footprint)).iter("path")
    }


def test_areas_are_stacked_without_gap_from_the_ground_up() -> None:
    held = MemoryTimeline({"activations": [0, 4 * GIB, 0], "parameters": [GIB, GIB, GIB]}, None, [])
    found = borders(made.on_cpu(timeline=held))
    below, above = found[figures.hue("parameters")], found[figures.hue("activations")]
    points = 3
    assert [y for _, y in below[points:]] == [figures.HISTORY_HEIGHT] * points
    assert above[points:] == below[:points][::-1]
    tall = [figures.HISTORY_HEIGHT - y for _, y in (below[1], above[1])]
    assert tall[1] == pytest.approx(5 * tall[0], abs=0.5)


def test_what_is_reserved_is_a_line_only_where_an_allocator_keeps_memory_back() -> None:
    assert "line error" in borders(made.predicted())
    assert "line error" not in borders(made.on_cpu())


def test_the_peak_is_marked_where_it_is_with_its_size() -> None:
    footprint = made.predicted()
    shown = parsed(drawing(footprint))
    (dot,) = shown.iter("circle")
    points = len(footprint.timeline.amounts["parameters"])
    place = 100 * footprint.peak.position / (points - 1)
    assert float((dot.get("cx") or "").removesuffix("%")) == pytest.approx(place, abs=0.01)
    top = min(y for _, y in borders(footprint)[figures.hue("other")])
    assert float(dot.get("cy") or 0) == pytest.approx(figures.TOP + top, abs=0.1)
    assert "peak 64.7 GiB" in texts(shown)


@pytest.mark.parametrize(("capacity", "drawn"), [(None, False), (48, True), (66, True), (96, True), (98, False)])
def test_the_capacity_is_drawn_where_it_is_near(capacity: int | None, drawn: bool) -> None:
    footprint = made.predicted(capacity=capacity and capacity * GIB)
    assert (f"capacity {capacity} GiB" in texts(parsed(drawing(footprint)))) == drawn


def test_phases_stand_under_the_plot_by_name_or_by_initial_and_all_on_hover() -> None:
    shown = parsed(drawing(made.predicted()))
    assert [said for said in texts(shown) if said in ("M", "data", "F", "B", "O", "Z")] == [
        "M", "data", "F", "B", "O", "Z", "F", "B", "O", "Z",
    ]  # fmt: skip
    hints = [title.text for title in shown.iter("title")]
    assert "backward, step 1" in hints
    assert [said for said in texts(shown) if said in ("set-up", "step 0", "step 1")] == ["set-up", "step 0", "step 1"]
    note = find(document(made.predicted(), None), Figure, "Over the history").note
    assert "M model, D data, F forward, B backward, O optimizer, Z zero grad." in note


@pytest.mark.parametrize("found", [{}, {"parameters": []}, {"parameters": [0, 0]}])
def test_a_history_in_which_nothing_is_held_is_not_drawn(found: dict[str, list[int]]) -> None:
    footprint = made.on_cpu(timeline=MemoryTimeline(found, None, []))
    assert "Over the history" not in titles(document(footprint, None))
    assert "nothing was held over the history" in paragraphs(document(footprint, None), "missing")


@given(st.data())
def test_any_timeline_is_drawn_within_reason(data: st.DataObject) -> None:
    points = data.draw(st.integers(1, 40))
    series = st.lists(st.integers(0, 2**45), min_size=points, max_size=points)
    held = MemoryTimeline(
        data.draw(st.dictionaries(st.sampled_from(CATEGORIES), series, min_size=1)),
        data.draw(st.none() | series),
        made.predicted().timeline.marks[: data.draw(st.integers(0, 10))],
    )
    found = made.predicted(timeline=held)
    is_drawn = "Over the history" in titles(document(found, None))
    assert is_drawn == any(map(any, held.amounts.values()))
    if is_drawn:
        parsed(drawing(found))


def test_phases_that_begin_where_another_does_leave_no_box_of_no_width() -> None:
    twice = [TimelineMark(0, "start", None), TimelineMark(0, "model", None), TimelineMark(2, "zero_grad", None)]
    held = MemoryTimeline({"parameters": [GIB, GIB, GIB]}, None, twice)
    boxes = [box.get("width") for box in parsed(drawing(made.on_cpu(timeline=held))).iter("rect")]
    assert boxes == ["100%"]


def test_a_bar_of_a_phase_is_as_long_as_what_it_holds() -> None:
    shown = drawing(made.predicted(), "Peak of each phase")
    filled: dict[str, float] = {}
    for x, y, width in re.findall(r'x="([\d.]+)%" y="(\d+)" width="([\d.]+)%" height="22"', shown):
        assert float(x) == pytest.approx(filled.get(y, 0), abs=0.1)
        filled[y] = filled.get(y, 0) + float(width)
    levels = [one.level.total for one in made.predicted().phases]
    assert list(filled.values()) == pytest.approx([100 * total / max(levels) for total in levels], abs=0.1)
