"""A file imports only from levels below its own (CONTRIBUTING.md has the map), and heavy packages only where they are used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.terminal import ROOT

# The first prefix that matches names the level. Files of one entry may import each other where a package is named as a whole.
LEVELS: tuple[tuple[str, float], ...] = (
    ("tuner.errors", 0), ("tuner.verbs", 0), ("tuner.units", 0.1), ("tuner.arrays", 0), ("tuner.spec", 0), ("tuner.files", 0),
    ("tuner.model", 1), ("tuner.cluster", 1), ("tuner.job", 1.2), ("tuner.plan_text", 1.1), ("tuner.plan_defaults", 9.1),
    ("tuner.plan", 1), ("tuner.measurement", 1.3), ("tuner.load", 2), ("tuner.hf_config", 2.1), ("tuner.presets", 2.2),
    ("tuner.failure", 1.2), ("tuner.timing", 2.1), ("tuner.cluster_text", 2.3),
    ("tuner.cost_model.curves", 2.9), ("tuner.cost_model.runs", 2.9),
    ("tuner.cost_model.calibration", 3), ("tuner.cost_model.rules", 3), ("tuner.cost_model.params", 4),
    ("tuner.cost_model.flops", 4), ("tuner.cost_model.shard", 4), ("tuner.cost_model.roofline", 4), ("tuner.cost_model.collectives", 4),
    ("tuner.cost_model.work", 4.5), ("tuner.cost_model.layer", 5), ("tuner.cost_model.activations", 5), ("tuner.cost_model.pipeline", 5.1),
    ("tuner.cost_model.weights", 5.2), ("tuner.cost_model.data_parallel", 5.3), ("tuner.cost_model.memory", 5.4),
    ("tuner.cost_model.estimate", 6), ("tuner.cost_model.explain", 7), ("tuner.cost_model.degraded", 6.5),
    ("tuner.failure", 1.3), ("tuner.cost_model.failures", 6.5), ("tuner.cost_model.goodput", 7), ("tuner.cost_model.policies", 6.6),
    ("tuner.cost_model.failure_simulation", 6.7), ("tuner.fallback_cost", 8), ("tuner.exporting", 9.2), ("tuner.nonuniform", 9.2),
    ("tuner.cost_model.fit", 8.5), ("tuner.cost_model", 3),
    ("tuner.launch.topology", 7.8), ("tuner.launch.switches", 7.8), ("tuner.launch.detection", 7.9),
    ("tuner.search", 8), ("tuner.launch", 8), ("tuner.accuracy", 9), ("tuner.request", 9), ("tuner.values", 2.2), ("tuner.answers", 9),
    ("tuner.predicted", 9.1), ("tuner.formats", 9), ("tuner.plan_schema", 8.6), ("tuner.translation", 9.25), ("tuner.spelling", 8.6),
    ("tuner.explained", 9.2), ("tuner.found", 9.2), ("tuner.shelf", 9.2), ("tuner.health", 9.3), ("tuner.searching", 9.3),
    ("tuner.measuring", 9.3), ("tuner.logged", 9.2), ("tuner.profiling", 9.25),
    ("tuner.failing", 9.1), ("tuner.fallback", 9.15), ("tuner.domains", 9.2), ("tuner.goodput", 9.3),
    ("tuner.checking", 9.35),
    ("tuner.workflow", 9.4), ("tuner.report", 10), ("tuner.cli", 11), ("tuner", 12),
)  # fmt: skip
WHOLE = (
    "tuner.cost_model.rules", "tuner.cost_model.fit", "tuner.hf_config", "tuner.search",
    "tuner.launch", "tuner.accuracy", "tuner.checking", "tuner.profiling", "tuner.report", "tuner.cli",
)  # fmt: skip
OPTUNAS = ("tuner.search.sampler", "tuner.profiling.storage")  # what subclasses Optuna's; imported where a study is run
ENGINE = ROOT / "tuner/launch/engine"
NONUNIFORM = [ROOT / f"tuner/launch/nonuniform/{name}.py" for name in ("failover", "groups", "reshard", "training")]
FILES = sorted((ROOT / "tuner").rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def entry_of(module: str) -> tuple[str, float]:
    return next(entry for entry in LEVELS if module == entry[0] or module.startswith(entry[0] + "."))


def imports(tree: ast.AST, *, typing_too: bool) -> list[str]:
    """Return the modules that a file imports, with those inside functions; `if TYPE_CHECKING` only when asked."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING" and not typing_too:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [
                name if (ROOT / (name.replace(".", "/") + ".py")).exists() or (ROOT / name.replace(".", "/")).is_dir() else node.module
                for name in submodules
            ]
        else:
            found += imports(node, typing_too=typing_too)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_imports_point_down(path: Path) -> None:
    module = module_of(path)
    own, level = entry_of(module)
    for name in imports(ast.parse(path.read_text()), typing_too=False):
        if not name.startswith("tuner.") or module in ("tuner", "tuner.verbs"):  # these two start a verb lazily, wherever it is
            continue
        other, theirs = entry_of(name)
        same_room = own == other and own in WHOLE
        assert theirs < level or same_room or name == module or (theirs == level and own != other and level < 9), f"{module} imports {name}"


def top_level_modules(path: Path) -> list[str]:
    """Return the modules that importing a file imports: not those inside functions, nor those for type checkers."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return imports(tree, typing_too=False)


def top_level_imports(path: Path) -> set[str]:
    """Return the packages of these modules."""
    return {name.partition(".")[0] for name in top_level_modules(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_torch_and_optuna_are_imported_where_they_are_used(path: Path) -> None:
    allowed = {"torch"} if path.is_relative_to(ENGINE) or path in NONUNIFORM else {"optuna"} if module_of(path) in OPTUNAS else set()
    assert not top_level_imports(path) & ({"torch", "optuna", "pyarrow", "pandas"} - allowed)


def test_only_a_trials_own_processes_import_the_engine() -> None:
    """What imports torch at the top is imported by nothing at start, and by two files inside functions."""
    own = [path for path in FILES if path.is_relative_to(ENGINE) or path in NONUNIFORM]
    users = {module_of(path) for path in FILES if path not in own and "tuner.launch.engine" in path.read_text()}
    assert users == {"tuner.launch.workload", "tuner.launch.ntp"}
    assert not {"torch"} & {name for user in ("workload", "ntp") for name in top_level_imports(ROOT / f"tuner/launch/{user}.py")}
    assert not any(name.startswith("tuner.launch.engine") for name in top_level_modules(ROOT / "tuner/launch/workload.py"))


def test_reports_and_commands_compute_nothing() -> None:
    for path in (ROOT / "tuner/report").glob("*.py"):
        assert not top_level_imports(path) & {"numpy", "scipy", "math"}
        assert "tuner.cost_model" not in path.read_text()
    for path in (ROOT / "tuner/cli").glob("*.py"):
        assert not top_level_imports(path) & {"numpy", "scipy", "pydantic", "yaml", "rich"}
        assert "tuner.cost_model" not in path.read_text()


def test_no_file_is_long() -> None:
    long = {module_of(path): lines for path in FILES if (lines := path.read_text().count("\n")) > 420}
    assert long == {}
