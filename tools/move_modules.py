"""Move modules of ``dstrial`` by a table, and rewrite whoever names them.

    python tools/move_modules.py TABLE

``TABLE`` has lines ``dstrial.old.module -> dstrial.new.module``; a line ``MERGED old -> new`` moves no file and only
rewrites names, and lines that begin with ``#`` are left out. What the files say changes only where it names a module: import
statements, dotted paths in strings and documents, and paths of files. The table of ``dstrial/old_paths.py`` grows by these
lines, so that the old paths stay importable.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess
import sys

SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".cfg", ".ini", ".html", ".run"}
UNTOUCHED = (
    "CHANGELOG.md",
    "tests/goldens/files/",
    "benchmarks/dsat_recorded/",
    "dstrial/old_paths.py",
    "tools/move",
)
ROOM_DOCSTRING = '"""{}"""\n'


def read_table(path: pathlib.Path) -> tuple[dict[str, str], set[str]]:
    """Return where each module goes, and those whose file is gone already."""
    moves: dict[str, str] = {}
    merged: set[str] = set()
    for line in path.read_text().splitlines():
        match = re.match(r"\s*-?\s*`?(MERGED )?\s*(dstrial[\w.]*) (?:->|→) (dstrial[\w.]*)", line)
        if match:
            moves[match[2]] = match[3]
            if match[1]:
                merged.add(match[2])
    return moves, merged


class Rewriter:
    """Rewrites the names of modules in one text at a time."""

    def __init__(self, moves: dict[str, str], root: pathlib.Path) -> None:
        """Prepare for this table and the tree at ``root``, which is as it was before the first move."""
        self._moves = moves
        self._root = root
        self._packages = sorted(
            (old for old in moves if (root / old.replace(".", "/")).is_dir()), key=len, reverse=True
        )
        self._exports = {
            ".".join(path.parent.relative_to(root).parts): _bound_names(ast.parse(path.read_text()))
            for path in (root / "dstrial").rglob("__init__.py")
        }
        longest_first = sorted(moves, key=len, reverse=True)
        names = "|".join(map(re.escape, longest_first))
        self._dotted = re.compile(rf"(?<![\w./-])({names})(?!\w)")
        files = {f"{name.replace('.', '/')}.py": f"{new.replace('.', '/')}.py" for name, new in moves.items()}
        short = {old.removeprefix("dstrial/"): new.removeprefix("dstrial/") for old, new in files.items()}
        self._files = {**files, **{old: new for old, new in short.items() if old.count("/")}}
        paths = "|".join(map(re.escape, sorted(self._files, key=len, reverse=True)))
        self._path = re.compile(rf"(?<![\w/.-])({paths})(?!\w)")

    def text(self, text: str) -> str:
        """Rewrite dotted names and paths of files."""
        text = self._dotted.sub(lambda match: self._moves[match[1]], text)
        return self._path.sub(lambda match: self._files[match[1]], text)

    def _new(self, name: str) -> str:
        """Return where a module is now; one of a package that moved as a whole goes with it."""
        if name in self._moves:
            return self._moves[name]
        package = next((old for old in self._packages if name.startswith(f"{old}.")), None)
        return name if package is None else self._moves[package] + name.removeprefix(package)

    def _is_module(self, name: str) -> bool:
        return name in self._moves or _file(self._root, name).exists()

    def python(self, source: str) -> str:
        """Rewrite import statements by their meaning, local names of renamed modules, and the rest as text."""
        tree = ast.parse(source)
        offsets = [0]
        for line in source.splitlines(keepends=True):
            offsets.append(offsets[-1] + len(line.encode()))
        raw = source.encode()
        edits: list[tuple[int, int, bytes]] = []
        renamed: dict[str, str] = {}
        bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
        bound |= {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        bound |= {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        }
        stores = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        }
        stores |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}

        for node in ast.walk(tree):
            if (
                not isinstance(node, ast.ImportFrom)
                or node.level
                or not (node.module or "").startswith("dstrial")
            ):
                continue
            groups: dict[str, list[str]] = {}
            is_changed = False
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                is_export = alias.name in self._exports.get(str(node.module), ())
                if self._new(full) != full and not is_export and self._is_module(full):
                    is_changed = True
                    base, _, name = self._new(full).rpartition(".")
                    local = alias.asname or alias.name
                    # Where the new name means something else in this file, the old one stays as the local name.
                    is_free = name not in bound and alias.name not in stores
                    if alias.asname is None and name != alias.name and is_free:
                        renamed[alias.name] = local = name
                    groups.setdefault(base, []).append(name if local == name else f"{name} as {local}")
                else:
                    base = self._new(str(node.module))
                    is_changed |= base != node.module
                    groups.setdefault(base, []).append(
                        alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"
                    )
            if not is_changed:
                continue
            indent = " " * node.col_offset
            statements = [f"from {base} import {', '.join(names)}" for base, names in groups.items()]
            start = offsets[node.lineno - 1] + node.col_offset
            end = offsets[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            edits.append((start, end, f"\n{indent}".join(statements).encode()))
        imports = [
            (
                offsets[node.lineno - 1] + node.col_offset,
                offsets[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0),
            )
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in renamed:
                start = offsets[node.lineno - 1] + node.col_offset
                edits.append((start, start + len(node.id.encode()), renamed[node.id].encode()))
        pieces: list[bytes] = []
        position = 0
        spans = sorted({*((start, end) for start, end, _ in edits), *imports})
        new = {(start, end): text for start, end, text in edits}
        for start, end in spans:
            pieces.append(self.text(raw[position:start].decode()).encode())
            pieces.append(new.get((start, end), raw[start:end]))
            position = end
        pieces.append(self.text(raw[position:].decode()).encode())
        return b"".join(pieces).decode()


def _bound_names(tree: ast.Module) -> set[str]:
    """Return what a package's own file binds: a name of these is not the module of that name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
    return found


