"""Which schedulers the installed diffusers has, and how options of one are written: what can be said without torch."""

import importlib.util
import re
from functools import cache
from pathlib import Path

from gpubench import errors
from gpubench.errors import SettingsError

EXAMPLE = "for example DDIMScheduler or EulerDiscreteScheduler"


@cache
def scheduler_names() -> list[str]:
    """Class names, in alphabetical order; read from the file that lists them, as importing diffusers takes seconds."""
    found = importlib.util.find_spec("diffusers")
    if found is None or not found.submodule_search_locations:
        raise SettingsError("diffusers is not installed", "pip install diffusers")
    listing = Path(found.submodule_search_locations[0], "schedulers", "__init__.py").read_text(encoding="utf-8")
    names = re.findall(r'"(\w+Scheduler)"', listing)
    return sorted({name for name in names if not name.startswith("Flax")})


def check_scheduler_name(name: str) -> None:
    """Raises SettingsError for a name that diffusers does not have, with the nearest that it has."""
    names = scheduler_names()
    if name in names:
        return
    near = [known for known in names if known.lower() in (name.lower(), f"{name}scheduler".lower())]
    within = [known for known in names if name.lower() in known.lower()][:3]
    hint = errors.offer(near) or errors.did_you_mean(name, names) or errors.offer(within) or EXAMPLE
    raise SettingsError(f"diffusers has no scheduler {name!r}", hint)


def parse_options(text: str) -> dict[str, str]:
    """`"a=1,b=x"` as `{"a": "1", "b": "x"}`. Raises SettingsError for a part without a key, or a key given twice."""
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (equals and key.isidentifier()):
            raise SettingsError(f"scheduler option {part!r} is not key=value", "for example solver_order=3")
        if key in options:
            raise SettingsError(f"scheduler option {key} is given twice", f"{options[key]!r} and {value!r}; keep one")
        options[key] = value
    return options
