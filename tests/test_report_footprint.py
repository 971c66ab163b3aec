"""What the terminal, the page, --json and TensorBoard show of a footprint."""

import io
import json
import re
from pathlib import Path

import footprints_made as made
import msgspec
import pytest
from browser import PHONE, needs_browser, wide_tables, width_on_a_phone
from footprints_made import GIB, MIB, PARAMETERS
from gpubench.report.footprint import holders, modules, phases, show, to_document
from gpubench.report.footprint_page import over_time, page, section
from gpubench.report.templating import environment
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from test_page import HOSTILE, Page
from test_plots import parsed, texts

from gpubench.findings import Findings
from gpubench.memory.footprint import (
    CATEGORIES,
    Amounts,
    Correction,
    Footprint,
    Footprints,
    Holder,
    Level,
    Timeline,
    TimelineMark,
    peaks,
    scalars,
)
from gpubench.memory.history import Counts
from gpubench.report import footprint as in_words
from gpubench.report import footprint_page, lanes
from gpubench.runs.directory import to_json

ATTACK = f"{HOSTILE}[bold]\x1b[2J\nline[/bold]"
REPLACE = msgspec.structs.replace

amounts = st.dictionaries(st.sampled_from([*CATEGORIES, "of a later version"]), st.integers(0, 2**40), min_size=1)


def rendered(
    footprint: Footprint, findings: Findings | None = None, width: int = 120, label: str = "", colour: bool = False
) -> str:
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="standard" if colour else None,
        no_color=False,
    )  # fmt: skip
    show(footprint, findings, console, label, ("results/exp/run/memory.json",))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def row(text: str, name: str) -> list[str]:
    return next(line.split() for line in text.splitlines() if line.startswith(name))


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


def test_the_headline_tells_the_peak_its_phase_what_fills_it_and_whether_it_fits() -> None:
    assert in_words.headline(made.predicted()) == (
        "peak 64.7 GiB in the optimizer step: 39 % optimizer state, 20 % parameters, 20 % gradients, "
        "20 % temporaries; fits in 141 GiB with 54 % to spare"
    )


@pytest.mark.parametrize(
    ("total", "capacity", "said"),
    [
        (27 * GIB, 24 * GIB, "; does not fit in 24 GiB: 3 GiB too much"),
        (24 * GIB + 1, 24 * GIB, "; does not fit in 24 GiB: 1 B too much"),
        (24 * GIB, 24 * GIB, "; fits in 24 GiB with 0 % to spare"),
        (20 * GIB, 80 * GIB, "; fits in 80 GiB with 75 % to spare"),
        (99 * GIB, 100 * GIB, "; fits in 100 GiB with 1 % to spare"),
    ],
)
def test_a_prediction_says_by_how_much_it_fits_or_not(total: int, capacity: int, said: str) -> None:
    assert in_words.headline(needing(total, capacity)).endswith(said)


@pytest.mark.parametrize(
    ("gibibytes", "said"),
    [
        (10, "fits in 10 GiB with 0 % to spare"),
        (9, "fits in 9 GiB only if the allocator gives back what it keeps unused"),
        (7, "fits in 7 GiB only if the allocator gives back what it keeps unused"),
        (6, "does not fit in 6 GiB: 4 GiB too much"),
    ],
)
def test_what_the_allocator_keeps_unused_is_not_what_a_program_fails_for(gibibytes: int, said: str) -> None:
    held: Amounts = {"parameters": 6 * GIB, "fragmentation": 3 * GIB, "other": GIB}
    known, found = made.predicted(capacity=gibibytes * GIB), [made.phase("first", "optimizer", held)]
    assert in_words.fits(made.of_phases(known, found, "first", "optimizer")) == said


