"""What failing GPUs cost, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.chart import bars
from tuner.report.estimate import broken_lines
from tuner.report.table import Column, Page, Table, hidden_note, noted, wrapped
from tuner.report.words import gigabytes, header, labelled, lasting, mesh, percent, plan_words, probability, seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

SPOKEN = {
    "wait": "wait for repairs",
    "spares": "spare groups",
    "drop": "drop replica",
    "ntp": "fall back",
    "ntp+boost": "fall back, boosted",
}
CHARTED = ("drop", "ntp", "ntp+boost")


def failures_text(record: dict[str, Any], page: Page) -> str:
    """Return the report of a record of `tuner failures`."""
    lines = [*header(record["job"], record["calibration"], page), ""]
    lines += question_lines(record, page)
    lines += broken_lines(record["broken"], page)
    if not record["fits"]:
        lines += labelled("memory", f"the plan does not fit: P(OOM) {probability(record['p_oom'])} (tuner explain)", page)
    for note in record["notes"]:
        lines += labelled("note", note, page)
    lines += ["", *policy_table(record, page)]
    lines += ["", *fallback_table(record, page)] if record["fallbacks"] else []
    lines += ["", *fraction_table(record, page), "", *fraction_chart(record, page)]
    lines += ["", *domain_table(record, page), "", *domain_chart(record, page)]
    lines += ["", *peak_lines(record, page)] if record["peaks"] else []
    return "\n".join([*lines, "", *source_lines(record, page)])


def groups_name(record: dict[str, Any]) -> str:
    """Return what falls together, in words."""
    return {"tp": "tensor-parallel groups", "ep": "expert-parallel groups"}[record["units"]["axis"]]


def question_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return the plan, what falls together, how often it fails and what a restart costs."""
    units, failures, data = record["units"], record["failures"], record["data"]
    lines = labelled("plan", plan_words(record["plan"]), page)
    lines += labelled("", mesh(record["plan"], record["job"]), page)
    sizes = f"{units['units']:,} {groups_name(record)} of {units['gpus']} GPUs fall together, {units['per_replica']} a replica"
    replicas = "1 replica" if units["replicas"] == 1 else f"{units['replicas']:,} replicas"
    packed = "restarts pack those that are hit into the fewest replicas" if units["packed"] else "those that are hit stay where they are"
    lines += labelled("groups", f"{sizes}: {replicas} of {units['samples']:,} samples a step; {packed}", page)
    down = f"{percent(failures['failed_fraction'], 3)} % of the GPUs are down ({failures['failed_gpus']:.1f})"
    down += f", {percent(units['hit'])} % of the groups hit"
    scale = f" x {data['rate_scale']:g}" if data["rate_scale"] != 1 else ""
    if failures["stated"]:
        lines += labelled("failures", f"{down}, as stated; repairs and restarts of {data['name']}", page)
    else:
        often = f"a GPU fails every {failures['mtbf_s'] / 3600:,.0f} h, one of the job's every {lasting(failures['job_mtbf_s'])}"
        lines += labelled(
            "failures", f"{data['name']}{scale}: {often}; repaired in {failures['repair_s'] / 3600:.4g} h on average: {down}", page
        )
    every = record["checkpoint_every_s"]
    daly = lasting(every["daly"]) if every["daly"] > 0 else "none: a checkpoint takes too long for its first order"
    best = f"best every {lasting(every['best'])} while all run (Young {lasting(every['young'])}, Daly {daly}"
    best += f", availability-optimal {lasting(every['available'])})"
    restart = data["detection"]["value"] + data["restart"]["value"]
    write = data["checkpoint_write"]["value"]
    return lines + labelled(
        "restart", f"{lasting(restart)}, detection included; a checkpoint stops the job for {lasting(write)}, {best}", page
    )


def policy_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return the policies with their goodput, beside a simulation's where one was asked for."""
    rows = record["policies"]
    seen = [row["simulated"] for row in rows]

    def simulated(name: str) -> list[str]:
        return ["" if one is None else f"{percent(one[name], 2)} +- {percent(one[name + '_error'], 2)}" for one in seen]

    table = Table(
        [
            Column("policy", [SPOKEN[row["policy"]] for row in rows], left=True),
            Column("spares kept", [f"{row['spares']:,}" if row["spares"] else "" for row in rows], rank=3),
            Column("samples %", [percent(row["samples"], 2) for row in rows], rank=3),
            Column("samples simulated", simulated("samples"), rank=5),
            Column("lasting %", [percent(row["lasting"], 2) for row in rows], rank=3),
            Column("goodput %", [percent(row["goodput"], 2) for row in rows]),
            Column("goodput simulated", simulated("goodput"), rank=1),
            Column("idle GPUs", [f"{row['idle_gpus']:,.0f}" for row in rows], rank=4),
            Column("checkpoint", [lasting(row["checkpoint_every_s"]) for row in rows], rank=6),
            Column("spares needed", [f"{row['spares_needed']:,}" for row in rows], rank=2),
            Column("spare GPUs needed", [f"{row['spare_gpus_needed']:,}" for row in rows], rank=3),
        ]
    )
    lines = [*table.lines(page), *hidden_note(table, page)]
    said = (
        "samples: those of a step, over those of all GPUs (spares too); lasting: share of time whose work survives restarts; goodput: "
        "their product, by which a search for goodput ranks too."
    )
    batch = "the minibatch is fixed: spares make up what is lost" if record["fixed_batch"] else "the minibatch shrinks by what is lost"
    if any(row["policy"].startswith("ntp") for row in rows):
        batch += (
            "; falling back needs whole replicas as spares, which make up the samples lost, dropping single groups in place of failed ones"
        )
    spares = f"spares needed: groups that stand by so that no sample is lost for {percent(record['quantile'])} % of the time"
    lines += [page.dim(line) for line in wrapped(f"{said} {batch}; {spares}", page)]
    return lines + best_lines(record, page)


