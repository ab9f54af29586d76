"""Contractions against numpy, and their compiled form: no weight is copied or transposed."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.contract import contract

SPECS = {
    "TD,NHD->TNH": ((5, 6), (3, 4, 6)),
    "TA,DA->TD": ((5, 12), (7, 12)),
    "TD,FD->TF": ((5, 6), (8, 6)),
    "TF,DF->TD": ((5, 8), (6, 8)),
}


@pytest.mark.parametrize("spec", SPECS)
def test_equals_einsum_in_float64(spec):
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape) for shape in SPECS[spec])
    got = contract(spec, jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32))
    np.testing.assert_allclose(got, np.einsum(spec, x, w), rtol=1e-5, atol=1e-5)


def test_result_dtype():
    x, w = jnp.ones((2, 6), jnp.bfloat16), jnp.ones((3, 6), jnp.bfloat16)
    assert contract("TD,FD->TF", x, w).dtype == jnp.bfloat16
    assert contract("TD,FD->TF", x, w, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("spec", ["TD,NHD->THN", "TD,DF->TF", "TNH,DNH->TD"])
def test_other_orders_are_refused(spec):
    with pytest.raises(AssertionError):
        contract(spec, jnp.ones((2,) * len(spec.split(",")[0])), jnp.ones((2,) * 3))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spec", ["TD,NHD->TNH", "TA,DA->TD"])
def test_no_weight_is_copied_or_transposed(spec, dtype):
    sizes = {"T": 4, "D": 96, "N": 6, "H": 16, "A": 96}
    x_dims, w_dims = spec.split("->")[0].split(",")
    x, w = (jax.ShapeDtypeStruct([sizes[d] for d in dims], dtype) for dims in (x_dims, w_dims))
    text = jax.jit(lambda x, w: contract(spec, x, w)).lower(x, w).compile().as_text()
    big = [
        line
        for line in text.splitlines()
        if (m := re.search(r"= \w+\[([\d,]+)\]\S* (copy|transpose)\(", line))
        and np.prod([int(n) for n in m[1].split(",")]) >= 96 * 96
    ]
    assert not big, big
