"""Sentences with values that may be unknown or empty: none has a gap, and none says None."""

import re
from pathlib import Path
from typing import Any

import pytest
from cases_made import completed_pipeline

from gpubench import errors
from gpubench.errors import RunFailed, SettingsError
from gpubench.kinds.pipeline import resuming, schedulers
from gpubench.kinds.pipeline.settings import PipeSettings
from gpubench.registry import RUN_KINDS
from gpubench.report import sweep
from gpubench.report.document import Paragraph
from gpubench.runs.directory import ENVIRONMENT, FAILED, RunWriter
from gpubench.settings.keys import in_words, label

GAP = re.compile(r"\bNone\b|  |\(\)|\( | \)| ,|,,|: *$|[(=,] *[,)]|\b(was|of|from|on)\)| (was|of|is|on|with)[,;]")


def assert_whole(sentence: str) -> None:
    assert sentence
    assert not GAP.search(sentence), sentence


def test_a_gap_is_found() -> None:
    for sentence in ("leave it out (it was ), or", "tiny, of  steps", "8 samples on None", "b=, c", "rank 1: ", "()"):
        assert GAP.search(sentence), sentence


@pytest.mark.parametrize("value", [None, "", [], {}, 0, False, 0.0])
def test_an_empty_setting_is_told_in_words(value: Any) -> None:
    assert_whole(f"leave it out (it was {in_words(value)})")


@pytest.mark.parametrize("key", ["work.negative_prompt", "sampling.options", "work.seeds", "work.prompts"])
def test_a_refused_change_from_and_to_nothing_is_told_in_words(key: str) -> None:
    given = {"work.negative_prompt": "fog", "sampling.options": "a=1", "work.seeds": "1", "work.prompts": "p.txt"}[key]
    section, _, name = key.partition(".")
    with_it, without = PipeSettings.model_validate({section: {name: given}}), PipeSettings()
    for before, after in ((with_it, without), (without, with_it)):
        with pytest.raises(SettingsError) as refusal:
            resuming.refuse_changes(before, after)
        assert_whole(refusal.value.message)
        assert_whole(refusal.value.hint or "")


def test_an_error_that_was_recorded_without_its_message_says_so() -> None:
    found = errors.recorded({"kind": None, "message": None, "hint": ""})
    assert isinstance(found, RunFailed)
    assert_whole(found.message)


def test_headlines_of_runs_of_which_nothing_is_known_are_whole() -> None:
    for kind in RUN_KINDS.values():
        assert_whole(kind.describe({}, {}, ranks=2))
        assert_whole(kind.describe({"precision": "fp32", "sampling.steps": None}, {"model": "", "scheduler": ""}))
        assert_whole(kind.describe({"program.command": "python t.py"}, {}))


@pytest.mark.parametrize("command", ["pipe-infer", "train-bench"])
def test_several_runs_that_failed_early_are_shown_without_gaps(tmp_path: Path, command: str) -> None:
    paths = []
    for _ in range(2):
        writer = RunWriter(tmp_path, "made", "", command=command, argv=[], world_size=1, git=None)
        writer.replace(ENVIRONMENT, {})
        writer.finish(FAILED, {"kind": "RunFailed", "message": None, "hint": None})
        paths.append(writer.path)
    for block in sweep.document(paths).blocks:
        for text in block.texts if isinstance(block, Paragraph) else ():
            assert_whole(text)


def test_a_variant_is_told_in_words() -> None:
    assert_whole(label({"work.prompts": None, "work.negative_prompt": "", "data.workers": 0}))


def test_a_scheduler_without_a_name_is_answered_without_a_guess() -> None:
    with pytest.raises(SettingsError) as refusal:
        schedulers.check_scheduler_name("")
    assert refusal.value.hint == schedulers.EXAMPLE


def test_a_sample_without_a_prompt_is_refused_in_words(tmp_path: Path) -> None:
    settings = completed_pipeline({"work.samples": 1})
    assert_whole(resuming._made_of(None, settings.seed))
