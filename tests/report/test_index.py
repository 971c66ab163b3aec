"""results/index.html: every run of a results folder in one page, which filters and sorts them in the browser."""

import html
import json
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from browser import PHONE, browse, needs_browser, probed, width_on_a_phone
from recorded_runs import edit, write_run
from running import Finished

from gpubench.foreign_files import TRIALS
from gpubench.report import index
from gpubench.runs.catalogue import catalogue

EVIL = "</script><script>document.title='taken'</script>@DATA@<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs: one that is twice as fast, one that failed, and one with a name that tries to be a script."""
    folder = tmp_path_factory.mktemp("index") / "results"
    write_run(folder, "slow", steps=14)
    write_run(folder, "fast", pace=0.5, steps=14)
    edit(write_run(folder, "broken", status="failed", steps=14) / "run.json", tags=[EVIL])
    return folder


def data(page: str) -> list[dict[str, object]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    rows: list[dict[str, object]] = json.loads(found[1])["runs"]
    return rows


def test_every_run_is_on_the_page_with_its_result_and_its_report(results: Path) -> None:
    rows = data(index.render(results, catalogue(results)))
    assert [row["experiment"] for row in rows] == ["broken", "fast", "slow"]
    assert [row["status"] for row in rows] == ["failed", "completed", "completed"]
    assert rows[1]["link"] == f"fast/{rows[1]['run']}/report.html"
    assert rows[1]["metric"] == "throughput"


def test_trials_of_another_runs_fixes_are_not_on_the_page(tmp_path: Path) -> None:
    write_run(tmp_path, "one", steps=14)
    write_run(tmp_path, f"one{TRIALS}", steps=14)
    assert [row["experiment"] for row in data(index.render(tmp_path, catalogue(tmp_path)))] == ["one"]


def test_a_folder_whose_name_is_not_utf_8_is_listed_and_linked(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"r\xff")
    path = write_run(folder, os.fsdecode(b"one\xff"), steps=14)
    assert index.refresh(folder) == folder / "index.html"
    (row,) = data((folder / "index.html").read_text())
    assert row["link"] == f"one%FF/{path.name}/report.html"
    assert [entry.path for entry in catalogue(folder)] == [path]


def test_text_of_a_run_cannot_become_part_of_the_page(results: Path) -> None:
    page = index.render(results, catalogue(results))
    assert data(page)[0]["tags"] == EVIL
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe-inline" not in policy[1].partition("script-src")[2]


def test_a_page_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text("<p>my own</p>")
    assert index.refresh(tmp_path) is None
    assert page.read_text() == "<p>my own</p>"
    page.unlink()
    assert index.refresh(tmp_path) == page
    page.write_text(page.read_text() + "old")
    assert index.refresh(tmp_path) == page
    assert "old" not in page.read_text()[-10:]
    page.unlink()
    page.symlink_to(tmp_path / "elsewhere.html")
    assert index.refresh(tmp_path) is None


def test_a_folder_that_cannot_be_written_or_is_missing_has_no_page(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    assert index.refresh(tmp_path / "nowhere") is None
    monkeypatch.setattr(index, "write_document", refuse)
    assert index.refresh(results) is None


def _add_and_refresh(folder: Path, name: str) -> None:
    write_run(folder, name, steps=14)
    index.refresh(folder)


def test_the_page_has_all_runs_after_several_have_ended_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    every = [context.Process(target=_add_and_refresh, args=(tmp_path, name)) for name in ("one", "two", "three")]
    for process in every:
        process.start()
    for process in every:
        process.join(60)
    assert {row["experiment"] for row in data((tmp_path / "index.html").read_text())} == {"one", "two", "three"}
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".tmp")]


def test_removing_a_run_takes_it_off_the_page(command_line: Callable[..., Finished], tmp_path: Path) -> None:
    kept, gone = (write_run(tmp_path / "results", name, steps=14) for name in ("kept", "gone"))
    index.refresh(tmp_path / "results")
    assert command_line("runs", "remove", gone.name, "--yes").code == 0
    page = (tmp_path / "results" / "index.html").read_text()
    assert kept.name in page
    assert gone.name not in page


