"""The settings of a run by dot-key, from its config.yaml: gpubench 0.2.0 and older wrote them nowhere else."""

from functools import lru_cache
from typing import Any

import msgspec

from gpubench.settings.keys import FILLED_IN, flatten


@lru_cache(maxsize=256)  # most runs of a group have equal settings, and parsing YAML takes long
def settings(config: bytes) -> dict[str, Any]:
    """Returns the settings. Raises ValueError, TypeError or RecursionError for what is not a configuration."""
    from gpubench.settings import yaml_text  # not needed for later runs

    plain = msgspec.json.encode(yaml_text.parse(config))  # YAML also knows dates, sets and NaN
    return flatten(msgspec.json.decode(plain, type=dict[str, Any]))


def chosen(config: bytes) -> frozenset[str]:
    """Returns the settings that gpubench chose, according to the comments."""
    found, section = set(), ""
    for line in config.decode(errors="replace").splitlines():
        key, _, rest = line.partition(":")
        section = section if key.startswith(" ") else key
        if f"# {FILLED_IN}" in rest:
            found.add(f"{section}.{key.strip()}" if key.startswith(" ") else key)
    return frozenset(found)
