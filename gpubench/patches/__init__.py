"""Turns settings that were tried from outside into edits of the program's own source, as a diff that applies.

`edits` has the table of settings and makes the edits, `calls`, `models` and `set_up` change one kind of place each,
`source` reads a file, and `diff` writes and applies patches. Nothing here runs or changes a program.
"""
