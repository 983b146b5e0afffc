"""Consistency of the repository: documentation, links, dependencies."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dstrial
from dstrial.cli.app import COMMANDS, _with_defaults, build_parser

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
MODEL_DEFS = sorted(path for path in (ROOT / "model_defs").iterdir() if (path / "model_def.py").exists())
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "model_defs/*/*.md")
    for path in ROOT.glob(pattern)
)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def text_of_pages() -> str:
    """Return the text of README.md and of every page in docs/."""
    return text_of("README.md") + "".join(page.read_text(encoding="utf-8") for page in PAGES)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> set[str]:
    """Return the anchors that GitHub generates for a document's headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def output_of(*command: str) -> str:
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def dstrial_help(*arguments: str) -> str:
    return output_of(str(Path(sys.executable).with_name("dstrial")), *arguments, "--help")


@pytest.mark.process
def test_no_text_installs_dstrial_by_name() -> None:
    """On PyPI the name dstrial belongs to another project."""
    by_name = re.compile(r"""pip install (?:[^\s`#]+ )*['"]?dstrial(?![\w./-])""")
    kinds = ("*.py", "*.md", "*.js", "*.html", "*.yaml", "*.toml", "*.sh", "Makefile")
    files = output_of("git", "ls-files", "--", *kinds).split()
    found = [name for name in files for line in text_of(name).splitlines() if by_name.search(line)]

    assert found == []


def test_readme_mentions_every_subcommand() -> None:
    missing = [name for name in COMMANDS if f"dstrial {name}" not in text_of("README.md")]

    assert not missing


@pytest.mark.process
def test_pages_mention_every_subcommand_option() -> None:
    documented = text_of_pages()
    missing = {
        f"dstrial {name} {option}"
        for name in COMMANDS
        for option in re.findall(r"--[a-z][a-z-]*", dstrial_help(name))
        if option != "--help" and option not in documented
    }

    assert not missing


@pytest.mark.parametrize("name", [name for name in dstrial.__all__ if not name.startswith("__")])
def test_public_name_is_documented_and_mentioned(name: str) -> None:
    public = getattr(dstrial, name)

    if inspect.isclass(public) or inspect.isroutine(public):
        is_ours = inspect.isclass(public) and public.__module__.startswith("dstrial.")
        own = vars(public).items() if is_ours else ()
        routines = [value for key, value in own if inspect.isroutine(value) and not key.startswith("_")]
        undocumented = [value.__qualname__ for value in (public, *routines) if not inspect.getdoc(value)]
        assert undocumented == [], f"without a docstring: {undocumented}"
    assert f"`{name}`" in text_of_pages(), f"`{name}` is neither in README.md nor in docs/"


@pytest.mark.process
def test_package_import_loads_no_torch_or_deepspeed() -> None:
    code = "import sys, dstrial; print([m for m in ('torch', 'deepspeed', 'determined') if m in sys.modules])"

    assert output_of(sys.executable, "-c", code).strip() == "[]"


def test_architecture_names_every_package() -> None:
    packages = [
        path.name
        for path in (ROOT / "dstrial").iterdir()
        if (path / "__init__.py").exists() and path.is_dir()
    ]
    modules = [path.name for path in (ROOT / "dstrial").glob("*.py")]

    missing = [
        name
        for name in packages + modules
        if not re.search(rf"`(dstrial[./])?{re.escape(name)}/?`", text_of("ARCHITECTURE.md"))
    ]

    assert not missing


