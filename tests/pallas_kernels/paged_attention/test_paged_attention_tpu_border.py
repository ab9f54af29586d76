"""What the TPU kernel refuses and why, its sizes, and the packing of queries into rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chips import CHIPS, chip
from pallas_kernels.paged_attention import choose, refusals, tpu_sizes
from pallas_kernels.paged_attention.layout import lanes_of, num_kv_heads_of, pages_shape
from pallas_kernels.paged_attention.spec import check, tolerance
from pallas_kernels.paged_attention.tpu_pack import pack, unpack
from pallas_kernels.paged_attention.tpu_sizes import default_sizes, vmem_bytes

V6E = chip("v6e")
HEADS = [(32, 8, 128), (9, 3, 64), (32, 32, 96), (8, 4, 256), (4, 1, 256)]
TPUS = [CHIPS[name] for name in ("v5e", "v5p", "v6e", "tpu7x")]


def spec_of(heads=(32, 8, 128), page_size=16, slots=64, columns=512, lanes=128, **change):
    """Llama 3.1 8B's decode unless told otherwise."""
    num_heads, num_kv_heads, head_dim = heads
    dtype = change.pop("kv_dtype", "bfloat16")
    shape = pages_shape(2, page_size, num_kv_heads, head_dim, lanes)

    def abstract(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    spec = check(
        abstract((slots, num_heads, head_dim), jnp.bfloat16),
        abstract(shape, dtype),
        abstract((slots, columns), jnp.int32),
        *(abstract((slots,), jnp.int32) for _ in range(3)),
        scale=0.1,
        max_q_len=change.pop("max_q_len", 1),
        window=None,
        softcap=None,
        sinks_N=None,
        kv_scale_2K=abstract((2, num_kv_heads), jnp.float32) if dtype == "int8" else None,
    )
    return dataclasses.replace(spec, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": (8, 8, 72)}, "head width 72: must be one of"),
        ({"heads": (8, 8, 64), "lanes": 1}, "rows of a page are 64 wide: must be 128"),
        ({"page_size": 24}, "page size 24: must be a multiple of 16 up to 256"),
        ({"page_size": 512}, "page size 512"),
        ({"q_dtype": "float16"}, "queries are float16"),
        ({"kv_dtype": "float16"}, "pages are float16: must be one of"),
        (
            {"slots": 256, "columns": 2048},
            "page table of 256 slots x 2048 pages is 2,097,152 bytes: scalar memory has 524,288",
        ),
    ],
)
def test_refused_with_the_reason(change, message):
    spec = spec_of(**change)
    assert message in refusals(spec, V6E)["tpu"]
    with pytest.raises(ValueError, match="impl 'tpu'"):
        choose(spec, V6E, "tpu")


def test_fallback_and_its_reason():
    spec = spec_of()
    assert choose(spec, V6E) == "tpu"
    assert choose(spec) == "xla"
    assert choose(spec, chip("l4")) == "gpu_triton"
    assert refusals(spec, None)["tpu"] == "needs a TPU, the call is for the host CPU"
    assert refusals(spec, chip("h100"))["tpu"] == "needs a TPU, the call is for h100"
    plain = spec_of(heads=(8, 8, 64), lanes=1)
    assert choose(plain, V6E) == "xla"
    # Rows that heads share are read by the kernel and the reference only.
    shared = spec_of(heads=(8, 8, 64))
    assert choose(shared, V6E) == "tpu"
    assert choose(shared) == "reference"


def test_256_slots_of_32k_tokens_fit_with_pages_of_64():
    assert refusals(spec_of(slots=256, columns=512, page_size=64), V6E)["tpu"] is None


@pytest.mark.parametrize("each", TPUS, ids=lambda each: each.name)
@pytest.mark.parametrize("page_size", [16, 48, 256])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("max_q_len", [1, 5, 2048])
def test_sizes_of_the_formula_fit(each, page_size, heads, max_q_len):
    spec = spec_of(heads, page_size, max_q_len=max_q_len, num_rows=4096)
    for sizes in default_sizes(spec, each):
        assert sizes.queries & (sizes.queries - 1) == 0
        assert sizes.buffers & (sizes.buffers - 1) == 0
        assert sizes.pages * page_size % 128 == 0
        assert vmem_bytes(spec, sizes) <= each.vmem_bytes * 3 // 4
    assert default_sizes(spec, each)[-1].queries >= min(max_q_len, 8)


