from hypothesis import given, settings
from hypothesis import strategies as st

from dflow.lowering.files.crc32c import crc32c
from tests.effort import examples

#: RFC 3720, B.4, and the check value of the catalogues.
KNOWN = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
    b"123456789": 0xE3069283,
}


def test_the_checksums_are_those_of_the_standard() -> None:
    assert {data: crc32c(data) for data in KNOWN} == KNOWN


@settings(max_examples=examples(50))
@given(st.binary(min_size=1, max_size=64), st.integers(0))
def test_no_flipped_bit_keeps_the_checksum(data: bytes, bit: int) -> None:
    flipped = (int.from_bytes(data, "little") ^ (1 << bit % (8 * len(data)))).to_bytes(len(data), "little")
    assert crc32c(flipped) != crc32c(data)
