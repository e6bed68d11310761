"""Rules of the code base that can be checked in the syntax trees of the sources.

Each rule is a function from sources to the violations in them. Each function is tested with sources that break its
rule, so that an empty result for the package is meaningful.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from megatron_ladder.cli.programs import PROGRAMS, script_of

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_ladder"

GROUND = {"command_line", "errors", "files", "flags", "processes", "progress"}
LOW = GROUND | {"blueprint", "config"}
PARALLEL = LOW | {"comm", "parallel"}
MODEL = PARALLEL | {"model"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "processes": set(),
    "progress": set(),
    "flags": {"errors", "files"},
    "command_line": {"errors", "flags"},
    "blueprint": GROUND,
    "config": GROUND | {"blueprint"},
    "comm": LOW,
    "parallel": LOW | {"comm"},
    "model": PARALLEL,
    "data": PARALLEL,
    "checkpoint": PARALLEL,
    "engine": MODEL | {"checkpoint"},
    "train": MODEL | {"engine", "data", "checkpoint"},
    "convert": MODEL | {"data", "checkpoint", "generate"},
    "generate": MODEL | {"data", "checkpoint"},
}
MAY_IMPORT["lm_eval"] = MODEL | {"data", "generate"}
MAY_IMPORT["api"] = set(MAY_IMPORT)
MAY_IMPORT["lab"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)

HOMES = {
    "deepspeed": ("engine/",),
    "apex": ("parallel/apex.py",),
}
"""The only places that import these libraries or check for them."""

MOST_LINES_OF_A_FUNCTION = 90
MOST_LINES_OF_A_FILE = 490


PROGRAM_INTERFACE = {"entry_point", "main", "parse_options"}
"""Functions of a program's module, which are called by name; see `cli/programs.py`."""
CLIENTS_OUTSIDE = ("tools", "examples", "docs")
"""Folders whose scripts count as clients of the package; tests do not."""
REMOTE_CODE = "convert/hf_module/"
"""Classes that transformers loads by name from exported models."""


def package_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def all_files() -> list[Path]:
    folders = [PACKAGE, "tools", "examples", "tests", "vllm_plugin/megatron_ladder_vllm", "vllm_plugin/tests"]
    scripts = [*ROOT.glob("*.py"), *(ROOT / "vllm_plugin").glob("*.py")]
    return sorted([*scripts, *(path for name in folders for path in (ROOT / name).rglob("*.py"))])


def imported_modules(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and absolute name of everything imported, at any nesting level, by statement or by name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = parents[: len(parents) - node.level + is_package]
                base = ".".join([*kept, base] if base else kept)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "find_spec", "__import__"):
                yield node.lineno, str(node.args[0].value)


def import_errors(source: str, relative: str) -> list[str]:
    """Find imports of a package file that violate MAY_IMPORT or HOMES; `relative` is its path in the package."""
    module = ".".join([PACKAGE, *Path(relative).with_suffix("").parts]).removesuffix(".__init__")
    room = Path(relative).parts[0].removesuffix(".py")
    is_package = relative.endswith("__init__.py")
    if room != "__init__" and room not in MAY_IMPORT:
        return [f"{relative}: add {room} to MAY_IMPORT"]
    errors = []
    for line, name in imported_modules(source, module, is_package):
        top, *below = name.split(".")
        if top == PACKAGE and below and below[0] in MAY_IMPORT:
            allowed = MAY_IMPORT.get(room, set()) | {room}
            if below[0] not in allowed:
                errors.append(f"{relative}:{line}: {room} must not import {below[0]}")
        elif top in HOMES and not relative.startswith(HOMES[top]):
            errors.append(f"{relative}:{line}: {top} must only be imported in {', '.join(HOMES[top])}")
    return errors


def size_errors(source: str, name: str) -> list[str]:
    lines = len(source.splitlines())
    errors = [f"{name}: {lines} lines"] if lines > MOST_LINES_OF_A_FILE else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_LINES_OF_A_FUNCTION:
                errors.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    return errors


def undocumented_fields(source: str, name: str) -> list[str]:
    """Find dataclass fields without a docstring, for which --help would have no text.

    A dataclass without any field docstring does not define flags.
    """
    errors = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        if not any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        documented: dict[str, bool] = {}
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign) and "ClassVar" not in ast.unparse(statement.annotation):
                value = following.value if isinstance(following, ast.Expr) else None
                is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
                documented[f"{name}:{statement.lineno}: {ast.unparse(statement.target)} of {node.name}"] = is_text
        if any(documented.values()):
            errors.extend(where for where, is_text in documented.items() if not is_text)
    return errors


