"""Where the tests are: folders that mirror the packages, and nothing shared but by helpers."""

import ast

from places import ROOT, TESTS

FILES = sorted(TESTS.rglob("test_*.py"))


def test_each_folder_of_tests_has_the_name_of_what_it_tests() -> None:
    folders = {path.parent.relative_to(TESTS) for path in FILES if path.parent != TESTS}
    assert [
        one for one in folders if not ((ROOT / "gpubench" / one / "__init__.py").exists() or (ROOT / one).is_dir())
    ] == []


def test_a_file_of_tests_imports_none_of_another_folder() -> None:
    """It would fail when it is run alone, and pass beside the other."""
    places = {path.stem: path.parent for path in FILES}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert {places.get(str(name), path.parent) for name in names} <= {path.parent}, path