def test_a_phase_after_the_peak_that_has_more_reserved_has_to_fit_too() -> None:
    known = made.predicted()
    grown = made.phase("steady", "zero_grad", {"parameters": PARAMETERS, "fragmentation": 70 * GIB})
    found = REPLACE(known, phases=[*known.phases, grown])
    assert found.most == PARAMETERS + 70 * GIB > known.peak.level.total
    assert in_words.fits(found) == "fits in 141 GiB with 41 % to spare"
    bars = re.findall(r"GiB  ([A-Z]+)(░*)  ", rendered(found, width=80))
    assert [len(rest) for _, rest in bars if rest == ""] == [0]  # only the longest is full


def test_what_the_allocator_takes_between_the_peaks_of_phases_has_to_fit_too() -> None:
    known = made.predicted()
    found = holding_later(known, 80 * GIB)
    assert known.most == known.peak.level.total
    assert found.most == 80 * GIB + made.CONTEXT
    assert in_words.headline(found) == (
        "peak 64.7 GiB in the optimizer step: 39 % optimizer state, 20 % parameters, 20 % gradients, "
        "20 % temporaries; 80.5 GiB are held later; fits in 141 GiB with 43 % to spare"
    )
    tight = REPLACE(found, capacity=80 * GIB)
    assert in_words.fits(tight) == "fits in 80 GiB only if the allocator gives back what it keeps unused"
    bars = re.findall(r"GiB  ([A-Z]+)(░*)  ", rendered(found, width=80))
    assert all(rest for _, rest in bars), "none is full: no phase's peak is the most"


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
    assert "; 1005 MiB are held later;" in in_words.headline(holding_later(known, 1005 * MIB + 1))
    little = in_words.headline(holding_later(known, 1005 * MIB - 1))
    assert "later" not in little
    assert little.endswith("; fits in 1.95 GiB with 50 % to spare")
    measured = REPLACE(holding_later(known, 1005 * MIB + 1), source="measured")
    assert in_words.headline(measured).endswith(": 100 % parameters; 1005 MiB are held later")


def test_what_was_measured_is_not_asked_whether_it_fits() -> None:
    assert "fit" not in in_words.headline(made.predicted(source="measured"))
    assert "fit" not in in_words.headline(made.predicted(capacity=None))


def test_a_peak_that_only_the_first_step_has_is_called_the_first() -> None:
    known = made.predicted(source="measured")
    without = [one for one in known.phases if (one.stage, one.phase) != ("steady", "optimizer")]
    said = in_words.headline(made.of_phases(known, without, "first", "optimizer"))
    assert said.startswith(
        "peak 64.7 GiB in the first optimizer step (57.6 GiB allocated in a steady step): 39 % optimizer"
    )
    alone = [one for one in known.phases if one.stage != "steady"]
    told = in_words.headline(made.of_phases(known, alone, "first", "optimizer"))
    assert told.startswith("peak 64.7 GiB in the optimizer step: ")


def test_a_steady_step_for_which_only_more_is_reserved_has_the_same_peak() -> None:
    known = made.predicted(source="measured")
    *others, last = known.phases
    before = next(one for one in others if (one.stage, one.phase) == ("steady", "optimizer"))
    for more, later in ((0, ""), (GIB, "; 65.7 GiB are held later")):
        spare = before.peak["fragmentation"] + more
        kept_back = made.phase("steady", "optimizer", {**before.peak, "fragmentation": spare})
        found = [kept_back if one is before else one for one in others]
        told = in_words.headline(made.of_phases(known, [*found, last], "first", "optimizer"))
        assert told.startswith("peak 64.7 GiB in the optimizer step: ")
        assert told.endswith(f"20 % temporaries{later}")
    one_less = made.phase("steady", "optimizer", {**before.peak, "parameters": PARAMETERS - MIB, "fragmentation": GIB})
    found = [one_less if one is before else one for one in others]
    told = in_words.headline(made.of_phases(known, [*found, last], "first", "optimizer"))
    assert told.startswith("peak 64.7 GiB in the first optimizer step (63.5 GiB allocated in a steady step): ")


