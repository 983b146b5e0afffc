"""Rename classes, functions, members, parameters and variables by a table, wherever they are named.

    python tools/rename_names.py TABLE [--merged FILE] [--check]

Lines of ``TABLE`` (what follows ``  #`` is a reason, and left out):

- ``dstrial.module:Name -> new``, ``dstrial.module:Class.member -> new``, ``dstrial.module:function.parameter -> new``:
  this name, its overrides, and all who use it, found by scopes and by mypy's types;
- ``dstrial.package.*:*.name -> new``: parameters and variables of this name in all functions below a package;
- ``word old -> new in DIRECTORY…``: every name of this spelling in Python code there, whatever it belongs to;
- ``text old -> new in FILE…``: words of a file, strings too.

Mentions in docstrings, comments and documents follow: everywhere where nothing else has the old name, else between
backquotes in files that use it. Strings stay, except dotted names of Python, and programs in strings that import a name.
``--merged`` names files with lines ``MERGED old.module -> new.module``: where names of the table's modules lie now.
``--check`` writes nothing. A line that finds nothing or whose new name is taken is printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import fnmatch
import functools
import io
import json
import pathlib
import re
import subprocess
import sys
import tokenize
import typing

from name_scopes import ROOTS, Entity, Mention, Project, Reader

UNTOUCHED = ("tests/goldens/files/", "tools/rename_names.py", "tools/name_scopes.py", "tools/move_modules.py")
DOCUMENTS = ("*.md", "docs/*.md", "examples/**/*.md", "benchmarks/**/*.md")
HISTORY = "CHANGELOG.md"
LINE = re.compile(r"(?P<module>[\w.*]+):(?P<name>[\w.*]+)\s*->\s*(?P<new>\w+)$")
WORD = re.compile(r"(?P<kind>word|text)\s+(?P<old>.+?)\s*->\s*(?P<new>.+?)(?:\s+in\s+(?P<places>.+))?$")


@dataclasses.dataclass
class Rename:
    """A line of the table, and what has come of it."""

    line: str
    module: str
    name: str
    new: str
    entities: set[Entity] = dataclasses.field(default_factory=set)
    num_changed: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)

    @property
    def old(self) -> str:
        """The name that goes."""
        return self.name.rpartition(".")[2]

    def covers(self, entity: Entity) -> bool:
        """Tell whether an entity gets the new name."""
        if entity in self.entities:
            return True
        is_named = entity.kind == "local" and entity.name == self.old and self.name.startswith("*.")
        return is_named and fnmatch.fnmatchcase(entity.owner, f"{self.module}.*")


@dataclasses.dataclass(frozen=True)
class TextRename:
    """A ``word`` or ``text`` line of the table."""

    line: str
    kind: str
    old: str
    new: str
    places: list[str]


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def read_table(path: pathlib.Path) -> tuple[list[Rename], list[TextRename]]:
    """Return the lines of a table."""
    renames, texts = [], []
    for line in path.read_text().splitlines():
        text = re.split(r"\s+#|^#", line)[0].strip()
        if not text:
            continue
        if match := WORD.match(text):
            texts.append(
                TextRename(text, match["kind"], match["old"], match["new"], (match["places"] or "").split())
            )
        elif match := LINE.match(text):
            renames.append(Rename(text, match["module"], match["name"], match["new"]))
        else:
            sys.exit(f"{path}: not understood: {line}")
    return renames, texts


def read_merged(paths: list[pathlib.Path]) -> dict[str, str]:
    """Return where modules have gone since the table was written."""
    moves = {}
    for path in paths:
        for match in re.finditer(r"MERGED\s+`?([\w.]+)`?\s*(?:->|→)\s*`?([\w.]+)", path.read_text()):
            moves[match[1]] = match[2]
    old_paths = pathlib.Path("dstrial/old_paths.json")
    return (json.loads(old_paths.read_text()) if old_paths.exists() else {}) | moves


class Renamer:
    """Applies the lines of a table to all files."""

    def __init__(self, renames: list[Rename], moves: dict[str, str], project: Project) -> None:
        self._renames = renames
        self._moves = moves
        self.project = project
        self._by_name: dict[str, list[Rename]] = collections.defaultdict(list)
        for rename in renames:
            self._find(rename)
            self._by_name[rename.old].append(rename)
        self._readers: dict[str, Reader] = {}
        self._sources: dict[str, str] = {}
        self.left: dict[str, list[str]] = collections.defaultdict(list)

    def _module(self, name: str) -> str:
        seen = set()
        while name not in self.project.modules and name in self._moves and name not in seen:
            seen.add(name)
            name = self._moves[name]
        return name

    def _find(self, rename: Rename) -> None:
        if rename.name.startswith("*."):
            rename.module = self._module(rename.module)
            return
        module = self._module(rename.module)
        entity = self._entity(module, rename.name)
        if entity is None:
            homes = [
                name
                for name in self.project.modules
                if name.startswith("dstrial") and self._entity(name, rename.name)
            ]
            if len(homes) != 1:
                rename.problems.append(f"not found in {module}")
                return
            entity = self._entity(homes[0], rename.name)
            say(f"moved: {rename.line}: in {homes[0]}")
        assert entity is not None
        rename.entities = {entity}
        if entity.kind == "member":
            rename.entities, problem = self.project.same_members(entity)
            if problem:
                rename.problems.append(problem)
        elif entity.kind == "local":
            owner, _, method = entity.owner.rpartition(".")
            if owner in self.project.classes and not method.startswith("__"):
                same, _ = self.project.same_members(Entity("member", owner, method))
                rename.entities |= {Entity("local", f"{each.owner}.{method}", entity.name) for each in same}

    def _entity(self, module: str, name: str) -> Entity | None:
        """Return what a dotted name of a module means, or None if there is no such thing."""
        if module not in self.project.modules:
            return None
        owner, _, last = f"{module}.{name}".rpartition(".")
        if owner == module:
            node = self.project.modules[module].names.get(last)
            is_own = node is not None and node.node is not None and node.node.fullname == f"{module}.{last}"
            return Entity("global", module, last) if is_own else None
        if owner in self.project.classes:
            is_own = last in self.project.classes[owner].names
            return Entity("member", owner, last) if is_own else None
        if (
            self.project.symbol(owner) is not None
            or self.project.symbol(owner.rpartition(".")[0]) is not None
        ):
            path = self.project.paths.get(module)
            if path and re.search(rf"\b{last}\b", path.read_text()) and self._has_local(module, owner, last):
                return Entity("local", owner, last)
        return None

    def _has_local(self, module: str, owner: str, name: str) -> bool:
        reader = Reader(self.project, module, self.project.paths[module].read_text(), {name})
        reader.read()
        return name in reader.bound_in(owner)

    def read(self) -> dict[str, list[Mention]]:
        """Return the mentions of all old names, by module."""
        found = {}
        words = re.compile(r"\b(?:" + "|".join(map(re.escape, self._by_name)) + r")\b")
        for module, path in self.project.paths.items():
            source = path.read_text()
            if any(str(path).endswith(name) for name in UNTOUCHED) or not (
                seen := set(words.findall(source))
            ):
                continue
            reader = Reader(self.project, module, source, seen)
            found[module] = reader.read()
            self._readers[module], self._sources[module] = reader, source
        return found

    def new_name(self, mention: Mention, module: str) -> Rename | None:
        """Return the line of the table that renames a mention."""
        if mention.entity is None:
            return self._guess(mention, module)
        exact = [rename for rename in self._by_name[mention.name] if mention.entity in rename.entities]
        loose = [rename for rename in self._by_name[mention.name] if rename.covers(mention.entity)]
        return next((rename for rename in exact + loose if not rename.problems), None)

    def _guess(self, mention: Mention, module: str) -> Rename | None:
        """Return the line for a member of what mypy has no type for, if only one package of the file has this member."""
        near = []
        for rename in self._by_name[mention.name]:
            homes = {".".join(each.owner.split(".")[:2]) for each in rename.entities if each.kind == "member"}
            others = any(
                mention.name in info.names and Entity("member", owner, mention.name) not in rename.entities
                for owner, info in self.project.classes.items()
                if owner.startswith(tuple(homes))
            )
            is_near = any(home in self._sources[module] for home in homes)
            if mention.is_attribute and is_near and not others and not rename.problems:
                near.append(rename)
        return near[0] if len({rename.new for rename in near}) == 1 else None

    def check(self, mentions: dict[str, list[Mention]]) -> None:
        """Note which new names are taken, and where an old name is left because nothing is known of it."""
        for module, found in mentions.items():
            reader = self._readers[module]
            going = {(m.entity, m.name) for m in found if self.new_name(m, module)}
            for mention in found:
                rename = self.new_name(mention, module)
                where = f"{self.project.paths[module]}:{mention.line}"
                if rename is None:
                    if not (mention.entity and mention.entity.kind == "local"):
                        self.left[mention.name].append(f"{where} ({_words(mention.entity)})")
                    continue
                if mention.entity is None:
                    say(f"guessed: {where}: {mention.name} -> {rename.new}")
                elif self._is_taken(mention.entity, rename.new, reader, going):
                    rename.problems.append(f"{rename.new} is taken: {where}")

    def _is_taken(
        self, entity: Entity, new: str, reader: Reader, going: set[tuple[Entity | None, str]]
    ) -> bool:
        if any(name == new for _, name in going):
            return False
        if entity.kind == "local":
            return new in reader.used_in(entity.owner)
        if entity.kind == "global":
            return new in reader.bound
        info = self.project.classes[entity.owner]
        return info.get(new) is not None and not self._is_going(entity.owner, new)

    def _is_going(self, owner: str, name: str) -> bool:
        return any(Entity("member", owner, name) in rename.entities for rename in self._by_name.get(name, []))


def _words(entity: Entity | None) -> str:
    return f"{entity.owner}.{entity.name}" if entity else "type not known"


def apply_mentions(path: pathlib.Path, edits: list[tuple[Mention, str]]) -> list[str]:
    """Write new names at the places of old ones, and return what could not be placed."""
    lines = path.read_bytes().split(b"\n")
    lost = []
    for mention, new in sorted(set(edits), key=lambda edit: (edit[0].line, -edit[0].column)):
        line, old = lines[mention.line - 1], mention.name.encode()
        if line[mention.column : mention.column + len(old)] != old:
            lost.append(f"{path}:{mention.line}: {mention.name}")
            continue
        lines[mention.line - 1] = line[: mention.column] + new.encode() + line[mention.column + len(old) :]
    path.write_bytes(b"\n".join(lines))
    return lost


def docstring_owners(source: str, module: str) -> dict[int, str]:
    """Return whose docstring begins in which line, by full name."""
    owners: dict[int, str] = {}

    def walk(node: ast.AST, fullname: str) -> None:
        for statement in getattr(node, "body", None) or []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                owners.setdefault(statement.value.lineno, fullname)
            is_named = isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
            walk(statement, f"{fullname}.{statement.name}" if is_named else fullname)

    walk(ast.parse(source), module)
    return owners


def prose_regions(source: str, docstrings: dict[int, str]) -> list[tuple[int, int, str]]:
    """Return where the docstrings and comments of a file lie, as offsets, and whose docstring it is."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    regions = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.start[0] in docstrings):
            owner = docstrings[token.start[0]] if token.type == tokenize.STRING else ""
            start, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            regions.append((start, end, owner))
    return regions


