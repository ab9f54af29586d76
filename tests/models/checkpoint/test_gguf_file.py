"""Reading GGUF files: types against the gguf package, damage of every kind against one rule."""

import struct
import time

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from models.checkpoint.gguf import open_gguf
from models.checkpoint.load import read_config
from models.checkpoint.registry import fetch
from tests.models.checkpoint.files import (
    ARRAY,
    STRING,
    U32,
    U64,
    bits,
    field,
    llama_file,
    raw_gguf,
    text,
)

F32, Q4_0, Q4_1 = 0, 2, 3


def _write(path, data: bytes):
    path.write_bytes(data)
    return path


def _random_blocks(type_id: int, rows: int, columns: int) -> bytes:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    return np.random.default_rng(type_id).bytes(rows * columns // block * size)


@pytest.mark.parametrize("type_id", [*range(42), 99])
def test_b71_each_type_equals_the_package_or_is_refused_by_name(tmp_path, type_id):
    known = type_id in set(GGMLQuantizationType)
    rows, columns = 3, 768
    raw = _random_blocks(type_id, rows, columns) if known else bytes(4 * rows * columns)
    data = raw_gguf([], [("odd.weight", [columns, rows], type_id, raw)])
    path = _write(tmp_path / "model.gguf", data)
    try:
        kind = GGMLQuantizationType(type_id)
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(np.frombuffer(raw, np.uint8).reshape(rows, -1), kind)
    except (ValueError, NotImplementedError):
        with pytest.raises(ValueError, match=rf"'odd\.weight'.*\b{type_id}\b"):
            open_gguf(path).read("odd.weight")
    else:
        got = open_gguf(path).read("odd.weight")
        assert got.dtype == np.float32
        assert got.shape == (rows, columns)
        np.testing.assert_array_equal(bits(got), bits(expected))


def test_b71_name_of_the_file_says_nothing(tmp_path):
    raw = _random_blocks(Q4_1, 2, 64)
    path = tmp_path / "model-q4_0.gguf"
    path.write_bytes(raw_gguf([], [("w", [64, 2], Q4_1, raw)]))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(
            np.frombuffer(raw, np.uint8).reshape(2, -1), GGMLQuantizationType.Q4_1
        )
    np.testing.assert_array_equal(bits(open_gguf(path).read("w")), bits(expected))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q5_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_tensor_of_many_slices_equals_the_package(tmp_path, name):
    # 1000 * 768 elements: five whole slices of 131,072, then full rows, then one short row.
    kind = GGMLQuantizationType[name]
    raw = _random_blocks(kind, 1000, 768)
    path = _write(tmp_path / "m.gguf", raw_gguf([], [("w", [768, 1000], kind, raw)]))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(np.frombuffer(raw, np.uint8).reshape(1000, -1), kind)
    np.testing.assert_array_equal(bits(open_gguf(path).read("w")), bits(expected))


def test_fields_and_tensors_equal_the_packages_reader(tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 2**32 - 1)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 2**63 + 1)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 日本 🙂")
    writer.add_array("floats", [0.5, -1.25])
    writer.add_array("ints", [1, 2, 3])
    writer.add_array("texts", ["", "a", "é🙂"])
    writer.add_array("flags", [True, False])
    for i, shape in enumerate([(5,), (3, 4), (2, 3, 4)]):
        writer.add_tensor(f"t{i}", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file, reader = open_gguf(path), gguf.GGUFReader(path)
    for name, value in reader.fields.items():
        if not name.startswith("GGUF."):
            assert file.fields[name] == value.contents(), name
    assert file.fields["f64"] == 0.1
    assert file.fields["u64"] == 2**63 + 1
    for tensor in reader.tensors:
        np.testing.assert_array_equal(file.read(tensor.name), tensor.data)
        assert file.shape(tensor.name) == tensor.data.shape


@pytest.mark.real_model
def test_real_header_equals_the_packages_reader_and_reads_fast():
    path = fetch("smollm2-135m")
    start = time.perf_counter()
    file = open_gguf(path)
    assert time.perf_counter() - start < 1.5
    reader = gguf.GGUFReader(path)
    fields = {k: v.contents() for k, v in reader.fields.items() if not k.startswith("GGUF.")}
    assert file.fields == fields
    assert set(file.names()) == {tensor.name for tensor in reader.tensors}
    assert len(file.fields["tokenizer.ggml.tokens"]) == 49152


GOOD = ("w", [32], F32, bytes(128))
TWO = [GOOD, ("v", [32], F32, bytes(128))]
HUGE = 2**62

DAMAGED = {
    "empty file": (b"", "0 bytes"),
    "cut in the preamble": (b"GGUF" + bytes(10), "14 bytes"),
    "another format": (b"PK\x03\x04" + bytes(60), "starts with"),
    "version 1": (raw_gguf([], [GOOD], version=1), "version 1;"),
    "version of the future": (raw_gguf([], [GOOD], version=4), "version 4;"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0) + bytes(64), "big-endian"),
    "count of fields": (raw_gguf([], [GOOD], num_fields=HUGE), "metadata fields need"),
    "count of tensors": (raw_gguf([], [GOOD], num_tensors=HUGE), "tensor records need"),
    "one tensor too many": (raw_gguf([], [GOOD], num_tensors=2), "damaged at byte"),
    "long name": (raw_gguf([struct.pack("<Q", HUGE) + b"x" * 30], [GOOD]), "string of"),
    "long text": (raw_gguf([text("a") + struct.pack("<IQ", STRING, HUGE)], [GOOD]), "string of"),
    "long array": (
        raw_gguf([field("a", ARRAY, struct.pack("<IQ", U32, 2**21))], [GOOD]),
        "elements of 'a' need",
    ),
    "absurd array": (
        raw_gguf([field("a", ARRAY, struct.pack("<IQ", U32, HUGE))], [GOOD]),
        "at most 4194304",
    ),
    "long array of texts": (
        raw_gguf([field("a", ARRAY, struct.pack("<IQ", STRING, 2**21))], [GOOD]),
        "strings of 'a' need",
    ),
    "nested array": (
        raw_gguf([field("a", ARRAY, struct.pack("<IQ", ARRAY, 1) + bytes(12))], [GOOD]),
        "unsupported value type 9",
    ),
    "unknown value type": (raw_gguf([field("a", 13, bytes(8))], [GOOD]), "value type 13"),
    "not UTF-8": (raw_gguf([field("a", STRING, text("xy")[:8] + b"\xff\xfe")], [GOOD]), "UTF-8"),
    "field twice": (raw_gguf([field("a", U32, bytes(4))] * 2, [GOOD]), "'a' appears twice"),
    "tensor twice": (raw_gguf([], [GOOD, GOOD]), "'w' appears twice"),
    "alignment 0": (
        raw_gguf([field("general.alignment", U32, struct.pack("<I", 0))], [GOOD]),
        "power of two",
    ),
    "alignment 24": (
        raw_gguf([field("general.alignment", U32, struct.pack("<I", 24))], [GOOD]),
        "power of two",
    ),
    "alignment is text": (
        raw_gguf([field("general.alignment", STRING, text("32"))], [GOOD]),
        "power of two",
    ),
    "huge alignment": (
        raw_gguf([field("general.alignment", U64, struct.pack("<Q", 2**50))], [GOOD]),
        "ends at byte",
    ),
    "no axes": (raw_gguf([], [("w", [], F32, bytes(128))]), "0 axes"),
    "nine axes": (raw_gguf([], [("w", [1] * 9, F32, bytes(128))]), "9 axes"),
    "axis 0": (raw_gguf([], [("w", [0, 8], F32, bytes(128))]), "must be positive"),
    "row no multiple of the block": (raw_gguf([], [("w", [40], Q4_0, bytes(128))]), "of 32"),
    "axes overflow": (raw_gguf([], [("w", [2**40, 2**40], F32, bytes(128))]), "ends at byte"),
    "axes too large": (raw_gguf([], [("w", [33], F32, bytes(128))]), "ends at byte"),
    "size of the first": (raw_gguf([], [("w", [64], F32, bytes(128)), TWO[1]]), "not at 256"),
    "offset beyond the file": (raw_gguf([], TWO, offsets=[0, HUGE]), "not at 128"),
    "offsets overlap": (raw_gguf([], TWO, offsets=[0, 0]), "not at 128"),
    "offset unaligned": (raw_gguf([], TWO, offsets=[0, 129]), "not at 128"),
    "hole between tensors": (raw_gguf([], TWO, offsets=[0, 160]), "not at 128"),
    "data cut off": (raw_gguf([], TWO)[:-1], "ends at byte"),
    "one of several parts": (
        raw_gguf([field("split.count", U32, struct.pack("<I", 3))], [GOOD]),
        "3 parts",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file_is_refused_with_one_message(tmp_path, case):
    data, message = DAMAGED[case]
    start = time.perf_counter()
    with pytest.raises(ValueError, match=message) as caught:
        open_gguf(_write(tmp_path / "bad.gguf", data))
    assert "bad.gguf" in str(caught.value)
    assert time.perf_counter() - start < 1


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no GGUF file at .*absent\.gguf"):
        open_gguf(tmp_path / "absent.gguf")


def _load_or_refuse(path) -> bool:
    """Whether everything in the file was readable; any exception but ValueError fails the test."""
    try:
        file = open_gguf(path)
        for name in file.names():
            file.read(name)
        read_config(path)
    except ValueError:
        return False
    return True


def test_file_cut_at_any_length_is_refused(tmp_path):
    llama_file(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    header = whole.index(b"output_norm.weight") + 64
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, header, 7), *np.linspace(header, len(whole) - 32, 60).astype(int)]:
        assert not _load_or_refuse(_write(cut, whole[:length])), length
    assert _load_or_refuse(_write(cut, whole))


def test_flipped_and_overwritten_bytes_load_or_are_refused(tmp_path):
    llama_file(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    rng = np.random.default_rng(0)
    header = whole.index(b"output_norm.weight") + 64
    bad = tmp_path / "bad.gguf"
    refused = 0
    for round_ in range(900):
        data = bytearray(whole)
        at = int(rng.integers(0, header))
        if round_ % 3 == 0:  # one bit
            data[at] ^= 1 << int(rng.integers(8))
        elif round_ % 3 == 1:  # some bytes
            data[at : at + 4] = rng.bytes(4)
        else:  # a length, count or offset near a power of two
            value = (1 << int(rng.integers(1, 64))) - int(rng.integers(0, 2))
            data[at : at + 8] = struct.pack("<Q", value)
        refused += not _load_or_refuse(_write(bad, bytes(data)))
    assert refused > 600  # what remains are values that a file may hold, such as another token id
