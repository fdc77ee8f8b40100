"""The checksums inside FFV1 packets: FFmpeg compares them too, but only writes a line to its log.

A packet is a row of slices. Each ends with its size (3 bytes), a byte of status, and a CRC-32 that
makes the checksum of the whole slice zero (RFC 9043, 4.9).
"""

from __future__ import annotations

import zlib

_TRAILER = 8
# FFV1 feeds bits highest first, zlib lowest first; with every byte mirrored the two agree on zero.
_MIRRORED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def damaged(packet: bytes) -> bool:
    """Whether a slice's checksum is wrong. Packets without checksums count as sound."""
    # A CRC-32 that starts from zero and is not inverted at the end is zero for a sound slice.
    return any(
        zlib.crc32(part.translate(_MIRRORED), 0xFFFFFFFF) != 0xFFFFFFFF for part in _slices(packet)
    )


def _slices(packet: bytes) -> list[bytes]:
    """The slices, found from the end; none if the sizes do not add up, as without checksums."""
    found = []
    end = len(packet)
    while end > _TRAILER:
        size = int.from_bytes(packet[end - _TRAILER : end - _TRAILER + 3], "big") + _TRAILER
        if size > end:
            return []
        found.append(packet[end - size : end])
        end -= size
    return [] if end else found