def is_distinct(name: str) -> bool:
    """Tell whether a word in prose can only be a name of code."""
    stripped = name.strip("_")
    return name.startswith("_") or "_" in stripped or bool(re.match(r"[A-Z][a-z0-9]+[A-Z]", stripped))


def everywhere(names: dict[str, str]) -> typing.Callable[[str], str]:
    """Return what puts new names for distinct old ones."""
    if not names:
        return lambda text: text
    alternatives = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w/\"'$-])({alternatives})(?![\w/\"'-]|\.(?:py|json|jsonl|md|yaml)\b)")
    return lambda text: pattern.sub(lambda match: names[match[1]], text)


def in_backquotes(names: dict[str, str], *, calls: bool = False) -> typing.Callable[[str], str]:
    """Return what puts new names for old ones that stand between backquotes; ``calls``: only before a parenthesis."""
    quoted = re.compile(r"(`+)([^`\n]+)\1")
    inner = re.compile(
        r"(?<![\w/\"'$-])("
        + "|".join(map(re.escape, names))
        + r")(?![\w/\"':-]|\.(?:py|json|jsonl|md|yaml)\b)"
    )

    def one(match: re.Match[str]) -> str:
        text = match[2]
        if not re.fullmatch(r"~?\.?[\w.]+(\(.*\))" if calls else r"~?\.?[\w.]+(\(.*\))?", text):
            return match[0]
        return match[1] + inner.sub(lambda found: names[found[1]], text) + match[1]

    return (lambda text: quoted.sub(one, text)) if names else (lambda text: text)


