"""How fast checkpoints go to a store and come back, and shards are read, beside the store's own client.

One file of 256 MiB (`--quick`: 64) at each store (`--store`): a real S3 server (LocalStack, from scripts/setup_s3.sh;
with CLIP_TRAIN_S3_SERVER=ceph Ceph's gateway) through obstore (`s3`) and through s3fs (`fsspec+s3`); Azurite, from
scripts/setup_clouds.sh, and tests/clouds/gcs_server.py through obstore; an sshd through paramiko. Ours and the client's
own, in turn, several times; the medians of the rates and of their ratios.

- upload: `put_file` of the storage, and the client's own upload, with parts of the same size, as many at a time.
- resume: a checkpoint is resumed from in an empty folder, until all of its state is there and verified by sha256; and
  the client's own download of the same file to a disk, with its sha256.
- shards: a shard is read from its begin to its end, with checksums, as a loader worker does; and the client's own
  reading, range after range of the same size, with their sha256.

"client, MiB" is the memory that the first requests take, "memory, MiB" what an upload and a download of the file add at
most. Absolute figures are this machine's and this server's. With `--json FILE`, rows of other stores stay in FILE.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from common import finish, output_of, parser, rows_of_others

from clip_train.checkpoint.config import CheckpointConfig
from clip_train.checkpoint.manager import CheckpointManager, Saved
from clip_train.storage.blocks import SUM_DIGITS, Checksums
from clip_train.storage.config import StorageConfig
from clip_train.storage.object_store import PARALLEL
from clip_train.storage.remote import PART_BYTES
from clip_train.storage.sftp_store import CONFIG
from clip_train.storage.urls import open_read, open_storage
from clip_train.task import Fragment
from tests.clouds.sshd import Sshd
from tests.s3.places import SERVERS, missing

TARGETS = {
    "upload": "at least 0.9 of the rate of the store's own client",
    "resume": "at least 0.5 of the rate of the client's own download and sha256",
    "shards": "at least 0.9 of the rate of the client's own reading and sha256",
}
LEAST = {"upload": 0.9, "resume": 0.5, "shards": 0.9}
BLOCK_BYTES = 4 << 20  # of a shard: `clip-train index` writes one checksum for each


@dataclass(frozen=True)
class Client:
    """A store's own client. A key is relative to the URL that it was made for."""

    upload: Callable[[Path, str], Any]
    download: Callable[[str, Path], Any]
    read: Callable[[str, int, int], bytes]  # key, begin, end


def obstore_client(url: str) -> Client:
    import obstore

    options: dict[str, Any] = {"client_options": {"allow_http": True}}
    if url.startswith("s3://"):
        options |= {"endpoint": os.environ["AWS_ENDPOINT_URL"], "checksum_algorithm": "sha256"}
    store = obstore.store.from_url(url, **options)

    def download(key: str, path: Path) -> None:
        with path.open("wb") as file:
            for chunk in obstore.get(store, key).stream(1 << 20):
                file.write(chunk)

    return Client(
        lambda path, key: obstore.put(
            store, key, path, chunk_size=PART_BYTES, max_concurrency=PARALLEL
        ),
        download,
        lambda key, begin, end: bytes(obstore.get_range(store, key, start=begin, end=end)),
    )


def s3fs_client(url: str) -> Client:
    import s3fs

    system = s3fs.S3FileSystem(skip_instance_cache=True)
    bucket = urlsplit(url).netloc
    return Client(
        lambda path, key: system.put_file(
            str(path), f"{bucket}/{key}", chunksize=PART_BYTES, max_concurrency=PARALLEL
        ),
        lambda key, path: system.get_file(f"{bucket}/{key}", str(path)),
        lambda key, begin, end: system.cat_file(f"{bucket}/{key}", start=begin, end=end),
    )


def paramiko_client(url: str) -> Client:
    import paramiko

    place = urlsplit(url)
    config = paramiko.SSHConfig.from_path(os.environ[CONFIG]).lookup(place.hostname or "")
    ssh = paramiko.SSHClient()
    ssh.load_host_keys(config["userknownhostsfile"])
    keys = config["identityfile"]
    ssh.connect(place.hostname or "", place.port or 22, config["user"], key_filename=keys)
    sftp = ssh.open_sftp()

    def read(key: str, begin: int, end: int) -> bytes:
        with sftp.open(f"{place.path}/{key}") as file:
            return b"".join(file.readv([(begin, end - begin)]))

    return Client(
        lambda path, key: sftp.put(str(path), f"{place.path}/{key}"),
        lambda key, path: sftp.get(f"{place.path}/{key}", str(path)),
        read,
    )


CLIENTS: dict[str, Callable[[str], Client]] = {  # by store: for this URL
    "s3": obstore_client,
    "fsspec+s3": s3fs_client,
    "az": obstore_client,
    "gs": obstore_client,
    "sftp": paramiko_client,
}


@contextmanager
def served(store: str, folder: Path) -> Iterator[str]:
    """Starts a server, without the proxy of `tests.s3.places.place`, which would be measured too. Gives the URL of an
    empty bucket, or of an empty folder."""
    if store == "sftp":
        served_folder = folder / "served"
        served_folder.mkdir()
        with Sshd() as sshd:
            os.environ |= sshd.environment()
            yield sshd.url(served_folder)
        return
    server = SERVERS[store]()().start()
    try:
        os.environ |= server.environment()
        bucket = f"stores-{uuid.uuid4().hex[:8]}"
        server.put(bucket)
        yield f"{store}://{bucket}"
    finally:
        server.stop()


