"""Layouts of units over the ranks of replicas of different degree, for thousands of sizes and some by hand."""

from __future__ import annotations

import pytest

from tuner.launch.nonuniform.layout import (
    Cast,
    Lost,
    Volume,
    balanced,
    comp_layout,
    ideal_bytes,
    moves,
    padded,
    shared,
    sources,
    volume,
)  # fmt: skip
from tuner.launch.nonuniform.layout import sync_layout as sync

COUNTS = [*range(1, 65), 127, 128, 256, 1000]
CASES = [(units, ranks, cores) for units in COUNTS for ranks in range(1, min(units, 17) + 1) for cores in range(1, ranks + 1)]


def test_every_unit_is_on_one_rank_and_ranks_differ_by_one_at_most() -> None:
    assert len(CASES) > 8000
    for units, ranks, cores in CASES:
        layout = comp_layout(units, ranks, cores)
        assert sorted(unit for held in layout for unit in held) == list(range(units))
        assert tuple(len(held) for held in layout) == balanced(units, ranks)
        assert max(map(len, layout)) - min(map(len, layout)) <= 1


def test_a_core_holds_a_prefix_of_its_sync_share_and_the_spares_runs_of_its_tail() -> None:
    for units, ranks, cores in CASES:
        layout, table = comp_layout(units, ranks, cores), moves(units, ranks, cores)
        for core, share in enumerate(sync(units, cores)):
            runs = [[unit for unit in held if unit in share] for held in (layout[core], *layout[cores:])]
            assert [unit for run in runs for unit in run] == list(share), (units, ranks, cores)
            assert [len(run) for run in runs[1:]] == [row[core] for row in table]


def test_a_spare_exchanges_the_same_with_every_core_to_one_unit_where_cores_keep_the_same() -> None:
    for units, ranks, cores in CASES:
        if units % ranks == 0:
            assert all(max(row) - min(row) <= 1 for row in moves(units, ranks, cores)), (units, ranks, cores)


def test_the_least_degree_computes_in_sync_layout() -> None:
    for units, ranks, _ in CASES:
        assert comp_layout(units, ranks, ranks) == tuple(map(tuple, sync(units, ranks)))


def test_the_papers_example() -> None:
    """12,000 columns, TP32 beside TP30: shards of 375 and 400, so that every core is sent 25 columns (arXiv 2504.06095, section 3)."""
    layout = comp_layout(12000, 32, 30)
    assert {len(held) for held in layout} == {375}
    assert {len(share) for share in sync(12000, 30)} == {400}
    assert moves(12000, 32, 30) == ((13,) * 15 + (12,) * 15, (12,) * 15 + (13,) * 15)
    assert {sum(row[core] for row in moves(12000, 32, 30)) for core in range(30)} == {25}


def test_eight_groups_over_four_ranks_beside_three_by_hand() -> None:
    assert sync(8, 3) == (range(3), range(3, 6), range(6, 8))
    assert comp_layout(8, 4, 3) == ((0, 1), (3, 4), (6, 7), (2, 5))
    assert moves(8, 4, 3) == ((1, 1, 0),)


def test_bytes_of_spares_and_cores_are_the_papers_where_all_divides() -> None:
    """480B, TP32 beside TP30, one of eight stages: 1.97e9 parameters a rank, so 3.9 GB a spare in bf16."""
    parameters = 12 * 20480**2 * 100 / 8
    assert ideal_bytes(parameters, 2, 31, 32, 30) == pytest.approx(3.93e9, rel=1e-2)
    assert ideal_bytes(parameters, 2, 0, 32, 30) == pytest.approx(3.93e9 * 2 / 30, rel=1e-2)
    assert [volume(12, 10, rank, 4, 3) for rank in (0, 3)] == [Volume(sent=0, received=10), Volume(sent=30, received=0)]
    assert ideal_bytes(120, 1, 3, 4, 3) == 30
    assert ideal_bytes(120, 1, 0, 4, 3) == 10


def test_samples_follow_the_degrees_and_nobody_is_left_without() -> None:
    assert shared(7, (4, 3)) == (4, 3)
    assert shared(5, (4, 3)) == (3, 2)
    assert shared(8, (4, 3, 2)) == (3, 3, 2)
    assert shared(3, (98, 1, 1)) == (1, 1, 1)
    assert shared(6, (4, 4, 4)) == (2, 2, 2)
    for total in range(3, 60):
        found = shared(total, (8, 7, 5))
        assert sum(found) == total
        assert min(found) > 0


def test_sequences_are_padded_to_the_ranks() -> None:
    assert [padded(8192, 7), padded(8192, 8), padded(1, 3)] == [8197, 8192, 3]


def test_what_a_lost_rank_held_comes_from_its_peer() -> None:
    cast = Cast.of((4, 4))
    new, numbers = cast.without([6])
    assert new.degrees == (4, 3)
    assert numbers == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 7: 6}
    before = [cast.held(rank, 8) for rank in numbers]
    for rank, found in enumerate(sources(8, cast, [6])):
        for unit, source in zip(new.held(rank, 8), found, strict=True):
            assert unit in before[source]
            if unit in before[rank]:
                assert source == rank
            elif any(unit in before[other] for other in new.members(new.place(rank)[0])):
                assert new.place(source)[0] == new.place(rank)[0]
    from_peer = {
        unit for rank in range(4, 7) for unit, source in zip(new.held(rank, 8), sources(8, cast, [6])[rank], strict=True) if source < 4
    }
    assert from_peer == {4, 5}


def test_two_replicas_that_lose_different_ranks_help_each_other_out() -> None:
    cast = Cast.of((4, 4))
    new, numbers = cast.without([1, 6])
    assert new.degrees == (3, 3)
    before = [cast.held(rank, 11) for rank in numbers]
    for rank, found in enumerate(sources(11, cast, [1, 6])):
        assert all(unit in before[source] for unit, source in zip(new.held(rank, 11), found, strict=True))


def test_units_that_died_in_every_replica_are_lost() -> None:
    with pytest.raises(Lost, match="unit 2 was on lost ranks alone"):
        sources(8, Cast.of((4, 4)), [1, 5])


def test_a_replica_without_ranks_is_gone() -> None:
    new, numbers = Cast.of((2, 1)).without([2])
    assert new.degrees == (2,)
    assert new.most == 2
    assert numbers == {0: 0, 1: 1}


def test_places_of_ranks() -> None:
    cast = Cast.of((4, 3, 2))
    assert (cast.cores, cast.ranks) == (2, 9)
    assert [cast.place(rank) for rank in (0, 3, 4, 6, 7, 8)] == [(0, 0), (0, 3), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert cast.members(1) == (4, 5, 6)