def best_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return which policy has the best goodput, and by how much."""
    first, *others = sorted(record["policies"], key=lambda row: -row["goodput"])
    words = f"{SPOKEN[first['policy']]}: goodput {percent(first['goodput'], 2)} %"
    if others:
        words += f", {percent(first['goodput'] - others[0]['goodput'], 2)} points more than {SPOKEN[others[0]['policy']]}"
    return labelled("best", words, page)


def fallback_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return what a group does at each lower degree, its overhead taken apart."""
    rows, axis = record["fallbacks"], record["units"]["axis"]
    boosts = any(row["policy"] == "ntp+boost" for row in record["policies"])

    def samples(row: dict[str, Any], which: str) -> str:
        return f"{row[which + 'samples']:,} of {row['of']:,}" + (", all wait" if row[which + "waits"] else "")

    table = Table(
        [
            Column(f"{axis} falls to", [str(row["degree"]) for row in rows]),
            Column("samples", ["" if row["why_not"] else samples(row, "") for row in rows]),
            Column("boosted", ["" if row["why_not"] or not boosts else samples(row, "boosted_") for row in rows], rank=1),
            Column("power it needs", ["" if row["why_not"] else f"{row['power']:.2f}x" for row in rows], rank=3),
            Column("overhead %", ["" if row["why_not"] else percent(row["overhead"], 2) for row in rows], rank=2),
            Column("before", [seconds(row["before_s"]) for row in rows], rank=4),
            Column("after", [seconds(row["after_s"]) for row in rows], rank=4),
            Column("reduction", [seconds(row["reduce_s"]) for row in rows], rank=4),
            Column("step", [seconds(row["step_s"]) for row in rows], rank=5),
            Column("GB", [gigabytes(row["memory_bytes"]) for row in rows], rank=2),
            Column("fits", ["no" if row["why_not"] else "yes" for row in rows], left=True),
        ]
    )
    lines = [*table.lines(page), *hidden_note(table, page)]
    for row in rows:
        if row["why_not"]:
            lines += labelled(f"{axis} {row['degree']}", f"does not run: {row['why_not']}", page)
    said = "overhead: of a step, that all replicas spend more: moving shards before and after gradients are reduced, and larger reductions"
    return lines + [page.dim(line) for line in wrapped(said, page)]


def lost(row: dict[str, Any], policy: str) -> str:
    """Return the share of samples that a policy loses, in percent."""
    return percent(1.0 - row["samples"][policy], 2) if policy in row.get("samples", {}) else ""