def test_a_peak_before_the_first_step_is_not_called_the_first() -> None:
    known = made.predicted(source="measured")
    early = made.peak_of([made.phase("setup", "data", {"inputs": 90 * GIB})], "setup", "data")
    assert in_words.headline(REPLACE(known, peak=early)) == "peak 90 GiB in the loading of data: 100 % inputs"


def test_a_small_part_is_left_out_of_the_headline_and_a_peak_of_small_parts_names_the_largest() -> None:
    parts: Amounts = {"parameters": 96 * MIB, "buffers": 4 * MIB}
    one = REPLACE(made.on_cpu(), peak=REPLACE(made.on_cpu().peak, amounts=parts, level=made.level(parts)))
    assert in_words.headline(one) == "peak 100 MiB in the forward pass: 96 % parameters"
    many: Amounts = {name: (100 + place) * MIB for place, name in enumerate(map(str, range(25)))}
    other = REPLACE(one, peak=REPLACE(one.peak, amounts=many, level=made.level(many)))
    assert in_words.headline(other).endswith(": 4.4 % 24")


def test_a_peak_without_a_phase_is_told_without_one() -> None:
    assert in_words.headline(made.of_snapshot()) == (
        "peak 13.5 GiB: 65 % there before, 29 % unknown, 5.8 % fragmentation"
    )


def test_where_the_figures_come_from_is_said_before_any_table() -> None:
    assert rendered(made.predicted(), width=200).splitlines()[1] == "predicted, not measured, for h200 with 141 GiB"
    assert rendered(made.on_cpu(rank=3)).splitlines()[1] == "measured on cpu, rank 3"
    _, about, lost, *_ = rendered(made.of_snapshot(), label="snap_shot.pickle").splitlines()
    assert about == "snap_shot.pickle: from a CUDA memory snapshot"
    assert lost.startswith("history truncated: ")
    likely = made.of_snapshot(truncation_proven=False)
    assert in_words.beginning(likely).startswith("history probably truncated: ")
    late = made.of_snapshot(truncated=False, late=True)
    assert in_words.beginning(late).startswith("recording began late: ")
    assert in_words.beginning(made.on_cpu()) == ""


def test_what_the_allocator_did_is_said_as_far_as_it_is_known() -> None:
    counts = Counts(12_345, 12_000, retries=2, ooms=0, largest_free=3 * made.GIB)
    said = in_words.allocator(made.predicted(allocator=counts))
    assert said == (
        "allocator: allocations 12,345, frees 12,000, cudaMalloc retries 2, out-of-memory errors 0, largest free block "
        "at the end 3 GiB"
    )
    assert in_words.allocator(made.on_cpu(allocator=Counts(5, 4))) == "tensors: allocations 5, frees 4"
    assert in_words.allocator(made.predicted()) == ""
    assert said in " ".join(rendered(made.predicted(allocator=counts), width=200).split())
    assert "allocations 12,345" in page(made.predicted(allocator=counts))
    (rank,) = to_document(made.predicted(allocator=counts), None)["memory"].ranks
    assert rank.allocator == counts


@given(amounts)
def test_putting_amounts_in_order_loses_no_byte(found: Amounts) -> None:
    told = in_words.ordered(found)
    assert sum(size for _, size in told) == sum(found.values())
    known = [CATEGORIES.index(name) for name, _ in told if name in CATEGORIES]
    assert known == sorted(known)
    assert all(name not in CATEGORIES for name, _ in told[len(known) :])


@given(st.lists(st.integers(0, 2**40), min_size=4, max_size=4).map(sorted), st.booleans())
def test_what_the_counts_add_leads_from_the_first_to_the_total(sizes: list[int], has_allocator: bool) -> None:
    requested, allocated, reserved, total = sizes
    peak = REPLACE(made.predicted().peak, level=Level(requested, allocated, reserved if has_allocator else None, total))
    told = in_words.counts(peak)
    assert bool(told) == (requested != total)
    if told:
        assert told[0].size + sum(count.adds or 0 for count in told[1:]) == told[-1].size == total
        assert all(count.adds for count in told[1:])


