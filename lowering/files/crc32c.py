"""The checksum CRC-32C (Castagnoli, RFC 3720), which zarr's format uses and Python's library lacks.

It is computed byte by byte in Python, so it suits short data only.
"""

_POLYNOMIAL = 0x82F63B78


def crc32c(data: bytes) -> int:
    """Return the 32-bit checksum of `data`."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _of_byte(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
    return value


_TABLE = tuple(map(_of_byte, range(256)))
