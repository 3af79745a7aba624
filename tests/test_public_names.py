"""What `import tuner` promises: these names, nothing heavy, and the same function however its module was first imported."""

from __future__ import annotations

import subprocess
import sys

import tuner
from tests.terminal import ROOT

PUBLIC = [
    "InfrastructureError", "NothingFeasible", "PlanError", "SpecError", "TunerError", "__version__",
    "calibrate", "check", "doctor", "estimate", "explain", "export", "failures", "profile_ntp", "replay", "search", "validate",
]  # fmt: skip


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def test_public_names() -> None:
    assert sorted(tuner.__all__) == sorted(PUBLIC)
    for name in (*PUBLIC, "presets"):
        assert getattr(tuner, name) is not None


def test_import_is_light() -> None:
    heavy = ("numpy", "pydantic", "optuna", "torch", "yaml", "typer")
    assert python(f"import sys, tuner; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_a_verb_that_is_also_a_package_can_be_called_however_it_was_imported() -> None:
    for code in ("import tuner", "import tuner.search.space, tuner", "from tuner import search; import tuner"):
        call = "tuner.search(model='tiny', cluster='h100x8', seq_len=128, global_batch=8, top=1)"
        assert python(f"{code}; print(len({call}.ranking))") == "1"
    assert python("import tuner.presets, tuner; print(len(tuner.presets().record()), len(tuner.presets.names('models')) > 9)") == "8 True"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert python("import tuner; print(hasattr(tuner, 'nope'))") == "False"
