"""The rules of the house that a program can check, read from the syntax trees of the sources.

Each rule is a function from a source to the mistakes in it. The functions are first shown a source that breaks
their rule, so that a green run over the package means something.
"""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron_ladder"

GROUND = {"errors", "files", "flags", "processes", "progress"}
LOW = GROUND | {"blueprint", "config"}
PARALLEL = LOW | {"comm", "parallel"}
MODEL = PARALLEL | {"model"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "processes": set(),
    "progress": set(),
    "flags": {"errors"},
    "blueprint": GROUND,
    "config": GROUND | {"blueprint"},
    "comm": LOW,
    "parallel": LOW | {"comm"},
    "model": PARALLEL,
    "data": PARALLEL,
    "checkpoint": PARALLEL,
    "engine": MODEL | {"checkpoint"},
    "train": MODEL | {"engine", "data", "checkpoint"},
    "convert": MODEL | {"data", "checkpoint"},
    "generate": MODEL | {"data", "checkpoint", "convert"},
}
MAY_IMPORT["lab"] = set(MAY_IMPORT)
MAY_IMPORT["cli"] = set(MAY_IMPORT)

HOMES = {
    "deepspeed": ("engine/",),
    "apex": ("parallel/apex.py",),
}
"""Where alone these libraries are imported or probed for."""

MOST_LINES_OF_A_FUNCTION = 90
MOST_LINES_OF_A_FILE = 470


def package_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def all_files() -> list[Path]:
    folders = [PACKAGE, "tools", "examples", "tests"]
    return sorted([*ROOT.glob("*.py"), *(path for name in folders for path in (ROOT / name).rglob("*.py"))])


def imported_modules(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of everything imported, at any depth of nesting, by statement or by name."""
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


def import_mistakes(source: str, relative: str) -> list[str]:
    """Imports of a file of the package (`relative` to it) that run against the order, or stray from home."""
    module = ".".join([PACKAGE, *Path(relative).with_suffix("").parts]).removesuffix(".__init__")
    room = Path(relative).parts[0].removesuffix(".py")
    is_package = relative.endswith("__init__.py")
    if room != "__init__" and room not in MAY_IMPORT:
        return [f"{relative}: say in MAY_IMPORT what {room} may import"]
    mistakes = []
    for line, name in imported_modules(source, module, is_package):
        top, *below = name.split(".")
        if top == PACKAGE and below and below[0] in MAY_IMPORT:
            allowed = MAY_IMPORT.get(room, set()) | {room}
            if below[0] not in allowed:
                mistakes.append(f"{relative}:{line}: {room} may not import {below[0]}")
        elif top in HOMES and not relative.startswith(HOMES[top]):
            mistakes.append(f"{relative}:{line}: {top} is imported in {', '.join(HOMES[top])} alone")
    return mistakes


def size_mistakes(source: str, name: str) -> list[str]:
    lines = len(source.splitlines())
    mistakes = [f"{name}: {lines} lines"] if lines > MOST_LINES_OF_A_FILE else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_LINES_OF_A_FUNCTION:
                mistakes.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    return mistakes


def undocumented_fields(source: str, name: str) -> list[str]:
    """Fields of dataclasses without a string below them, of which --help would have nothing to say.

    A dataclass that documents none of its fields is not one of those that become flags.
    """
    mistakes = []
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
            mistakes.extend(where for where, is_text in documented.items() if not is_text)
    return mistakes


def asynchronous_calls(source: str) -> int:
    return sum(
        keyword.arg == "async_op" and getattr(keyword.value, "value", None) is True
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        for keyword in node.keywords
    )


def broken(rule: Callable[[str, str], list[str]], files: list[Path], root: Path) -> list[str]:
    return [
        mistake
        for path in files
        for mistake in rule(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    ]


def test_imports_run_one_way() -> None:
    assert broken(import_mistakes, package_files(), ROOT / PACKAGE) == []


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
def test_a_wrong_import_is_found(relative: str, source: str) -> None:
    assert len(import_mistakes(source, relative)) == 1


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
def test_a_right_import_passes(relative: str, source: str) -> None:
    assert import_mistakes(source, relative) == []


@pytest.mark.parametrize("module", [PACKAGE, f"{PACKAGE}.errors"])
def test_importing_the_package_is_light(module: str) -> None:
    script = f"import sys, {module}; print(sorted({{'torch', 'deepspeed', 'apex', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_collectives_are_started_asynchronously_in_one_file() -> None:
    assert asynchronous_calls("dist.all_reduce(x, async_op=True); dist.barrier(async_op=False)") == 1
    files = [path for path in package_files() if asynchronous_calls(path.read_text(encoding="utf-8"))]
    assert len(files) == 1, files


def test_functions_and_files_are_short() -> None:
    assert broken(size_mistakes, all_files(), ROOT) == []


def test_a_long_function_and_a_long_file_are_found() -> None:
    body = "    x = 1\n"
    assert size_mistakes("def f():\n" + body * 89, "a.py") == []
    assert size_mistakes("class C:\n def f():\n" + body * 90, "a.py") == ["a.py:2: f has 91 lines"]
    assert size_mistakes("x = 1\n" * 471, "a.py") == ["a.py: 471 lines"]


def test_every_field_of_a_configuration_is_documented() -> None:
    files = sorted((ROOT / PACKAGE / "config").rglob("*.py"))
    assert broken(undocumented_fields, files, ROOT) == []


def test_an_undocumented_field_is_found() -> None:
    source = '@dataclass(frozen=True)\nclass C:\n    a: int\n    """Said."""\n    b: int = 1\n    c: int\n'
    assert undocumented_fields(source, "a.py") == ["a.py:5: b of C", "a.py:6: c of C"]
    assert undocumented_fields(source.replace("@dataclass(frozen=True)\n", ""), "a.py") == []
    assert undocumented_fields("@dataclass\nclass Pair:\n    a: int\n    b: int\n", "a.py") == []
