"""Characters that command a terminal, or turn the direction of what follows, in text of others."""

import re

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def spelled_out(text: str) -> str:
    """`text` with each of them as its escape; line ends and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
