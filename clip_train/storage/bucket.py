"""A bucket of S3 as this user may see it: opened with the settings of AWS, and anew when credentials are refused.

obstore makes the requests. botocore finds what it cannot: profiles, SSO, credentials that refresh themselves; and it
lists unfinished uploads.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore import UNSIGNED
from botocore.config import Config
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import ClientError, NoCredentialsError
from botocore.session import Session
from obstore.store import S3Store

from clip_train.storage.errors import Meaning, from_environment

if TYPE_CHECKING:
    from obstore.store import ClientConfig

_FIRST_BACKOFF_SECONDS = 0.1  # obstore's


class Stores(NamedTuple):
    """The same bucket, for what is retried here (`single`) and by obstore itself (`uploads`: each part on its own)."""

    single: S3Store
    uploads: S3Store


class Bucket:
    """Opened by the first request. To be used on the event loop.

    upload_seconds: what a request of an upload may take. patience_seconds: how long it is repeated.
    """

    def __init__(
        self, name: str, *, upload_seconds: float = 180.0, patience_seconds: float = 60.0
    ) -> None:
        self.name, self._upload_seconds, self._patience_seconds = (
            name,
            upload_seconds,
            patience_seconds,
        )
        self._stores: Stores | None = None
        self._region: str | None = None  # where it is not the one of the settings
        self._is_elsewhere = False
        self.generation = 0  # how often it was opened anew
        self.worked = False  # ever
        self._opening = asyncio.Lock()

    async def stores(self) -> Stores:
        """ValueError, or an error of botocore, where the settings make no sense."""
        async with self._opening:
            if self._stores is None:
                self._stores = await asyncio.to_thread(self._open)
            return self._stores

    def renew(self, kind: Meaning, generation: int, renewed: bool) -> bool:
        """Close it where another attempt may then succeed; whether it may.

        kind: what the error meant. generation: at the attempt, since another one may have done it meanwhile.
        renewed: it was done for this operation already.
        """
        if kind == "elsewhere":
            helps = self._region is None and not renewed
        elif (
            renewed
        ):  # whoever renews the credentials may be a little late, or just writing the file
            helps = (
                self.worked
                and not from_environment()
                and (kind == "expired" or self._stores is None)
            )
        else:
            helps = kind in ("denied", "expired")
        if helps and self.generation == generation:
            self._is_elsewhere = self._is_elsewhere or kind == "elsewhere"
            self._close()
        return helps

    def give_more_time(self) -> None:
        """To each request of an upload from now on: the link is slow."""
        self._upload_seconds = longer(self._upload_seconds)
        self._close()

    def _close(self) -> None:
        self.generation += 1
        self._stores = None

    def client(self) -> Any:
        """botocore's, whose calls block; it takes 20 MiB."""
        signed = {"signature_version": UNSIGNED} if _is_public() else {}
        seconds = max(1.0, self._patience_seconds / 3)  # asked three times
        config = Config(
            connect_timeout=min(10.0, seconds),
            read_timeout=min(60.0, seconds),
            retries={"total_max_attempts": 1},
            **signed,
        )
        return Session().create_client("s3", region_name=self._region, config=config)

    def _open(self) -> Stores:
        session = Session()  # with the settings in files and environment as they are now
        if self._is_elsewhere and self._region is None:
            self._region = self._find_region()
        options = _options(session, self.name, self._region)
        client: ClientConfig = {"allow_http": True, "connect_timeout": timedelta(seconds=10)}
        if bundle := session.get_config_variable("ca_bundle"):  # AWS_CA_BUNDLE
            client["root_certificate"] = Path(bundle).read_bytes()
        # doubling waits that add up to the patience; a silent request is repeated once
        retries = int(math.log2(1 + self._patience_seconds / _FIRST_BACKOFF_SECONDS))
        longest = timedelta(seconds=1.5 * self._upload_seconds)
        return Stores(
            single=S3Store(
                self.name,
                **options,
                client_options={**client, "timeout": timedelta(days=1)},  # whoever asks has a limit
                retry_config={"max_retries": 0},
            ),
            uploads=S3Store(
                self.name,
                **options,
                checksum_algorithm="sha256",
                client_options={**client, "timeout": timedelta(seconds=self._upload_seconds)},
                retry_config={"max_retries": retries, "retry_timeout": longest},
            ),
        )

    def _find_region(self) -> str | None:
        """By a header that refusals have as well."""
        try:
            answer = self.client().head_bucket(Bucket=self.name)
        except ClientError as e:
            answer = e.response
        return answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region")


def longer(seconds: float) -> float:
    """What a request may take that took too long."""
    return min(4 * seconds, 900.0)


@functools.lru_cache
def shared_bucket(name: str) -> Bucket:
    """The one of this process for all that is read from it."""
    return Bucket(name)


def _options(session: Session, bucket: str, region: str | None) -> dict[str, Any]:
    """What obstore must know of the user's settings."""
    scoped = session.get_scoped_config()
    options: dict[str, Any] = {"disable_bulk_delete": True}  # which other servers may not know
    options["region"] = region or session.get_config_variable("region") or "us-east-1"
    endpoint = ConfiguredEndpointProvider(session.full_config, scoped, "s3").provide()
    if endpoint is None and options["region"].startswith("cn-"):  # which obstore does not know
        endpoint = f"https://s3.{options['region']}.amazonaws.com.cn"
    virtual = (scoped.get("s3") or {}).get("addressing_style") == "virtual"
    if endpoint is not None:
        scheme, found, host = endpoint.partition("://")
        if not found or scheme not in ("http", "https"):
            raise ValueError(
                f"AWS_ENDPOINT_URL or endpoint_url is {endpoint!r}: write https://host, or http://host"
            )
        options["endpoint"] = f"{scheme}://{bucket}.{host}" if virtual else endpoint
    if virtual:
        options["virtual_hosted_style_request"] = True
    if _is_public():
        return options | {"skip_signature": True}
    return options | {"credential_provider": _provider(session)}


def _is_public() -> bool:
    """No credentials are needed, or wanted."""
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")


def _provider(session: Session) -> Callable[[], dict[str, Any]]:
    """For each request the credentials of the default chain, which botocore refreshes. NoCredentialsError."""
    held = session.get_credentials()
    if held is None:
        raise NoCredentialsError

    def credentials() -> dict[str, Any]:
        found = held.get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(timezone.utc),  # so botocore is asked again
        }

    return credentials
