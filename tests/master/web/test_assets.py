"""Files of the page are listed for all requests at once, and those outside its directories are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrial.master.web import assets


@pytest.fixture
def static(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "static"
    directory.mkdir()
    (directory / "app.js").write_text("1")
    monkeypatch.setattr(assets, "STATIC", directory)
    monkeypatch.setattr(assets, "_names", frozenset())
    return directory


def content_of(name: str) -> bytes | None:
    found = assets.find(name)
    return None if found is None else found.content


def test_the_files_are_listed_again_for_one_that_was_not_there(
    static: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, names = [], assets.names

    def counted_names() -> list[str]:
        listed.append(1)
        return names()

    monkeypatch.setattr(assets, "names", counted_names)

    assert [content_of("app.js") for _ in range(3)] == [b"1"] * 3
    assert len(listed) == 1
    (static / "later.js").write_text("2")
    assert [content_of("later.js"), content_of("app.js")] == [b"2", b"1"]
    assert len(listed) == 2


def test_a_file_that_has_gone_and_one_beside_the_directory_are_none_of_the_page(static: Path) -> None:
    (static.parent / "secret.js").write_text("3")

    assert content_of("app.js") == b"1"
    (static / "app.js").unlink()
    assert [content_of(name) for name in ("app.js", "../secret.js", "/etc/passwd", "")] == [None] * 4
