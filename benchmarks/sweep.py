"""How fast a space is swept: plans a second (time, memory and legality), wall time, peak memory.

    python benchmarks/sweep.py [--large] [--compare N] [--json]

Each job is swept on one core. plans counts those estimated, legal those that the rules allow, combinations the product of the axes. The
last job is ranked by goodput over failures, with degrees to fall back to as an axis. --large adds a space of about a hundred million plans,
to see that memory stays bounded (a minute). --compare N checks N random legal plans of the first space against single estimates, which
must be equal to the last bit.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner import presets
from tuner.cost_model.calibration import load_calibration
from tuner.cost_model.estimate import estimate
from tuner.job import Job
from tuner.search.axes import fallback_degrees
from tuner.search.blocks import blocks
from tuner.search.exhaustive import judge, sweep
from tuner.search.space import SpaceSpec, build_space
from tuner.searching import read_failures

if TYPE_CHECKING:
    from tuner.failure import FailureData
    from tuner.search.space import Space

JOBS: dict[str, tuple[str, str, int, int, str]] = {
    "GPT-3 175B on 1,024 A100": ("gpt3-175b", "a100x1024", 2048, 1536, "megatron-lm"),
    "Llama-3 70B on 64 H100": ("llama3-70b", "h100x64", 8192, 512, "megatron-lm"),
    "Llama-3 405B on 2,048 H100, torchtitan": ("llama3-405b", "h100x2048", 8192, 2048, "torchtitan"),
    "DeepSeek-V3 on 2,048 H100": ("deepseek-v3", "h100x2048", 4096, 8192, "megatron-bridge"),
}
GOODPUT = "Llama-3 70B on 1,024 H100, for goodput"
LARGE = "DeepSeek-V3 on 2,048 H100, axes not thinned"


def job_of(model: str, cluster: str, seq_len: int, global_batch: int, framework: str) -> Job:
    """Return the job of these presets."""
    return Job(
        model=presets.model(model),
        cluster=presets.cluster(cluster),
        framework=presets.framework(framework),
        seq_len=seq_len,
        global_batch=global_batch,
    )


def measure(name: str, job: Job, most_plans: int | None = None, failures: FailureData | None = None) -> dict[str, Any]:
    """Return the figures of one sweep, the building of its space included."""
    start = time.perf_counter()
    spec = SpaceSpec() if failures is None else SpaceSpec(axes={"fallback_tp": list(fallback_degrees(job))})
    space = build_space(job, spec, **({} if most_plans is None else {"most_plans": most_plans}))
    calibration = load_calibration("auto", job)
    if failures is None:
        result = sweep(job, space, calibration)
    else:
        result = sweep(job, space, calibration, objective="goodput", estimator=judge(space, failures))
    wall = time.perf_counter() - start
    return {
        "job": name,
        "combinations": result.combinations,
        "plans": result.plans,
        "legal": result.legal,
        "fit": result.fit,
        "sweep_s": result.seconds,
        "wall_s": wall,
        "plans_per_s": result.plans_per_s,
        "legal_per_s": result.legal / result.seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024**2),
        "best_step_s": result.best[0].step_s if result.best else None,
    }


def compare(job: Job, count: int, seed: int = 0) -> int:
    """Return how many of `count` random legal plans of the space differ in any bit of time or memory from single estimates."""
    space: Space = build_space(job, SpaceSpec())
    calibration = load_calibration("auto", job)
    random = np.random.default_rng(seed)
    grids = [block for block in blocks(space) if block.plan is not None]
    different = 0
    for block, share in zip(grids, np.array_split(np.arange(count), len(grids)), strict=True):
        of = estimate(job, block.plan, calibration)
        columns = [np.broadcast_to(column, block.shape).reshape(-1) for column in (of.step_s, of.memory_bytes, of.p_oom)]
        rows = random.choice(np.flatnonzero(np.broadcast_to(block.allowed, block.shape)), len(share))
        for row, index in zip(rows.tolist(), block.indices(space, rows).tolist(), strict=True):
            one = estimate(job, space.plan_at(index), calibration)
            different += [float(column[row]) for column in columns] != [float(one.step_s), float(one.memory_bytes), float(one.p_oom)]
    return different


def main() -> int:
    """Print the figures; 1 when a plan of the sweep differs from its single estimate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--large", action="store_true", help="sweep a hundred million plans as well")
    parser.add_argument("--compare", type=int, default=1000, metavar="N", help="plans to compare with single estimates (1000)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(name, job_of(*spec)) for name, spec in JOBS.items()]
    rows.append(measure(GOODPUT, job_of("llama3-70b", "h100x1024", 8192, 1024, "megatron-lm"), failures=read_failures(None)))
    if options.large:
        rows.append(measure(LARGE, job_of(*JOBS["DeepSeek-V3 on 2,048 H100"]), most_plans=10**12))
    first = next(iter(JOBS.values()))
    different = compare(job_of(*first), options.compare) if options.compare else 0
    if options.json:
        print(json.dumps({"sweeps": rows, "compared": options.compare, "different": different}, indent=2))
        return int(different > 0)
    print(f"{'job':<46}{'plans':>13}{'legal':>13}{'fit':>12}{'sweep s':>9}{'wall s':>8}{'plans/s':>12}{'legal/s':>12}{'peak MB':>9}")
    for row in rows:
        print(
            f"{row['job']:<46}{row['plans']:>13,}{row['legal']:>13,}{row['fit']:>12,}{row['sweep_s']:>9.2f}{row['wall_s']:>8.2f}"
            f"{row['plans_per_s']:>12,.0f}{row['legal_per_s']:>12,.0f}{row['peak_mb']:>9.0f}"
        )
    if options.compare:
        print(f"{options.compare:,} random plans against single estimates: {different} differ")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