@needs_browser
def test_the_table_filters_and_sorts_in_the_browser(results: Path, tmp_path: Path) -> None:
    page = index.render(results, catalogue(results))
    script = """
      const cells = () => [...document.querySelectorAll("#rows [data-name=experiment]")];
      const shown = () => cells().map((one) => one.textContent).join();
      const found = [document.title, shown()];
      document.querySelector("th[data-key=result] button").click(); found.push(shown());
      document.getElementById("find").value = "COMPLETED slow"; document.getElementById("find").oninput;
      document.getElementById("find").dispatchEvent(new Event("input")); found.push(shown());
      document.body.dataset.found = found.join(";");
    """
    # The page's policy allows no script but its own, so that the one of the test needs another policy.
    (tmp_path / "page.html").write_text(
        re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", page) + f"<script>{script}</script>"
    )
    done = browse(tmp_path / "page.html", "--virtual-time-budget=2000", "--dump-dom")
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found
    assert found[1].split(";") == ["Runs in results", "broken,fast,slow", "fast,broken,slow", "slow"]


@needs_browser
def test_chosen_runs_stand_side_by_side_with_the_command_that_compares_them(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    for name, pace, workers in (("slow", 1.0, 0), ("fast", 0.5, 2), ("other", 1.5, 0)):
        edit(write_run(folder, name, pace=pace, steps=14) / "run.json", settings={"seed": 0, "data.workers": workers})
    edit(write_run(folder, "broken", status="failed", steps=14) / "summary.json", metrics=[])
    page = index.render(folder, catalogue(folder))
    script = """{
      const choose = (name) => [...document.querySelectorAll("#rows tr")].find((row) => row.textContent.includes(name))
        .querySelector("input").click();
      navigator.clipboard.writeText = async (text) => { found.copied = text; };
      const found = {hidden: [find("chosen").hidden, find("beside").hidden]};
      choose("slow"); found.alone = find("compare").disabled;
      choose("fast"); find("compare").click();
      found.rows = [...find("beside-rows").rows].map((row) => [...row.cells].map((cell) => cell.textContent));
      found.bars = [...find("bars").querySelectorAll("p")].map((one) => one.textContent);
      found.widths = [...find("bars").querySelectorAll("rect")].map((one) => parseFloat(one.getAttribute("width")));
      found.command = find("command-line").textContent;
      document.querySelector("button.copy").click();
      find("find").value = "other"; find("find").dispatchEvent(new Event("input"));
      find("find").value = ""; find("find").dispatchEvent(new Event("input"));
      found.kept = document.querySelectorAll("#rows input:checked").length;
      find("clear").click(); found.cleared = [find("chosen").hidden, find("beside").hidden];
      setTimeout(() => { document.body.dataset.found = JSON.stringify(found); }, 50);
    }"""
    (tmp_path / "page.html").write_text(probed(page, script))
    done = browse(tmp_path / "page.html", "--virtual-time-budget=2000", "--dump-dom")
    match = re.search(r'data-found="([^"]*)"', done.stdout)
    assert match
    found = json.loads(html.unescape(match[1]))
    slow, fast = (next(one["id"] for one in data(page) if one["experiment"] == name) for name in ("slow", "fast"))
    assert found["command"] == found["copied"] == f"gpubench compare {slow} {fast}"
    assert found["hidden"] == found["cleared"] == [True, True]
    assert found["alone"]
    assert found["kept"] == 2
    rows = {name: values for name, *values in found["rows"]}
    assert rows["data.workers"] == ["0", "2"]
    assert "seed" not in rows, "what is the same is left out"
    assert [text.endswith("samples/s") or "samples/s ±" in text for text in rows["throughput"]] == [True, True]
    assert found["widths"][1] == pytest.approx(2 * found["widths"][0], rel=0.01)
    assert [value in text for value, text in zip(rows["throughput"], found["bars"], strict=True)] == [True, True]


def test_a_row_has_only_the_settings_that_are_its_own(tmp_path: Path) -> None:
    for workers in (0, 0, 2):
        edit(write_run(tmp_path, steps=14) / "run.json", settings={"seed": 0, "data.workers": workers})
    edit(write_run(tmp_path, steps=14) / "run.json", settings={"seed": 0})
    unusual = [row["settings"] for row in data(index.render(tmp_path, catalogue(tmp_path)))]
    assert unusual == [{}, {"data.workers": 2}, {"data.workers": 0}, {"data.workers": 0}]


@needs_browser
def test_the_pages_policy_lets_its_own_script_run(results: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(index.render(results, catalogue(results)))
    done = browse(tmp_path / "page.html", "--virtual-time-budget=2000", "--dump-dom")
    assert done.stdout.count("<tr>") == 3  # rows of the body; that of the head has an id
    assert "Refused" not in done.stderr


@needs_browser
def test_long_results_fit_on_a_phone(results: Path, tmp_path: Path) -> None:
    page = re.sub(
        r'"result":"[^"]+"', '"result":"1,305 to 11,384 samples/s"', index.render(results, catalogue(results))
    )
    assert width_on_a_phone(page, tmp_path) <= PHONE
