import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cost_model.flat import CLUSTER, calibration
from tuner import presets
from tuner.cost_model.calibration import COLLECTIVES, calibration_for
from tuner.cost_model.collectives import Group, collective_seconds, dispatch_seconds, inner_seconds, members, send_seconds
from tuner.cost_model.curves import Grid

FLAT = calibration()
SAMPLE = json.loads((Path(__file__).parents[1] / "fixtures" / "operators_sample.json").read_text())
NODES = {
    "a100-sxm-80gb": "dgx-a100",
    "h100-sxm-80gb": "dgx-h100",
    "h200-sxm-141gb": "dgx-h200",
    "b200-sxm-180gb": "dgx-b200",
    "gb200": "gb200-nvl72",
    "gb300": "gb300-nvl72",
}


def flat(op, bytes_, size, stride=1, used=FLAT):
    return float(collective_seconds(op, bytes_, Group(size, stride), cluster=CLUSTER, calibration=used))


def test_members_of_a_domain():
    # 16 ranks: neighbours fill a node of 8; two apart 4 share it; 8 apart each is alone.
    assert [int(members(Group(16, stride), 8)) for stride in (1, 2, 3, 8, 64)] == [8, 4, 2, 1, 1]
    assert int(members(Group(4, 1), 8)) == 4


def test_ring_all_reduce_by_hand():
    # 2 (n-1)/n V / b = 2 * 7/8 * 1e9 / 400e9 = 4.375 ms.
    assert flat("all_reduce", 1e9, 8) == pytest.approx(4.375e-3, rel=1e-6)
    assert flat("all_gather", 1e9, 8) == flat("reduce_scatter", 1e9, 8) == pytest.approx(2.1875e-3, rel=1e-6)


def test_ring_across_nodes_by_hand():
    # 16 over two nodes: 8 members stripe over 8 NICs of 25 GB/s = 200 GB/s < 400; 2 * 15/16 * 1e9 / 200e9 = 9.375 ms,
    # and a tree of depth 1 up and down: 2 * 2 us.
    assert flat("all_reduce", 1e9, 16) == pytest.approx(9.375e-3 + 4e-6, rel=1e-6)
    # Alone in each node: one NIC.
    assert flat("all_reduce", 1e9, 16, stride=8) == pytest.approx(2 * 15 / 16 * 1e9 / 25e9 + 4 * 4e-6, rel=1e-6)