MEMORY = """
import sys
from pathlib import Path
from clip_train.storage.urls import open_read, open_storage
url, path = sys.argv[1:]
def memory(line):
    return int(Path("/proc/self/status").read_text().partition(line)[2].split()[0])
start = memory("VmRSS:")
storage = open_storage(url)
assert storage.put_bytes("warm", b"x") and storage.read_bytes("warm") == b"x"
before = memory("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
storage.put_file(path, "memory")
with open_read(f"{url}/memory") as file:
    while file.read(1 << 20):
        pass
print(before - start, memory("VmHWM:") - before)
"""


def fragments_of(num_bytes: int) -> list[Fragment]:
    numel, tensors = num_bytes // 4 // 16, 16
    generator = torch.Generator().manual_seed(0)
    return [
        Fragment(f"w{i}", (numel,), 0, {"param": torch.randn(numel, generator=generator)})
        for i in range(tensors)
    ]


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def checksums_of(path: Path) -> Checksums:
    sums = []
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            sums.append(hashlib.sha256(block).hexdigest()[:SUM_DIGITS])
    return Checksums(path.stat().st_size, BLOCK_BYTES, "".join(sums))


def measure(name: str, num_bytes: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """A row for each of upload, resume and shards at this store."""
    with served(name, folder) as url:
        client = CLIENTS[name](url)
        fragments = fragments_of(num_bytes)
        path = saved(f"{url}/run", fragments, folder / "first")
        key = f"run/{path.relative_to(folder / 'first').as_posix()}"
        storage, checksums = open_storage(url), checksums_of(path)

        def read_ours() -> None:
            with open_read(f"{url}/{key}", StorageConfig(), checksums) as file:
                while file.read(1 << 20):
                    pass

        def read_own() -> None:
            size = path.stat().st_size
            for begin in range(0, size, BLOCK_BYTES):
                end = min(size, begin + BLOCK_BYTES)
                data = client.read(key, begin, end)
                assert len(data) == end - begin
                hashlib.sha256(data)

        def download_own() -> None:
            client.download(key, folder / "own")
            whole = hashlib.sha256()
            with (folder / "own").open("rb") as file:
                while piece := file.read(1 << 20):
                    whole.update(piece)

        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "upload": (
                lambda: storage.put_file(path, "ours"),
                lambda: client.upload(path, "own"),
            ),
            "resume": (
                lambda: resumed(f"{url}/run", fragments, folder / uuid.uuid4().hex),
                download_own,
            ),
            "shards": (read_ours, read_own),
        }
        rates: dict[str, list[tuple[float, float]]] = {what: [] for what in pairs}
        for _ in range(repeats):
            for what, pair in pairs.items():
                ours, own = (path.stat().st_size / seconds(action) / 1e6 for action in pair)
                rates[what].append((ours, own))
        client_kib, grown_kib = map(int, output_of("-c", MEMORY, url, str(path)).split())
    rows = []
    for what, measured in rates.items():
        ours, own = (statistics.median(each) for each in zip(*measured, strict=True))
        row = {
            "store": name,
            "what": what,
            "ours, MB/s": ours,
            "its own client, MB/s": own,
            "ours / its own": statistics.median(a / b for a, b in measured),
        }
        if what == "upload":
            row |= {"client, MiB": client_kib / 1024, "memory, MiB": grown_kib / 1024}
        rows.append(row)
    return rows


def saved(url: str, fragments: list[Fragment], folder: Path) -> Path:
    """The local file of a checkpoint that is also at the store."""
    manager = CheckpointManager(CheckpointConfig(remote=url, grace_seconds=600), folder)
    manager.begin()
    assert manager.save(1, fragments, {}, {"step": 1}, wait=True) is Saved.COMMITTED
    manager.close()
    return next(folder.glob("ckpt/*/*/rank00000.safetensors"))


def resumed(url: str, fragments: list[Fragment], folder: Path) -> None:
    """All state of the checkpoint, fetched and verified."""
    manager = CheckpointManager(CheckpointConfig(remote=url, grace_seconds=600), folder)
    found = manager.resume()
    assert found is not None and found.step == 1
    found.reader.prepare((each.name, "param", 0, each.shape[0]) for each in fragments)
    assert found.reader.fetched > 0
    manager.close()


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--store", nargs="+", choices=CLIENTS, default=list(CLIENTS))
    args = arguments.parse_args()
    torch.set_num_threads(1)
    num_bytes, repeats = (64 << 20, 3) if args.quick else (256 << 20, 5)
    missed = [why for store in args.store if (why := missing(store))]
    if missed:
        print(*missed, sep="\n")
        return 1
    rows: list[dict[str, Any]] = rows_of_others(args.json, "store", args.store)
    for store in args.store:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(store, num_bytes, repeats, Path(folder))
        rows += found
        missed += [
            f"{store}, {row['what']}: {row['ours / its own']:.2f} of its own client's rate, "
            f"at least {LEAST[row['what']]:g}"
            for row in found
            if row["ours / its own"] < LEAST[row["what"]]
        ]
    return finish("stores", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(main())
