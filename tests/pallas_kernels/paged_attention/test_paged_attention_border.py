"""What a call is refused for, and how an implementation is chosen."""

import jax.numpy as jnp
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention import (
    Implementation,
    choose,
    ragged_paged_attention,
    refusals,
)
from pallas_kernels.paged_attention.layout import pages_shape
from pallas_kernels.paged_attention.spec import check


def arguments():
    return {
        "q_TNH": jnp.zeros((3, 4, 8)),
        "kv_pages": jnp.zeros(pages_shape(2, 4, 2, 8)),
        "page_table_SM": jnp.zeros((2, 1), jnp.int32),
        "q_start_S": jnp.zeros(2, jnp.int32),
        "q_len_S": jnp.zeros(2, jnp.int32),
        "kv_len_S": jnp.zeros(2, jnp.int32),
        "scale": 1.0,
        "max_q_len": 1,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_TNH": jnp.zeros((3, 4))}, r"q_TNH has shape \(3, 4\): must be \(any, any, any\)"),
        ({"q_TNH": jnp.zeros((0, 4, 8))}, "q_TNH has shape"),
        ({"q_TNH": jnp.zeros((3, 4, 8), jnp.int32)}, "q_TNH is int32: must be floating"),
        (
            {"q_TNH": jnp.zeros((3, 3, 8))},
            "3 query heads over 2 KV heads",
        ),
        (
            {"q_TNH": jnp.zeros((3, 4, 16))},
            r"kv_pages has .* \(any, 2, any, any, 16",
        ),
        ({"kv_pages": jnp.zeros((2, 3, 2, 4, 8))}, "kv_pages has shape"),
        ({"kv_pages": jnp.zeros((2, 2, 2, 4, 8), jnp.int8)}, "kv_pages is int8"),
        ({"page_table_SM": jnp.zeros((2, 1))}, "page_table_SM is float32: must be int32"),
        ({"page_table_SM": jnp.zeros((2, 0), jnp.int32)}, "page_table_SM has shape"),
        ({"q_len_S": jnp.zeros(3, jnp.int32)}, r"q_len_S has shape \(3,\): must be \(2\)"),
        ({"kv_len_S": jnp.zeros(2)}, "kv_len_S is float32: must be int32"),
        ({"sinks_N": jnp.zeros(3)}, r"sinks_N has shape \(3,\): must be \(4\)"),
        ({"max_q_len": 0}, "max_q_len is 0: must be at least 1"),
        ({"window": 0}, "window is 0: must be at least 1"),
        ({"softcap": 0.0}, "softcap is 0.0: must be positive"),
        ({"impl": "cuda"}, r"impl is 'cuda': must be one of \['auto', 'tpu', 'gpu_mosaic', 'gpu_"),
    ],
)
def test_bad_call_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ragged_paged_attention(**(arguments() | change))


@pytest.fixture
def spec():
    return check(**arguments(), window=None, softcap=None, sinks_N=None)


def test_auto_is_the_first_that_can(spec, monkeypatch):
    assert choose(spec) == "xla"
    assert choose(spec, None, "reference") == "reference"
    refuses = Implementation(lambda spec, _: f"head width {spec.head_dim} is odd", None)
    monkeypatch.setattr(
        paged_attention, "IMPLEMENTATIONS", {"chip": refuses, **paged_attention.IMPLEMENTATIONS}
    )
    assert choose(spec) == "xla"
    assert refusals(spec, None)["chip"] == "head width 8 is odd"
    with pytest.raises(ValueError, match="impl 'chip': head width 8 is odd"):
        choose(spec, None, "chip")


def test_every_reason_is_given(spec, monkeypatch):
    table = {name: Implementation(lambda *_, n=name: f"no {n}", None) for name in ("a", "b")}
    monkeypatch.setattr(paged_attention, "IMPLEMENTATIONS", table)
    with pytest.raises(ValueError, match="impl 'a': no a; impl 'b': no b"):
        choose(spec)