def test_the_counts_of_the_peak_are_told_with_what_each_adds() -> None:
    text = rendered(made.predicted())
    assert row(text, "requested") == ["requested", "63.4", "GiB", "what", "tensors", "asked", "for"]
    assert row(text, "allocated")[3:5] == ["+131", "MiB"]
    assert row(text, "reserved")[3:5] == ["+700", "MiB"]
    assert row(text, "total")[1:5] == ["64.7", "GiB", "+512", "MiB"]


def test_counts_that_are_all_the_same_are_not_told() -> None:
    assert "count" not in rendered(made.on_cpu())
    assert section(made.on_cpu())["counts"] == []


def test_corrections_come_by_their_size_whatever_their_sign_and_those_not_looked_at_last() -> None:
    text = rendered(made.predicted())
    start = text.splitlines().index("What corrects the prediction")
    told = [re.split(r"  +", line)[:2] for line in text.splitlines()[start + 1 : start + 5]]
    assert told[:3] == [["foreach temporaries", "+12.7 GiB"], ["dropout", "-640 MiB"], ["block rounding", "+131 MiB"]]
    assert told[3][0] == "autocast"
    assert "corrects" not in rendered(made.on_cpu())
    unknown, none = Correction("a", "", None), Correction("b", "", 0)
    assert in_words.corrections([unknown, none]) == [none, unknown]


def test_phases_stand_in_their_stages_with_peak_and_end() -> None:
    lines = [line.rstrip() for line in rendered(made.predicted(), width=80).splitlines()]
    start = next(place for place, line in enumerate(lines) if line.startswith("phase"))
    names = [line[:11].rstrip() for line in lines[start + 1 : start + 14]]
    assert names == [
        "set-up", " model", " data", "first step", " forward", " backward", " optimizer", " zero grad",
        "steady step", " forward", " backward", " optimizer", " zero grad",
    ]  # fmt: skip
    assert lines[start].split() == ["phase", "allocated", "peak", "end"]
    assert lines[start + 7].split()[1:5] == ["63.5", "GiB", "64.7", "GiB"]
    assert lines[start + 7].split()[-2:] == ["50.8", "GiB"]


def test_at_the_end_of_a_phase_stands_what_is_allocated_where_an_allocator_keeps_memory_back() -> None:
    end: Amounts = {"parameters": 3 * GIB, "fragmentation": 2 * GIB, "other": GIB}
    found = [made.phase("first", "optimizer", {**end, "temporaries": 4 * GIB}, end)]
    shown = row(rendered(made.of_phases(made.predicted(), found, "first", "optimizer")), " optimizer")
    assert (shown[1:5], shown[-2:]) == (["7", "GiB", "10", "GiB"], ["3", "GiB"])
    alike = Level(10 * GIB, 10 * GIB, None, 10 * GIB)
    without = [made.phase("first", "optimizer", {**end, "temporaries": 4 * GIB}, end, counted=alike)]
    shown = row(rendered(made.of_phases(made.on_cpu(), without, "first", "optimizer")), " optimizer")
    assert (shown[1:3], shown[-2:]) == (["10", "GiB"], ["6", "GiB"])


def test_without_colours_a_bar_is_made_of_the_letters_of_its_legend() -> None:
    text = rendered(made.predicted(), width=80)
    bar = next(line for line in text.splitlines() if line.startswith(" optimizer")).split()[5]
    assert re.fullmatch("P+G+O+T+F?C?", bar)
    forward = next(line for line in text.splitlines() if line.startswith(" forward")).split()[5]
    assert len(forward) == len(bar)
    assert forward.index("░") == round(len(bar) * 22.7 / 64.7)
    for letter in set(bar):
        assert re.search(rf"^{letter}  [a-z ]+\d", text, re.MULTILINE)


def test_with_colours_a_block_hides_its_letter_in_a_ground_of_its_own() -> None:
    assert "\x1b[34;44mPPPP" in rendered(made.predicted(), width=80, colour=True)


