"""What each name of a Python file means: a class, a function, a member, a parameter or a local variable.

Names and their scopes are read with :mod:`ast`; the type of what stands before a dot comes from mypy, built once
over the package and its tests. ``tools/rename_names.py`` renames by it.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import typing

from mypy import build, nodes, types
from mypy.find_sources import create_source_list
from mypy.fscache import FileSystemCache
from mypy.options import Options

ROOTS = ("dstrial", "tests", "benchmarks", "tools")
_UNTYPED = (
    "accelerate",
    "attrdict",
    "deepspeed",
    "determined",
    "pynvml",
    "re2",
    "sklearn",
    "transformers",
    "torch",
    "numpy",
)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_LINKS = {
    "node",
    "info",
    "type",
    "unanalyzed_type",
    "names",
    "imports",
    "alias_deps",
    "original_def",
    "type_args",
}
_PARTS: dict[type, list[str]] = {}
Span = tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Entity:
    """What a name means: kind ``global``, ``member`` or ``local``, its owner's full name, and the name."""

    kind: str
    owner: str
    name: str


@dataclasses.dataclass(frozen=True)
class Mention:
    """A name in a file: its line (from 1), its column in bytes, and what it means (None: not known)."""

    line: int
    column: int
    name: str
    entity: Entity | None
    is_attribute: bool = False


@dataclasses.dataclass
class Scope:
    """A module, class, function, lambda or comprehension, with the names bound in it."""

    kind: str
    fullname: str
    parent: Scope | None
    names: dict[str, str | None]  # what an import binds is its full name
    info: nodes.TypeInfo | None = None


def bound_names(body: typing.Iterable[ast.AST]) -> dict[str, str | None]:
    """Return the names that statements bind in their own scope."""
    names: dict[str, str | None] = {}
    foreign: set[str] = set()
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            names[node.name] = None
            continue
        if isinstance(node, (ast.Lambda, *_COMPREHENSIONS)):
            continue
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names[node.id] = None
        elif isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            foreign.update(node.names)
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            names[node.name] = None
        waiting.extend(ast.iter_child_nodes(node))
    return {name: bound for name, bound in names.items() if name not in foreign}


class Project:
    """All files, as mypy sees them."""

    def __init__(self, root: pathlib.Path) -> None:
        options = Options()
        options.check_untyped_defs = options.preserve_asts = options.export_types = True
        options.incremental = False
        options.follow_imports = "silent"
        options.ignore_missing_imports = options.explicit_package_bases = options.namespace_packages = True
        options.mypy_path = [str(root)]
        options.exclude = ["backends/site/"]
        options.python_version = (3, 11)
        options.per_module_options = {
            f"{name}.*": {"follow_imports": "skip", "ignore_missing_imports": True} for name in _UNTYPED
        }
        options.build_per_module_cache()
        sources = create_source_list([str(root / name) for name in ROOTS], options, FileSystemCache())
        result = build.build(sources, options)
        self._types = result.types
        self.modules = result.files
        self.paths = {str(each.module): pathlib.Path(str(each.path)).relative_to(root) for each in sources}
        self.classes: dict[str, nodes.TypeInfo] = {}
        self.class_lines: dict[tuple[str, str, int], nodes.TypeInfo] = {}
        for module in self.paths:
            if module in self.modules:
                self._collect_classes(module, self.modules[module].names)

    def _collect_classes(self, module: str, names: nodes.SymbolTable) -> None:
        for symbol in names.values():
            info = symbol.node
            if (
                isinstance(info, nodes.TypeInfo)
                and info.module_name == module
                and info.fullname not in self.classes
            ):
                self.classes[info.fullname] = info
                self.class_lines[module, info.defn.name, info.defn.line] = info
                self._collect_classes(module, info.names)

    def types_at(self, module: str, spans: set[Span]) -> dict[Span, types.Type]:
        """Return the types of the expressions at places of a module."""
        found: dict[Span, types.Type] = {}
        if not spans or module not in self.modules:
            return found
        for node in _walk(self.modules[module]):
            if isinstance(node, nodes.Expression):
                span = (node.line, node.column, node.end_line or 0, node.end_column or 0)
                if span in spans and node in self._types and not isinstance(found.get(span), types.Instance):
                    found[span] = types.get_proper_type(self._types[node])
        return found

    def symbol(self, fullname: str) -> nodes.SymbolNode | None:
        """Return the module, class, function or variable of a dotted path, through re-exports."""
        if fullname in self.modules:
            return self.modules[fullname]
        owner, _, name = fullname.rpartition(".")
        if not owner:
            # pytest imports a helper of tests by its bare name
            homes = [
                module
                for module in self.modules
                if module.startswith("tests.") and module.endswith(f".{name}")
            ]
            return self.modules[homes[0]] if len(homes) == 1 else None
        node = self.symbol(owner)
        if isinstance(node, (nodes.MypyFile, nodes.TypeInfo)) and name in node.names:
            return node.names[name].node
        return None

    def member(self, info: nodes.TypeInfo, name: str, skip: int = 0) -> Entity | None:
        """Return the member that a class has or inherits."""
        for base in info.mro[skip:]:
            if name in base.names:
                return Entity("member", base.fullname, name)
        return None

    def same_members(self, first: Entity) -> tuple[set[Entity], str | None]:
        """Return a member with those it overrides, overrides it, or implement its protocol; or what forbids it."""
        name = first.name
        group = {first.owner}
        while True:
            grown = set(group)
            for fullname, info in self.classes.items():
                if fullname not in group and self._is_related(info, name, group):
                    grown.add(fullname)
            if grown == group:
                break
            group = grown
        for owner in group:
            for base in self.classes[owner].mro:
                if name in base.names and base.fullname not in self.classes:
                    return set(), f"{base.fullname} defines it"
        return {Entity("member", owner, name) for owner in group}, None

    def _is_related(self, info: nodes.TypeInfo, name: str, group: set[str]) -> bool:
        if name not in info.names:
            return False
        for owner in group:
            other = self.classes[owner]
            if info in other.mro or other in info.mro:
                return True
            for protocol, class_ in ((other, info), (info, other)):
                if protocol.is_protocol and all(class_.get(member) for member in protocol.protocol_members):
                    return True
        return False


