import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tuner.units import Bytes, parse_quantity, show_bytes, show_count, show_flops, show_rate, show_seconds


@pytest.mark.parametrize(
    ("text", "dimension", "value"),
    [
        ("80 GB", "bytes", 80e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("84943715697 B", "bytes", 84943715697),
        ("989.4 TFLOP/s", "FLOP/s", 989.4e12),
        ("400 Gb/s", "bytes/s", 50e9),
        ("3.35 TB/s", "bytes/s", 3.35e12),
        ("3 us", "seconds", 3e-6),
        ("30d", "seconds", 30 * 86400),
        ("700 W", "watts", 700),
        ("1.83 GHz", "hertz", 1.83e9),
        ("15T", "tokens", 15e12),
        ("1e3", "tokens", 1000),
    ],
)
def test_quantities_in_si(text: str, dimension: str, value: float) -> None:
    assert parse_quantity(text, dimension=dimension) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["80", "80 GBs", "80 gb", "GB", "", "1e400 GB", "nan GB", "inf B", "8 0 GB", "80 GFLOP/s", None, True, [], "9" * 100]
)
def test_wrong_quantities_name_an_example(text: object) -> None:
    with pytest.raises(ValueError, match=r"80 GB|finite"):
        parse_quantity(text, dimension="bytes")


def test_bare_numbers_pass_inside_the_program_but_not_where_units_are_asked_for() -> None:
    assert parse_quantity(5, dimension="bytes") == 5.0
    with pytest.raises(ValueError, match="with a unit"):
        parse_quantity(5, dimension="bytes", units=True)
    assert parse_quantity(3e11, dimension="tokens", units=True) == 3e11  # a count of tokens has no unit
    adapter: TypeAdapter[float] = TypeAdapter(Bytes)
    assert adapter.validate_python(5.0) == 5.0
    with pytest.raises(ValueError, match="with a unit"):
        adapter.validate_python(5.0, context={"units": True})


@given(st.floats(min_value=1e-3, max_value=1e6), st.sampled_from(["B", "kB", "GiB", "TB"]))
def test_every_written_quantity_is_read(number: float, unit: str) -> None:
    assert math.isfinite(parse_quantity(f"{number} {unit}", dimension="bytes"))


@given(st.one_of(st.text(max_size=20), st.integers(), st.floats()))
def test_any_value_is_read_or_refused(value: object) -> None:
    try:
        assert math.isfinite(parse_quantity(value, dimension="seconds"))
    except ValueError as error:
        assert str(error)


def test_quantities_for_a_person() -> None:
    assert show_bytes(93.4e9) == "93.4 GB"
    assert show_flops(989.4e12) == "989 TFLOP/s"
    assert show_rate(450e9) == "450 GB/s"
    assert show_count(70.55e9) == "70.5B"
    assert show_seconds(12.3e-6) == "12.3 us"
    assert show_seconds(24 * 86400) == "24 d"
