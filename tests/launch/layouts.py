"""Small models and layouts of them, run by one group of processes for each count of ranks (see worker.py)."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.terminal import ROOT
from tuner import presets
from tuner.job import Job
from tuner.model import Model
from tuner.plan import Plan
from tuner.plan_text import parse_knobs, split_knobs

if TYPE_CHECKING:
    from pathlib import Path

_LLAMA: dict[str, Any] = {
    "name": "llama", "layers": 4, "hidden": 32, "ffn_hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 61,
}  # fmt: skip
_GPT = {"kv_heads": 4, "vocab": 64, "gated_mlp": False, "tied_embeddings": True, "norm": "layer", "biases": True, "positions": "learned",
        "max_positions": 48}  # fmt: skip
_ODD = {"norms_per_layer": 4, "qk_norm": True, "qkv_bias": True, "embedding_norm": True, "sliding_window": {"size": 5, "full_every": 2}}
_MOE = {"moe": {"experts": 4, "top_k": 2, "expert_ffn_hidden": 32, "shared_expert_ffn_hidden": 32, "first_dense_layers": 1}}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt": _GPT | {"name": "gpt"},
    "odd": _ODD | {"name": "odd"},
    "moe": _MOE | {"name": "moe"},
    "five": {"layers": 5, "name": "five"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan of a model on some ranks. broken: what the worker leaves out on purpose; microbatches, routing: as for a trial;
    turns: counts of micro batches that steps hold in turn, like 2,4.
    """

    ranks: int
    knobs: str
    model: str = "llama"
    precision: str = "fp32"
    attention: str = "flash"
    global_batch: int = 8
    microbatches: int = 0
    turns: str = ""
    routing: str = "balanced"
    broken: str = ""

    def __str__(self) -> str:
        changed = [str(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "knobs" and getattr(self, f.name) != f.default]
        return " ".join([*changed, self.knobs])

    @property
    def reference(self) -> Layout:
        """The same training on one rank, unsharded, a sequence at a time."""
        batch, sequences = self.global_batch, int(self.plan.micro_batch * self.plan.dp(self.ranks))
        if self.microbatches:
            batch = self.microbatches * sequences
        turns = ",".join(str(int(count) * sequences) for count in self.turns.split(",") if count)
        return dataclasses.replace(
            self, ranks=1, knobs="tp=1", microbatches=0, turns=turns, broken="", precision="fp32", global_batch=batch
        )

    @property
    def plan(self) -> Plan:
        """The plan that the knobs spell."""
        return Plan(**parse_knobs(split_knobs(self.knobs, "layout"), "layout"))

    @property
    def job(self) -> Job:
        """The job that the ranks train."""
        return Job(
            model=Model(**_LLAMA | MODELS[self.model]),
            cluster=presets.cluster("h100x8").replace(gpus=self.ranks),
            framework=presets.framework("generic"),
            seq_len=32,
            global_batch=self.global_batch,
            precision=self.precision,
            attention=self.attention,
        )


def of_ranks(ranks: int, model: str, *knobs: str, **changes: Any) -> list[Layout]:
    """Return one layout for each of the knobs."""
    return [Layout(ranks=ranks, model=model, knobs=text, **changes) for text in knobs]


def torchrun(ranks: int, *arguments: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run a module under torchrun, with one thread a rank."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", *arguments]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
            out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_all(layouts: list[Layout], folder: Path) -> dict[str, dict[str, Any]]:
    """Run layouts of the same count of ranks one after the other in the same processes; return what each gave, by its text.

    A layout that fails ends the processes: it and those behind it have the end of the log instead.
    """
    wanted, answers = folder / "layouts.json", folder / "answers.jsonl"
    wanted.write_text(json.dumps([dataclasses.asdict(layout) for layout in layouts]))
    answers.touch()
    done = torchrun(layouts[0].ranks, "tests.launch.worker", str(wanted), str(answers))
    found = {record["layout"]: record for record in map(json.loads, answers.read_text().splitlines())}
    lost = {"error": (done.stdout + done.stderr)[-12000:]}
    return {str(layout): found.get(str(layout), lost) for layout in layouts}
