"""Files that are no books: each is refused in words, none of them crashes or is believed."""

from __future__ import annotations

import json
import math
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import books
import numpy as np
import pytest
import torch

from jali.maskbook import BookError, MaskBook
from jali.maskbook.container import HEADER_LIMIT, book_digest, checksum
from jali.maskbook.header import read_header


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a.safetensors"
    books.make(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def good_rd(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "rd.safetensors"
    books.make_errors(path)
    return path.read_bytes()


def parts(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: Any, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def refused(tmp_path: Path, raw: bytes, match: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(raw)
    with pytest.raises(BookError, match=match):
        MaskBook.open(path).verify()


class TestNoPickle:
    @pytest.mark.parametrize("name", ["masks.pt", "masks.PTH", "masks.ckpt", "masks.pkl"])
    def test_by_name(self, tmp_path: Path, name: str) -> None:
        torch.save({"masks": torch.zeros(2)}, tmp_path / name)
        with pytest.raises(BookError, match=r"pickle.*jali calibrate"):
            MaskBook.open(tmp_path / name)

    def test_by_content(self, tmp_path: Path) -> None:
        torch.save({"masks": torch.zeros(2)}, tmp_path / "a.safetensors")
        with pytest.raises(BookError, match="pickle or a zip"):
            MaskBook.open(tmp_path / "a.safetensors")
        with zipfile.ZipFile(tmp_path / "b.safetensors", "w") as file:
            file.writestr("x", "y" * 100)
        with pytest.raises(BookError, match="zip"):
            MaskBook.open(tmp_path / "b.safetensors")


class TestPlaces:
    def test_nothing_there(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="jali calibrate"):
            MaskBook.open(tmp_path / "a.safetensors")

    def test_not_a_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe.safetensors")
        with pytest.raises(BookError, match="regular file"):
            MaskBook.open(tmp_path / "pipe.safetensors")
        with pytest.raises((BookError, IsADirectoryError)):
            MaskBook.open(tmp_path)
        with pytest.raises(BookError, match="regular file"):
            MaskBook.open("/dev/zero")


class TestHostile:
    def test_short(self, tmp_path: Path, good: bytes) -> None:
        for length in (0, 1, 7, 8, 9, 100, 4000, 4096, len(good) // 2, len(good) - 1):
            refused(tmp_path, good[:length], "short|bytes|header")

    def test_longer(self, tmp_path: Path, good: bytes) -> None:
        refused(tmp_path, good + b"\0", "cut short or changed: .*not fully covered")

    def test_huge_header(self, tmp_path: Path, good: bytes) -> None:
        refused(tmp_path, (2**63).to_bytes(8, "little") + good[8:], f"at most {HEADER_LIMIT}")
        refused(tmp_path, (HEADER_LIMIT).to_bytes(8, "little") + good[8:], "cut short")

    def test_not_json(self, tmp_path: Path, good: bytes) -> None:
        _, data = parts(good)
        for text in (b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a":NaN}', b'{"a":1e999}'):
            refused(tmp_path, joined(text.ljust(16), data), "header|tensor")

    def test_deep(self, tmp_path: Path, good: bytes) -> None:
        _, data = parts(good)
        refused(tmp_path, joined(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", data), "header")
        header, data = parts(good)
        header["__metadata__"]["book"] = "[" * 100_000
        refused(tmp_path, joined(header, data), "not a readable book")

    def test_a_name_twice(self, tmp_path: Path, good: bytes) -> None:
        header, data = parts(good)
        text = json.dumps(header)
        entry = json.dumps({"bits.0": header["bits.0"]})[1:-1]
        refused(tmp_path, joined((text[:-1] + "," + entry + "}").encode(), data), "twice")

    @pytest.mark.parametrize(
        ("key", "value", "match"),
        [
            ("dtype", "F64", "changed"),
            ("dtype", "I64", "changed"),
            ("dtype", "I8", "'dtype': 'I8'.*not as its header says: .*'U8'"),
            ("dtype", "X8", "changed"),
            ("dtype", ["U8"], "changed"),
            ("shape", [2**61, 2**61], "changed: .*overflow"),
            ("shape", [-1, 4], "changed"),
            ("shape", [1.5], "changed"),
            ("shape", [True], "changed"),
            ("shape", "12", "changed"),
            ("shape", [1] * 9, "changed"),
            ("shape", [336], "not as its header says"),
            ("shape", [1, 4, 2, 1, 3, 7, 2], "not as its header says"),
            ("data_offsets", [0], "changed"),
            ("data_offsets", [10, 5], "changed"),
            ("data_offsets", [-8, 8], "changed"),
            ("data_offsets", [2**80, 2**80], "changed"),
            ("more", 1, "not as its header says"),
        ],
    )
    def test_entries(self, tmp_path: Path, good: bytes, key: str, value: Any, match: str) -> None:
        header, data = parts(good)
        header["bits.0"][key] = value
        refused(tmp_path, joined(header, data), match)

    def test_overlaps_and_gaps(self, tmp_path: Path, good: bytes) -> None:
        header, data = parts(good)
        start, end = header["bits.1"]["data_offsets"]
        header["bits.1"]["data_offsets"] = [start - 8, end - 8]
        refused(tmp_path, joined(header, data), "changed: .*offset")
        header["bits.1"]["data_offsets"] = [start + 8, end + 8]
        refused(tmp_path, joined(header, data), "changed: .*offset")

    def test_other_tensors(self, tmp_path: Path, good: bytes) -> None:
        header, data = parts(good)
        end = len(data)
        four = {"dtype": "U8", "shape": [4], "data_offsets": [end, end + 4]}
        more = {**header, "../../etc/passwd": four}
        refused(tmp_path, joined(more, data + b"abcd"), "not as")
        none = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        many = {**header, **{f"t{i}": none for i in range(300)}}
        refused(tmp_path, joined(many, data), "not as")
        del header["bits.0"]
        refused(tmp_path, joined(header, data), "changed: .*offset")

    def test_some_other_safetensors_file(self, tmp_path: Path) -> None:
        from safetensors.numpy import save_file

        save_file({"w": np.zeros(4, np.float32)}, tmp_path / "bad.safetensors")
        with pytest.raises(BookError, match="not a book of jali"):
            MaskBook.open(tmp_path / "bad.safetensors")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("grid", [[2**40, 2**40, 2**40]]), ("grid", []), ("grid", [[3, 4]]),
            ("grid", [[True, 4, 9]]), ("grid", {"a": 1}), ("layers", 10**9), ("heads", -3),
            ("blocks", [0, 8]), ("blocks", [16]), ("order", "spiral"), ("order", {"tiled": [1]}),
            ("noise", "abcd"), ("noise", [1, 2, 3, None]), ("branches", [1]),
            ("budgets", [0.5, 0.5]), ("fingerprints", []), ("fingerprints", {"transformer": 3}),
            ("settings", []), ("prompts", "x"), ("importance", 1), ("model", 7),
            ("scorer", "x" * 10_000), ("costs", [0.1]), ("jali", None),
        ],
        ids=str,
    )  # fmt: skip
    def test_header_values(self, tmp_path: Path, good: bytes, key: str, value: Any) -> None:
        header, data = parts(good)
        plain = json.loads(header["__metadata__"]["book"])
        plain[key] = value
        header["__metadata__"]["book"] = json.dumps(plain)
        refused(tmp_path, joined(header, data), "not a readable book|not as|damaged")

    def test_unknown_and_missing_keys(self, tmp_path: Path, good: bytes) -> None:
        header, data = parts(good)
        plain = json.loads(header["__metadata__"]["book"])
        header["__metadata__"]["book"] = json.dumps({**plain, "evil": 1})
        refused(tmp_path, joined(header, data), "evil")
        del plain["noise"]
        header["__metadata__"]["book"] = json.dumps(plain)
        refused(tmp_path, joined(header, data), "noise")

    def test_empty_rows_with_right_checksums(self, tmp_path: Path) -> None:
        """Who can write a checksum can write wrong bits: a row must still read something."""
        from jali.maskbook import write

        def nothing(*_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            h = books.SMALL
            return torch.zeros(h.heads, h.M, 2, dtype=torch.uint8), torch.zeros(h.heads)

        real, write.keep_bits = write.keep_bits, nothing
        try:
            made = books.make(tmp_path / "a")
        finally:
            write.keep_bits = real
        with pytest.raises(BookError, match="row without a block"):
            made.plan(0.5, 0, 0)

    def test_bits_behind_the_keys(self, tmp_path: Path) -> None:
        from jali.maskbook import write

        def all_bits(*_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            h = books.SMALL
            return torch.full((h.heads, h.M, 2), 255, dtype=torch.uint8), torch.ones(h.heads)

        real, write.keep_bits = write.keep_bits, all_bits
        try:
            made = books.make(tmp_path / "a")
        finally:
            write.keep_bits = real
        with pytest.raises(BookError, match="behind the keys"):
            made.plan(0.5, 0, 0)


def forged(good: bytes, name: str, value: float) -> bytes:
    """A book whose last value of a tensor is another one, with all its checksums made to fit."""
    header, data = parts(good)
    words = header.pop("__metadata__")
    raw = bytearray(data)
    kinds = {"U8": "u1", "U32": "<u4", "F32": "<f4"}
    arrays = {
        n: np.frombuffer(raw, kinds[t["dtype"]], math.prod(t["shape"]), t["data_offsets"][0])
        for n, t in header.items()
    }
    arrays = {n: array.reshape(header[n]["shape"]) for n, array in arrays.items()}
    arrays[name].reshape(-1)[-1] = value
    of = ("errors",) if "errors" in arrays else ("importance", "peaks")
    arrays["checks"][-1, -1, -1] = checksum(*(arrays[n][-1, -1] for n in of))
    tables = [arrays[n] for n in read_header(words["book"], "x").tables]
    words["digest"] = book_digest(words["book"], header, tables)
    return joined({"__metadata__": words, **header}, bytes(raw))


class TestForged:
    """Who can change a value can change its checksum: it must be a share all the same."""

    def test_a_share_is_believed(self, tmp_path: Path, good: bytes) -> None:
        for name in ("costs.1", "peaks"):
            (tmp_path / "a").write_bytes(forged(good, name, 0.25))
            book = MaskBook.open(tmp_path / "a")
            book.verify()
            assert name == "peaks" or book.costs(0.5)[-1, -1, -1, -1] == 0.25

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5, 1.5])
    def test_costs(self, tmp_path: Path, good: bytes, value: float) -> None:
        (tmp_path / "a").write_bytes(forged(good, "costs.1", value))
        with pytest.raises(BookError, match=r"costs\.1 holds costs that are not shares"):
            MaskBook.open(tmp_path / "a")

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.5])
    def test_importance(self, tmp_path: Path, good: bytes, value: float) -> None:
        (tmp_path / "a").write_bytes(forged(good, "peaks", value))
        book = MaskBook.open(tmp_path / "a")
        for read in (book.verify, lambda: book.importance(3, 1), lambda: book.derive(0.4)):
            with pytest.raises(BookError, match="step 3, layer 1 is no share"):
                read()

    @pytest.mark.parametrize("key", ["costs", "importance_error", "noise", "sharpness"])
    @pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
    def test_numbers_of_the_header(
        self, tmp_path: Path, good: bytes, key: str, number: str
    ) -> None:
        header, data = parts(good)
        plain = json.loads(header["__metadata__"]["book"])
        plain[key] = [float(number)] * len(plain[key]) if isinstance(plain[key], list) else 0
        text = (
            json.dumps(plain)
            if isinstance(plain[key], list)
            else json.dumps(plain).replace(f'"{key}": 0', f'"{key}": {number}')
        )
        header["__metadata__"]["book"] = text
        refused(tmp_path, joined(header, data), "finite number")


class TestOfRd:
    """The other kind of book is believed as little."""

    def test_short_and_long(self, tmp_path: Path, good_rd: bytes) -> None:
        for length in (0, 7, 9, 4000, 4096, len(good_rd) // 2, len(good_rd) - 1):
            refused(tmp_path, good_rd[:length], "short|bytes|header")
        refused(tmp_path, good_rd + b"\0", "not fully covered")

    @pytest.mark.parametrize("name", ["errors", "tops", "checks"])
    @pytest.mark.parametrize(
        ("key", "value"),
        [("dtype", "I8"), ("dtype", "F64"), ("dtype", "BOOL"), ("shape", [-1, 4]), ("shape", [1]),
         ("shape", [2**61, 2**61]), ("data_offsets", [10, 5]), ("data_offsets", [0, 2**60]),
         ("more", 1)],
    )  # fmt: skip
    def test_entries(self, tmp_path: Path, good_rd: bytes, name: str, key: str, value: Any) -> None:
        header, data = parts(good_rd)
        header[name][key] = value
        refused(tmp_path, joined(header, data), "changed|not as its header says")

    def test_other_tensors_and_names_twice(self, tmp_path: Path, good_rd: bytes) -> None:
        header, data = parts(good_rd)
        four = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
        refused(tmp_path, joined({**header, "bits.0": four}, data + b"abcd"), "not as")
        text = json.dumps(header)
        entry = json.dumps({"tops": header["tops"]})[1:-1]
        refused(tmp_path, joined((text[:-1] + "," + entry + "}").encode(), data), "twice")
        book = header["__metadata__"]["book"]
        header["__metadata__"]["book"] = book[:-1] + ',"errors":{"keep":0.3,"levels":[2]}}'
        refused(tmp_path, joined(header, data), "twice")
        del header["tops"]
        refused(tmp_path, joined(header, data), "changed: .*offset")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("errors", None), ("errors", []), ("errors", {}), ("errors", {"levels": [2]}),
            ("errors", {"levels": [2], "keep": 0.3, "more": 1}),
            ("errors", {"levels": [2, 4, 8, 254, 0], "keep": 0}),
            ("errors", {"levels": [2, 4, 8, 254, 0], "keep": 1e-9}),
            ("errors", {"levels": [2, 4, 8, 254, 0], "keep": True}),
            ("errors", {"levels": [2, 4, 8, 254, 0], "keep": "0.3"}),
            ("errors", {"levels": [2, 4, 8, 254, 0], "keep": 1.0}),
            ("errors", {"levels": [0, 2, 4, 8, 254], "keep": 0.3}),
            ("errors", {"levels": [1, 2, 4, 8, 0], "keep": 0.3}),
            ("errors", {"levels": [2, 2, 4, 8, 0], "keep": 0.3}),
            ("errors", {"levels": "24", "keep": 0.3}), ("errors", {"levels": [], "keep": 0.3}),
            ("format", 1), ("format", True), ("format", "2"), ("format", [2]), ("budgets", [0.5]),
            ("importance", True), ("blocks", [16, 12]), ("layers", 10**9), ("heads", 0),
            ("noise", [1, 2]), ("transformers", ["a"] * 4), ("grid", [[2**40, 2**40, 2**40]]),
        ],
        ids=str,
    )  # fmt: skip
    def test_header_values(self, tmp_path: Path, good_rd: bytes, key: str, value: Any) -> None:
        header, data = parts(good_rd)
        plain = json.loads(header["__metadata__"]["book"])
        plain[key] = value
        header["__metadata__"]["book"] = json.dumps(plain)
        refused(tmp_path, joined(header, data), "not a readable book|not as")

    @pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
    def test_numbers_of_the_header(self, tmp_path: Path, good_rd: bytes, number: str) -> None:
        header, data = parts(good_rd)
        text = header["__metadata__"]["book"]
        header["__metadata__"]["book"] = text.replace('"keep":0.3', f'"keep":{number}')
        refused(tmp_path, joined(header, data), "not a readable book")

    def test_a_finite_top_is_believed(self, tmp_path: Path, good_rd: bytes) -> None:
        (tmp_path / "a").write_bytes(forged(good_rd, "tops", 0.25))
        MaskBook.open(tmp_path / "a").verify()

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 128.0, -1e30])
    def test_tops(self, tmp_path: Path, good_rd: bytes, value: float) -> None:
        (tmp_path / "a").write_bytes(forged(good_rd, "tops", value))
        with pytest.raises(BookError, match="tops holds errors that are no finite numbers"):
            MaskBook.open(tmp_path / "a")

    def test_a_flipped_bit_is_found_and_named(self, tmp_path: Path, good_rd: bytes) -> None:
        header, data = parts(good_rd)
        for name, match in (
            ("errors", "errors of part 2, layer 1 do not match"),
            ("tops", "damaged"),
            ("checks", "damaged"),
        ):
            raw = bytearray(good_rd)
            raw[len(good_rd) - len(data) + header[name]["data_offsets"][1] - 1] ^= 4
            refused(tmp_path, bytes(raw), match)


class TestDamage:
    def test_a_flipped_bit_is_found_and_named(self, tmp_path: Path, good: bytes) -> None:
        header, _ = parts(good)
        start = len(good) - len(parts(good)[1])
        for name, match in (("bits.1", "bits of step"), ("importance", "importance of step"),
                            ("peaks", "importance of step")):  # fmt: skip
            begin, end = header[name]["data_offsets"]
            for at in (begin, (begin + end) // 2, end - 1):
                raw = bytearray(good)
                raw[start + at] ^= 4
                refused(tmp_path, bytes(raw), match)
        for name in ("costs.0", "checks"):
            raw = bytearray(good)
            raw[start + header[name]["data_offsets"][0]] ^= 1
            refused(tmp_path, bytes(raw), "damaged")

    def test_what_is_not_read_is_not_checked(self, tmp_path: Path, good: bytes) -> None:
        """Opening a large book must not read all of it."""
        raw = bytearray(good)
        header, data = parts(good)
        at = len(good) - len(data) + header["importance"]["data_offsets"][1] - 1
        raw[at] ^= 1
        (tmp_path / "a").write_bytes(raw)
        made = MaskBook.open(tmp_path / "a")
        made.plan(0.5, 0, 0)
        with pytest.raises(BookError, match="step 3, layer 1"):
            made.verify()


def mutate(raw: bytes, chance: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or moved; often where it hurts most."""
    out = bytearray(raw)
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        limit = chance.choice((8, 600, header, len(out)))
        at = chance.randrange(min(limit, len(out)))
        kind = chance.randrange(7)
        if kind == 0:
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[at] = chance.randrange(256)
        elif kind == 2:
            del out[at : at + chance.choice((1, 4, 64, 4096))]
        elif kind == 3:
            out[at:at] = bytes(chance.randrange(256) for _ in range(chance.choice((1, 8))))
        elif kind == 4:
            out[at : at + 1] = chance.choice((b"9", b"-", b'"', b"{", b"]", b"e", b"\\", b"\0"))
        elif kind == 5:
            other = chance.randrange(len(out))
            out[at : at + 16] = out[other : other + 16]
        else:
            del out[at:]
        if not out:
            out = bytearray(b"\0")
    return bytes(out)


def contents(book: MaskBook) -> list[Any]:
    if book.header.errors is not None:
        places = np.ndindex(book.header.outer)
        return [book.header, *(book.slab(*place).numpy().tobytes() for place in places)]
    return [book.header, *(book.bits(b, s).tobytes() for b in book.budgets for s in range(4)),
            *(book.importance(s, la).numpy().tobytes() for s in range(4) for la in range(2)),
            *(book.costs(b).tobytes() for b in book.budgets)]  # fmt: skip


@pytest.mark.parametrize("kind", ["good", "good_rd"])
def test_fuzz(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    """Whatever happens to a file, it is refused in words, or it is the same book still."""
    full, good = request.config.getoption("--full"), request.getfixturevalue(kind)
    path = tmp_path / "a.safetensors"
    path.write_bytes(good)
    want = contents(MaskBook.open(path))
    chance = random.Random(4)
    refusals = 0
    count = 10_000 if full else 1_200 if kind == "good" else 600
    for number in range(count):
        raw = mutate(good, chance)
        path.write_bytes(raw)
        try:
            book = MaskBook.open(path)
            book.verify()
        except BookError:
            refusals += 1
            continue
        assert contents(book) == want, f"mutation {number} was believed"
    assert refusals > 0.8 * count
