"""Nested mappings and their flat form: {"training": {"steps": 5}} and {"training.steps": 5}."""

from collections.abc import Mapping
from typing import Any


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as {dot-key: leaf}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """{dot-key: leaf} as nested mappings."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *path, leaf = key.split(".")
        branch = tree
        for name in path:
            branch = branch.setdefault(name, {})
        branch[leaf] = value
    return tree