def main() -> None:
    """Move, rewrite, and let ruff put imports in order."""
    moves, merged = read_table(pathlib.Path(sys.argv[1]))
    root = pathlib.Path.cwd()
    rewriter = Rewriter(moves, root)
    tracked = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split(
        "\n"
    )
    for name in filter(None, tracked):
        path = root / name
        is_text = path.suffix in SUFFIXES or path.name in ("Makefile", "run")
        if not is_text or name.startswith(UNTOUCHED) or not path.is_file():
            continue
        before = path.read_text()
        after = rewriter.python(before) if path.suffix == ".py" else rewriter.text(before)
        if after != before:
            path.write_text(after)
    places = {old: _file(root, old) for old in moves if old not in merged}
    rooms = {old: places[old].parent for old in places if places[old].name == "__init__.py"}
    staged: list[tuple[pathlib.Path, pathlib.Path]] = []
    for old, new in moves.items():
        if old in merged:
            continue
        source = places[old]
        target = root / (new.replace(".", "/") + ("/__init__.py" if source.name == "__init__.py" else ".py"))
        # Through a name that nothing has, since a module may go where another has not left yet.
        between = source.with_name(f"{source.name}.moving")
        subprocess.run(["git", "mv", str(source), str(between)], check=True)
        staged.append((between, target))
    for between, target in staged:
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", str(between), str(target)], check=True)
    for old, folder in rooms.items():
        _move_data(root, folder, root / moves[old].replace(".", "/"))
    _add_to_table(root / "dstrial/old_paths.json", moves)
    for folder in {target.parent for _, target in staged}:
        if not (folder / "__init__.py").exists():
            sys.stderr.write(f"{folder.relative_to(root)} has no __init__.py\n")


def _move_data(root: pathlib.Path, folder: pathlib.Path, target: pathlib.Path) -> None:
    """Take along what is no module of its own: templates, scripts, files that run by their path."""
    listed = subprocess.run(
        ["git", "ls-files", str(folder)], check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\n")):
        new = target / (root / name).relative_to(folder)
        new.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "mv", name, str(new)], check=True)


def _file(root: pathlib.Path, module: str) -> pathlib.Path:
    base = root / module.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _add_to_table(path: pathlib.Path, moves: dict[str, str]) -> None:
    table: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
    for old, new in table.items():
        table[old] = moves.get(new, new)
    table.update(moves)
    root = path.parent.parent
    # A path that a package has now answers for itself; one that went with its package needs no line of its own.
    kept = {old: new for old, new in table.items() if not _file(root, old).exists()}
    by_package = {
        old
        for old, new in kept.items()
        if kept.get(old.rpartition(".")[0]) == new.rpartition(".")[0]
        and old.split(".")[-1] == new.split(".")[-1]
    }
    path.write_text(json.dumps({old: kept[old] for old in sorted(kept.keys() - by_package)}, indent=0) + "\n")


if __name__ == "__main__":
    main()
