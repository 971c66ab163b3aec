"""Tells what an object holds, whichever way its class stores attributes."""

from __future__ import annotations

from types import MemberDescriptorType
from typing import Any, Dict


def attributes(found: Any) -> Dict[str, Any]:
    """Returns what an object holds in its `__dict__` and in the `__slots__` of its classes, by name."""
    held = getattr(found, "__dict__", None)
    attributes = dict(held) if isinstance(held, dict) else {}
    for cls in type(found).__mro__:
        if "__slots__" in vars(cls):
            for name, slot in vars(cls).items():
                if isinstance(slot, MemberDescriptorType):
                    try:
                        attributes[name] = slot.__get__(found)
                    except AttributeError:  # it has not been set
                        continue
    return attributes


def set_attribute(found: Any, name: str, value: Any) -> None:
    """Sets one of the `attributes` of an object, also if its class refuses that, as a frozen one does."""
    held = getattr(found, "__dict__", None)
    if isinstance(held, dict) and name in held:
        held[name] = value
    else:
        object.__setattr__(found, name, value)
