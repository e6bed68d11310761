"""Rules of the code base: what may import what, where things belong, and how long functions may be."""

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_ladder.config.run import SECTIONS
from megatron_ladder.flags import flag_name, section_flags
from tests.distributed import test_correctness
from tests.helpers.commands import REPOSITORY_ROOT as ROOT
from tests.helpers.commands import package_metadata, tracked_files

PACKAGE = "megatron_ladder"
parse = functools.cache(ast.parse)


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(parse(source)))


GROUND = {"command_line", "errors", "files", "flags", "processes", "progress", "typed"}
LOW = GROUND | {"blueprint", "tokenizers", "config"}
PARALLEL = LOW | {"comm", "parallel", "torch_private"}
MODEL = PARALLEL | {"model"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": {"errors"},
    "processes": set(),
    "typed": {"errors"},
    "progress": set(),
    "flags": {"errors", "files"},
    "command_line": {"errors", "flags"},
    "blueprint": GROUND,
    "tokenizers": {"errors", "files", "typed"},
    "config": GROUND | {"blueprint", "tokenizers"},
    "torch_private": set(),
    "comm": LOW | {"torch_private"},
    "parallel": LOW | {"comm", "torch_private"},
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
MAY_IMPORT["cli"] = set(MAY_IMPORT)
MAY_IMPORT["__main__"] = {"cli", "errors"}

HOMES = {
    "deepspeed": ("engine/deepspeed.py",),
    "apex": ("model/operations.py",),
    "ladder_lab": (),
    "tools": (),
}
"""The only places that import these libraries or check for them; nothing imports the experiments."""

MOST_LINES_OF_A_FUNCTION = 80
MOST_FILES_WITH_ONE_IMPORTER = 25
MOST_REQUIREMENTS, MOST_EXTRAS = 12, 7
CALLED_BY_NAME = ("cli/", "convert/hf_module/")
"""Programs, and classes that transformers loads from exported models."""


def package_files() -> list[Path]:
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def all_files() -> list[Path]:
    return sorted(ROOT / name for name in tracked_files() if name.endswith(".py"))


def imported_modules(source: str, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the line and absolute name of everything imported, at any nesting level, by statement or by name."""
    for node in nodes_of(source):
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
            errors.append(f"{relative}:{line}: {top} must only be imported in {', '.join(HOMES[top]) or 'tools/'}")
    return errors


def size_errors(source: str, name: str) -> list[str]:
    errors = []
    for node in nodes_of(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_LINES_OF_A_FUNCTION:
                errors.append(f"{name}:{node.lineno}: {node.name} has {length} lines")
    return errors


def broken(rule: Callable[[str, str], list[str]], files: list[Path], root: Path) -> list[str]:
    return [
        error for path in files for error in rule(path.read_text(encoding="utf-8"), path.relative_to(root).as_posix())
    ]


def test_imports_run_one_way() -> None:
    assert broken(import_errors, package_files(), ROOT / PACKAGE) == []


def private_parts(source: str, relative: str) -> list[str]:
    """Find names of torch with an underscore, except for functions of tensors that torch's own optimizers call."""
    errors = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        for name in names:
            is_private = re.match(r"\.?(torch|dist|distributed_c10d)(\.\w+)*\._(?!_)", name)
            if is_private and not re.search(r"\._(foreach_\w+|assert_async)$", name):
                errors.append(f"{relative}:{node.lineno}: {name} belongs in torch_private.py")
    return errors


def test_private_parts_of_torch_are_in_one_file() -> None:
    planted = (
        "import torch._C\nfrom torch.distributed import _world\ntorch.ops.aten._copy(dist._x)\ntorch._foreach_add(x)"
    )
    assert len(private_parts(planted, "")) == 4
    files = [path for path in package_files() if path.name != "torch_private.py"]
    assert broken(private_parts, files, ROOT / PACKAGE) == []


def test_importing_the_package_is_light() -> None:
    script = (
        f"import sys, {PACKAGE}.errors; print(sorted({{'torch', 'deepspeed', 'apex', 'numpy'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_collectives_are_started_asynchronously_in_one_file() -> None:
    files = [path for path in package_files() if re.search("async_op=True[,)]", path.read_text(encoding="utf-8"))]
    assert len(files) == 1, files


def test_functions_are_short() -> None:
    assert broken(size_errors, all_files(), ROOT) == []


SPELLING = {"command_line.py", "lm_eval.py", "config/megatron_flags.py"}
"""Files whose subject flags are, also those of other programs."""
NAMING = {
    # The word itself.
    *("errors.py", "flags.py", "command_line.py", "config/file.py"),
    # Words of a command line.
    "blueprint/model.py",
    # Keys of stored descriptions.
    *("data/encoding.py", "data/streaming.py"),
}
"""Files that may make flags of the names of fields."""


def spelled_flags(source: str, relative: str, known: set[str]) -> list[str]:
    """Return the flags in texts of a file other than docstrings, help, declarations, and commands in backticks."""
    texts: list[tuple[int, str]] = []
    skipped = set[ast.AST]()
    for node in nodes_of(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        elif isinstance(node, ast.keyword) and node.arg in ("aliases", "requires", "excludes"):
            skipped |= {*ast.walk(node)}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "DESCRIPTION":
            skipped.add(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Wiring":
            skipped.add(node.args[1])
        elif isinstance(node, ast.JoinedStr):
            # Outer nodes come first. A value may be the name of a flag.
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            texts.append((node.lineno, "".join(map(str, parts))))
            skipped |= {*node.values}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            texts.append((node.lineno, node.value))
    words = (
        (line, word)
        for line, text in texts
        for word in re.findall(r"--(?:[a-z][a-z\d-]*|\0)", re.sub(r"`[^`]*`", "", text))
    )
    named = [node.lineno for node in nodes_of(source) if isinstance(node, ast.Name) and node.id == "flag_name"]
    if relative in NAMING:
        named.clear()
    return [
        *(f"{relative}:{line}: {word}" for line, word in words if word in known),
        *(f"{relative}:{line}: flag_name" for line in named),
    ]


def test_no_message_below_the_command_line_spells_a_flag() -> None:
    """Messages name fields, which `errors.Vocabulary` spells for command lines, files, keywords and other programs."""
    sources = {path.relative_to(ROOT / PACKAGE): path.read_text() for path in package_files()}
    names = {
        node.target.id
        for source in sources.values()
        for node in nodes_of(source)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    known = {"--\0", *map(flag_name, names), *(flag_name(f"no_{name}") for name in names)}
    source = "x = f'--{name}-path `--lr`'\nfix = 'give --lr'\n'--lr'\nflag(aliases='--lr')\nflag_name(name)\n"
    source += "DESCRIPTION = '--lr'\nWiring('x', '--lr')"
    assert sorted(spelled_flags(source, "x", known)) == ["x:1: --\0", "x:2: --lr", "x:5: flag_name"]
    assert [
        error
        for path, source in sources.items()
        if path.parts[0] != "cli" and str(path) not in SPELLING
        for error in spelled_flags(source, str(path), known)
    ] == []


def test_every_flag_of_the_trainer_is_documented() -> None:
    assert [one.name for one in section_flags(*SECTIONS) if not one.docstring] == []


def public_definitions(source: str) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in parse(source).body if isinstance(node, kinds) and node.name[0] != "_"]


def annotated_names(source: str) -> set[str]:
    """Names in annotations and bases: a class in the signature of a public definition may be public."""
    names = set()
    for node in nodes_of(source):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None), *getattr(node, "bases", ())]
        names |= {word for part in parts if part is not None for word in re.findall(r"\w+", ast.unparse(part))}
    return names


def test_public_definitions_have_clients_and_names_of_their_own() -> None:
    sources = {
        path.relative_to(ROOT / PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in package_files()
    }
    scripts = [ROOT / name for name in tracked_files() if not name.startswith((PACKAGE, "tests"))]
    outside = " ".join(path.read_text(encoding="utf-8") for path in scripts if path.suffix in (".py", ".sh"))
    words = {path: set(re.findall(r"\w+", source)) for path, source in sources.items()}
    elsewhere = set(re.findall(r"\w+", outside))
    alone, places = [], dict[str, str]()
    for path, source in sources.items():
        for name in public_definitions(source):
            used = name in elsewhere or any(name in words[other] for other in sources if other != path)
            if not (used or name in annotated_names(source) or path.startswith(CALLED_BY_NAME)):
                alone.append(f"{path}: {name}")
            if name[0].isupper():
                assert places.setdefault(name, path) == path, f"{name}: {path}, {places[name]}"
    assert alone == []


def test_the_quick_run_names_cases_that_are_not_slow() -> None:
    """Their names change with each axis of the grid, and pytest leaves out a slow case without an error."""
    script = (ROOT / "tests" / "run.sh").read_text(encoding="utf-8")
    (names,) = re.findall(r"test_every_wiring_and_layout\[.\{(.+)\}.\]", script)
    (grid,) = test_correctness.test_every_wiring_and_layout.pytestmark
    quick = {case.id for case in grid.args[1] if not case.marks}
    assert {*names.split(",")} <= quick


def test_an_installation_stays_within_its_budget() -> None:
    metadata = package_metadata()
    assert len(metadata["install_requires"]) <= MOST_REQUIREMENTS and len(metadata["extras_require"]) <= MOST_EXTRAS


def listed_in_tables(source: str) -> set[str]:
    """Names in the rows of the tables of a file, and what the functions among them import.

    A table is a constant: a dictionary, or a tuple. A row is a name, or a call with names as arguments.
    """
    names = set[str]()
    for node in parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(constant)], value=table):
                pass
            case ast.AnnAssign(target=ast.Name(constant), value=table):
                pass
            case _:
                continue
        rows: list[ast.expr] = []
        match table:
            case ast.Dict(values=rows) | ast.Tuple(elts=rows):
                pass
            case ast.DictComp(generators=[ast.comprehension(iter=ast.Tuple(elts=rows))]):
                pass
        for row in rows if constant.isupper() else ():
            parts = [*row.args, *(word.value for word in row.keywords)] if isinstance(row, ast.Call) else [row]
            names |= {part.id for part in parts if isinstance(part, ast.Name)}
    functions = [node for node in parse(source).body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in itertools.chain.from_iterable(map(ast.walk, functions)):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return names


def with_one_importer(sources: dict[str, str]) -> list[str]:
    """Find modules that at most one other imports, without those from which a table of kinds takes its rows."""
    importers: dict[str, set[str]] = {}
    in_tables = set[str]()
    for module, source in sources.items():
        listed = listed_in_tables(source)
        for _, name in imported_modules(source, module):
            parent, _, definition = name.rpartition(".")
            target = name if name in sources else parent
            importers.setdefault(target, set()).add(module)
            if definition in listed:
                in_tables.add(parent)
    return [module for module in sources if len(importers.get(module, ())) <= 1 and module not in in_tables]


def test_files_in_tables_of_kinds_may_have_one_importer() -> None:
    importing = "from kinds.ring import Ring\nfrom kinds.star import Star\nfrom kinds.line import Line, draw\n"
    sources = {
        "kinds.ring": "",
        "kinds.star": "",
        "kinds.line": "",
        "walk": importing,
        "__main__": "import walk, kinds",
    }
    one_importer = ["kinds.ring", "kinds.star", "kinds.line", "walk", "__main__"]
    assert with_one_importer(sources) == one_importer
    for table in (
        'KINDS: dict[str, type] = {"ring": Ring}',
        'KINDS = {kind.name: kind for kind in (Kind("ring", Ring),)}',
        'KINDS = (Kind("ring", load=load),)\ndef load():\n    from kinds.ring import Ring',
    ):
        assert with_one_importer(sources | {"walk": f"{importing}{table}\n"}) == one_importer[1:]
    for no_table in ("ring = Ring()", 'KINDS = {"line": draw(3)}', "WIDTH = Ring", "def f():\n    KINDS = {1: Ring}"):
        assert with_one_importer(sources | {"walk": f"{importing}{no_table}\n"}) == one_importer


def test_files_have_importers() -> None:
    """A file with one importer costs a reader more than it saves, unless it is large or in a table of kinds."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in package_files()}
    sources = {module: path.read_text(encoding="utf-8") for module, path in modules.items()}
    few = [
        module
        for module in with_one_importer(sources)
        if not module.endswith("__init__")
        and not modules[module].relative_to(ROOT / PACKAGE).as_posix().startswith(CALLED_BY_NAME)
    ]
    assert len(few) <= MOST_FILES_WITH_ONE_IMPORTER, few
