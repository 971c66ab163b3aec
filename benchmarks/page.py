"""Writes docs/benchmarks.md: the latest result of each benchmark."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from bars import FAILED, MISSED, STOPPED
from listing import Benchmark
from records import PYTHON, Machine, Record
from tables import table

from gpubench import units

LINES = {
    "processor": "processor",
    "memory": "memory",
    "GPU": "gpu",
    "system": "system",
    "versions": "versions",
}


def page(
    benchmarks: Sequence[Benchmark], records: Mapping[str, Record], references: Mapping[str, str]
) -> Iterator[str]:
    """Lines of Markdown. `references` are results of the GPU suite, one text per machine."""
    yield "# Benchmark results"
    yield ""
    yield "    make benchmarks                                   # all benchmarks that this machine can run"
    yield "    .venv/bin/python benchmarks/suite.py --only NAME  # one section of this page"
    yield ""
    yield "These commands write this page. [benchmarks/README.md](../benchmarks/README.md) describes the methods."
    machines = list(dict.fromkeys(_hardware(record.machine) for record in records.values()))
    for number, machine in enumerate(machines):
        yield from _machine(machine, f" {number + 1}" if len(machines) > 1 else "")
    yield ""
    yield table(
        [("benchmark", "question", "bar", "verdict"), *(_line(one, records.get(one.name)) for one in benchmarks)]
    )
    for one in benchmarks:
        yield from _section(one, records.get(one.name), machines)
    yield from _on_gpus(references)


def _hardware(machine: Machine) -> Machine:
    """The machine without the version of gpubench that ran on it."""
    return msgspec.structs.replace(machine, gpubench="")


def _machine(machine: Machine, number: str) -> Iterator[str]:
    yield ""
    yield table([(f"machine{number}", ""), *((name, getattr(machine, key)) for name, key in LINES.items())])


def _line(benchmark: Benchmark, record: Record | None) -> list[str]:
    return [f"[{benchmark.name}](#{benchmark.name})", benchmark.question, benchmark.bar, _verdict(benchmark, record)]


def _verdict(benchmark: Benchmark, record: Record | None) -> str:
    if record is None:
        return f"not run here: needs {benchmark.needs}" if benchmark.needs else "not run yet"
    missed = [bar for bar in record.bars if bar.verdict == MISSED]
    if record.verdict == MISSED:
        return f"missed by {missed[0].by}" if len(record.bars) == 1 else f"{len(missed)} of {len(record.bars)} missed"
    return f"{record.verdict}: {record.trouble}" if record.verdict == FAILED and record.trouble else record.verdict


def _section(benchmark: Benchmark, record: Record | None, machines: Sequence[Machine]) -> Iterator[str]:
    command = " ".join((PYTHON, *benchmark.command) if record is None else record.command)
    yield from (
        "",
        f"## {benchmark.name}",
        "",
        benchmark.question,
        "",
        f"    {command}",
        "",
    )
    if record is None:
        yield f"{_capitalised(_verdict(benchmark, record))}."
        return
    where = f" on machine {machines.index(_hardware(record.machine)) + 1}" if len(machines) > 1 else ""
    took = units.seconds(record.seconds)
    yield f"Finished{where} at {record.finished} after {took}: gpubench {record.machine.gpubench}."
    yield ""
    if record.bars:
        yield table([("measured", "gpubench", "bar", "verdict"), *_judged(record)])
    else:
        yield f"{record.verdict.capitalize()}."
    if record.trouble:
        yield from ("", *_fenced(record.trouble))
    if report := _without_verdicts(record):
        yield from ("", *_fenced(report))
    if record.verdict == STOPPED:
        yield from ("", "The benchmark timed out. The output above is incomplete.")


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def _judged(record: Record) -> Iterator[tuple[str, str, str, str]]:
    for bar in record.bars:
        yield bar.what, bar.figure, bar.bar, f"{bar.verdict} by {bar.by}" if bar.by else bar.verdict


def _without_verdicts(record: Record) -> str:
    """What the benchmark printed, without the lines of its bars, which are in the table."""
    judged = tuple(f"{bar.what}: {bar.figure}, bar {bar.bar}" for bar in record.bars)
    return "\n".join(line for line in record.printed.splitlines() if not line.endswith(judged)).strip("\n")


def _fenced(text: str) -> Iterator[str]:
    yield from ("```", *(line.rstrip().replace("```", "'''") for line in text.strip("\n").splitlines()), "```")


def _on_gpus(references: Mapping[str, str]) -> Iterator[str]:
    yield from ("", "## On GPUs", "")
    if not references:
        yield "No GPU has run the suite yet. `benchmarks/gpu_suite.py --dry-run` lists its measurements."
    for name, text in references.items():
        yield from (f"### {name}", "", text.strip(), "")


def references(folder: Path) -> dict[str, str]:
    """Results of the GPU suite below `folder`, by machine, without their title, as sections below those of the page."""
    return {
        path.parent.name: path.read_text().partition("\n")[2].replace("\n## ", "\n#### ")
        for path in sorted(folder.glob("*/summary.md"))
    }
