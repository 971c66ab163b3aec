"""Comments a comparison on the pull request, for action.yml: one comment for each program, which later runs replace.

The comparison is comparison.md in the folder REPORT, and PROGRAM tells the comments of several programs apart. TOKEN
may be one that cannot write, as in a pull request from a fork: then nothing is commented, and nothing fails, because
the summary of the job has the comparison too.
"""

import hashlib
import json
import os
import sys
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

AUTHOR = "github-actions[bot]"
"""Who comments with the token of a workflow. Comments of others are never replaced."""
LONGEST = 65_000
"""GitHub takes comments of 65,536 characters."""
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
    text = (Path(os.environ["REPORT"]) / "comparison.md").read_text(encoding="utf-8")
    try:
        comment(int(pull_request["number"]), text)
    except (HTTPError, URLError, TimeoutError) as error:
        print(f"::warning::the comparison was not commented on the pull request: {error}")
    return 0


def comment(number: int, text: str) -> None:
    """Writes the text to the pull request, in place of the comment of an earlier run. Raises HTTPError or URLError."""
    mark = f"<!-- gpubench {hashlib.sha256(os.environ['PROGRAM'].encode()).hexdigest()[:16]} -->"
    body = f"{mark}\n{text}"
    if len(body) > LONGEST:
        body = f"{body[:LONGEST]}\n\nThe summary of the job has all of it."
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
            if one["user"]["login"] == AUTHOR and one["body"].startswith(mark):
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
