"""The connection to S3 that a file system of s3fs holds, and how its credentials are renewed."""

from __future__ import annotations

import asyncio
from typing import Any

from clip_train.storage.answers import Meaning, from_environment


class Session:
    """One for each s3fs file system: `Session.of(fs)`. To be used on fsspec's event loop only."""

    def __init__(self) -> None:
        self.generation = 0  # how often the credentials were renewed
        self.worked = False  # ever; then expired credentials are waited for: who renews them may be a little late
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, fs: Any) -> Session:
        if "clip_train_session" not in vars(fs):  # kept there: file systems with equal arguments are equal
            fs.clip_train_session = cls()
        return fs.clip_train_session

    def should_renew(self, kind: Meaning, renewed: bool) -> bool:
        """After an error of that kind. renewed: this was tried already, and new ones were refused just so."""
        if not renewed:
            return kind in ("denied", "expired")
        return kind == "expired" and self.worked and not from_environment()

    async def renew(self, fs: Any, generation: int) -> None:
        """Ask the credential chain anew, unless that was done since `generation`, by another request.

        A session of the same kind gets the new ones in place: another client costs 12 MiB that s3fs never gives back.
        Credentials that refresh themselves (a role, a container, SSO) get here only when they were withdrawn early.
        """
        async with self._lock:
            if self.generation != generation:
                return
            self.generation += 1
            await fs.set_session()
            held = await fs.session.get_credentials()
            fresh = await type(fs.session)(**fs.kwargs).get_credentials()
            if held is None or fresh is None or type(held) is not type(fresh) or hasattr(held, "refresh_needed"):
                await fs.set_session(refresh=True)
            else:
                held.access_key, held.secret_key, held.token = fresh.access_key, fresh.secret_key, fresh.token