def test_members_stripe_over_their_nics():
    times = [flat("all_gather", 1e9, 64, stride=stride) for stride in (1, 2, 4, 8)]
    assert times == pytest.approx([63 / 64 * 1e9 / (25e9 * g) + (64 // g - 1) * 2e-6 for g in (8, 4, 2, 1)], rel=1e-6)


def test_striping_is_capped_by_the_inner_link():
    fast = CLUSTER.replace(domains=(CLUSTER.domains[0], CLUSTER.domains[1].replace(bandwidth={"value": 100e9, "source": "by hand"})))
    seconds = collective_seconds("all_gather", 1e9, Group(16, 1), cluster=fast, calibration=FLAT)
    assert float(seconds) == pytest.approx(15 / 16 * 1e9 / 400e9 + 2e-6, rel=1e-6)


def test_all_to_all_by_hand():
    # Inside: 7/8 of 1e9 at 400e9. Over two nodes half of it leaves over the rank's own NIC.
    assert flat("all_to_all", 1e9, 8) == pytest.approx(7 / 8 * 1e9 / 400e9, rel=1e-6)
    assert flat("all_to_all", 1e9, 16) == pytest.approx(0.5e9 / 25e9 + 2e-6, rel=1e-6)


def test_a_rack_is_one_domain():
    rack = presets.cluster("gb200-nvl72")
    seconds = inner_seconds("all_reduce", 1e9, 32, link=rack.domains[0].bandwidth.value, calibration=FLAT)
    whole = collective_seconds("all_reduce", 1e9, Group(32, 1), cluster=rack, calibration=FLAT)
    assert float(whole) == seconds == pytest.approx(2 * 31 / 32 * 1e9 / 900e9, rel=1e-6)


def test_latency_is_paid_once_inside():
    slow = calibration(latency=Grid(axes=((2.0, 8.0),), values="1e-5 4e-5"))
    assert flat("all_gather", 1.0, 5, used=slow) == pytest.approx(2.5e-5, rel=1e-6)


def test_dispatch_sends_each_token_once_to_a_node():
    # 2 nodes of 8, 1 expert: half of the tokens leave. 8 experts: nearly all, once, where all_to_all would send 4 times that.
    group = Group(16, 1)
    one = dispatch_seconds(1e6, 1000.0, 1, group, cluster=CLUSTER, calibration=FLAT)
    many = dispatch_seconds(1e6, 1000.0, 8, group, cluster=CLUSTER, calibration=FLAT)
    assert float(one) == pytest.approx(0.5e9 / 25e9 + 2e-6, rel=1e-6)
    assert float(many) == pytest.approx((1 - 0.5**8) * 1e9 / 25e9 + 2e-6, rel=1e-6)
    inside = dispatch_seconds(1e6, 1000.0, 2, Group(8, 1), cluster=CLUSTER, calibration=FLAT)
    assert float(inside) == pytest.approx(8 * (1 - (7 / 8) ** 2) * 7 / 8 * 1e9 / 400e9, rel=1e-6)
    assert float(dispatch_seconds(1e6, 1000.0, 2, Group(1, 1), cluster=CLUSTER, calibration=FLAT)) == 0.0


def test_sends_by_hand():
    near, far = (float(send_seconds(1e9, stride, cluster=CLUSTER, calibration=FLAT)) for stride in (4, 8))
    assert near == pytest.approx(1e9 / 400e9, rel=1e-6)
    assert far == pytest.approx(1e9 / 25e9 + 2e-6, rel=1e-6)


@pytest.mark.parametrize("op", COLLECTIVES)
def test_a_group_of_one_is_free(op):
    assert flat(op, 1e9, 1) == 0.0
    assert flat(op, 1e9, 1, stride=64) == 0.0


@pytest.mark.parametrize("gpu", sorted(SAMPLE["nccl"]))
def test_shipped_collectives_describe_measured_ones(gpu):
    node = presets.cluster(NODES[gpu])
    used = calibration_for("auto", node.gpu)
    assert node.gpu.name == gpu
    errors = [
        float(collective_seconds(op, float(size), Group(n, 1), cluster=node, calibration=used)) * 1e3 / ms - 1
        for op, size, n, ms in SAMPLE["nccl"][gpu]
    ]
    assert np.median(np.abs(errors)) <= 0.08


@pytest.mark.parametrize("node", ["dgx-a100", "dgx-h100", "gb300-nvl72"])
@pytest.mark.parametrize("op", COLLECTIVES)
@settings(max_examples=25, deadline=None)
@given(bytes_=st.lists(st.floats(1.0, 1e12), min_size=2, max_size=20), size=st.sampled_from([2, 3, 4, 6, 8, 16, 72, 100, 1024]))
def test_more_bytes_never_take_less_time(node, op, bytes_, size):
    cluster = presets.cluster(f"{node}x7200")
    used = calibration_for("auto", cluster.gpu)
    seconds = collective_seconds(op, np.sort(bytes_), Group(size, 1), cluster=cluster, calibration=used)
    assert (np.diff(seconds) >= -1e-15).all()


@pytest.mark.parametrize("op", COLLECTIVES)
@settings(max_examples=25, deadline=None)
@given(
    bytes_=st.lists(st.integers(0, 10**13), min_size=1, max_size=6),
    size=st.lists(st.integers(1, 4096), min_size=1, max_size=6),
    stride=st.lists(st.integers(1, 4096), min_size=1, max_size=6),
)
def test_numbers_and_arrays_agree_to_the_last_bit(op, bytes_, size, stride):
    cluster = presets.cluster("h100x4096")
    keys = {"cluster": cluster, "calibration": calibration_for("auto", cluster.gpu)}
    b, n, s = (np.array(axis).reshape(shape) for axis, shape in ((bytes_, (-1, 1, 1)), (size, (-1, 1)), (stride, (-1,))))
    grid = collective_seconds(op, b, Group(n, s), **keys)
    tokens = dispatch_seconds(b, 7168.0, 8, Group(n, s), **keys)
    sends = send_seconds(b, s, **keys)
    for i, j, k in np.ndindex(grid.shape):
        group = Group(size[j], stride[k])
        assert collective_seconds(op, bytes_[i], group, **keys) == grid[i, j, k]
        assert dispatch_seconds(bytes_[i], 7168.0, 8, group, **keys) == tokens[i, j, k]
        assert send_seconds(bytes_[i], stride[k], **keys) == sends[i, 0, k]
