import logging
from pathlib import Path
from typing import get_args

import pytest

from gpubench import logs, units
from gpubench.host.loggers import RunLog
from gpubench.logs import LogfmtFormatter, render_logfmt
from gpubench.runs.directory import LOG, RunWriter
from gpubench.settings.sections import LoggingSettings


def test_the_two_levels_have_names_and_stand_where_they_should() -> None:
    assert logging.getLevelName("NOTIMPORTANT") == logs.NOTIMPORTANT < logging.DEBUG
    assert logging.INFO < logging.getLevelName("MODIFIABLE") == logs.MODIFIABLE < logging.WARNING


@pytest.mark.parametrize("level", get_args(LoggingSettings.model_fields["level"].annotation))
def test_every_level_that_can_be_chosen_is_one_of_loggings(level: str) -> None:
    assert isinstance(logging.getLevelName(level), int)


@pytest.mark.parametrize("level", get_args(LoggingSettings.model_fields["level"].annotation))
def test_every_run_has_a_log_with_its_level_and_whatever_workers_print(tmp_path: Path, level: str) -> None:
    writer = RunWriter(tmp_path, "made", "", command="train-bench", argv=[], world_size=1, git=None)
    handler = RunLog(writer, logging.getLevelName(level))
    assert writer.path.joinpath(LOG).read_text() == ""
    printed = (logs.WORKER_OUTPUT, logs.PROGRAM_OUTPUT)
    for name in ("gpubench.run", *printed):
        for number in (logging.INFO, logging.CRITICAL):
            handler.handle(logging.LogRecord(name, number, "", 0, f"{name} at {number}", None, None))
    writer.finish("completed")
    found = writer.path.joinpath(LOG).read_text()
    expected = {"gpubench.run at 20": logging.getLevelName(level) <= logging.INFO, "gpubench.run at 50": True}
    expected |= {f"{name} at 20": name == logs.WORKER_OUTPUT for name in printed}
    assert {text: text in found for text in expected} == expected


def test_the_levels_are_in_order_and_end_with_critical() -> None:
    levels = get_args(LoggingSettings.model_fields["level"].annotation)
    numbers = [logging.getLevelName(level) for level in levels]
    assert numbers == sorted(numbers)
    assert levels[-1] == "CRITICAL"


def test_a_line_carries_time_level_rank_logger_message_and_fields() -> None:
    line = render_logfmt(0.25, logs.MODIFIABLE, 3, "gpubench.run", "two words", {"key": "data.workers", "value": 4})
    assert line == (
        "time=1970-01-01T00:00:00.250Z level=MODIFIABLE rank=3 logger=gpubench.run "
        'msg="two words" key=data.workers value=4'
    )


def test_a_line_stays_one_line_whatever_the_message_holds() -> None:
    line = render_logfmt(0.0, logging.ERROR, None, "x", 'a "quote"\nand = a\ttab', {"empty": ""})
    assert "\n" not in line
    assert r'msg="a \"quote\"\nand = a\ttab" empty=""' in line
    assert "rank=host" in line


def test_the_formatter_takes_fields_and_tracebacks() -> None:
    try:
        raise KeyError("gone")
    except KeyError as error:
        record = logging.LogRecord("x", logging.ERROR, "", 0, "failed %d times", (2,), (KeyError, error, None))
    record.fields = {"step": 7}
    line = LogfmtFormatter().format(record)
    assert "failed 2 times" in line
    assert "KeyError" in line
    assert line.endswith("step=7")


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.0, "s", "0 s"),
        (2.5e-9, "s", "2.50 ns"),
        (0.0123, "s", "12.3 ms"),
        (-0.0123, "s", "-12.3 ms"),
        (59.96, "s", "60.0 s"),
        (150, "s", "2 min 30 s"),
        (3091.4, "samples/s", "3,091 samples/s"),
        (12.34, "samples/s", "12.3 samples/s"),
        (1536, "B", "1.50 KiB"),
        (3, "B", "3 B"),
        (0.4567, "fraction", "45.7 %"),
        (0.00123, "fraction", "0.12 %"),
        (9.894e14, "FLOP/s", "989 TFLOP/s"),
        (2.36, "", "2.36"),
        (0.001534, "", "0.00153"),
        (0, "steps", "0 steps"),
    ],
)
def test_quantities_read_well(value: float, unit: str, expected: str) -> None:
    assert units.quantity(value, unit) == expected
