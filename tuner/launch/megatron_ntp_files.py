"""The files of a nonuniform tensor-parallel job on Megatron-LM's dev branch: experimental, their README says what is wrong there."""

from __future__ import annotations

import json
import shlex
from textwrap import fill
from typing import TYPE_CHECKING

from tuner.errors import Problem, SpecError
from tuner.launch.launchers.launcher import Written
from tuner.launch.megatron_ntp import NAME, SOURCE, defects, refusals, vocab_multiple
from tuner.launch.megatron_ntp_arguments import arguments, of_a_whole_run
from tuner.launch.megatron_ntp_script import PROGRAM, TEXT
from tuner.launch.megatron_ntp_slurm import MOST_PARTS, TASK, batch, parts, table, task

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.launch.megatron_ntp import Layout
    from tuner.plan import Plan

CONFIG, GROUPS, ARGUMENTS, RANKS = "ntp.json", "groups.json", "arguments.sh", "ranks.txt"
BATCH, PARITY, READ_ME = "launch.sbatch", "parity.sh", "README.md"
UNIFORM = {CONFIG: "uniform.json", GROUPS: "uniform_groups.json", RANKS: "uniform_ranks.txt", BATCH: "uniform.sbatch"}


def write(job: Job, plan: Plan, layout: Layout, named: int) -> Written:
    """Return the files of the export; `named`: how many GPUs were named as failed. Raises SpecError listing every rule of that
    implementation that the job breaks.
    """
    node = job.cluster.gpus_per_node
    problems = refusals(job, plan, layout.degree)
    if layout.reduced >= layout.replicas:
        problems.append(_problem("ntp-reduced", "every replica lost GPUs: none is healthy", "a smaller tp for all"))
    if len(parts(layout, node)) > MOST_PARTS:
        text = f"nodes lack GPUs in {len(parts(layout, node))} ways, and Slurm takes {MOST_PARTS} parts of a job"
        problems.append(_problem("ntp-parts", text, "fewer reduced replicas"))
    if problems:
        raise SpecError(problems)
    uniform = layout.uniform()
    files = {
        PROGRAM: TEXT,
        CONFIG: _config(layout, GROUPS),
        GROUPS: _groups(layout),
        ARGUMENTS: _arguments(job, plan, layout),
        RANKS: table(layout, parts(layout, node)),
        TASK: task(layout.world),
        BATCH: batch(parts(layout, node), node, name="ntp"),
        PARITY: _parity(job, layout),
        UNIFORM[CONFIG]: _uniform_config(uniform),
        UNIFORM[GROUPS]: _groups(uniform),
        UNIFORM[RANKS]: table(uniform, parts(uniform, node)),
        UNIFORM[BATCH]: batch(parts(uniform, node), node, name="ntp-uniform", before=(_uniform_variables(uniform),)),
        READ_ME: _read_me(job, plan, layout, named),
    }
    notes = ["experimental: run the parity check of README.md first; upstream's gradients are known to be wrong", _idle(layout, named)]
    notes.append("it takes zero 0 alone, while a search ranks zero 1 first, which needs less memory: price this plan as it is exported")
    if not plan.dp_overlap:
        notes.append("dp_overlap=true is the path that upstream has optimised")
    start = f"PRETRAIN=/path/to/pretrain_gpt.py sbatch {BATCH}"
    return Written(files=files, programs=(TASK, BATCH, UNIFORM[BATCH], PARITY), start=start, notes=tuple(notes))


def _problem(rule: str, text: str, hint: str) -> Problem:
    return Problem(where=NAME, path=rule, value="", rule=text, hint=hint)


def _idle(layout: Layout, named: int) -> str:
    """Return how many GPUs are not used, and how many of these were named as failed."""
    unused = layout.reduced * layout.spares * layout.cp
    return f"{unused} GPUs are not used: {named} failed, {unused - named} idle though healthy"


