"""Figures of the house: how many rooms, who visits them, how long things are, what explains itself.

    python tools/house_figures.py                      # the working tree
    python tools/house_figures.py --against e503a3f     # a commit beside it, and what is left of its files

Only the standard library, and only reading: the syntax tree of every module of ``dstrial``.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import pathlib
import subprocess
import tarfile
import tempfile
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field

PACKAGE = "dstrial"
MAX_MODULES = 20
MAX_FUNCTION_LINES = 60
MAX_FIRST_LINE = 80
SMALL_MODULE_LINES = 120


@dataclass(frozen=True)
class Module:
    """One module as the figures need it."""

    name: str
    path: pathlib.PurePath
    source: str
    num_docstring_lines: int
    first_lines: tuple[int, ...]
    """Characters of each docstring's first line."""
    long_functions: tuple[tuple[str, int], ...]
    public_names: tuple[str, ...]
    imports: frozenset[str]
    """Modules of the package that it imports, inside functions too; not those for type checkers only."""
    early_imports: frozenset[str]
    """Those of them that are imported when it is."""

    @property
    def num_lines(self) -> int:
        """Return how many lines it has."""
        return self.source.count("\n")

    @property
    def num_comment_lines(self) -> int:
        """Return how many of them are comments and nothing else."""
        return sum(
            token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
            for token in tokenize.generate_tokens(io.StringIO(self.source).readline)
        )


@dataclass
class House:
    """A tree's modules."""

    modules: dict[str, Module]
    words: dict[str, int] = field(default_factory=dict)

    def importers(self) -> dict[str, set[str]]:
        """Return who imports each module."""
        visits: dict[str, set[str]] = {name: set() for name in self.modules}
        for module in self.modules.values():
            for imported in module.imports - {module.name}:
                visits[imported].add(module.name)
        return visits


def read(root: pathlib.Path) -> House:
    """Read every module under ``root/dstrial``, and count the words of the two documents beside it."""
    paths = sorted((root / PACKAGE).rglob("*.py"))
    names = {_module_name(path.relative_to(root)): path for path in paths}
    modules = {name: _read_module(name, path, root, names.keys()) for name, path in names.items()}
    words = {
        name: len((root / name).read_text().split())
        for name in ("README.md", "ARCHITECTURE.md")
        if (root / name).exists()
    }
    return House(modules, words)


