"""Who says what in the master: the store has all SQL, and neither it nor what follows from an event knows a client."""

import ast
import re
from pathlib import Path

import pytest

from dstrial.errors import RequestError
from dstrial.master.advice import WORDS
from dstrial.master.api.errors import status_and_text
from dstrial.master.store.errors import ConflictError, Hint, InvalidError, NotFoundError, StoreError

MASTER = Path(__file__).parents[2] / "dstrial" / "master"
CLIENT = re.compile(r"`(det|dstrial) ")
KNOWS_NO_CLIENT = ("store", "experiment", "command")


def _modules(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((MASTER / room).rglob("*.py"))]


def _texts(path: Path) -> list[tuple[int, str]]:
    """The string constants of a module that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said
    ]


@pytest.mark.parametrize(
    "path", _modules(*KNOWS_NO_CLIENT), ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_the_store_and_what_follows_from_an_event_name_no_client_and_no_status(path: Path) -> None:
    found = [f"{path.name}:{line}: {text}" for line, text in _texts(path) if CLIENT.search(text)]
    assert not found
    assert RequestError.__name__ not in path.read_text(encoding="utf-8")


def test_every_hint_has_words_for_those_who_use_a_client() -> None:
    assert set(WORDS) == set(Hint)
    assert all(words.startswith(("; ", " ")) for words in WORDS.values())


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
def test_an_error_of_the_store_is_answered_with_its_status_and_its_words(
    error: StoreError, status: int, text: str
) -> None:
    answered = status_and_text(error)
    assert (answered.status, answered.text) == (status, text)