def _config(layout: Layout, groups: str) -> str:
    """Return ntp.json: the fields of NonuniformTPConfig, and what the program needs besides."""
    idle = {f"{replica},{slice_},0": list(slots) for replica, slots in layout.idle.items() for slice_ in range(layout.cp)}
    fields: dict[str, object] = {"tp_base": layout.tp, "tp_spares": layout.spares, "num_reduced_tp_dp_ranks": layout.reduced}
    return _json(fields | {"non_active_ranks_per_dp": idle} | _counts(layout, groups))


def _uniform_config(uniform: Layout) -> str:
    fields: dict[str, object] = {"tp_base": uniform.degree, "tp_spares": 0, "num_reduced_tp_dp_ranks": 0, "non_active_ranks_per_dp": {}}
    return _json(fields | _counts(uniform, UNIFORM[GROUPS]))


def _counts(layout: Layout, groups: str) -> dict[str, object]:
    return {"context_parallel": layout.cp, "replicas": layout.replicas, "world": layout.world, "groups": groups}


def _json(value: dict[str, object]) -> str:
    """Return a JSON object with one line for each of its values, lists and objects too."""
    lines = []
    for key, item in value.items():
        if isinstance(item, (dict, list)) and item:
            opened, closed = "{}" if isinstance(item, dict) else "[]"
            rows = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in item.items()] if isinstance(item, dict) else map(json.dumps, item)
            lines.append(f"  {json.dumps(key)}: {opened}\n    " + ",\n    ".join(rows) + f"\n  {closed}")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(item)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _groups(layout: Layout) -> str:
    """Return groups.json: the ranks of each process group, in the order in which they are made."""
    return _json(dict(layout.groups().items()))


def _arguments(job: Job, plan: Plan, layout: Layout) -> str:
    """Return arguments.sh: two arrays, as the parity check takes the first alone."""
    lines = ["  " + shlex.join(words) for words in arguments(job, plan, vocab_multiple(job, layout.tp, layout.degree))]
    return "\n".join(
        [
            "# shellcheck shell=bash disable=SC2034",
            f"# {shlex.quote(job.model.name)}: model, batch and parallelism. Tokenizer, data and schedule are yours: give them to {BATCH}.",
            f"# The vocabulary is padded so that both {layout.tp} and {layout.degree} divide it.",
            "ARGUMENTS=(",
            *lines,
            ")",
            f"WHOLE_RUN=({' '.join(shlex.join(words) for words in of_a_whole_run(job))})",
            "",
        ]
    )


def _uniform_variables(uniform: Layout) -> str:
    return f"export NTP_LAYOUT={UNIFORM[CONFIG]} NTP_RANKS={UNIFORM[RANKS]} NTP_WORLD={uniform.world}"


def _parity(job: Job, layout: Layout) -> str:
    """Return parity.sh: a few steps in fp32 at both degrees and at n2 throughout, compared."""
    few = {
        "--num-layers": "2", "--train-iters": "3", "--tokenizer-type": "NullTokenizer", "--vocab-size": str(job.model.vocab),
        "--attention-dropout": "0.0", "--hidden-dropout": "0.0", "--lr": "1e-4", "--log-interval": "1", "--eval-iters": "0",
    }  # fmt: skip
    words = shlex.join([word for pair in few.items() for word in pair])
    padding = vocab_multiple(job, layout.tp, layout.degree) * layout.tp // layout.degree
    return f"""#!/bin/bash
# Two layers, three steps, fp32, made-up data, the same weights cut for each degree: at tp {layout.tp} and {layout.degree}, then
# at {layout.degree} throughout. Losses and gradient norms must agree. The first loss says whether the model is the same, all else is
# about gradients.
set -euo pipefail
cd "$(dirname "$0")"
: "${{PRETRAIN:?the path of pretrain_gpt.py in Megatron-LM}}"
export NTP_PARITY=1 PRETRAIN
few=({words} --mock-data --use-cpu-initialization)
sbatch --wait --output=parity.ntp.log {BATCH} "${{few[@]}}"
uniform=(--tensor-model-parallel-size {layout.degree} --make-vocab-size-divisible-by {padding})  # the same padded vocabulary
sbatch --wait --output=parity.uniform.log {UNIFORM[BATCH]} "${{few[@]}}" "${{uniform[@]}}"
figures() {{ grep -oE '(lm loss|grad norm): [0-9.E+-]+' "$1"; }}
paste -d ' ' <(figures parity.ntp.log) <(figures parity.uniform.log) | awk '
  {{ mine = $3; other = $6; gap = mine > other ? mine - other : other - mine
    bad = !(NF == 6 && gap <= 1e-4 * other + ($1 == "grad") * 1e-3)  # norms are printed with three decimals
    print $1, $2, mine, other, bad ? "DIFFERS" : "agrees"; wrong += bad }}
  END {{ if (NR != 6) {{ print "a run did not end: see parity.*.log"; exit 1 }} exit wrong > 0 }}'
"""


