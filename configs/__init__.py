"""Presets: complete, short YAML files, named after what they run. `gpubench COMMAND --config NAME`."""

from importlib.resources import files


def presets() -> list[str]:
    """Their names."""
    return sorted(file.name.removesuffix(".yaml") for file in files(__name__).iterdir() if file.name.endswith(".yaml"))
