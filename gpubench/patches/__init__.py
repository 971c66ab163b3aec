"""Turns settings and findings into edits of the program's own source, as a diff that applies.

`edits` has the table of settings and makes the edits, `calls`, `models` and `set_up` change one kind of place each.
`by_finding` has the table of findings that no setting answers, and `loops`, `evaluation` and `attention` find the
idioms that these are about. `source` reads a file, and `diff` writes and applies patches. Nothing here runs or changes
a program.
"""