def test_every_category_has_a_letter_and_a_colour_of_its_own() -> None:
    assert set(in_words.BLOCKS) == set(CATEGORIES)
    for kind in zip(*in_words.BLOCKS.values(), strict=True):
        assert len(set(kind)) == len(CATEGORIES)


@given(amounts, st.integers(6, 60), st.integers(0, 2**40))
def test_a_bar_is_as_long_as_its_share_of_the_whole(found: Amounts, room: int, more: int) -> None:
    held = sum(found.values())
    bar = in_words.bar(found, held + more, room).plain
    assert len(bar) == room
    assert bar.rstrip("░").count("░") == 0
    filled = held / (held + more) * room if held + more else 0
    assert abs(len(bar.rstrip("░")) - filled) <= 0.5


def test_the_legend_tells_what_fills_the_peak_and_names_what_fills_other_phases() -> None:
    text = rendered(made.predicted())
    assert row(text, "O  optimizer state") == ["O", "optimizer", "state", "25.4", "GiB", "39", "%"]
    assert row(text, "C  context") == ["C", "context", "512", "MiB", "0.77", "%"]
    assert row(text, "I  inputs") == ["I", "inputs"]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("footprint", [made.predicted(), made.of_snapshot(), made.on_cpu(), hostile()])
def test_no_line_is_wider_than_the_terminal(footprint: Footprint, width: int) -> None:
    whole = "kept: ", "keep: "  # to be copied
    lines = rendered(footprint, made.findings(), width).splitlines()
    assert max(cell_len(line) for line in lines if not line.startswith(whole)) <= width


def test_a_narrow_terminal_still_has_bars_and_reads_every_figure() -> None:
    text = rendered(made.predicted(), width=40)
    assert re.search(r"^ optimizer +64\.7 GiB  P[GOT]+  50\.8 GiB$", text, re.MULTILINE)
    assert "…" not in text
    assert "foreach temporaries  +12.7 GiB\n   AdamW runs" in text


def test_without_room_for_a_bar_the_figures_stand_alone() -> None:
    assert re.search(r"^ optimizer +64\.7 GiB +50\.8 GiB$", rendered(made.predicted(), width=34), re.MULTILINE)


def test_alike_allocations_share_a_row_and_the_rest_is_counted_in_pieces() -> None:
    shown = holders(made.predicted())
    assert shown.columns == ("kind", "size", "share", "pieces", "module", "where", "shapes", "operator")
    assert shown.rows[0][:4] == ("optimizer state", "8.79 GiB", "14 %", "128")
    assert len(shown.rows) == in_words.HOLDERS
    left = made.predicted().holders[in_words.HOLDERS :]
    pieces = sum(one.count for one in left)
    assert shown.rest == f"{pieces} other pieces, {sum(one.size for one in left) / GIB:.1f} GiB in all"


def test_of_a_snapshot_the_line_of_the_program_is_told_instead_of_the_module() -> None:
    assert holders(made.of_snapshot()).columns == ("kind", "size", "share", "pieces", "where", "operator")


def test_a_module_has_a_column_for_each_category_that_occurs_the_largest_first() -> None:
    shown = modules(made.predicted())
    assert shown.columns == ("module", "in all", "optimizer state", "gradients", "parameters", "buffers")
    assert shown.rows[0] == ("transformer.h.0.mlp", "1.56 GiB", "800 MiB", "400 MiB", "400 MiB", "512 B")
    assert "(others)" not in [cells[0] for cells in shown.rows]
    assert shown.rest == "the others, 14.1 GiB in all"
    assert modules(made.on_cpu()).rows == [("(no module)", "4 MiB", "4 MiB")]


def test_the_figures_of_each_phase_are_in_its_row() -> None:
    shown = phases(made.predicted())
    told = dict(zip(shown.columns, shown.rows[3], strict=True))
    assert told["phase"] == "first step, backward"
    assert (told["peak"], told["gradients"], told["temporaries"]) == ("26.6 GiB", "5.86 GiB", "")
    assert told["allocated"] == "25.4 GiB"
    assert "allocated" not in phases(made.on_cpu()).columns