def asynchronous_calls(source: str) -> int:
    return sum(
        keyword.arg == "async_op" and getattr(keyword.value, "value", None) is True
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )


def shared_class_names(sources: Mapping[str, str]) -> list[str]:
    """Find names of public classes that several files define."""
    places: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in places.items() if len(paths) > 1]


def definitions_without_client(sources: Mapping[str, str], scripts: str = "") -> list[str]:
    """Find public functions and classes that no other file of the package and no script uses.

    A class in the annotations or bases of a public definition of its file may be public.

    Args:
        sources: package files by path relative to the package.
        scripts: text of the scripts that use the package.
    """
    modules = {_module_of(path): path for path in sources}
    trees = {path: ast.parse(source) for path, source in sources.items()}
    used = {reference for path, tree in trees.items() for reference in _references(tree, path, modules)}
    words = set(re.findall(r"\w+", scripts))
    found = []
    for path, tree in trees.items():
        annotated = _annotated_names(tree)
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name[0] == "_":
                continue
            is_annotation = isinstance(node, ast.ClassDef) and node.name in annotated
            if not (is_annotation or node.name in words or (path, node.name) in used):
                found.append(f"{path}: {node.name}")
    return found


def _module_of(path: str) -> str:
    return ".".join([PACKAGE, *Path(path).with_suffix("").parts]).removesuffix(".__init__")


