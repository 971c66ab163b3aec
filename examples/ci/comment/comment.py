"""Comments a comparison on the pull request, for the action beside it: one comment for each program, which later runs
replace.

The comparison is comparison.txt in the folder REPORT, and PROGRAM tells the comments of several programs apart. The
program that was measured may have written anything into that folder, so the file is quoted as text of somebody else,
and nothing else there is opened. TOKEN may be one that cannot write: then nothing is commented, and nothing fails,
because the summary of the job that measured has the comparison too.
"""

import errno
import hashlib
import json
import os
import re
import stat
import sys
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

AUTHOR = "github-actions[bot]"
"""Who comments with the token of a workflow. Comments of others are never replaced."""
CHARACTERS, LINES = 30_000, 400
"""The most of a comparison that is commented. GitHub takes comments of 65,536 characters."""
PAGE = 100
PATIENCE = 30.0


def main() -> int:
    event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
    pull_request = event.get("pull_request")
    if pull_request is None:
        print("not a pull request: nothing to comment on")
        return 0
    source = (pull_request["head"]["repo"] or {}).get("full_name")  # none once the fork is deleted
    if source != os.environ["GITHUB_REPOSITORY"]:
        print("a pull request from a fork: the summary of the job has the comparison")
        return 0
    try:
        text = read(Path(os.environ["REPORT"]) / "comparison.txt")
    except OSError as error:
        print(f"no comparison was left to comment: {error.strerror}")
        return 0
    try:
        comment(int(pull_request["number"]), quoted(text))
    except (OSError, HTTPException, ValueError) as error:  # those of urllib are an OSError
        print(f"::warning::the comparison was not commented on the pull request: {error}")
    return 0


def read(file: Path) -> str:
    """Reads a little more of a file than is commented. Raises OSError for a link or anything else that is no file."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return opened.read(4 * CHARACTERS + 4).decode("utf-8", errors="replace")


def quoted(text: str) -> str:
    """Returns a text as an indented code block, in which Markdown knows no mention, link, image, HTML or reference.

    Line ends are line feeds, and other characters that cannot be seen are replaced, so that no line leaves the block.
    """
    lines = re.split(r"\r\n|\r|\n", text[:CHARACTERS])
    shown = ["".join(char if char.isprintable() else "\ufffd" for char in line.expandtabs()) for line in lines[:LINES]]
    block = "\n".join(f"    {line}" for line in shown)[: 2 * CHARACTERS]
    more = "" if len(text) <= CHARACTERS and len(lines) <= LINES else "\n\nThe artifact of the run has all of it."
    return f"What the job that ran the pull request says of its speed:\n\n{block}{more}"


def comment(number: int, text: str) -> None:
    """Writes the text to the pull request, in place of the comment of an earlier run. Raises HTTPError or URLError."""
    mark = f"<!-- gpubench {hashlib.sha256(os.environ['PROGRAM'].encode()).hexdigest()[:16]} -->"
    body = f"{mark}\n\n{text}"
    comments = f"/repos/{os.environ['GITHUB_REPOSITORY']}/issues/{number}/comments"
    if (earlier := find(comments, mark)) is None:
        request("POST", comments, {"body": body})
    else:
        request("PATCH", f"/repos/{os.environ['GITHUB_REPOSITORY']}/issues/comments/{earlier}", {"body": body})


def find(comments: str, mark: str) -> int | None:
    """Returns the number of the comment with this mark; None if there is none."""
    for page in count(1):
        found = request("GET", f"{comments}?per_page={PAGE}&page={page}")
        for one in found:
            if (one["user"] or {}).get("login") == AUTHOR and one["body"].startswith(mark):
                return int(one["id"])
        if len(found) < PAGE:
            break
    return None


def request(method: str, path: str, content: dict[str, str] | None = None) -> Any:
    data = None if content is None else json.dumps(content).encode()
    headers = {"Authorization": f"Bearer {os.environ['TOKEN']}", "Accept": "application/vnd.github+json"}
    asked = Request(f"{os.environ['GITHUB_API_URL']}{path}", data, headers, method=method)
    with urlopen(asked, timeout=PATIENCE) as answer:
        return json.load(answer)


if __name__ == "__main__":
    sys.exit(main())