class Reader:
    """Finds the mentions of wanted names in one file."""

    def __init__(self, project: Project, module: str, source: str, wanted: set[str]) -> None:
        self._project = project
        self._module = module
        self._wanted = wanted
        self._lines = source.encode().split(b"\n")
        self._tree = ast.parse(source)
        self.mentions: list[Mention] = []
        self.bound: set[str] = set()
        self._bound_in: dict[str, set[str]] = {}
        self._used_in: dict[str, set[str]] = {}
        self._types = project.types_at(module, self._spans())

    def _spans(self) -> set[Span]:
        spans: set[Span] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Attribute) and node.attr in self._wanted:
                spans.add(_span(node.value))
            elif isinstance(node, ast.Call) and self._has_wanted_word(node):
                spans.update(_span(each) for each in (node.func, *node.args[:1]))
                if isinstance(node.func, ast.Attribute):
                    spans.add(_span(node.func.value))
        return spans

    def _has_wanted_word(self, call: ast.Call) -> bool:
        return any(keyword.arg in self._wanted for keyword in call.keywords) or any(
            isinstance(arg, ast.Constant) and arg.value in self._wanted for arg in call.args[1:2]
        )

    def read(self) -> list[Mention]:
        """Return all mentions of wanted names, in no order."""
        scope = Scope("module", self._module, None, bound_names(self._tree.body))
        self._note(scope)
        for node in self._tree.body:
            self._walk(node, scope)
        return self.mentions

    def bound_in(self, scope: str) -> set[str]:
        """Return the names that a function binds, parameters included."""
        return self._bound_in.get(scope, set())

    def used_in(self, scope: str) -> set[str]:
        """Return all names that a function's code mentions."""
        return self._used_in.get(scope, set())

    def _note(self, scope: Scope, node: ast.AST | None = None) -> None:
        self.bound.update(scope.names)
        self._bound_in.setdefault(scope.fullname, set()).update(scope.names)
        if node is not None:
            used = self._used_in.setdefault(scope.fullname, set())
            used.update(scope.names, (each.id for each in ast.walk(node) if isinstance(each, ast.Name)))

    def _add(
        self, line: int, column: int, name: str, entity: Entity | None, is_attribute: bool = False
    ) -> None:
        if name in self._wanted:
            self.mentions.append(Mention(line, column, name, entity, is_attribute))

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, _FUNCTIONS):
            self._function(node, scope)
        elif isinstance(node, ast.ClassDef):
            self._class(node, scope)
        elif isinstance(node, ast.Lambda):
            self._lambda(node, scope)
        elif isinstance(node, _COMPREHENSIONS):
            self._comprehension(node, scope)
        else:
            self._leaf(node, scope)
            for child in ast.iter_child_nodes(node):
                self._walk(child, scope)

    def _leaf(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Name) and node.id in self._wanted:
            self._add(node.lineno, node.col_offset, node.id, self._resolve(node.id, scope))
        elif isinstance(node, ast.Attribute) and node.attr in self._wanted:
            column = (node.end_col_offset or 0) - len(node.attr.encode())
            self._add(node.end_lineno or 0, column, node.attr, self._attribute(node, scope), True)
        elif isinstance(node, ast.Call):
            self._call(node, scope)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                entity = self._global(f"{node.module}.{alias.name}")
                self._add(alias.lineno, alias.col_offset, alias.name, entity)
        elif isinstance(node, ast.Assign) and scope.kind == "module" and _is_all(node):
            for each in ast.walk(node.value):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    self._add(each.lineno, each.col_offset + 1, each.value, self._resolve(each.value, scope))
        elif isinstance(node, (ast.Global, ast.Nonlocal)):
            self._words_of(node, node.names, scope)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            self._words_of(node, [node.name], scope, r" as {}\b")
        elif isinstance(node, ast.MatchClass):
            self._pattern(node, scope)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            column = (node.end_col_offset or 0) - len(node.name)
            self._add(node.end_lineno or 0, column, node.name, self._resolve(node.name, scope))

    def _words_of(
        self, node: ast.stmt | ast.ExceptHandler, names: list[str], scope: Scope, _form: str = ""
    ) -> None:
        line = self._lines[node.lineno - 1]
        for name in names:
            column = line.find(name.encode(), node.col_offset + 6)
            if column >= 0:
                self._add(node.lineno, column, name, self._resolve(name, scope))

    def _pattern(self, node: ast.MatchClass, scope: Scope) -> None:
        info = self._project.symbol(self._dotted(node.cls, scope) or "")
        for name, pattern in zip(node.kwd_attrs, node.kwd_patterns, strict=True):
            column = self._lines[pattern.lineno - 1].rfind(name.encode() + b"=", 0, pattern.col_offset)
            if isinstance(info, nodes.TypeInfo) and column >= 0:
                self._add(pattern.lineno, column, name, self._project.member(info, name))

    def _resolve(self, name: str, scope: Scope | None) -> Entity | None:
        is_first = True
        while scope is not None:
            if name in scope.names and (scope.kind != "class" or is_first):
                bound = scope.names[name]
                if bound is not None:
                    return self._global(bound)
                if scope.kind == "module":
                    return self._global(f"{scope.fullname}.{name}")
                if scope.kind == "class":
                    return Entity("member", scope.info.fullname if scope.info else scope.fullname, name)
                return Entity("local", scope.fullname, name)
            is_first = False
            scope = scope.parent
        return None

    def _global(self, fullname: str) -> Entity:
        node = self._project.symbol(fullname)
        found = getattr(node, "fullname", None) or fullname
        if "." not in found or (
            isinstance(node, nodes.Var) and found.rpartition(".")[2] != fullname.rpartition(".")[2]
        ):
            found = fullname
        return Entity("global", *found.rpartition(".")[::2])

    def _dotted(self, node: ast.expr, scope: Scope) -> str | None:
        """Return the full name of an expression that names a module, class or function."""
        if isinstance(node, ast.Subscript):
            return self._dotted(node.value, scope)
        if isinstance(node, ast.Name):
            entity = self._resolve(node.id, scope)
            return f"{entity.owner}.{entity.name}".lstrip(".") if entity and entity.kind != "local" else None
        if isinstance(node, ast.Attribute):
            owner = self._dotted(node.value, scope)
            found = self._project.symbol(owner) if owner else None
            if isinstance(found, nodes.MypyFile):
                entity = self._global(f"{found.fullname}.{node.attr}")
                return f"{entity.owner}.{entity.name}"
            if isinstance(found, nodes.TypeInfo):
                member = self._project.member(found, node.attr)
                return f"{member.owner}.{member.name}" if member else None
        return None

    def _attribute(self, node: ast.Attribute, scope: Scope) -> Entity | None:
        return self._member_of(node.value, node.attr, scope)

    def _member_of(self, value: ast.expr, name: str, scope: Scope) -> Entity | None:
        owner = self._dotted(value, scope)
        found = self._project.symbol(owner) if owner else None
        if isinstance(found, nodes.MypyFile):
            return self._global(f"{found.fullname}.{name}")
        if isinstance(found, nodes.TypeInfo):
            return self._project.member(found, name)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super":
            info = _class_of(scope)
            return self._project.member(info, name, skip=1) if info else None
        infos = _infos(self._types.get(_span(value)))
        entities = {entity for info in infos if (entity := self._project.member(info, name))}
        if not entities:
            return Entity("foreign", infos[0].fullname, name) if infos else None
        return min(entities, key=lambda entity: entity.owner)

    def _callees(self, node: ast.expr, scope: Scope) -> list[str]:
        """Return the full names of the function or class that is called."""
        if owner := self._dotted(node, scope):
            return [owner]
        if (
            isinstance(node, ast.Name)
            and (entity := self._resolve(node.id, scope))
            and entity.kind == "local"
        ):
            names = [f"{entity.owner}.{entity.name}"]
            info = next(
                (
                    i
                    for (m, n, _), i in self._project.class_lines.items()
                    if (m, n) == (self._module, node.id)
                ),
                None,
            )
            if info:
                return [info.fullname]
        else:
            names = []
        if isinstance(node, ast.Attribute) and (member := self._attribute(node, scope)):
            names.append(f"{member.owner}.{member.name}")
        type_ = self._types.get(_span(node))
        if isinstance(type_, types.CallableType):
            if type_.is_type_obj():
                names = [type_.type_object().fullname]
            elif type_.definition is not None:
                names.append(type_.definition.fullname)
        elif isinstance(type_, types.TypeType):
            names = [info.fullname for info in _infos(type_)]
        return names

    def _call(self, node: ast.Call, scope: Scope) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in {"setattr", "delattr", "getattr", "hasattr", "object"} and len(node.args) >= 2:
            self._by_text(node, scope)
        if not any(keyword.arg in self._wanted for keyword in node.keywords):
            return
        called = node.args[0] if name == "partial" and node.args else node.func
        if name == "replace" and node.args and (infos := _infos(self._types.get(_span(node.args[0])))):
            callees = [info.fullname for info in infos]
        else:
            callees = self._callees(called, scope)
        for keyword in node.keywords:
            if keyword.arg in self._wanted:
                entity = self._keyword(callees, keyword.arg or "")
                self._add(keyword.lineno, keyword.col_offset, keyword.arg or "", entity)

    def _keyword(self, callees: list[str], name: str) -> Entity | None:
        for callee in callees:
            info = self._project.classes.get(callee)
            if info is None:
                return Entity("local", callee, name)
            for base in info.mro:
                init = base.names.get("__init__")
                if init is not None and not init.plugin_generated:
                    return Entity("local", f"{base.fullname}.__init__", name)
                if name in base.names:
                    return Entity("member", base.fullname, name)
        return None

    def _by_text(self, node: ast.Call, scope: Scope) -> None:
        value, text = node.args[:2]
        if isinstance(text, ast.Constant) and text.value in self._wanted:
            column = text.col_offset + 1
            self._add(text.lineno, column, text.value, self._member_of(value, text.value, scope), True)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: Scope) -> None:
        at = self._lines[node.lineno - 1].find(node.name.encode(), node.col_offset + 4)
        self._add(node.lineno, at, node.name, self._resolve(node.name, scope))
        arguments = node.args
        given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        given += [each for each in (arguments.vararg, arguments.kwarg) if each]
        outside = [
            *node.decorator_list,
            *arguments.defaults,
            *(d for d in arguments.kw_defaults if d),
            node.returns,
        ]
        for part in [*outside, *(each.annotation for each in given)]:
            if part is not None:
                self._walk(part, scope)
        inner = self._inner("function", f"{scope.fullname}.{node.name}", scope, bound_names(node.body))
        inner.names.update({each.arg: None for each in given})
        self._note(inner, node)
        for each in given:
            self._add(each.lineno, each.col_offset, each.arg, self._resolve(each.arg, inner))
        for statement in node.body:
            self._walk(statement, inner)

    def _inner(self, kind: str, fullname: str, scope: Scope, names: dict[str, str | None]) -> Scope:
        return Scope(kind, fullname, scope, names, scope.info if kind != "class" else None)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        at = self._lines[node.lineno - 1].find(node.name.encode(), node.col_offset + 6)
        self._add(node.lineno, at, node.name, self._resolve(node.name, scope))
        for part in [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]:
            self._walk(part, scope)
        inner = self._inner("class", f"{scope.fullname}.{node.name}", scope, bound_names(node.body))
        lines = [node.lineno, *(decorator.lineno for decorator in node.decorator_list)]
        found = [
            info for line in lines if (info := self._project.class_lines.get((self._module, node.name, line)))
        ]
        inner.info = found[0] if found else None
        for statement in node.body:
            self._walk(statement, inner)

    def _lambda(self, node: ast.Lambda, scope: Scope) -> None:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        given += [each for each in (node.args.vararg, node.args.kwarg) if each]
        for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d)]:
            self._walk(default, scope)
        inner = self._inner(
            "function", f"{scope.fullname}.<lambda>", scope, {each.arg: None for each in given}
        )
        self._note(inner, node)
        for each in given:
            self._add(each.lineno, each.col_offset, each.arg, self._resolve(each.arg, inner))
        self._walk(node.body, inner)

    def _comprehension(self, node: typing.Any, scope: Scope) -> None:
        names = bound_names([generator.target for generator in node.generators])
        inner = self._inner("function", f"{scope.fullname}.<for>", scope, names)
        self._note(inner, node)
        self._walk(node.generators[0].iter, scope)
        for position, generator in enumerate(node.generators):
            self._walk(generator.target, inner)
            for part in [*generator.ifs, *([generator.iter] if position else [])]:
                self._walk(part, inner)
        for part in [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]:
            self._walk(part, inner)


