"""Presets: complete, short YAML files, named after what they run. `gpubench COMMAND --config NAME`."""
