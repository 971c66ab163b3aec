"""The run directory's files as JSON Schema: `python -m gpubench.schema > docs/run-directory.schema.json`."""

import json
from inspect import cleandoc
from typing import Any

import msgspec

from gpubench.compare.decision import Decision
from gpubench.compare.result import Noise
from gpubench.data_cost import DataCost
from gpubench.events import Handoff, Sample, Span, Step
from gpubench.findings import Findings
from gpubench.host.loggers import Epoch
from gpubench.memory.batch_sizes import BatchSizes, Trades
from gpubench.memory.footprint import Footprints
from gpubench.runs.directory import (
    BATCH_SIZES,
    DECISION,
    EPOCHS,
    FINDINGS,
    HANDOFFS,
    LOADER,
    MEMORY,
    NOISE,
    PROFILE,
    RUN,
    SAMPLES,
    SCHEMA_VERSION,
    STEPS,
    SUMMARY,
    TELEMETRY,
    TIMELINE,
    TRADES,
    RunRecord,
)
from gpubench.runs.summary import Summary
from gpubench.telemetry import TelemetrySample
from gpubench.trace.profile import Profile

FILES = {
    RUN: RunRecord,
    STEPS: Step,
    EPOCHS: Epoch,
    SAMPLES: Sample,
    HANDOFFS: Handoff,
    TIMELINE: Span,
    TELEMETRY: TelemetrySample,
    SUMMARY: Summary,
    NOISE: Noise,
    PROFILE: Profile,
    MEMORY: Footprints,
    BATCH_SIZES: BatchSizes,
    TRADES: Trades,
    LOADER: DataCost,
    FINDINGS: Findings,
    DECISION: Decision,
}
"""The type of each file's document, or of each line of a .jsonl file."""


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of the run directory, whose `properties` are the files."""
    files, definitions = msgspec.json.schema_components(FILES.values(), ref_template="#/$defs/{name}")
    for one in definitions.values():
        if "description" in one:  # before Python 3.13 a docstring keeps the indentation of its lines
            one["description"] = cleandoc(one["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"gpubench run directory, schema version {SCHEMA_VERSION}",
        "type": "object",
        "properties": dict(zip(FILES, files, strict=True)),
        "$defs": definitions,
    }


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
