"""The page of a whole results folder, results/index.html: every run in a table that filters and sorts in the browser.

Runs that are chosen in it are shown side by side. The runs are on the page as data, which its script draws: it puts
them in as text only, and the page's policy lets no other script run and nothing be loaded. Thousands of runs so cost a
second to write.
"""

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from gpubench import foreign_files, units
from gpubench.report import listing, quoted
from gpubench.report.page import is_of_others, rendered
from gpubench.runs.catalogue import catalogue
from gpubench.runs.directory import COMPARISON_PAGE, HISTORY, REPORT, write_document
from gpubench.runs.entries import Entry, common_variables, without
from gpubench.text import spelled_out, typeset

INDEX = "index.html"
SIDE_BY_SIDE = (
    *("speedup", "throughput", "token_throughput", "latency_p50", "latency_p95", "step_time", "makespan", "mfu"),
    *("peak_memory_total", "peak_memory_allocated", "peak_memory_reserved", "peak_memory_rss", "final_loss"),
)
"""The metrics that are shown side by side."""
WAIT_SECONDS = 2.0
"""How long to wait for another process that writes the page. Then it is left to that one."""

log = logging.getLogger("gpubench.report.index")


def refresh(results: Path) -> Path | None:
    """Writes the page of a results folder, and returns its path.

    It never raises: a folder that cannot be written, or that has an index.html of somebody else, is left as it is, and
    None is returned. Of several processes that do this at once, the last one reads the folder after the others.
    """
    page = results / INDEX
    try:
        with foreign_files.locked(results, WAIT_SECONDS):
            if is_of_others(page):
                return None
            write_document(page, render(results, catalogue(results)))
            return page
    except Exception as error:  # whatever it is: the run that has just ended is well, and its results are safe
        log.debug("no index of %s: %s", results, error)
        return None


def render(results: Path, entries: Sequence[Entry]) -> str:
    """Returns the page, without runs that are only a part of a search or a trial. Links are relative to the folder."""
    whole = [entry for entry in entries if entry.part_of is None]
    usual = _usual_settings(whole)
    shared = common_variables(whole)
    runs = [row for entry in whole for row in _rows(results, entry, usual[entry.record.command], shared)]
    metrics = {name: units.words(name) for name in SIDE_BY_SIDE}
    return rendered(
        "index.html",
        ["page.js", "index.js"],
        [("History", HISTORY)] if (results / HISTORY).is_file() else [],
        folder=results.resolve().name,
        count=units.counted(len(whole), "run"),
        data={"runs": runs, "usual": usual, "metrics": metrics},
    )


def _usual_settings(entries: Sequence[Entry]) -> dict[str, dict[str, object]]:
    """Returns by kind of run the settings of one of them, from which those of the others differ little."""
    return {entry.record.command: _shown(entry.settings) for entry in reversed(entries)}


def _shown(settings: Mapping[str, object]) -> dict[str, object]:
    return {key: spelled_out(value) if isinstance(value, str) else value for key, value in settings.items()}


def _unusual(settings: Mapping[str, object], usual: Mapping[str, object]) -> dict[str, object]:
    """Returns the settings that differ from the usual ones; null stands for one that the run does not have."""
    differing = {key: value for key, value in settings.items() if key not in usual or usual[key] != value}
    return differing | dict.fromkeys(usual.keys() - settings.keys())


def _figures(entry: Entry) -> dict[str, list[object]]:
    """Returns the metrics that are shown side by side: each as text, then its estimate and the ends of its interval."""
    return {
        name: [typeset(quoted.together(*quoted.of_entry(found))), found.estimate, found.low, found.high]
        for name in SIDE_BY_SIDE
        if (found := entry.metrics.get(name))
    }


def _rows(results: Path, entry: Entry, usual: Mapping[str, object], shared: frozenset[str]) -> list[dict[str, object]]:
    """Returns what the page shows of a run and, before it, of the comparison of which it is the candidate.

    `shared` has the words of its variant that all runs have.
    """
    row = _row(results, entry, shared)
    if entry.measured and not entry.is_search:
        row["id"] = shlex.quote(spelled_out(entry.run_id))
        row["metrics"] = _figures(entry)
        row["kind"] = entry.record.command
        row["settings"] = _unusual(_shown(entry.settings), usual)
    found = entry.compared
    if found is None:
        return [row]
    folder = Path(os.path.relpath(entry.folder, results)).as_posix()
    compared = {
        "run": spelled_out(listing.comparison_label(found)),
        "command": found.by,
        "variant": "",
        "result": listing.verdict(found),
        "value": found.ratio,
        "metric": "",
        "doubt": "",
        "status": "",
        "link": quote(os.fsencode(f"{folder}/{COMPARISON_PAGE if found.by == 'compare' else REPORT}")),
    }
    listed = {key: value for key, value in row.items() if key not in ("id", "metrics", "kind", "settings")}
    return [listed | compared, row]


def _row(results: Path, entry: Entry, shared: frozenset[str]) -> dict[str, object]:
    """Returns what the page shows of a run. The script knows these names."""
    record = entry.record
    name, figure = listing.main_figure(entry) or ("", None)
    shown, doubt = listing.result(entry)
    folder = Path(os.path.relpath(entry.folder, results)).as_posix()
    return {
        "started": record.started[:16].replace("T", " "),
        "run": spelled_out(entry.name or entry.run_id),
        "command": spelled_out(entry.command),
        "model": spelled_out(entry.model),
        "variant": spelled_out(without(entry.variant, shared)),
        "result": shown,
        "value": figure.estimate if figure else None,
        "metric": units.words(name),
        "doubt": typeset(doubt),
        "status": record.status,
        "precision": str(entry.settings.get("precision") or ""),
        "device": spelled_out(entry.device or ""),
        "host": spelled_out(record.host),
        "commit": listing.commit(entry),
        "experiment": "" if listing.is_usual(entry) else spelled_out(record.experiment),
        "tags": spelled_out(" ".join(entry.tags)),
        "link": quote(os.fsencode(f"{folder}/{REPORT}")) if entry.measured or entry.is_search else "",
    }
