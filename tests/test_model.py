import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tuner.errors import SpecError
from tuner.model import LayerKind, Model, Moe, SlidingWindow

BASE = Model(name="m", layers=12, hidden=8, ffn_hidden=32, heads=4, kv_heads=2, head_dim=4, vocab=10)
MOE = Moe(experts=8, top_k=2, expert_ffn_hidden=4)


def test_a_dense_model_has_one_kind_of_layer() -> None:
    assert BASE.layer_groups() == ((LayerKind(0, False), 12),)
    assert BASE.leading_dense_layers == 0


def test_leading_dense_layers_and_every_second_expert_layer() -> None:
    leading = BASE.replace(moe=MOE.replace(first_dense_layers=3))
    assert dict(leading.layer_groups()) == {LayerKind(0, False): 3, LayerKind(0, True): 9}
    assert dict(leading.leading_groups()) == {LayerKind(0, False): 3}
    second = BASE.replace(moe=MOE.replace(every=2))
    assert dict(second.layer_groups()) == {LayerKind(0, False): 6, LayerKind(0, True): 6}
    assert second.kind(0) == LayerKind(0, False)


def test_sliding_windows() -> None:
    sixth = BASE.replace(sliding_window=SlidingWindow(size=512, full_every=6))
    assert dict(sixth.layer_groups()) == {LayerKind(512, False): 10, LayerKind(0, False): 2}
    assert sixth.kind(5).window == 0
    always = BASE.replace(sliding_window=SlidingWindow(size=512))
    assert dict(always.layer_groups()) == {LayerKind(512, False): 12}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_heads": 3}, "heads = 4 must be a multiple of kv_heads = 3"),
        ({"moe": {"experts": 2, "top_k": 3, "expert_ffn_hidden": 4}}, "top_k = 3 must not exceed"),
        ({"moe": {"experts": 2, "top_k": 1, "expert_ffn_hidden": 4, "first_dense_layers": 13}}, "must not exceed layers = 12"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"layers": True}, "whole number"),
        ({"hidden": 2**40}, "less than or equal to"),
        ({"vocab": 10.5}, "whole number"),
        ({"mtp_layers": -1}, "greater than or equal to 0"),
    ],
)
def test_impossible_shapes(changes: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        BASE.replace(**changes)


def test_a_model_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        BASE.layers = 3  # type: ignore[misc]


@given(
    st.integers(1, 60), st.integers(0, 60), st.integers(1, 4), st.integers(0, 7), st.integers(1, 9)
)  # fmt: skip
def test_groups_count_every_layer_once(layers: int, leading: int, every: int, full_every: int, size: int) -> None:
    moe = MOE.replace(first_dense_layers=min(leading, layers), every=every)
    model = BASE.replace(layers=layers, moe=moe, sliding_window=SlidingWindow(size=size, full_every=full_every))
    assert sum(count for _, count in model.layer_groups()) == layers
    assert sum(count for _, count in model.leading_groups()) == model.leading_dense_layers
    assert all(count == sum(model.kind(i) == kind for i in range(layers)) for kind, count in model.layer_groups())
    assert len(model.body_groups()) <= 4


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[31mred", "left\u202eright", "x" * 121])
def test_a_name_is_text_that_can_be_seen(name: str) -> None:
    with pytest.raises(SpecError, match="name"):
        BASE.replace(name=name)


def test_a_replaced_field_that_is_wrong_names_the_spec_and_the_field() -> None:
    with pytest.raises(SpecError) as caught:
        BASE.replace(layers=0, vocab="many")
    assert [(p.where, p.path, p.value) for p in caught.value.problems] == [("m", "layers", "0"), ("m", "vocab", "'many'")]
