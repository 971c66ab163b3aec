"""How sure a metric is, as its recorded interval has it."""

import pytest

from gpubench.estimates import metric_of, relative_half_width


def test_a_rate_is_as_sure_as_the_time_it_is_averaged_as() -> None:
    rates = [100.0, 120.0, 150.0]
    width = relative_half_width("throughput", rates)
    assert width is not None
    assert width == relative_half_width("step_time", [1 / rate for rate in rates])
    metric = metric_of("throughput", rates, 30, None, None)
    assert metric.interval is not None
    assert list(metric.interval) == pytest.approx([metric.estimate / (1 + width), metric.estimate / (1 - width)])


def test_one_repeat_says_nothing_of_how_sure_it_is() -> None:
    assert relative_half_width("throughput", [100.0]) is None
    assert relative_half_width("throughput", []) is None