def in_arguments(names: dict[str, str]) -> typing.Callable[[str], str]:
    """Return what puts new names in the ``Args`` and ``Attributes`` of docstrings."""
    pattern = re.compile(r"(?m)^(\s+)(" + "|".join(map(re.escape, names)) + r")(?=( \([^)\n]*\))?: )")
    return lambda text: pattern.sub(lambda match: match[1] + names[match[2]], text) if names else text


def change_prose(
    source: str,
    docstrings: dict[int, str],
    arguments: dict[str, dict[str, str]],
    *changes: typing.Callable[[str], str],
) -> str:
    """Return a Python file with its docstrings and comments changed.

    Args:
        source: of the file.
        docstrings: by first line, whose they are.
        arguments: by full name of a function or class, its parameters and fields, old -> new.
        changes: of a docstring's or comment's text.
    """
    for start, end, owner in reversed(prose_regions(source, docstrings)):
        text = source[start:end]
        for change in changes:
            text = change(text)
        if known := {**arguments.get(owner, {}), **arguments.get(f"{owner}.__init__", {})}:
            text = in_arguments(known)(text)
        source = source[:start] + text + source[end:]
    return source


def change_programs(source: str, names: dict[str, str]) -> str:
    """Return a Python file with the names changed that programs in its strings import from ``dstrial``."""
    if not names:
        return source
    form = re.compile(r"from (dstrial[\w.]*) import ([\w, ]+)")
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    data = source.encode()
    spans = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            end = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
            spans.add((starts[node.lineno - 1] + node.col_offset, end))
    for start, end in sorted(spans, reverse=True):
        text = data[start:end].decode(errors="replace")
        for match in form.finditer(text):
            for imported in re.split(r",\s*", match[2].strip()):
                old = imported.split(" as ")[0].strip()
                if new := names.get(f"{match[1]}.{old}"):
                    text = re.sub(rf"(?<![\w.]){old}\b", new, text)
        data = data[:start] + text.encode() + data[end:]
    return data.decode()