def fraction_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return what each policy loses, and the spares it needs, by the share of GPUs that are down."""
    rows = record["by_fraction"]
    columns = [
        Column("GPUs down %", [percent(row["failed_fraction"], 2) for row in rows]),
        Column("groups hit %", [percent(row["hit"], 2) for row in rows], rank=2),
        *loss_columns(rows, record),
    ]
    table = Table(columns)
    title = wrapped("samples lost against the share of GPUs that are down, restarts left out", page)
    lines = [*map(page.bold, title), *table.lines(page), *hidden_note(table, page)]
    for row in rows:
        lines += labelled(f"{percent(row['failed_fraction'], 2)} %", row["why_not"], page) if row["why_not"] else []
    return lines


def loss_columns(rows: Sequence[dict[str, Any]], record: dict[str, Any]) -> list[Column]:
    """Return a column of samples lost, and one of spares needed, for each policy."""
    names = [row["policy"] for row in record["policies"] if row["policy"] in ("spares", *CHARTED)]
    columns = [Column(f"{name} %", [lost(row, name) for row in rows], rank=4 if name == "spares" else 0) for name in names]
    for name in names[1:] if "drop" in names else names:  # `spares` needs as many as `drop`
        need = [f"{row['spares_needed'][name]:,}" if name in row.get("spares_needed", {}) else "" for row in rows]
        columns.append(Column(f"spares, {name}", need, rank=3))
    return columns


def domain_table(record: dict[str, Any], page: Page) -> list[str]:
    """Return what each policy loses by the size of what falls together, at the same share of GPUs down."""
    rows, gpus = record["by_domain"], record["job"]["gpus"]
    columns = [
        Column("domain", [str(row["domain"]) for row in rows]),
        Column("hit %", [percent(row["hit"], 2) for row in rows], rank=1),
        Column("replicas", [f"{row['replicas']:,} of {row['per_replica']}" if "replicas" in row else "" for row in rows], rank=5),
        *loss_columns(rows, record),
    ]
    table = Table(columns)
    down = percent(record["failures"]["failed_fraction"], 3)
    title = wrapped(f"the same against the size of the NVLink domain that falls together ({down} % of the GPUs down)", page)
    lines = [*map(page.bold, title), *table.lines(page), *hidden_note(table, page)]
    said = "losses jump where groups no longer divide heads, samples or GPUs evenly: the fullest rank and whole samples count"
    lines += [page.dim(line) for line in wrapped(said, page)]
    for row in rows:
        if row["why_not"]:
            lines += labelled(f"{row['domain']}", row["why_not"], page)
        elif row["gpus"] != gpus:
            words = f"does not divide the job: replicas of {row['per_replica']} domains on {row['gpus']:,} of its {gpus:,} GPUs"
            lines += labelled(f"{row['domain']}", words, page)
    return lines


def chart_rows(rows: Sequence[dict[str, Any]], record: dict[str, Any], name: str) -> list[tuple[str, str, float, str]]:
    """Return the bars of samples lost, grouped by a key of the rows."""
    names = [row["policy"] for row in record["policies"] if row["policy"] != "wait"]
    policies = [name for name in names if name != "spares" or "drop" not in names]
    found = []
    for row in rows:
        label = f"{percent(row[name], 2)} %" if name == "failed_fraction" else f"{row[name]}"
        found += [(label, p, 1.0 - row["samples"][p], f"{lost(row, p)} %") for p in policies if p in row.get("samples", {})]
    return found


def fraction_chart(record: dict[str, Any], page: Page) -> list[str]:
    """Return the losses by the share of GPUs down as bars."""
    rows = chart_rows(record["by_fraction"], record, "failed_fraction")
    return bars("samples lost, by GPUs down", rows, page) if rows else []


def domain_chart(record: dict[str, Any], page: Page) -> list[str]:
    """Return the losses by the size of the domain as bars."""
    rows = chart_rows(record["by_domain"], record, "domain")
    return bars("samples lost, by GPUs that fall together", rows, page) if rows else []


def peak_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return what the simulated traces peak at."""
    peaks, units = record["peaks"], record["units"]
    lines = labelled("peaks", f"{peaks['traces']} traces of {peaks['days']:g} days, {units['units']:,} groups", page)
    share = f"for {percent(record['quantile'])} % of the time not more than {peaks['quantile_units']:.0f}"
    lines += labelled("", f"groups hit: {share}, peak {peaks['peak_units']:.0f} (highest {peaks['most_units']})", page)
    needs = ", ".join(f"{SPOKEN[name]} {mean:.0f} (highest {most})" for name, (mean, most) in peaks["never_waits"].items())
    lines += labelled("", f"spare groups with which a whole trace loses no sample: {needs}", page)
    above = [percent(peaks[name]) for name in ("above_a_thousandth", "above_a_thousandth_from_healthy")]
    words = f"more than 0.1 % of the GPUs down for {above[0]} % of the time; {above[1]} % from a healthy start with repairs of fixed length"
    return lines + labelled("", words, page)


def source_lines(record: dict[str, Any], page: Page) -> list[str]:
    """Return every figure of the failure data with its source."""
    data = record["data"]
    rows = [(name, shown(name, data[name]["value"]), data[name]["source"]) for name in FIGURES]
    rows += [
        (f"events of {each['gpus']} GPU{'' if each['gpus'] == 1 else 's'}", f"{percent(each['share']['value'])} %", each["share"]["source"])
        for each in data["blast"]
    ]
    names, values = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [page.bold(f"failure data {data['name']}")]
    for name, value, source in rows:
        head = f"{name.replace('_', ' '):<{names}}  {value:<{values}}  "
        lines += noted(head, source, page, page.dim)
    return lines


def shown(name: str, value: float) -> str:
    """Return a figure of failure data with its unit."""
    if name == "mtbf":
        return f"{value / 3600:,.0f} h"
    if name == "hardware_share":
        return f"{percent(value)} %"
    return {"power_cap": f"{value:g}x", "power_exponent": f"{value:g}"}.get(name) or lasting(value)


FIGURES = (
    "mtbf",
    "hardware_share",
    "repair",
    "software_repair",
    "detection",
    "restart",
    "in_place_restart",
    "checkpoint_write",
    "power_exponent",
    "power_cap",
)
