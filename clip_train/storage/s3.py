"""S3 with the settings of AWS: profiles, SSO and roles, whose credentials are renewed.

obstore makes the requests. botocore finds what it cannot: profiles, SSO, refreshed credentials,
a bucket's region, the server's clock and unfinished uploads.
"""

import asyncio
import contextlib
import email.utils
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from botocore import UNSIGNED
from botocore.config import Config
from botocore.configprovider import ConfiguredEndpointProvider
from botocore.exceptions import ClientError, NoCredentialsError
from botocore.session import Session
from obstore.store import S3Store

from clip_train.storage.errors import Meaning, from_environment
from clip_train.storage.object_store import Connection, ObjectStorage
from clip_train.storage.retry import Pace


class Bucket(Connection):
    """A bucket of S3, opened anew if its credentials are refused or it is in another region."""

    _region: str | None = None  # if it is not the configured one

    def open(self, client: dict[str, Any], retries: dict[str, Any]) -> S3Store:
        """ValueError, or an error of botocore, if the settings make no sense."""
        session = Session()  # with files and environment as they are now
        scoped = session.get_scoped_config()
        region = self._region or session.get_config_variable("region") or "us-east-1"
        endpoint = ConfiguredEndpointProvider(session.full_config, scoped, "s3").provide()
        if endpoint is None and region.startswith("cn-"):  # obstore does not know these
            endpoint = f"https://s3.{region}.amazonaws.com.cn"
        virtual = (scoped.get("s3") or {}).get("addressing_style") == "virtual"
        options: dict[str, Any] = {"virtual_hosted_style_request": virtual}
        if endpoint is not None:
            scheme, _, host = endpoint.partition("://")
            if not host or scheme not in ("http", "https"):
                raise ValueError(
                    f"AWS_ENDPOINT_URL or endpoint_url is {endpoint!r}: write https://host, "
                    "or http://host"
                )
            options["endpoint"] = f"{scheme}://{self.name}.{host}" if virtual else endpoint
        if _is_public():
            options["skip_signature"] = True
        else:
            options["credential_provider"] = _credentials(session)
        bundle = session.get_config_variable("ca_bundle")  # AWS_CA_BUNDLE
        if bundle:
            client = {**client, "root_certificate": Path(bundle).read_bytes()}
        return S3Store(
            self.name,
            region=region,
            disable_bulk_delete=True,  # which other servers may not know
            checksum_algorithm="sha256",
            client_options=client,  # type: ignore[arg-type]
            retry_config=retries,  # type: ignore[arg-type]
            **options,
        )

    def renew(self, kind: Meaning, again: bool) -> bool:
        if kind == "elsewhere":
            helps = self._region is None and not again
            if helps:
                try:  # refusals have this header as well
                    answer = self.client(10.0).head_bucket(Bucket=self.name)
                except ClientError as e:
                    answer = e.response
                headers = answer["ResponseMetadata"]["HTTPHeaders"]
                self._region = headers.get("x-amz-bucket-region")
        elif again:  # whoever renews them may be late, or just writing the file
            waits = kind == "expired" or self._store is None
            helps = self.worked and waits and not from_environment()
        else:
            helps = True
        if helps:
            self._store = None
        return helps

    def client(self, seconds: float) -> Any:
        """Return botocore's client, whose calls block; it takes 20 MiB.

        seconds: to wait for an answer.
        """
        signed = {"signature_version": UNSIGNED} if _is_public() else {}
        config = Config(
            connect_timeout=min(10.0, seconds),
            read_timeout=seconds,
            retries={"total_max_attempts": 1},
            **signed,
        )
        return Session().create_client("s3", region_name=self._region, config=config)


def _is_public() -> bool:
    """Whether no credentials are needed, or wanted."""
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")


def _credentials(session: Session) -> Callable[[], dict[str, Any]]:
    """A provider of the default chain's credentials, which botocore refreshes."""
    held = session.get_credentials()
    if held is None:
        raise NoCredentialsError

    def provide() -> dict[str, Any]:
        found = held.get_frozen_credentials()
        return {
            "access_key_id": found.access_key,
            "secret_access_key": found.secret_key,
            "token": found.token,
            "expires_at": datetime.now(timezone.utc),  # so botocore is asked again
        }

    return provide


class S3Storage(ObjectStorage):
    """`Storage` over `s3://bucket/prefix`."""

    connection_type = Bucket
    bucket: Bucket

    def clock(self) -> float:
        def date(pace: Pace) -> float:
            client = self.bucket.client(pace.seconds)
            answer = client.list_objects_v2(Bucket=self.bucket.name, Prefix=self.root, MaxKeys=1)
            date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
            return email.utils.parsedate_to_datetime(date).timestamp() if date else time.time()

        return self.ask("asking for the time", lambda pace: asyncio.to_thread(date, pace))

    def sweep(
        self, older_than: float, spare: Callable[[str], bool] = lambda name: False, prefix: str = ""
    ) -> int:
        """Abort multipart uploads: their parts cost, and are not listed."""
        folder = self.folder(prefix)
        where = {"Bucket": self.bucket.name}

        def abort(pace: Pace) -> int:
            client = self.bucket.client(pace.seconds)
            pages = client.get_paginator("list_multipart_uploads").paginate(**where, Prefix=folder)
            found = [upload for page in pages for upload in page.get("Uploads", [])]
            count = 0
            for each in found:
                name = each["Key"].removeprefix(f"{self.root}/")
                if each["Initiated"].timestamp() < older_than and not spare(name):
                    upload = {"Key": each["Key"], "UploadId": each["UploadId"]}
                    with contextlib.suppress(client.exceptions.NoSuchUpload):  # just ended
                        client.abort_multipart_upload(**where, **upload)
                    count += 1
            return count

        return self.ask("listing unfinished uploads", lambda pace: asyncio.to_thread(abort, pace))