def change_dotted(text: str, names: dict[str, str], *, is_prose: bool = False) -> str:
    """Return a text with the full names changed (``dstrial.module.Name``, ``dstrial.module:Name``).

    Prose may leave out ``dstrial.``.
    """

    def one(match: re.Match[str]) -> str:
        prefix = "" if match[0].startswith("dstrial.") else "dstrial."
        parts = re.split(r"([.:])", match[0])
        for end in range(1, len(parts) + 1, 2):
            if new := names.get(prefix + "".join(parts[:end]).replace(":", ".")):
                parts[end - 1] = new
        return "".join(parts)

    form = r"(?<![\w.])[a-z]\w*(?:\.\w+)+(?::\w+)?" if is_prose else r"\bdstrial\.[\w.]+(?::\w+)?"
    return re.sub(form, one, text) if names else text


def change_words(source: str, old: str, new: str) -> str:
    """Return Python code with every name of a spelling changed."""
    lines = source.split("\n")
    found = [
        token.start
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME and token.string == old
    ]
    for row, column in reversed(found):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + len(old) :]
    return "\n".join(lines)


def files_of(patterns: typing.Iterable[str]) -> list[pathlib.Path]:
    """Return the tracked files that a table's places name: files, directories or patterns."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    return [pathlib.Path(name) for name in listed.split("\n") if name and not name.startswith(UNTOUCHED)]


def apply_texts(texts: list[TextRename]) -> int:
    """Apply the ``word`` and ``text`` lines, and return how many found nothing."""
    num_failed = 0
    for text in texts:
        num = 0
        for path in files_of(text.places or ROOTS):
            if text.kind == "word" and path.suffix != ".py":
                continue
            before = path.read_text()
            if text.kind == "word":
                after = change_words(before, text.old, text.new)
                docstrings = docstring_owners(before, "")
                after = change_prose(after, docstrings, {}, in_backquotes({text.old: text.new}))
                if after != before and re.search(rf"\b{text.new}\b", before):
                    say(f"CLASH? {text.line}: {text.new} was in {path}")
            else:
                edges = [
                    r"(?<!\w)" if text.old[0].isalnum() else "",
                    r"(?!\w)" if text.old[-1].isalnum() else "",
                ]
                after = re.sub(edges[0] + re.escape(text.old) + edges[1], lambda _, new=text.new: new, before)
            if after != before:
                path.write_text(after)
                num += 1
        if not num:
            say(f"NOTHING: {text.line}")
            num_failed += 1
    return num_failed


def wrap_prose(path: pathlib.Path, limit: int = 130) -> None:
    """Break lines of docstrings and comments that new names have made longer than ruff allows."""
    source = path.read_text()
    if all(len(line) <= limit for line in source.split("\n")):
        return
    prose: dict[int, str] = {}
    docstrings = docstring_owners(source, "")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING and token.start[0] in docstrings:
            prose.update(dict.fromkeys(range(token.start[0], token.end[0] + 1), ""))
        elif token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            prose[token.start[0]] = "# "
    lines = []
    for number, line in enumerate(source.split("\n"), 1):
        while number in prose and len(line) > limit and " " in line[40:limit]:
            indent = re.match(r"\s*", line)[0]  # type: ignore[index]
            end = line.rindex(" ", 0, limit)
            lines.append(line[:end])
            line = indent + prose[number] + line[end + 1 :]
        lines.append(line)
    path.write_text("\n".join(lines))


def _string_constants(source: str) -> set[str]:
    found = (node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    return {value for value in found if isinstance(value, str)}


def apply_names(renamer: Renamer, mentions: dict[str, list[Mention]]) -> None:
    """Write the new names into code, docstrings, comments and documents."""
    edits = {
        module: [(mention, rename) for mention in found if (rename := renamer.new_name(mention, module))]
        for module, found in mentions.items()
    }
    by_old: dict[str, set[str]] = collections.defaultdict(set)
    full: dict[str, str] = {}
    for mention, rename in (edit for each in edits.values() for edit in each):
        by_old[mention.name].add(rename.new)
        if mention.entity and mention.entity.kind != "local":
            full[f"{mention.entity.owner}.{mention.name}"] = rename.new
    last = {module.rpartition(".")[2] for module in renamer.project.modules}
    others = {
        mention.name
        for module, found in mentions.items()
        for mention in found
        if not renamer.new_name(mention, module)
    }
    alone = {
        old: next(iter(new)) for old, new in by_old.items() if len(new) == 1 and old not in others | last
    }
    distinct = {old: new for old, new in alone.items() if is_distinct(old)}
    for module, path in renamer.project.paths.items():
        if any(str(path).endswith(name) for name in UNTOUCHED):
            continue
        found = edits.get(module, [])
        docstrings = docstring_owners(path.read_text(), module)
        for text in apply_mentions(path, [(mention, rename.new) for mention, rename in found]):
            say(f"NOT PLACED: {text}")
        here: dict[str, set[str]] = collections.defaultdict(set)
        arguments: dict[str, dict[str, str]] = collections.defaultdict(dict)
        for mention, rename in found:
            rename.num_changed += 1
            here[mention.name].add(rename.new)
            if mention.entity and mention.entity.kind != "global":
                arguments[mention.entity.owner][mention.name] = rename.new
        before = path.read_text()
        words = _string_constants(before)  # a key or value of this spelling may be what prose means
        known = {old: next(iter(new)) for old, new in here.items() if len(new) == 1 and old not in words}
        after = change_dotted(change_programs(before, full), full)
        dotted = functools.partial(change_dotted, names=full, is_prose=True)
        changes = dotted, everywhere(distinct), in_backquotes(known), in_backquotes(alone, calls=True)
        after = change_prose(after, docstrings, arguments, *changes)
        if after != before:
            path.write_text(after)
    for path in {path for path in files_of(DOCUMENTS) if path.name != HISTORY}:
        before = path.read_text()
        after = everywhere(distinct)(change_dotted(before, full, is_prose=True))
        after = in_backquotes(alone, calls=True)(after)
        after = in_backquotes({old: new for old, new in alone.items() if old[0].isupper()})(after)
        if after != before:
            path.write_text(after)


def main(project: Project | None = None) -> int:
    """Apply the table, format, and tell what is left."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", type=pathlib.Path)
    parser.add_argument(
        "--merged", type=pathlib.Path, action="append", default=[], help="files with MERGED lines"
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    renames, texts = read_table(args.table)
    renamer = Renamer(renames, read_merged(args.merged), project or Project(pathlib.Path.cwd()))
    mentions = renamer.read()
    renamer.check(mentions)
    if not args.check:
        apply_names(renamer, mentions)
    else:
        for module, found in mentions.items():
            for mention in found:
                if rename := renamer.new_name(mention, module):
                    rename.num_changed += 1
    for name, places in renamer.left.items():
        say(f"left: {name}: {len(places)}: " + ", ".join(places[:6]))
    failed = [rename for rename in renames if rename.problems or not rename.num_changed]
    for rename in failed:
        say(f"FAILED: {rename.line}: {'; '.join(sorted(set(rename.problems))[:3]) or 'nothing found'}")
    num_failed = len(failed)
    if not args.check:
        num_failed += apply_texts(texts)
        for path in files_of(f"{root}/*.py" for root in ROOTS):
            wrap_prose(path)
        subprocess.run(
            [sys.executable, "-m", "ruff", "check", "-q", "--select", "I", "--fix", "."], check=False
        )
        subprocess.run([sys.executable, "-m", "ruff", "format", "-q", "."], check=False)
        subprocess.run(
            [sys.executable, "-m", "ruff", "check", "--output-format", "concise", "."], check=False
        )
    say(f"{len(renames) + len(texts)} lines, {num_failed} failed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