@pytest.mark.parametrize("model_def", MODEL_DEFS, ids=lambda path: path.name)
def test_model_definition_has_readme_and_config(model_def: Path) -> None:
    config_path = ROOT / "experiment_configs" / f"{model_def.name}.yaml"
    config = yaml.safe_load(config_path.read_text())

    assert f"dstrial run experiment_configs/{config_path.name} model_defs/{model_def.name}" in (
        model_def / "README.md"
    ).read_text(encoding="utf-8")
    class_name = re.fullmatch(r"python3 -m dstrial\.launch --trial model_def:(\w+)", config["entrypoint"])
    assert class_name is not None
    assert f"class {class_name[1]}(DeepSpeedTrial):" in (model_def / "model_def.py").read_text()
    hyperparameters = config["hyperparameters"]
    named = [value for key, value in hyperparameters.items() if key.endswith("deepspeed_config")]
    assert sorted(named) == sorted(path.name for path in model_def.glob("*.json"))
    for file_name in named:
        json.loads((model_def / file_name).read_text())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_links_resolve(document: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(document)))

    missing = []
    for link in links:
        if "://" in link:
            continue
        file_name, _, anchor = link.partition("#")
        path = (ROOT / document).parent / file_name if file_name else ROOT / document
        if not path.exists() or (anchor and anchor not in anchors_of(path)):
            missing.append(link)

    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_of_document_parse_and_import_public_names(document: str) -> None:
    for kind, code in re.findall(
        r"^```(python|yaml)\n(.*?)^```", text_of(document), flags=re.MULTILINE | re.DOTALL
    ):
        if kind == "yaml":
            yaml.safe_load(code)
            continue
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dstrial":
                module = importlib.import_module(str(node.module))
                for name in node.names:
                    is_module = importlib.util.find_spec(f"{node.module}.{name.name}") is not None
                    assert is_module or hasattr(module, name.name), name.name


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "CHANGELOG.md"])
def test_files_named_in_document_exist(document: str) -> None:
    folders = "tests|tools|benchmarks|examples|model_defs|experiment_configs|docs"
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", text_of(document))

    assert not [name for name in named if not (ROOT / name).exists()]


def test_failure_table_names_existing_tests() -> None:
    text = text_of("docs/contributors/what-survives-what-tests.md")
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| what happens")
    ]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)

    assert len(rows) >= 20
    assert not [row for row in rows if "::test_" not in row.split(" | ")[-1]]
    assert not [
        f"{file}::{name}"
        for file, name in named
        if not re.search(rf"^ *(async )?def {name}\(", text_of(file), flags=re.MULTILINE)
    ]


def test_every_invariant_names_its_test() -> None:
    section = text_of("ARCHITECTURE.md").partition("## Invariants")[2].partition("\n## ")[0]
    invariants = re.findall(r"^(\d+)\. (.*)$", section, flags=re.MULTILINE)

    assert [int(number) for number, _ in invariants] == list(range(1, len(invariants) + 1))
    assert not [number for number, text in invariants if not re.search(r"`tests/[\w/]+\.py`", text)]


def test_navigation_of_site_names_every_page() -> None:
    named = re.findall(r"[\w/-]+\.md", text_of("mkdocs.yml"))

    assert sorted(named) == [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]
    assert "](docs/README.md)" in text_of("README.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_in_document_parse(document: str) -> None:
    lines = re.findall(r"^    dstrial (\w.*?)(?: +#.*)?$", text_of(document), flags=re.MULTILINE)

    for line in lines:
        words = shlex.split(line)
        build_parser(words[0]).parse_args(_with_defaults(words[0], words))  # an invalid command exits


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of("Makefile"), flags=re.MULTILINE))

    for document in DOCUMENTS:
        commands = re.findall(
            r"(?:^    |`)make ([a-z0-9 -]+?)(?=$| {2}| [A-Z#]|`)", text_of(document), flags=re.MULTILINE
        )
        named = {target for command in commands for target in command.split()}
        assert named <= targets, document


def test_docstring_first_lines_are_short() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        (path.relative_to(ROOT).as_posix(), ast.get_docstring(node) or "")
        for path in (ROOT / "dstrial").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, documented)
    ]

    assert [(path, text) for path, text in docstrings if len(text.split("\n")[0]) > 80] == []


