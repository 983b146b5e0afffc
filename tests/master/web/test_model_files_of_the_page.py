"""The files of a model definition, as the page shows them."""

from __future__ import annotations

import pytest
from seeded_tabs import packed

from dstrial.errors import RequestError
from dstrial.master.web.model_files import MAX_TEXT_BYTES, listed, shown_file

TGZ = packed(
    {"b/two.py": "x = 1\n", "a.bin": b"\0\1", "same.py": "x = 1\n", "long.txt": "y" * (MAX_TEXT_BYTES + 5)}
)


def test_files_are_listed_by_path_and_equal_ones_have_one_digest() -> None:
    files = {file["path"]: file for file in listed(TGZ)["files"]}
    assert list(files) == ["a.bin", "b/two.py", "long.txt", "same.py"]
    assert files["b/two.py"]["bytes"] == 6
    assert files["b/two.py"]["digest"] == files["same.py"]["digest"] != files["a.bin"]["digest"]
    assert listed(b"") == {"files": [], "more": False}


def test_a_file_is_shown_as_text_cut_where_it_is_long() -> None:
    assert shown_file(TGZ, "b/two.py")["text"] == "x = 1\n"
    assert shown_file(TGZ, "a.bin") == {
        "path": "a.bin",
        "bytes": 2,
        "text": "",
        "isBinary": True,
        "isCut": False,
    }
    long = shown_file(TGZ, "long.txt")
    assert (len(long["text"]), long["isCut"], long["bytes"]) == (MAX_TEXT_BYTES, True, MAX_TEXT_BYTES + 5)


@pytest.mark.parametrize(
    ("tgz", "path", "status"),
    [
        (TGZ, "../outside", 400),
        (TGZ, "b", 400),
        (TGZ, "gone.py", 404),
        (b"", "gone.py", 404),
        (b"damaged", "gone.py", 400),
    ],
    ids=["outside", "a directory", "gone", "gone of none", "gone of a damaged one"],
)
def test_what_is_not_there_is_refused(tgz: bytes, path: str, status: int) -> None:
    with pytest.raises(RequestError) as caught:
        shown_file(tgz, path)
    assert caught.value.status == status