def test_what_no_phase_changes_and_what_is_small_in_all_has_no_column_of_its_own() -> None:
    known = made.predicted()
    held = [{"parameters": (1 + number) * GIB, "inputs": MIB, "buffers": number * MIB} for number in range(2)]
    found = [
        REPLACE(phase, peak=amounts | {"other": GIB}, end=amounts)
        for phase, amounts in zip(known.phases[:2], held, strict=True)
    ]
    shown = phases(REPLACE(known, phases=found))
    assert "others" not in shown.columns, "one alone is named"
    assert shown.note == "Throughout: context 1 GiB, inputs 1 MiB."
    found[0] = REPLACE(found[0], peak=found[0].peak | {"inputs": 3 * MIB})
    shown = phases(REPLACE(known, phases=found))
    assert shown.columns[-2:] == ("parameters", "others")
    assert [row[-1] for row in shown.rows] == ["3 MiB", "2 MiB"]
    assert shown.note == "Throughout: context 1 GiB. Others: inputs, buffers."
    assert not phases(REPLACE(known, phases=found[:1])).rest.startswith("context"), "one phase changes nothing"


def test_what_a_phase_leaves_is_the_same_in_the_terminal_and_on_the_page() -> None:
    found = made.predicted()
    shown = phases(found)
    ends = [row[shown.columns.index("at its end")] for row in shown.rows]
    lines = [line.split() for line in rendered(found, width=120).splitlines()]
    assert all([*end.split()] in [line[-2:] for line in lines] for end in ends)


def test_findings_are_told_as_of_a_profile_in_parts_of_the_peak() -> None:
    text = rendered(made.predicted(), made.findings(), width=200)
    assert text.splitlines()[1] == "AdamW's foreach temporaries add 12.7 GiB; fused would not"
    assert "1. the optimizer step holds a second copy of the parameters  high" in text
    assert "saves up to 20.0 % of the peak" in text
    assert "--training.optimizer_impl=fused" in text
    assert "not judged, data missing (reserved bytes): fragmentation" in text
    assert "no finding" not in rendered(made.predicted())


def test_notes_and_what_was_kept_come_last() -> None:
    note, kept = rendered(made.predicted()).splitlines()[-2:]
    assert note == "note: attention was traced as CUDA's flash kernels run it"
    assert kept == "kept: results/exp/run/memory.json"


def test_hostile_names_are_shown_in_the_terminal_and_not_obeyed() -> None:
    text = rendered(hostile(), width=1000, label=ATTACK)
    assert "\x1b" not in text
    assert text.count("[bold]\\x1b[2J\\nline[/bold]") > 8


def test_a_document_holds_the_footprint_as_it_is() -> None:
    footprint, findings = made.predicted(), made.findings()
    document = json.loads(to_json(to_document(footprint, findings)))
    assert msgspec.convert(document["memory"], Footprints) == Footprints([footprint])
    assert msgspec.convert(document["findings"], Findings) == findings
    assert set(to_document(footprint, None)) == {"schema_version", "memory"}


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


def test_the_page_leads_with_the_headline_and_holds_every_table() -> None:
    source = page(made.predicted(), made.findings(), "memory.json")
    order = [
        "<h1>Peak 64.7 GiB in the optimizer step", "foreach temporaries add 12.7 GiB; fused would not.</p>",
        "Predicted, not measured, for h200", "Over the history", "<h3>The peak</h3>", "<h3>The peak by count",
        "<h3>What corrects the prediction", "<h3>Findings", "<h3>Phases</h3>", "<h3>Phases by category",
        "<h3>What holds the peak", "<h3>Modules",
    ]  # fmt: skip
    places = [source.index(said) for said in order]
    assert places == sorted(places)
    assert "\u2212640 MiB" in source
    assert "saves up to 20.0\u00a0% of the peak" in source
    assert Page(source).words.count("memory.json") == 1