def _read_me(job: Job, plan: Plan, layout: Layout, named: int) -> str:
    idle = "\n".join(f"| {r} | {layout.was(r)} | {', '.join(map(str, slots))} |" for r, slots in layout.idle.items())
    wrong = "\n".join(
        fill(f"- [{known}] {text}", 140, subsequent_indent="  ", break_long_words=False) for known, text in defects(job, plan)
    )
    return f"""# {job.model.name} at tensor-parallel degrees {layout.tp} and {layout.degree} on Megatron-LM's dev branch

EXPERIMENTAL. {layout.reduced} of {layout.replicas} replicas run at {layout.degree} of {layout.tp} GPUs, {layout.world} processes in all.
{_idle(layout, named)}.
Source of what is said here: {SOURCE}
(PR 4585; read as of 2026-08-21; main has none of it).

| replica | was | slots not used |
|---|---|---|
{idle}

Reduced replicas come first. There is one reduced degree for the whole job: the replica that lost most counts, others leave their highest
healthy slots idle too.

| file | what |
|---|---|
| `{CONFIG}`, `{GROUPS}` | NonuniformTPConfig; the ranks of every process group |
| `{PROGRAM}` | runs your pretrain_gpt.py with these: there is no flag for it |
| `{ARGUMENTS}` | model, batch, parallelism; tokenizer, data and schedule are yours |
| `{RANKS}` | rank and GPU of each of Slurm's processes, and what the rank is |
| `{BATCH}`, `{TASK}` | a Slurm job, heterogeneous where nodes differ: torchrun cannot start different counts of processes |
| `{PARITY}`, `uniform*` | the parity check |

    PRETRAIN=/path/to/Megatron-LM/pretrain_gpt.py sbatch {BATCH} --data-path ... --tokenizer-type ...

GPUs in `{RANKS}` are numbered as on a whole node, and whole nodes are asked for: where the driver no longer lists a failed GPU, lower the
numbers above it and `--gpus-per-node`. Give the nodes of each part with `--nodelist` in `{BATCH}`.

## Before anything else: parity

    PRETRAIN=/path/to/Megatron-LM/pretrain_gpt.py ./{PARITY}

At the commit named above gradients will differ: see the defects. No upstream test compares gradients; its one end-to-end test (6 GPUs, TP2
and TP4, one layer) looks at whether the loss is finite.

## Known to be wrong there

Seen in a run on CPUs with synthetic gradients [run], or read in the source [read]:

{wrong}

## Limits

- Every replica takes the same batch, so the reduced ones are the slowest; their GPUs hold {layout.tp}/{layout.degree} times the weights.
- No pipelines, experts, distributed optimizer, latent attention, CUDA graphs; both degrees must divide heads and ffn_hidden.
- Checkpoints are neither written nor read for two degrees; start anew, or convert weights yourself.
- Its own set-up of groups (initialize_nonuniform_tp_process_groups) starts the failed ranks too and keeps data-parallel groups by slot, so
  that only the last slots may be missing: here groups are made by hand, as its README asks of packed ranks.
- Rank 0 prints the loss here, as the last rank is an extra one, which averages over healthy replicas alone; TensorBoard has that one's.
- `{PROGRAM}` was written from the source and has never trained anything.

`tuner profile --ntp` runs such layouts with the tuner's own engine, whose gradients equal those of one process.
"""
