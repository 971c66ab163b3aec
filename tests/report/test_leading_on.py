"""Pages lead to each other, list their sections, and have commands and traces at hand."""

import gzip
import json
import re
from pathlib import Path

import pytest
from browser import browse, needs_browser, probed
from recorded_runs import edit, write_run

from gpubench.report import after_run, index, perfetto
from gpubench.report.document import Command, Document, Heading
from gpubench.report.page import anchor, digest, render
from gpubench.runs import directory

ADDRESS = re.compile(r'href="([^"#][^"]*)"')


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that were interleaved, with all pages that a comparison writes."""
    results = tmp_path_factory.mktemp("pages") / "results"
    paths = [write_run(results, pace=pace) for pace in (1.0, 0.5)]
    for path, other, variant in zip(paths, reversed(paths), ("baseline", "workers=2"), strict=True):
        edit(path / directory.RUN, interleaved_with=[other.name], variant=variant)
        after_run.write_up(path)
    (results / directory.HISTORY).write_text("made by gpubench history")
    found = after_run.judge_pair(paths)
    assert found is not None
    after_run.keep_pair(paths, found)
    assert index.refresh(results)
    return paths


def addresses(page: Path) -> list[Path]:
    """The files that a page leads to."""
    found = [one for one in ADDRESS.findall(page.read_text()) if not one.startswith(("data:", "http"))]
    return [(page.parent / one).resolve() for one in found]


def test_every_page_of_a_pair_leads_to_all_others_and_no_link_is_dead(pair: list[Path]) -> None:
    baseline, candidate = pair
    results = baseline.parent.parent
    everywhere = [results / index.INDEX, results / directory.HISTORY]
    comparison = candidate / directory.COMPARISON_PAGE
    reports = [path / directory.REPORT for path in pair]
    for page, expected in {
        reports[0]: [*everywhere, comparison, reports[1]],
        reports[1]: [*everywhere, comparison, reports[0]],
        comparison: [results / index.INDEX, *reports],
    }.items():
        assert set(expected) <= set(addresses(page)), page
        assert all(one.is_file() for one in addresses(page)), page


def test_the_title_of_a_page_is_what_was_run_and_not_an_id(pair: list[Path]) -> None:
    edit(pair[1] / directory.RUN, name="my-run")
    after_run.write_up(pair[1])
    first, second = (re.findall("<title>(.*)</title>", (path / directory.REPORT).read_text())[0] for path in pair)
    assert pair[0].name not in first
    assert "baseline" in first
    assert second.lower().startswith("my-run · workers=2")


def test_a_long_page_lists_its_sections() -> None:
    names = [f"Section {number}" for number in range(6)]
    page = render(Document("answer", [Heading(name) for name in names]))
    for name in names:
        assert f'<a href="#{anchor(name)}">{name}</a>' in page
        assert f'id="{anchor(name)}"' in page
    assert "contents" not in re.sub("<style>.*</style>", "", render(Document("answer", [Heading("One")])), flags=re.S)


def test_the_policy_of_a_page_lets_its_own_script_run_and_no_other() -> None:
    page = render(Document("answer", []))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    script = page.partition("<script>")[2].partition("</script>")[0]
    assert policy[1].endswith(f"script-src 'sha256-{digest(script)}'")
    assert policy[1].startswith("default-src 'none'")


@needs_browser
def test_a_command_is_copied_by_a_button(tmp_path: Path) -> None:
    script = """
        navigator.clipboard.writeText = async (text) => { document.body.dataset.copied = text; };
        document.querySelector("button.copy").click();
    """
    page = tmp_path / "page.html"
    page.write_text(
        probed(render(Document("answer", [Command("diagnosis", "gpubench profile --trace a.json")])), script)
    )
    done = browse(page, "--virtual-time-budget=2000", "--dump-dom")
    assert 'data-copied="gpubench profile --trace a.json"' in done.stdout


@needs_browser
def test_the_page_of_a_trace_hands_it_over_to_the_viewer(tmp_path: Path) -> None:
    trace = tmp_path / "rank0.pt.trace.json.gz"
    content = gzip.compress(json.dumps({"traceEvents": [{"name": "</script><b>"}]}).encode())
    trace.write_bytes(content)
    perfetto.write_pages([trace])
    script = """
        const said = [];
        const viewer = {postMessage(message, origin) {
          if (message === "PING") {
            const pong = new MessageEvent("message", {data: "PONG", origin: "https://ui.perfetto.dev"});
            Object.defineProperty(pong, "source", {value: viewer});
            window.dispatchEvent(pong);
          } else {
            const {title, buffer} = message.perfetto;
            document.body.dataset.got = [origin, title, new Uint8Array(buffer).join()].join(" ");
          }
        }};
        window.open = (address) => { said.push(address); return viewer; };
        document.getElementById("open").click();
    """
    page = perfetto.page_of(trace)
    page.write_text(probed(page.read_text(), script))
    done = browse(page, "--virtual-time-budget=2000", "--dump-dom")
    found = re.search(r'data-got="([^"]*)"', done.stdout)
    assert found
    assert found[1] == f"{perfetto.VIEWER} {trace.name} {','.join(map(str, content))}"


def test_a_trace_that_is_too_large_has_no_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "LARGEST", 3)
    small, large = tmp_path / "a.pt.trace.json", tmp_path / "b.pt.trace.json"
    small.write_bytes(b"123")
    large.write_bytes(b"1234")
    perfetto.write_pages([small, large])
    assert perfetto.page_of(small).is_file()
    assert not perfetto.page_of(large).exists()
