"""The rules that turn a profile or a memory footprint into findings; each is a function of a case."""
