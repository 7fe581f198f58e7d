"""Answers of HTTP servers that are no longer than what was asked for."""

import re

import aiohttp

from clip_train.storage.errors import ChangedError

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class BoundedResponse(aiohttp.ClientResponse):
    """An answer to a range, which a server may not fill the memory with."""

    async def read(self) -> bytes:
        """The body. ChangedError if it is longer than the range of the request."""
        asked = _RANGE.fullmatch(self.request_info.headers.get("Range", ""))
        if self._body is None and asked is not None and self.ok:
            most = int(asked[2]) - int(asked[1]) + 1
            body = bytearray()
            async for part in self.content.iter_any():
                body += part
                if len(body) > most:
                    self.close()
                    raise ChangedError(
                        f"the server sends more than the {most} bytes asked for: it ignores ranges"
                    )
            self._body = bytes(body)
        return await super().read()
