"""Adds what was timed while batches were made, and tells which samples took longest."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional

from .stages import TRANSFER

MOST_KEPT = 20_000
"""The samples whose times are kept."""
MOST_SLOW = 8
"""The slowest samples that are named."""


class BatchRecords:
    """The records of many batches, added."""

    def __init__(self, records: List[Dict[str, Any]], own: Mapping[str, List[int]], each_batch: float) -> None:
        rest = [each for each in records if not each.get("first")] or records
        self._rest = rest
        self._places: Dict[str, str] = {}
        for each in records:
            self._places.update(each.get("places", {}))
        plain = [each for each in rest if not each.get("traced")] or rest
        self._plain = plain
        self.delay = sum(each.get("delay", 0) for each in plain)
        made = sum(each["made"] for each in plain)
        self._each = each_batch if made == len(plain) else 1
        """The samples of what the dataset makes at a time, which may be a whole batch."""
        self.samples = round(self._each * made)
        totals: Dict[str, List[int]] = {}
        for each in plain:
            for stage, total in each["stages"].items():
                _add(totals, stage, total)
            _add(totals, TRANSFER, each.get("sent", (0, 0, 0)))
        for stage, total in own.items():  # of all batches, and of some that are not made any more
            share = len(plain) / total[2] if total[2] else 0.0
            _add(totals, stage, [round(share * part) for part in total])
        self._totals = totals
        times = [(key, wall) for each in rest for key, wall in each["samples"] if self._each == 1]
        self._times = times[:MOST_KEPT]
        longest: Dict[str, int] = {}
        for key, wall in self._times:
            longest[key] = max(wall, longest.get(key, 0))
        self.slowest = sorted(longest.items(), key=lambda each: -each[1])[:MOST_SLOW]

    def _reading(self) -> Dict[str, List[int]]:
        """Returns the time of the calls that read by the stage that they are in, for as many samples as the stages."""
        traced = [each for each in self._rest if "reads" in each]
        samples = self._each * sum(each["made"] for each in traced)
        found: Dict[str, List[int]] = {}
        for each in traced:
            for stage, total in each["reads"].items():
                _add(found, stage, [round(self.samples / samples * part) for part in total])
        return found

    def stages(self) -> List[Dict[str, Any]]:
        """Returns the stages, those with most time first."""
        found = []
        reading = self._reading()
        for stage, (wall, cpu, calls) in sorted(self._totals.items(), key=lambda each: -each[1][0]):
            if wall <= 0:
                continue
            kind, _, name = stage.partition(" ")
            read, read_cpu, _ = reading.get(stage, (0, 0, 0))
            found.append(
                {
                    "kind": kind,
                    "name": name,
                    "seconds": wall / 1e9,
                    "cpu": max(0, min(cpu, wall)) / 1e9,
                    "calls": calls,
                    "place": self._places.get(stage, "")[:200],
                    "reading": min(read, wall) / 1e9,
                    "reading_cpu": max(0, min(read_cpu, read, wall)) / 1e9,
                }
            )
        return found[:1000]

    def times(self, again: Mapping[str, Any]) -> Optional[Dict[str, Any]]:
        walls = sorted(wall for _, wall in self._times)
        if not walls:
            return None
        last = len(walls) - 1
        files, slow = again.get("files", {}), again.get("slow", {})
        return {
            "number": len(walls),
            "quantiles": [walls[round(part * last / 100)] / 1e9 for part in range(101)],
            "slowest": [
                {"index": key, "seconds": wall / 1e9, "again": slow.get(key, []), "file": files.get(key, "")}
                for key, wall in self.slowest
            ],
            "typical_again": again.get("typical", []),
        }

    def read(self) -> Optional[Dict[str, int]]:
        found = [each for each in self._rest if "bytes" in each]
        if not found:
            return None
        return {
            "samples": round(self._each * sum(each["made"] for each in found)),
            "asked": sum(each["bytes"][0] for each in found),
            "disk": sum(each["bytes"][1] for each in found),
        }


def _add(totals: Dict[str, List[int]], stage: str, more: Any) -> None:
    total = totals.setdefault(stage, [0, 0, 0])
    for place in range(3):
        total[place] += more[place]
