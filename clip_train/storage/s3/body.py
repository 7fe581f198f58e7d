"""The bytes of a request, hashed once, where that does not hold up the loop; and how they get to the server unspoilt.

Each is held by the server against two sums: the CRC32 by newer ones, the sha256 in the signature by all that check
signatures.
"""

from __future__ import annotations

import base64
import hashlib
import io
import zlib
from typing import Any


class Sums:
    """Of some bytes."""

    def __init__(self, data: bytes) -> None:
        self.sha256 = hashlib.sha256(data).hexdigest()
        # As `ChecksumCRC32`. Left to botocore it would go as a trailer over https, which older servers do not know.
        self.crc32 = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


class Body(io.BytesIO):
    """Bytes to send, whose sums are known."""

    def __init__(self, data: bytes, sums: Sums) -> None:
        super().__init__(data)
        self.data, self.sums = data, sums

    def getbuffer(self) -> memoryview:
        """aiohttp asks the length in this way, and BytesIO's own would copy all of the bytes for it."""
        return memoryview(self.data)


def sign_by_known_sums() -> None:
    """botocore hashes a body when it signs it, on the loop: a `Body`'s sum is taken as it is. Once per process."""
    from botocore import auth

    class Signature(auth.S3SigV4Auth):
        def payload(self, request: Any) -> str:
            return request.body.sums.sha256 if isinstance(request.body, Body) else super().payload(request)

    if auth.AUTH_TYPE_MAPS["s3v4"] is auth.S3SigV4Auth:
        auth.AUTH_TYPE_MAPS["s3v4"] = Signature