EXTRAS = {
    "huggingface": (
        "dstrial/integrations/huggingface",
        "dstrial/integrations/accelerate",
        "dstrial/cli/templates",
    ),
    "ray": ("dstrial/ray",),
    "results": ("dstrial/results.py",),
}
"""Extra -> modules that may import its distributions, unlike all other modules."""

LOGGERS = {name: f"dstrial/loggers/{name}_logger.py" for name in ("wandb", "mlflow")}
"""Extra whose only distribution has its name -> module (``make test-loggers``)."""

NOT_IMPORTED = {
    "setuptools": "torch.utils.cpp_extension builds DeepSpeed's operators with it",
    "tensorboard": "torch.utils.tensorboard writes with it",
    "tokenizers": "transformers loads tokenizers with it",
}


def requirements_of(extra: str | None) -> set[str]:
    """Return the distributions declared for an extra, or for the core if None."""
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    listed = project["dependencies"] if extra is None else project["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name) for line in listed}


@functools.cache
def installed_modules() -> dict[str, str]:
    """Return module -> distribution; Python 3.10's packages_distributions omits many."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        lines = (distribution.read_text("RECORD") or "").splitlines()
        modules = {
            line.partition(",")[0].partition("/")[0] for line in lines if ".py," in line or ".so," in line
        }
        modules |= set(
            (distribution.read_text("top_level.txt") or "").split()
        )  # all that pip writes without wheel
        found |= dict.fromkeys(
            (name.partition(".")[0] for name in modules), canonicalize_name(distribution.name)
        )
    return found


@functools.cache
def imported_in(path: Path) -> set[str]:
    """Return the top-level names of all modules that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def imported_below(*folders: str, without: tuple[str, ...] = ()) -> set[str]:
    """Return the distributions that the Python files below ``folders`` import."""
    names = set()
    paths = (path for folder in folders for path in [ROOT / folder, *(ROOT / folder).rglob("*.py")])
    for path in (path for path in paths if path.is_file()):
        if path.is_relative_to(ROOT / "dstrial/master/backends/site") or any(
            path.is_relative_to(ROOT / folder) for folder in without
        ):
            continue
        names |= imported_in(path)
    foreign = names - sys.stdlib_module_names - {"tomllib", "dstrial"}  # 3.10 has no tomllib
    distributions = installed_modules()
    assert foreign <= distributions.keys(), f"not installed: {foreign - distributions.keys()}"
    return {distributions[name] for name in foreign}


def test_core_dependencies_equal_its_imports() -> None:
    used = imported_below("dstrial", without=(*sum(EXTRAS.values(), ()), *LOGGERS.values()))

    assert used - requirements_of(None) == set(), "imported and not declared"
    assert requirements_of(None) - used - NOT_IMPORTED.keys() == set(), "declared and imported nowhere"


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_dependencies_equal_its_imports(extra: str) -> None:
    used = imported_below(*EXTRAS[extra])

    assert used - requirements_of(None) - requirements_of(extra) == set(), "imported and not declared"
    assert requirements_of(extra) - used - NOT_IMPORTED.keys() == set(), "declared and imported nowhere"


def test_modules_named_in_architecture_exist() -> None:
    """Paths (``engine/adapters``) and dotted names (``trial.runtime``) lack dstrial/."""
    text = text_of("ARCHITECTURE.md").partition("## Seams")[2]
    elsewhere = ("tests", "docs", "benchmarks", "tools", "data", "pyproject")
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]+)+)/?`", text)
    dotted = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)\.[A-Za-z_]+", text)
    named = {
        name.replace(".", "/") for name in (*paths, *dotted) if re.split("[./]", name)[0] not in elsewhere
    }

    missing = [
        name
        for name in sorted(named)
        if not ((ROOT / "dstrial" / name).exists() or (ROOT / "dstrial" / f"{name}.py").exists())
    ]

    assert len(named) > 20
    assert not missing
