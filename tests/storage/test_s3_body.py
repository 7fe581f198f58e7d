"""What protects the bytes of an upload, as it leaves: also over https, where the S3 tests do not go."""

from __future__ import annotations

import base64
import hashlib
import io
import zlib
from collections.abc import Iterator

import botocore.session
import pytest
from botocore.awsrequest import AWSResponse

from clip_train.storage.s3.body import Body, Sums, sign_by_known_sums

DATA = b"0123456789" * 1000


class Empty(io.BytesIO):
    """The body of an answer, as botocore reads it."""

    def stream(self) -> Iterator[bytes]:
        return iter(())


def sent(endpoint: str, data: bytes, sums: Sums | None) -> dict[str, str]:
    """The headers of a part's request; without sums, as botocore would have it."""
    sign_by_known_sums()
    session = botocore.session.Session()
    session.set_credentials("key", "secret")
    client = session.create_client("s3", region_name="us-east-1", endpoint_url=endpoint)
    seen: dict[str, str] = {}

    def answer(request, **_) -> AWSResponse:
        seen.update({k.lower(): v.decode() if isinstance(v, bytes) else v for k, v in request.headers.items()})
        return AWSResponse(endpoint, 200, {}, Empty())

    client.meta.events.register("before-send.s3", answer)
    where = {"Bucket": "bucket", "Key": "k", "UploadId": "u", "PartNumber": 1}
    if sums is None:
        client.upload_part(**where, Body=data)
    else:
        client.upload_part(**where, Body=Body(data, sums), ChecksumCRC32=sums.crc32)
    return seen


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "https://s3.example.com"])
def test_both_sums_go_with_every_part(endpoint: str) -> None:
    headers = sent(endpoint, DATA, Sums(DATA))
    assert headers["x-amz-content-sha256"] == hashlib.sha256(DATA).hexdigest()
    assert headers["x-amz-checksum-crc32"] == base64.b64encode(zlib.crc32(DATA).to_bytes(4, "big")).decode()
    assert "x-amz-trailer" not in headers and headers["content-length"] == str(len(DATA))


def test_the_known_sum_is_what_is_signed_and_others_are_still_made() -> None:
    """A body that claims to be another one is signed as that: it is not hashed again."""
    headers = sent("http://127.0.0.1:1", DATA, Sums(b"other"))
    assert headers["x-amz-content-sha256"] == hashlib.sha256(b"other").hexdigest()
    assert sent("http://127.0.0.1:1", DATA, None)["x-amz-content-sha256"] == hashlib.sha256(DATA).hexdigest()