def _module_name(path: pathlib.PurePath) -> str:
    parts = list(path.with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _read_module(
    name: str, path: pathlib.Path, root: pathlib.Path, names: collections.abc.Set[str]
) -> Module:
    source = path.read_text()
    tree = ast.parse(source)
    docstrings = list(_docstrings(tree))
    early, late = _imports(tree, name, path.name == "__init__.py", names)
    return Module(
        name=name,
        path=path.relative_to(root),
        source=source,
        num_docstring_lines=sum(text.count("\n") + 1 for text in docstrings),
        first_lines=tuple(len(text.strip().split("\n")[0]) for text in docstrings),
        long_functions=tuple(
            (node.name, length)
            for node in statements(tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
        ),
        public_names=tuple(
            node.name
            for node in tree.body
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name[0] != "_"
        ),
        imports=frozenset(early | late),
        early_imports=frozenset(early),
    )


def _inner_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a statement consists of that is no expression: statements, handlers and cases."""
    for name in ("body", "handlers", "cases", "orelse", "finalbody"):
        yield from getattr(node, name, ())


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a module or statement and all statements in it; walking through expressions would take long."""
    yield node
    for inner in _inner_statements(node):
        yield from statements(inner)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in statements(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node, clean=False)
            if text:
                yield text


def _imports(
    tree: ast.Module, name: str, is_package: bool, names: collections.abc.Set[str]
) -> tuple[set[str], set[str]]:
    """Return the modules imported at import time, and those imported later."""
    found: tuple[set[str], set[str]] = (set(), set())
    package = name if is_package else name.rpartition(".")[0]

    def visit(node: ast.AST, is_late: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for other in node.orelse:
                visit(other, is_late)
            return
        if isinstance(node, ast.Import):
            found[is_late].update(alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                target = f"{base}.{alias.name}"
                found[is_late].update({target} if target in names else ({base} & set(names)))
        is_late = is_late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in _inner_statements(node):
            visit(inner, is_late)

    visit(tree, False)
    return found


def _with_packages(name: str, imported: collections.abc.Set[str]) -> set[str]:
    """Return modules with the packages around them, but for those that are around the importing one, too."""
    packages = {
        ".".join(parts[:length])
        for parts in (one.split(".") for one in imported)
        for length in range(1, len(parts))
    }
    return {*imported, *(one for one in packages if not name.startswith(f"{one}."))}


def cycles(house: House, is_early: bool = True) -> list[list[str]]:
    """Return the groups of modules that import each other: when they are imported, or ever (Tarjan, 1972).

    Who imports a module imports the packages that it is in, and whatever these import.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def connect(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        module = house.modules[name]
        named = module.early_imports if is_early else module.imports
        for imported in _with_packages(name, named) & house.modules.keys() - {name}:
            if imported not in index:
                connect(imported)
                low[name] = min(low[name], low[imported])
            elif imported in stack:
                low[name] = min(low[name], index[imported])
        if low[name] == index[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in house.modules:
        if name not in index:
            connect(name)
    return found


def figures(house: House, counted: collections.abc.Set[str] | None = None) -> dict[str, object]:
    """Return every figure by its name, in the order of the table.

    Args:
        house: the tree.
        counted: names of the modules that count, whoever imports them; None for all.
    """
    modules = [module for module in house.modules.values() if counted is None or module.name in counted]
    num_lines = sum(module.num_lines for module in modules)
    single = [
        name
        for name, visitors in house.importers().items()
        if len(visitors) == 1 and (counted is None or name in counted)
    ]
    folders = collections.Counter(
        str(module.path.parent)
        for module in modules
        if module.path.name not in ("__init__.py", "__main__.py")
    )
    first_lines = [length for module in modules for length in module.first_lines]
    packages = collections.Counter(
        ".".join(module.name.split(".")[:2]) for module in modules for _ in module.public_names
    )
    return {
        "files": len(modules),
        "lines": num_lines,
        "modules with exactly one importer": len(single),
        f"of these under {SMALL_MODULE_LINES} lines": sum(
            house.modules[name].num_lines < SMALL_MODULE_LINES for name in single
        ),
        f"folders with more than {MAX_MODULES} modules": ", ".join(
            f"{folder} {count}" for folder, count in folders.most_common() if count > MAX_MODULES
        )
        or "none",
        "comment lines": f"{sum(module.num_comment_lines for module in modules) / num_lines:.1%}",
        "docstring lines": f"{sum(module.num_docstring_lines for module in modules) / num_lines:.1%}",
        f"docstrings' first lines over {MAX_FIRST_LINE} characters": sum(
            n > MAX_FIRST_LINE for n in first_lines
        ),
        "of these over 100": sum(n > 100 for n in first_lines),
        f"functions over {MAX_FUNCTION_LINES} lines": sum(len(module.long_functions) for module in modules),
        "public classes and functions": sum(packages.values()),
        "most of them in": ", ".join(f"{name} {count}" for name, count in packages.most_common(6)),
        "import cycles": len(cycles(house)),
        "import cycles, with imports inside functions": len(cycles(house, is_early=False)),
        **{f"words of {name}": count for name, count in house.words.items()},
    }


def _at_commit(commit: str) -> House:
    archive = subprocess.run(["git", "archive", commit], check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as directory:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(directory, filter="data")
        return read(pathlib.Path(directory))


def _kept_since(commit: str, house: House) -> set[str]:
    """Return the modules that are files of a commit's, changed or renamed, as git sees it at 40 %."""
    command = ["git", "diff", "-M40%", "-l100000", "--name-status", "--diff-filter=A", commit, "--", PACKAGE]
    added = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    new = {pathlib.PurePath(line.split("\t")[1]) for line in added.splitlines()}
    return {module.name for module in house.modules.values() if module.path not in new}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--against", metavar="COMMIT", help="show this commit's figures beside the working tree's"
    )
    parser.add_argument(
        "--list", action="store_true", help="name the modules, functions and cycles behind the numbers"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    here = read(pathlib.Path.cwd())
    columns = {"now": figures(here)}
    if arguments.against:
        kept = figures(here, _kept_since(arguments.against, here))
        columns = {
            arguments.against: figures(_at_commit(arguments.against)),
            "left of its files": kept,
            **columns,
        }
    if arguments.json:
        print(json.dumps(columns, indent=2))
        return
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for row in columns["now"]:
        print(f"| {row} | " + " | ".join(str(column[row]) for column in columns.values()) + " |")
    if arguments.list:
        _print_names(here)


def _print_names(house: House) -> None:
    print("\nModules with exactly one importer:")
    for name, visitors in sorted(house.importers().items()):
        if len(visitors) == 1:
            print(f"  {name} ({house.modules[name].num_lines}) <- {next(iter(visitors))}")
    print("\nLong functions:")
    for module in house.modules.values():
        for function, length in module.long_functions:
            print(f"  {module.name}.{function} ({length})")
    print("\nCycles:")
    for group in cycles(house, is_early=False):
        print("  " + ", ".join(group))


if __name__ == "__main__":
    main()
