"""Imports point one way, heavy packages stay where they belong, and nothing runs text as code.

The layers and who may know what are explained in docs/architecture.md.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "autotune"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"cli"}),
    frozenset({"export"}),
    frozenset({"report"}),
    frozenset({"search"}),
    frozenset({"store"}),
    frozenset({"serving"}),
    frozenset({"measure"}),
    frozenset({"traffic"}),
    frozenset({"demo"}),
    frozenset({"shipped", "strict"}),
    frozenset({"paths", "closing"}),
    frozenset({"errors"}),
)
"""From top to bottom: a package may import itself and what stands below it, nothing else.

`export` stands on `report`, because it reads a study in the report's form.
"""

ROOMS = frozenset().union(*LAYERS)

# Who may import what, by the start of the module's path below autotune/.
ONLY_IN = {
    "optuna": ("search/", "report/dashboard.py"),
    "optuna_dashboard": ("report/dashboard.py",),
    "torch": ("demo/training/",),
    "transformers": ("demo/training/",),
    "safetensors": ("demo/training/",),
    "vllm": (),  # asked through a process of its own, never imported
    "sqlalchemy": ("store/",),
    "alembic": ("store/",),
    "click": ("cli/", "demo/training/__main__.py"),
    "rich": ("cli/", "report/"),
    "aiohttp": ("measure/client_worker.py", "measure/quality/endpoint.py"),
    "pynvml": ("serving/gpu.py",),
}
HEAVY = {"torch", "vllm", "optuna", "transformers", "pydantic"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "yaml.unsafe_load",
}


@dataclass(frozen=True)
class Import:
    """One imported module and where it is imported."""

    module: str
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text}"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def sources() -> list[Path]:
    return [*modules(), *sorted((ROOT / "scripts").rglob("*.py"))]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports(path: Path) -> Iterator[Import]:
    """Find all imports of a module, those inside functions and type-checking blocks included."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written from the top"
            # `from autotune import store` imports a module, `from autotune.store import x` a name.
            names = [node.module or ""]
            if node.module == "autotune":
                names = [f"autotune.{alias.name}" for alias in node.names if alias.name in ROOMS]
        else:
            continue
        for name in names:
            yield Import(name, path, node.lineno, lines[node.lineno - 1].strip())


def room(module: str) -> str:
    """Return the package or top-level module below `autotune` that a dotted name lies in."""
    return module.split(".")[1]


def level(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_package_has_its_layer() -> None:
    found = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    found |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    assert found == ROOMS


def test_imports_point_downwards() -> None:
    wrong = []
    for path in modules():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts == ("__init__",):
            continue
        for found in imports(path):
            # `import autotune` alone is for the version, which every layer may know.
            if not found.module.startswith("autotune.") or room(found.module) == parts[0]:
                continue
            if level(room(found.module)) <= level(parts[0]):
                wrong.append(str(found))
    assert wrong == []


def test_the_package_itself_imports_nothing() -> None:
    assert [
        str(found) for found in imports(PACKAGE / "__init__.py") if found.module != "__future__"
    ] == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_is_imported_only_where_it_belongs(package: str) -> None:
    wrong = [
        str(found)
        for path in modules()
        for found in imports(path)
        if found.module.partition(".")[0] == package
        and not path.relative_to(PACKAGE).as_posix().startswith(ONLY_IN[package])
    ]
    assert wrong == []


def test_a_room_and_its_owner_exist() -> None:
    for places in ONLY_IN.values():
        for place in places:
            assert (PACKAGE / place).exists(), place


def test_scripts_need_nothing_but_python() -> None:
    """They set the environment up, so they run before there is one."""
    wrong = [
        str(found)
        for path in sorted((ROOT / "scripts").glob("*.py"))
        for found in imports(path)
        if found.module.partition(".")[0] not in sys.stdlib_module_names
    ]
    assert wrong == []


LIST_MODULES = """
import json, sys
before = set(sys.modules)
import autotune
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def loaded_by(statement: str) -> set[str]:
    program = LIST_MODULES.replace("import autotune\n", f"{statement}\n")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(json.loads(done.stdout))


def test_import_autotune_loads_next_to_nothing() -> None:
    assert loaded_by("import autotune") & (HEAVY | {"numpy", "sqlalchemy", "rich"}) == set()


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import autotune.errors", HEAVY),
        ("import autotune.demo.target", HEAVY),
        ("import autotune.traffic.schedule", HEAVY - {"pydantic"}),
        ("import autotune.measure.client", HEAVY - {"pydantic"}),
        ("import autotune.serving.vllm_engine", HEAVY - {"pydantic"}),
        ("import autotune.store.repository", HEAVY - {"pydantic"}),
        ("import autotune.search.study", {"torch", "vllm", "transformers"}),
        ("import autotune.export.base", {"torch", "vllm", "transformers"}),
        ("import autotune.cli.running", {"torch", "vllm", "transformers"}),
        ("import autotune.demo.training", {"torch", "vllm", "transformers"}),
    ],
)
def test_a_layer_loads_nothing_heavier_than_it_needs(statement: str, absent: set[str]) -> None:
    assert loaded_by(statement) & absent == set()


# --- Nothing runs text as code ---


def called(node: ast.Call) -> str:
    """Return the name of what is called, dotted where it is an attribute of a name."""
    if isinstance(node.func, ast.Name):
        return node.func.id
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return f"{node.func.value.id}.{node.func.attr}"
    return ""


def has(node: ast.Call, name: str, value: object) -> bool:
    return any(
        keyword.arg == name
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is value
        for keyword in node.keywords
    )


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_module_runs_text_as_code(path: Path) -> None:
    wrong = [str(x) for x in imports(path) if x.module.partition(".")[0] in FORBIDDEN_MODULES]
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call):
            continue
        shell = next((keyword for keyword in node.keywords if keyword.arg == "shell"), None)
        is_shell = shell is not None and not has(node, "shell", False)
        is_unsafe_load = called(node) == "torch.load" and not has(node, "weights_only", True)
        if called(node) in FORBIDDEN_CALLS or is_shell or is_unsafe_load:
            wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert wrong == []


def test_what_runs_text_as_code_is_found() -> None:
    # Text that is only parsed, never run: it proves that the check above can fail.
    bad = "subprocess.run(x, shell=True)\neval(x)\nos.system(x)\ntorch.load(x)\n"
    calls = [node for node in ast.walk(ast.parse(bad)) if isinstance(node, ast.Call)]
    assert sorted(map(called, calls)) == ["eval", "os.system", "subprocess.run", "torch.load"]
    assert has(next(c for c in calls if called(c) == "subprocess.run"), "shell", True)