def _walk(root: nodes.Node) -> typing.Iterator[nodes.Node]:
    """Yield a file's statements and expressions (mypy's own visitors are compiled, and cannot be extended)."""
    waiting: list[typing.Any] = [root]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, (list, tuple)):
            waiting.extend(each for each in item if each is not None)
        elif isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(
            item, (nodes.Statement, nodes.Expression, nodes.MypyFile, nodes.Argument, nodes.Node)
        ):
            if id(item) in seen:
                continue
            seen.add(id(item))
            yield item
            kind = type(item)
            if kind not in _PARTS:
                names = [name for base in kind.__mro__ for name in getattr(base, "__mypyc_attrs__", ())]
                _PARTS[kind] = [name for name in names if name not in _LINKS and not name.startswith("__")]
            for name in _PARTS[kind]:
                part = getattr(item, name, None)
                if isinstance(part, (list, tuple, nodes.Node)):
                    waiting.append(part)


def _is_all(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)


def _span(node: ast.expr) -> Span:
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0


def _class_of(scope: Scope | None) -> nodes.TypeInfo | None:
    while scope is not None:
        if scope.info is not None:
            return scope.info
        scope = scope.parent
    return None


def _infos(type_: types.Type | None) -> list[nodes.TypeInfo]:
    """Return the classes whose members a value of a type has."""
    if type_ is None:
        return []
    proper = types.get_proper_type(type_)
    if isinstance(proper, types.Instance):
        return [proper.type]
    if isinstance(proper, types.UnionType):
        return [info for item in proper.items for info in _infos(item)]
    if isinstance(proper, types.TupleType):
        return [proper.partial_fallback.type]
    if isinstance(proper, types.TypeVarType):
        return _infos(proper.upper_bound)
    if isinstance(proper, types.TypeType):
        return _infos(proper.item)
    if isinstance(proper, types.LiteralType):
        return [proper.fallback.type]
    if isinstance(proper, types.CallableType):
        return [proper.type_object()] if proper.is_type_obj() else [proper.fallback.type]
    return []
