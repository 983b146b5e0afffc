"""Module boundaries in the master, such as no SQL outside the store."""

import ast
import functools
import re
from pathlib import Path

import pytest

from dstrial.errors import RequestError
from dstrial.master.http.responses import problem_of
from dstrial.master.store.errors import ConflictError, Hint, InvalidError, NotFoundError, StoreError

MASTER = Path(__file__).parents[2] / "dstrial" / "master"
SQL_WORDS = re.compile(r"SELECT|INSERT|UPDATE|DELETE|REPLACE|WITH|CREATE|ALTER|DROP|PRAGMA|SAVEPOINT|BEGIN")
SQL = re.compile(rf"\s*({SQL_WORDS.pattern})\s")
CLIENT = re.compile(r"`(det|dstrial) ")
CLIENT_FREE_PACKAGES = ("store", "lifecycle")


def _modules(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((MASTER / package).rglob("*.py"))]


@functools.cache
def _nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _string_constants(path: Path) -> list[tuple[int, str]]:
    """Return (line number, text) of a module's string constants, without docstrings."""
    said = {id(node.value) for node in _nodes(path) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in _nodes(path)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    ]


def test_store_and_lifecycle_name_no_client_or_status() -> None:
    paths = _modules(*CLIENT_FREE_PACKAGES)
    assert not [
        f"{path}:{line}: {text}"
        for path in paths
        for line, text in _string_constants(path)
        if CLIENT.search(text)
    ]
    assert not [str(path) for path in paths if RequestError.__name__ in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (
            NotFoundError("experiment 7 is not found", Hint.LIST_EXPERIMENTS),
            404,
            "experiment 7 is not found; expected one of `det experiment list --all`.",
        ),
        (ConflictError("model 'a' exists"), 409, "model 'a' exists"),
        (InvalidError("name is empty; expected a text. Choose a name."), 400, "name is empty; expected a text. Choose a name."),
    ],
)  # fmt: skip
def test_store_error_maps_to_status(error: StoreError, status: int, text: str) -> None:
    answered = problem_of(error)
    assert (answered.status, answered.text) == (status, text)


def test_only_store_contains_sql() -> None:
    paths = [
        path
        for path in sorted(MASTER.rglob("*.py"))
        if MASTER / "store" not in path.parents
        and (SQL_WORDS.search(text := path.read_text(encoding="utf-8")) or "execute" in text)
    ]
    said = [
        f"{path}:{line}: {text}"
        for path in paths
        for line, text in _string_constants(path)
        if SQL.match(text)
    ]
    executed = [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path in paths
        for node in _nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("execute", "executemany", "executescript")
    ]
    assert not said + executed