def test_the_page_of_a_footprint_alone_has_neither_findings_nor_corrections() -> None:
    source = page(made.on_cpu())
    assert "<h3>Findings" not in source
    assert "<h3>What corrects" not in source
    assert "reserved" not in source


def test_a_section_begins_with_its_headline_in_the_page_of_a_run() -> None:
    template = environment().from_string('{% import "footprint.html" as footprints %}{{ footprints.section(memory) }}')
    said = template.render(memory=section(made.predicted(), made.findings()))
    assert said.index('<h2 id="memory">') < said.index('<p class="learned">Peak 64.7') < said.index("Over the history")


def test_a_truncated_history_and_notes_stand_among_the_doubts() -> None:
    found = section(made.of_snapshot(notes=["out of memory at event 12"]))
    assert found["doubts"][0].startswith("History truncated: ")
    assert found["doubts"][1:] == ["out of memory at event 12"]


def test_hostile_names_are_shown_on_the_page_and_not_obeyed() -> None:
    source = page(hostile(), made.findings(headline=ATTACK), ATTACK)
    found = Page(source)
    assert {"script", "img", "iframe", "object"}.isdisjoint(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert "\x1b" not in source
    assert found.words.count(HOSTILE) > 8


def test_the_page_needs_nothing_but_itself() -> None:
    source = page(made.predicted(), made.findings())
    assert not set(re.findall(r'(?:href|src)="(?!#|data:,)([^"]*)"', source))
    assert not re.search(r"url\(|@import|nan|inf%", source)


def borders(footprint: Footprint) -> dict[str, list[tuple[float, float]]]:
    """The outline of each area by the class that colours it."""
    drawn = parsed(over_time(footprint)).iter("path")
    return {
        path.get("class") or "": [
            (float(x), float(y)) for x, y in re.findall(r"([\d.e+-]+),([\d.e+-]+)", path.get("d") or "")
        ]
        for path in drawn
    }


def test_areas_are_stacked_without_gap_from_the_ground_up() -> None:
    held = Timeline({"activations": [0, 4 * GIB, 0], "parameters": [GIB, GIB, GIB]}, None, [])
    found = borders(made.on_cpu(timeline=held))
    below, above = found[footprint_page.hue("parameters")], found[footprint_page.hue("activations")]
    points = 3
    assert [y for _, y in below[points:]] == [footprint_page.HEIGHT] * points
    assert above[points:] == below[:points][::-1]
    tall = [footprint_page.HEIGHT - y for _, y in (below[1], above[1])]
    assert tall[1] == pytest.approx(5 * tall[0], abs=0.5)


def test_what_is_reserved_is_a_line_only_where_an_allocator_keeps_memory_back() -> None:
    assert "line error" in borders(made.predicted())
    assert "line error" not in borders(made.on_cpu())


def test_the_peak_is_marked_where_it_is_with_its_size() -> None:
    footprint = made.predicted()
    drawing = parsed(over_time(footprint))
    (dot,) = drawing.iter("circle")
    points = len(footprint.timeline.amounts["parameters"])
    place = 100 * footprint.peak.position / (points - 1)
    assert float((dot.get("cx") or "").removesuffix("%")) == pytest.approx(place, abs=0.01)
    top = min(y for _, y in borders(footprint)[footprint_page.hue("other")])
    assert float(dot.get("cy") or 0) == pytest.approx(footprint_page.TOP + top, abs=0.1)
    assert "peak 64.7 GiB" in texts(drawing)


@pytest.mark.parametrize(("capacity", "drawn"), [(None, False), (48, True), (66, True), (96, True), (98, False)])
def test_the_capacity_is_drawn_where_it_is_near(capacity: int | None, drawn: bool) -> None:
    footprint = made.predicted(capacity=capacity and capacity * GIB)
    assert (f"capacity {capacity} GiB" in texts(parsed(over_time(footprint)))) == drawn


def test_phases_stand_under_the_plot_by_name_or_by_initial_and_all_on_hover() -> None:
    drawing = parsed(over_time(made.predicted()))
    assert [said for said in texts(drawing) if said in ("M", "data", "F", "B", "O", "Z")] == [
        "M", "data", "F", "B", "O", "Z", "F", "B", "O", "Z",
    ]  # fmt: skip
    hints = [title.text for title in drawing.iter("title")]
    assert "backward, step 1" in hints
    assert [said for said in texts(drawing) if said in ("set-up", "step 0", "step 1")] == ["set-up", "step 0", "step 1"]
    note = section(made.predicted())["history"].note
    assert "M model, D data, F forward, B backward, O optimizer, Z zero grad." in note


@pytest.mark.parametrize("found", [{}, {"parameters": []}, {"parameters": [0, 0]}])
def test_a_history_in_which_nothing_is_held_is_not_drawn(found: dict[str, list[int]]) -> None:
    footprint = made.on_cpu(timeline=Timeline(found, None, []))
    assert over_time(footprint) is None
    assert "Nothing was held over the history" in page(footprint)


@given(st.data())
def test_any_timeline_is_drawn_within_reason(data: st.DataObject) -> None:
    points = data.draw(st.integers(1, 40))
    series = st.lists(st.integers(0, 2**45), min_size=points, max_size=points)
    held = Timeline(
        data.draw(st.dictionaries(st.sampled_from(CATEGORIES), series, min_size=1)),
        data.draw(st.none() | series),
        made.predicted().timeline.marks[: data.draw(st.integers(0, 10))],
    )
    drawing = over_time(made.predicted(timeline=held))
    assert (drawing is None) == (not any(map(any, held.amounts.values())))
    if drawing is not None:
        parsed(drawing)


def test_phases_that_begin_where_another_does_leave_no_box_of_no_width() -> None:
    twice = [TimelineMark(0, "start", None), TimelineMark(0, "model", None), TimelineMark(2, "zero_grad", None)]
    held = Timeline({"parameters": [GIB, GIB, GIB]}, None, twice)
    boxes = [box.get("width") for box in parsed(over_time(made.on_cpu(timeline=held))).iter("rect")]
    assert boxes == ["100%"]


def test_a_bar_of_a_phase_is_as_long_as_what_it_holds() -> None:
    drawing = footprint_page.phases(made.predicted()) or ""
    filled: dict[str, float] = {}
    for x, y, width in re.findall(r'x="([\d.]+)%" y="(\d+)" width="([\d.]+)%" height="22"', drawing):
        assert float(x) == pytest.approx(filled.get(y, 0), abs=0.1)
        filled[y] = filled.get(y, 0) + float(width)
    levels = [one.level.total for one in made.predicted().phases]
    assert list(filled.values()) == pytest.approx([100 * total / max(levels) for total in levels], abs=0.1)


def test_no_two_categories_share_a_colour() -> None:
    assert set(footprint_page.STYLES) == set(CATEGORIES)
    assert len({footprint_page.hue(name) for name in CATEGORIES}) == len(CATEGORIES)
    assert set(footprint_page.STYLES.values()) <= lanes.HUES
    assert footprint_page.hue(ATTACK) == "hue-other"


@needs_browser
def test_a_phone_shows_the_page_without_scrolling_sideways(tmp_path: Path) -> None:
    source = page(made.predicted(), made.findings(), "memory.json")
    assert width_on_a_phone(source, tmp_path) <= PHONE


@needs_browser
def test_no_table_of_the_page_has_to_be_scrolled_on_a_small_screen(tmp_path: Path) -> None:
    assert wide_tables(page(made.predicted(), made.findings(), "memory.json"), tmp_path, 1000) == 0


def test_a_long_name_may_go_on_in_another_line_and_stays_the_same_name() -> None:
    source = page(made.predicted())
    assert ">transformer.<wbr>h.<wbr>0.<wbr>mlp.<wbr>c_<wbr>fc</td>" in source
    assert 'title="transformer.h.0.mlp.c_fc"' in source
