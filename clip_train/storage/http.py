"""Reject answers of HTTP servers that are longer than the requested range."""

import re

import aiohttp

from clip_train.storage.errors import ChangedError

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class BoundedResponse(aiohttp.ClientResponse):
    """An answer to a range request. It is read only up to the range's length, so that a server
    cannot fill the memory."""

    async def read(self) -> bytes:
        """The body. ChangedError if it is longer than the range of the request."""
        match = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
        if self._body is None and match is not None and self.ok:
            limit = int(match[2]) - int(match[1]) + 1  # bytes
            body = bytearray()
            async for part in self.content.iter_any():
                body += part
                if len(body) > limit:
                    self.close()
                    raise ChangedError(
                        f"the server sends more than the {limit} bytes asked for: it ignores ranges"
                    )
            self._body = bytes(body)
        return await super().read()
