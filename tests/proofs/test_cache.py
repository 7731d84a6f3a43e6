"""The cache of compiles: its key depends on all source that decides the compiled step."""

from pathlib import Path

import pytest

import meshwright
from meshwright.proofs import cache

SOURCE = Path(meshwright.__file__).parent


@pytest.mark.parametrize("pattern", cache._PARTS)
def test_every_part_of_the_key_names_files_that_exist(pattern: str) -> None:
    assert list(SOURCE.glob(pattern)), pattern


def test_a_change_of_layouts_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "layouts").mkdir()
    file = tmp_path / "layouts" / "layout.py"
    monkeypatch.setattr(meshwright, "__file__", str(tmp_path / "__init__.py"))
    keys = set()
    for text in ("a = 1", "a = 2"):
        file.write_text(text)
        keys.add(cache.request_key({"machine": "cpu:8"}, "jax"))
    assert len(keys) == 2
