"""Listing, display and comparison of model definition files for the page."""

from __future__ import annotations

import base64
import io
import tarfile

import pytest
from seeded import packed

from dstrial.context_directory import MAX_BYTES
from dstrial.errors import RequestError
from dstrial.master.backends.model_definition import pack
from dstrial.master.web.experiment_tabs import MAX_TEXT_BYTES, code_differences, listed_files, shown_file

TGZ = packed(
    {"b/two.py": "x = 1\n", "a.bin": b"\0\1", "same.py": "x = 1\n", "long.txt": "y" * (MAX_TEXT_BYTES + 5)}
)


def archive(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for member in members:
            made.addfile(member, io.BytesIO(b"x" * member.size))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname, found.size = kind, link, size
    return found


HOSTILE = archive(
    member("../out.py", size=1),
    member("/etc/out.py", size=1),
    member("soft", tarfile.SYMTYPE, "/etc/passwd"),
    member("hard", tarfile.LNKTYPE, "in.py"),
    member("pipe", tarfile.FIFOTYPE),
    member("in.py", size=1),
)
ARCHIVES = {
    "whole": TGZ,
    "none": b"",
    "hostile": HOSTILE,
    "text": b"damaged",
    "magic": b"\x1f\x8b",
    "cut short": archive(member("a", size=9))[:-30],
    "large": archive(member("large", size=MAX_BYTES + 1)),
}


def sent(*paths: str) -> bytes:
    return pack(
        {"path": path, "type": 48, "content": base64.b64encode(b"x").decode(), "mtime": "0", "mode": 0o644}
        for path in paths
    )


def paths_of(tgz: bytes) -> list[str]:
    return [file["path"] for file in listed_files(tgz)["files"]]


def test_files_are_listed_by_path() -> None:
    files = {file["path"]: file for file in listed_files(TGZ)["files"]}
    assert list(files) == ["a.bin", "b/two.py", "long.txt", "same.py"]
    assert files["b/two.py"]["bytes"] == 6
    assert listed_files(b"") == {"files": [], "more": False}


def test_file_is_shown_as_text_and_truncated() -> None:
    assert shown_file(TGZ, "./b//two.py")["text"] == "x = 1\n"
    assert shown_file(TGZ, "a.bin") == {
        "path": "a.bin",
        "bytes": 2,
        "text": "",
        "isBinary": True,
        "isCut": False,
    }
    long = shown_file(TGZ, "long.txt")
    assert (len(long["text"]), long["isCut"], long["bytes"]) == (MAX_TEXT_BYTES, True, MAX_TEXT_BYTES + 5)


def test_links_and_outside_paths_are_not_listed() -> None:
    assert paths_of(HOSTILE) == ["in.py"]
    assert shown_file(HOSTILE, "in.py")["text"] == "x"


@pytest.mark.parametrize(
    ("which", "path", "status"),
    [
        *(
            ("whole", path, 400)
            for path in ("../outside", "b/../../x", "/etc/passwd", "", "a\0b", "x" * 2000)
        ),
        *((which, path, 404) for which in ("whole", "none") for path in ("gone.py", "b")),
        *(("hostile", path, 404) for path in ("soft", "hard", "pipe", "out.py", "etc/out.py", "soft/x")),
        *((which, "a", 400) for which in ("text", "magic", "cut short")),
        ("large", "large", 413),
    ],
)
def test_shown_file_of_invalid_path_is_refused(which: str, path: str, status: int) -> None:
    with pytest.raises(RequestError) as caught:
        shown_file(ARCHIVES[which], path)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"a.py": "x = 1\n"}, {"a.py": "x = 2\n"}, ["-x = 1", "+x = 2"]),
        ({"a.bin": "\0a"}, {"a.bin": "\0b"}, ["--- a/a.bin", "(they differ, but not in the text"]),
        ({"a.csv": "1\n" * 6000}, {"a.csv": "1\n" * 5999 + "2\n"}, ["(they differ, but not in the text"]),
        (
            {},
            {"__init__.py": ""},
            ["--- /dev/null", "+++ b/__init__.py", "(they differ, but not in the text"],
        ),
        ({"a.py": "x = 1\n"}, {"a.py": "x = 1\n"}, []),
        (
            {f"{number}.py": "x = 1\n" for number in range(100, 200)},
            {f"{number}.py": "x = 2\n" for number in range(0, 350)},
            ["(150 more files differ)"],
        ),
    ],
)
def test_differing_files_are_never_shown_as_equal(
    before: dict[str, str], after: dict[str, str], expected: list[str]
) -> None:
    lines = code_differences(packed(before), packed(after))

    assert bool(lines) == bool(expected)
    for start in expected:
        assert any(line.startswith(start) for line in lines), lines


@pytest.mark.parametrize("which", ["text", "magic", "cut short"])
def test_listing_damaged_archive_is_refused(which: str) -> None:
    with pytest.raises(RequestError, match="is damaged"):
        listed_files(ARCHIVES[which])


def test_pack_path_depth_over_100_is_refused() -> None:
    assert len(paths_of(sent("a/" * 100 + "train.py"))) == 1
    with pytest.raises(RequestError, match="100 directories"):
        sent("a/" * 101 + "train.py")
