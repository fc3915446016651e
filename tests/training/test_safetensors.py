"""The safetensors format, against bytes put together by hand from its description."""

import io
import json
import struct

import numpy as np
import pytest
import torch

from training import safetensors


def file_of(header, data, path):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_a_file_made_by_hand_is_read(tmp_path):
    numbers, flags = np.arange(6, dtype="<f4"), np.array([1, 0], dtype="?")
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BOOL", "shape": [2], "data_offsets": [24, 26]},
    }
    tensors = safetensors.read(file_of(header, numbers.tobytes() + flags.tobytes(), tmp_path / "x"))

    assert torch.equal(tensors["a"], torch.arange(6.0).view(2, 3))
    assert torch.equal(tensors["b"], torch.tensor([True, False]))


def test_what_is_written_is_laid_out_as_the_format_says():
    out = io.BytesIO()
    safetensors.write(out, {"half": torch.ones(3, dtype=torch.bfloat16), "long": torch.tensor(-2)}, {"format": "pt"})
    length = struct.unpack("<Q", out.getvalue()[:8])[0]
    header, data = json.loads(out.getvalue()[8 : 8 + length]), out.getvalue()[8 + length :]

    assert (8 + length) % 8 == 0
    assert header == {
        "__metadata__": {"format": "pt"},
        "long": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
        "half": {"dtype": "BF16", "shape": [3], "data_offsets": [8, 14]},
    }
    assert data == struct.pack("<q", -2) + bytes.fromhex("803f") * 3


@pytest.mark.parametrize("dtype", list(safetensors.DTYPES.values()), ids=list(safetensors.DTYPES))
def test_every_dtype_and_layout_comes_back(tmp_path, dtype):
    values = torch.randint(0, 2, (3, 4, 5)).to(dtype)
    tensors = {"plain": values, "turned": values.transpose(0, 2), "empty": values[:0], "scalar": values[0, 0, 0]}
    with (tmp_path / "x").open("wb") as file:
        safetensors.write(file, tensors)

    back = safetensors.read(tmp_path / "x")

    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensor) and back[name].dtype == dtype for name, tensor in tensors.items())


def test_tensors_that_are_not_aligned_are_read(tmp_path):
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
    }
    assert safetensors.read(file_of(header, b"\x07" + struct.pack("<f", 2.5), tmp_path / "x"))["b"].item() == 2.5


def test_writing_to_a_tensor_leaves_the_file_as_it_is(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        safetensors.write(file, {"a": torch.zeros(3)})
    safetensors.read(tmp_path / "x")["a"].add_(1)

    assert torch.equal(safetensors.read(tmp_path / "x")["a"], torch.zeros(3))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": ENTRY}, b"1234567", "cut short"),
        ({"a": ENTRY}, b"123456789", "cut short"),
        ({"a": ENTRY | {"shape": [3]}}, b"12345678", "not where its shape"),
        ({"a": ENTRY | {"data_offsets": [4, 12]}}, b"123456789012", "not where its shape"),
        ({"a": ENTRY | {"data_offsets": [-8, 0]}}, b"12345678", "not a safetensors file"),
        ({"a": ENTRY | {"dtype": "F8"}}, b"12345678", "not a safetensors file"),
        ({"a": {}}, b"", "not a safetensors file"),
        (["a"], b"", "not a safetensors file"),
    ],
)
def test_what_is_no_safetensors_file_is_refused_by_name(tmp_path, header, data, message):
    with pytest.raises(ValueError, match=rf"bad\.safetensors.*{message}"):
        safetensors.read(file_of(header, data, tmp_path / "bad.safetensors"))


@pytest.mark.parametrize("content", [b"", b"hello", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 9) + b"{not json"])
def test_what_has_no_header_is_refused_by_name(tmp_path, content):
    (tmp_path / "bad").write_bytes(content)

    with pytest.raises(ValueError, match=r"bad: not a safetensors file"):
        safetensors.read(tmp_path / "bad")