def _references(tree: ast.Module, path: str, modules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield file and name of the definitions that one file takes from other files."""
    aliases: dict[str, str] = {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Attribute)]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            parents = _module_of(path).split(".")
            parents = parents[: len(parents) - node.level + path.endswith("__init__.py")] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                if f"{base}.{alias.name}" in modules:
                    aliases[alias.asname or alias.name] = modules[f"{base}.{alias.name}"]
                elif base in modules:
                    yield modules[base], alias.name
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            yield aliases[node.value.id], node.attr


def _annotated_names(tree: ast.Module) -> set[str]:
    """Return the names in annotations and bases of the public definitions of a file."""
    expressions: list[ast.expr | None] = []
    definitions = [node for node in tree.body if isinstance(node, ast.stmt)]
    for node in definitions:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            expressions += node.bases
            methods = [m for m in node.body if not getattr(m, "name", "").startswith("_") or m.name == "__init__"]
            expressions += [e for member in methods for e in _annotations(member)]
        elif not getattr(node, "name", "").startswith("_"):
            expressions += _annotations(node)
    text = " ".join(ast.unparse(expression) for expression in expressions if expression is not None)
    return set(re.findall(r"\w+", text))


def _annotations(node: ast.stmt) -> list[ast.expr | None]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        return [node.returns, *(argument.annotation for argument in arguments if argument is not None)]
    if isinstance(node, ast.AnnAssign):
        return [node.annotation, node.value]
    return [node.value] if isinstance(node, ast.Assign) else []


def broken(rule: Callable[[str, str], list[str]], files: list[Path], root: Path) -> list[str]:
    return [
        error for path in files for error in rule(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    ]


def test_imports_run_one_way() -> None:
    assert broken(import_errors, package_files(), ROOT / PACKAGE) == []


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("blueprint/model.py", "from megatron_ladder.comm.mesh import Mesh"),
        ("blueprint/model.py", "from megatron_ladder import model"),
        ("comm/mesh.py", "import megatron_ladder.parallel.linear"),
        ("parallel/linear.py", "from ..model.stack import Stack"),
        ("model/__init__.py", "from ..train import loop"),
        ("model/stack.py", "def late():\n    from megatron_ladder.engine.pipeline import Stage"),
        ("checkpoint/format.py", "from megatron_ladder.train.loop import train"),
        ("generate/engine.py", "from megatron_ladder.engine.optimizer import Schedule"),
        ("train/loop.py", "from megatron_ladder.cli.pretrain import main"),
        ("__init__.py", "from megatron_ladder.errors import UserError"),
        ("errors.py", "from .config import fields"),
        ("newroom/file.py", ""),
        ("model/stack.py", "import deepspeed.comm as dist"),
        ("train/setup.py", "import deepspeed"),
        ("comm/mesh.py", "from deepspeed import comm"),
        ("generate/engine.py", 'importlib.import_module("deepspeed")'),
        ("train/loop.py", 'importlib.util.find_spec("apex.normalization")'),
    ],
)
def test_a_forbidden_import_is_found(relative: str, source: str) -> None:
    assert len(import_errors(source, relative)) == 1


@pytest.mark.parametrize(
    ("relative", "source"),
    [
        ("model/stack.py", "from ..parallel.linear import RowParallelLinear"),
        ("model/__init__.py", "from .stack import Stack"),
        ("cli/pretrain.py", "from megatron_ladder.train.loop import train"),
        ("generate/engine.py", "from megatron_ladder.data.tokenizers import load_tokenizer"),
        ("engine/build.py", "import deepspeed"),
        ("parallel/apex.py", 'importlib.import_module("apex.normalization")'),
        ("blueprint/model.py", "from megatron_ladder import __version__"),
    ],
)
def test_an_allowed_import_passes(relative: str, source: str) -> None:
    assert import_errors(source, relative) == []


@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.errors"])
def test_importing_the_package_is_light(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'deepspeed', 'apex', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_git_ignores_what_the_examples_write() -> None:
    scripts = [path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.sh")]
    folders = [name for text in scripts for name in re.findall(r"^run=(\w+)$", text, re.MULTILINE)]
    folders += ["quickstart", "tutorial"]
    command = ["git", "check-ignore", *(f"{folder}/file" for folder in folders)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert len(folders) > 2 and done.stdout.split() == [f"{folder}/file" for folder in folders]


def test_collectives_are_started_asynchronously_in_one_file() -> None:
    assert asynchronous_calls("dist.all_reduce(x, async_op=True); dist.barrier(async_op=False)") == 1
    files = [path for path in package_files() if asynchronous_calls(path.read_text(encoding="utf-8"))]
    assert len(files) == 1, files


def test_functions_and_files_are_short() -> None:
    assert broken(size_errors, all_files(), ROOT) == []


def test_a_long_function_and_a_long_file_are_found() -> None:
    body = "    x = 1\n"
    assert size_errors("def f():\n" + body * 89, "a.py") == []
    assert size_errors("class C:\n def f():\n" + body * 90, "a.py") == ["a.py:2: f has 91 lines"]
    assert size_errors("x = 1\n" * 491, "a.py") == ["a.py: 491 lines"]


def test_every_field_of_a_configuration_is_documented() -> None:
    files = sorted((ROOT / PACKAGE / "config").rglob("*.py"))
    assert broken(undocumented_fields, files, ROOT) == []


def test_an_undocumented_field_is_found() -> None:
    source = '@dataclass(frozen=True)\nclass C:\n    a: int\n    """Documented."""\n    b: int = 1\n    c: int\n'
    assert undocumented_fields(source, "a.py") == ["a.py:5: b of C", "a.py:6: c of C"]
    assert undocumented_fields(source.replace("@dataclass(frozen=True)\n", ""), "a.py") == []
    assert undocumented_fields("@dataclass\nclass Pair:\n    a: int\n    b: int\n", "a.py") == []


def package_sources() -> dict[str, str]:
    return {path.relative_to(ROOT / PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in package_files()}


def test_class_names_are_unique() -> None:
    assert shared_class_names(package_sources()) == []


def test_a_shared_class_name_is_found() -> None:
    sources = {"data/a.py": "class Plan: ...\nclass _Row: ...", "lab/b.py": "class Plan: ...\nclass _Row: ..."}
    assert shared_class_names(sources) == ["Plan: data/a.py, lab/b.py"]


def test_public_definitions_have_clients() -> None:
    scripts = [ROOT / "setup.py", ROOT / "pretrain_ladder.py"]
    files = [path for folder in CLIENTS_OUTSIDE for path in (ROOT / folder).rglob("*")]
    scripts += [path for path in files if path.suffix in (".py", ".sh")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in scripts)
    interfaces = {f"cli/{program}.py: {name}" for program in PROGRAMS for name in PROGRAM_INTERFACE}
    interfaces |= {"cli/programs.py: load_program", "cli/programs.py: script_of"}
    assert all((ROOT / script_of(program)).is_file() for program in PROGRAMS)
    found = definitions_without_client(package_sources(), text)
    assert [one for one in found if one not in interfaces and not one.startswith(REMOTE_CODE)] == []


def test_a_public_definition_without_client_is_found() -> None:
    sources = {
        "model/a.py": "class Row: ...\nclass Alone: ...\ndef rows() -> Row: ...\ndef unused(): rows()\ndef _own(): ...",
        "model/b.py": "from .a import rows\nfrom megatron_ladder.model import c\nc.helper()",
        "model/c.py": "def helper(): ...\ndef other(): ...\nasync def script(): ...",
    }
    found = ["model/a.py: Alone", "model/a.py: unused", "model/c.py: other"]
    assert definitions_without_client(sources, "run(script)") == found
