"""How a metric of one run is quoted: the estimate with its interval or, if it is too noisy for one, a range.

Every listing, report and page takes the figures of a run from here, so that none quotes what another calls too noisy.
It is imported whenever runs are listed, so that it imports nothing that takes time.
"""

from gpubench import units
from gpubench.metrics import Metric
from gpubench.runs.entries import EntryFigure

EVEN = 0.1  # of an estimate: within this distance both ends of a log-scale interval are about equally far away
WIDE = 1000  # ratio of the ends of an interval, beyond which a table does not show them
TOO_NOISY = "too noisy to quote"


def figure(metric: Metric) -> str:
    """Returns a metric of one run, as "1,096 samples/s +- 3.4 %" or "96.2 samples/s (80.1 to 116 samples/s)".

    With an interval wider than a factor of two it is "median 67.2 samples/s (13.4 to 331 samples/s, too noisy to
    quote)".
    """
    estimate, doubt = central(metric), uncertainty(metric)
    if metric.too_noisy:
        return f"{estimate} ({TOO_NOISY if wide(metric) else f'{doubt}, {TOO_NOISY}'})"
    return together(estimate, doubt)


def central(metric: Metric) -> str:
    """Returns the estimate of a metric of one run, or of one that is too noisy the median of its repeats."""
    if metric.too_noisy:
        return f"median {units.quantity(metric.median, metric.unit)}"
    return units.quantity(metric.estimate, metric.unit)


def uncertainty(metric: Metric) -> str:
    """Returns the 95 % interval over repeats, as "+- 3.4 %" if both ends are about equally far away, else as a range.

    Without an interval the string is empty. The ends of a very wide interval, such as 1 ns to 1 h, are left out.
    """
    if metric.interval is None or not metric.estimate:
        return ""
    if said := wide(metric):
        return said
    reach = metric.reach or 0.0
    if reach > EVEN or metric.too_noisy:
        return units.span(*metric.interval, metric.unit)
    return f"+- {units.percent(reach)}"


def wide(metric: Metric) -> str:
    """Returns a note in place of an interval whose ends say nothing; an empty string for any other."""
    low, high = metric.interval or (0.0, 0.0)
    return f"wider than {WIDE:,} x" if low > 0 and high / low > WIDE else ""


def of_entry(found: EntryFigure) -> tuple[str, str]:
    """Returns the estimate and its interval as `uncertainty` has it; of one too noisy its range, and nothing.

    Of one whose range says nothing it is that it is too noisy.
    """
    metric = _metric(found)
    if metric.too_noisy and wide(metric):
        return TOO_NOISY, ""
    return (uncertainty(metric), "") if metric.too_noisy else (central(metric), uncertainty(metric))


def briefly(found: EntryFigure) -> str:
    """Returns the estimate alone; of one too noisy that it is so."""
    metric = _metric(found)
    return "too noisy" if metric.too_noisy else central(metric)


def together(estimate: str, doubt: str) -> str:
    """Returns an estimate with its interval as one text."""
    return f"{estimate} ({doubt})" if doubt and not doubt.startswith("+-") else f"{estimate} {doubt}".rstrip()


def _metric(found: EntryFigure) -> Metric:
    interval = None if found.low is None or found.high is None else (found.low, found.high)
    return Metric("", found.unit, found.better, found.estimate, interval, 0, None, [], None)
