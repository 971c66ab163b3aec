from pathlib import Path

import pytest

from gpubench.kinds.program.code_of_fixes import in_code
from gpubench.kinds.program.source_names import names_of, renamed


def named(tmp_path: Path, line: str, before: str = "") -> dict[str, str]:
    (tmp_path / "train.py").write_text(f"{before}\n{line}\n")
    return dict(names_of({"model": "train.py:2"}, tmp_path, None))


@pytest.mark.parametrize(
    ("line", "before", "names"),
    [
        ("out = net(images)", "", {"model": "net", "batch": "images"}),
        ("loss = criterion(self.net(x), y).mean()", "", {"model": "self.net", "batch": "x"}),
        ("out = net(x.to('cpu'), masks)", "", {"model": "net"}),
        ("out = float(net(**inputs))", "", {"model": "net"}),
        ("out = step(net, x)", "from engine import step", {}),
        ("out = net(", "", {}),
        ("x = 1", "", {}),
    ],
)
def test_the_names_are_those_of_the_call(tmp_path: Path, line: str, before: str, names: dict[str, str]) -> None:
    assert named(tmp_path, line, before) == names


def test_what_cannot_be_read_has_no_names(tmp_path: Path) -> None:
    assert names_of({"model": "gone.py:2"}, tmp_path, "cuda") == {"device.type": '"cuda"'}
    assert names_of({}, tmp_path, None) == {}


def test_code_names_variables_of_the_program() -> None:
    names = {"model": "net", "batch": "images", "device.type": '"cuda"'}
    places = {"model": "train.py:2"}
    assert in_code({"performance.compile": True}, places, {}, names).startswith("net = torch.compile(net)")
    assert in_code({"precision": "bf16"}, {}, {}, names).startswith('with torch.autocast("cuda", torch.bfloat16)')
    assert renamed("model.to(x), batch.to(x), my_model, a.model", names) == "net.to(x), images.to(x), my_model, a.model"
