"""Small copies of the images that a pipeline made, for the page of its run.

Only files that the run lists and that lie in its own directory are read. An image is decoded and encoded again, so that
the page holds none of the file's bytes.
"""

import base64
import io
import struct
from collections.abc import Iterator
from pathlib import Path

from markupsafe import Markup

from gpubench import foreign_files
from gpubench.compare.evidence import RunEvidence
from gpubench.report.document import Figure
from gpubench.runs.directory import IMAGE, is_sample_file

SHOWN = 8  # images of a page
SIDE = 256  # pixels: the longer side of a copy
LARGEST = 16 * 2**20  # bytes of a file
MOST_PIXELS = 2**24
"""Pixels of an image that is decoded: 4096 x 4096."""
HEAD = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"


def of_samples(run: RunEvidence) -> Iterator[Figure]:
    """Yields the first images of a run that kept any. Damaged images are left out."""
    samples = run.files.samples if run.files else []
    kept = {one.sample: one for one in samples if is_sample_file(one.image, one.sample, IMAGE)}
    for sample, one in sorted(kept.items())[:SHOWN]:
        if copy := _copy(run.path / str(one.image)):
            source = "data:image/png;base64," + base64.b64encode(copy).decode("ascii")
            title = f"sample {sample}, seed {one.seed}"
            drawing = Markup('<img src="{}" alt="{}">').format(source, one.prompt or title)
            yield Figure(title, drawing, one.prompt or "", shape="image")


def _copy(path: Path) -> bytes | None:
    """A small PNG of a sample's image; None if the file cannot be read or is not a PNG."""
    if path.is_symlink() or path.parent.is_symlink():
        return None
    try:
        content = foreign_files.content(path, LARGEST)
    except OSError:
        return None
    if not content.startswith(HEAD) or len(content) < len(HEAD) + 8:
        return None
    width, height = struct.unpack_from(">II", content, len(HEAD))
    if not 0 < width * height <= MOST_PIXELS:
        return None
    from PIL import Image  # imported here, because most pages have no images

    small = io.BytesIO()
    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            found = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    found.thumbnail((SIDE, SIDE))
    found.save(small, "PNG")
    return small.getvalue()