def test_tuned_sizes_come_before_the_formula(monkeypatch):
    spec = spec_of(max_q_len=512, num_rows=512, slots=8)
    few, chunk = default_sizes(spec, V6E)
    tuned = '{"v6e": {"H128 K8 C16 bfloat16": {"few": 256}}}'
    monkeypatch.setattr(tpu_sizes, "read_table", lambda: tpu_sizes.parse_table(tuned))
    assert default_sizes(spec, V6E) == (dataclasses.replace(few, pages=256 // 16), chunk)
    assert default_sizes(spec, chip("v5e")) == (few, chunk)
    other_pages = spec_of(page_size=32, max_q_len=512, num_rows=512, slots=8)
    assert default_sizes(other_pages, V6E)[0].pages * 32 == few.pages * 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ('{"v9": {}}', "there is no chip 'v9'"),
        ('{"v6e": {"Llama": {"few": 256}}}', 'tuned sizes of v6e, "Llama"'),
        ('{"v6e": {"H128 K8 C16 bfloat16": {"chunks": 256}}}', "'chunks': 256"),
        ('{"v6e": {"H128 K8 C16 bfloat16": {"few": 100}}}', "multiples of 128"),
    ],
)
def test_tuned_sizes_that_mean_nothing_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        tpu_sizes.parse_table(text)
    assert tpu_sizes.read_table().keys() <= CHIPS.keys()


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ((8, 128), (2, 2, 8, 16, 128)),
        ((8, 64), (2, 2, 4, 16, 128)),
        ((3, 64), (2, 1, 3, 16, 128)),
        ((1, 64), (2, 1, 1, 16, 128)),
        ((8, 80), (2, 2, 8, 16, 128)),
        ((4, 256), (2, 2, 4, 16, 256)),
        ((4, 32), (2, 2, 1, 16, 128)),
    ],
)
def test_narrow_heads_share_rows_of_128(heads, expected):
    """A head of 64 takes 64 lanes: nothing is padded."""
    shape = pages_shape(2, 16, *heads, lanes_of(V6E))
    assert shape == expected
    assert num_kv_heads_of(shape, heads[1]) == heads[0]
    assert pages_shape(2, 16, *heads, lanes_of(None)) == (2, 2, heads[0], 16, heads[1])


@pytest.mark.parametrize("heads", [(6, 2, 128), (8, 4, 64), (9, 3, 64), (4, 4, 32)])
def test_packed_queries_meet_their_own_head(heads):
    """Scores of packed queries against page rows are those of each head; unpacking inverts it."""
    N, K, H = heads
    rng = np.random.default_rng(0)
    q_ZQNH = rng.standard_normal((3, 2, N, H)).astype(np.float32)
    kv_pages = rng.standard_normal(pages_shape(2, 16, K, H, 128)).astype(np.float32)
    q_ZRML = np.asarray(pack(jnp.asarray(q_ZQNH), kv_pages))
    assert q_ZRML.shape[2] % 8 == 0
    _, parts, R, C, L = kv_pages.shape
    rows_RCfH = kv_pages[1, 0].reshape(R, C, L // H, H)
    k_KCH = np.stack([rows_RCfH[k * R // K, :, k % (K // R)] for k in range(K)])
    score_ZRMC = np.einsum("ZRML,RCL->ZRMC", q_ZRML, kv_pages[1, 0])
    expected_ZQNC = np.einsum("ZQNH,NCH->ZQNC", q_ZQNH, np.repeat(k_KCH, N // K, axis=0))
    got_ZRnQC = score_ZRMC[:, :, : N // R * 2].reshape(3, R, N // R, 2, C)
    got_ZQNC = got_ZRnQC.transpose(0, 3, 1, 2, 4).reshape(3, 2, N, C)
    np.testing.assert_allclose(got_ZQNC, expected_ZQNC, atol=1e-4)

    one_head = np.zeros_like(q_ZRML)
    one_head[..., L - H :] = q_ZRML[..., :H] if parts == 1 else q_ZRML[..., L - H :]
    back = unpack(jnp.asarray(one_head if parts == 1 else q_ZRML), 2, N, H, parts)
    np.testing.assert_array_equal(back, q_ZQNH)


def test_tolerance_by_dtype_and_length():
    narrow, wide = spec_of(), spec_of(q_dtype="float32", kv_dtype="float32")
    assert tolerance(wide, 4096)[0] < 2e-5 < 5e-3 < tolerance(narrow, 64)[0] < 1e-2
    assert tolerance(wide, 4096)[0] > tolerance(wide, 64)[0]
