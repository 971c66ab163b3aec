"""The ledger: its lines, and what the kept edits have gained together."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli import complaint
from decisions_made import KEPT
from running import Finished

from gpubench.compare.ledger import JudgedEdit, add, line_of, read, together
from gpubench.errors import RunDirectoryError, RunFailed

CommandLine = Callable[..., Finished]
ONE = line_of(KEPT)


def edit(base: str, gain: float, decision: str = "keep", **changes: object) -> JudgedEdit:
    changes = {"interval": (gain / 1.01, gain * 1.01)} | changes
    return msgspec.structs.replace(ONE, base=base, gain=gain, decision=decision, **changes)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "edits.jsonl"
    add(path, ONE)
    add(path, msgspec.structs.replace(ONE, started="later"))
    assert [one.started for one in read(path)] == [ONE.started, "later"]


def test_a_judgement_that_was_resumed_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "edits.jsonl"
    add(path, msgspec.structs.replace(ONE, decision="undecided"))
    add(path, ONE)
    assert [one.decision for one in read(path)] == ["keep"]


@pytest.mark.parametrize(
    "content",
    [b"{}\n", b"\xff\n", b"[" * 100_000],
)
def test_a_file_that_is_no_ledger_is_named_with_its_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "edits.jsonl"
    path.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=":1 is not a judged edit"):
        read(path)


def test_a_ledger_of_a_newer_version_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="there is no ledger"):
        read(tmp_path / "none")
    add(tmp_path / "edits.jsonl", msgspec.structs.replace(ONE, schema_version=99))
    with pytest.raises(RunDirectoryError, match="newer version"):
        read(tmp_path / "edits.jsonl")
    with pytest.raises(RunFailed, match="cannot write"):
        add(tmp_path, ONE)


IMPOSSIBLE: dict[str, list[Any]] = {
    "gain": [-1, 0, 1e308, 1e-308, [], "1"],
    "interval": [[0, 0], [-1, 1], [1, 1e308], [1], [1, 1, 1], []],
    "rounds": [-1, 1e308, 10**40, 1.5],
    "margin": [-1, 1e308, None],
    "schema_version": [0, -1, 2**40],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in IMPOSSIBLE.items() for value in values])
def test_an_impossible_value_is_refused(command_line: CommandLine, tmp_path: Path, name: str, value: object) -> None:
    line = json.dumps(msgspec.to_builtins(ONE) | {name: value})
    (tmp_path / "edits.jsonl").write_bytes(msgspec.json.encode(ONE) + b"\n" + line.encode() + b"\n")
    said, _ = complaint(command_line("judge", "--ledger", "edits.jsonl"))
    assert said.startswith("edits.jsonl:2 is ")
    assert name in said or "newer version" in said


@pytest.mark.parametrize("gain", [1e-100, 1e100])
def test_the_product_of_many_gains_stays_a_number(command_line: CommandLine, tmp_path: Path, gain: float) -> None:
    for number in range(9):
        add(tmp_path / "edits.jsonl", edit(str(number), gain, interval=(1e-100, 1e100), started=str(number)))
    done = command_line("judge", "--ledger", "edits.jsonl", "--json")
    assert done.code == 0, done
    assert json.loads(done.stdout)["together"]["gain"] == pytest.approx(gain)
    assert command_line("judge", "--ledger", "edits.jsonl").code == 0


@pytest.mark.parametrize("kept", range(1, 60, 7))
@pytest.mark.parametrize("before", [0, 2])
def test_a_torn_line_is_left_out_and_reported(
    command_line: CommandLine, tmp_path: Path, kept: int, before: int
) -> None:
    path = tmp_path / "edits.jsonl"
    for number in range(before):
        add(path, msgspec.structs.replace(ONE, started=str(number)))
    with path.open("ab") as file:
        file.write(msgspec.json.encode(ONE)[:kept])
    done = command_line("judge", "--ledger", "edits.jsonl")
    assert done.code == 0
    assert f"edits.jsonl:{before + 1} is left out" in done.stderr
    add(path, ONE)
    assert [one.started for one in read(path)] == [*map(str, range(before)), ONE.started]
    assert path.read_bytes().count(b"\n") == before + 1


def test_a_line_whose_end_an_editor_has_removed_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "edits.jsonl"
    path.write_bytes(msgspec.json.encode(ONE))
    add(path, msgspec.structs.replace(ONE, started="later"))
    assert [one.started for one in read(path)] == [ONE.started, "later"]


def test_the_gain_of_kept_edits_is_the_product_of_theirs() -> None:
    found = together([edit("a", 1.1), edit("b", 0.9, "discard"), edit("b", 1.2)])
    assert found is not None
    assert found.gain == pytest.approx(1.1 * 1.2)
    assert found.interval == pytest.approx((1.32 / 1.01**2**0.5, 1.32 * 1.01**2**0.5))
    assert found.whole is None
    assert together([edit("a", 0.9, "discard")]) is None


def test_an_edit_that_is_judged_again_from_the_same_base_takes_the_place_of_the_first() -> None:
    found = together([edit("a", 1.1), edit("b", 1.2), edit("b", 1.3)])
    assert found is not None
    assert found.gain == pytest.approx(1.1 * 1.3)


@pytest.mark.parametrize("decision", ["keep", "discard", "undecided"])
def test_a_judgement_against_the_first_base_is_that_of_all_edits_together(decision: str) -> None:
    found = together([edit("a", 1.1), edit("b", 1.2), edit("a", 1.25, decision)])
    assert found is not None
    assert found.gain == pytest.approx(1.32)
    assert found.whole is not None
    assert found.whole.gain == 1.25


def test_edits_judged_by_another_metric_do_not_count() -> None:
    found = together([edit("a", 1.1), edit("b", 2.0, metric="peak_memory_rss"), edit("b", 1.2)])
    assert found is not None
    assert found.gain == pytest.approx(1.32)
