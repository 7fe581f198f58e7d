"""`clip-train mine` from shards in a bucket into another folder of it, through faults."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np

from tests.data.shards import sample, tar_bytes
from tests.launcher.conftest import clean_environment, finish
from tests.s3.bucket import Bucket
from tests.s3.proxy import Fault, FaultyProxy
from tests.warm import Command


def test_mined_shards_are_complete_in_the_bucket(
    tmp_path: Path, view: Bucket, proxy: FaultyProxy
) -> None:
    keys = [f"k{i}" for i in range(12)]
    members = [sample(key, number) for number, key in enumerate(keys)]
    for shard in range(2):
        half = members[6 * shard : 6 * shard + 6]
        view.put(f"set/{shard}.tar", tar_bytes([each for pair in half for each in pair]))
    features = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
    (tmp_path / "features").mkdir()
    for kind in ("image", "text"):
        np.save(tmp_path / "features" / f"{kind}-00000-00000.npy", features)
    lines = [
        {"key": key, "shard": f"{view.url}/set/{i // 6}.tar", "captions": [f"caption {i}"]}
        for i, key in enumerate(keys)
    ]
    listed = "\n".join(map(json.dumps, lines))
    (tmp_path / "features" / "samples-00000-00000.jsonl").write_text(listed)
    proxy.faults = [Fault("cut", times=2), Fault("status", times=2, method="GET|PUT")]
    line = ("mine", "features", "--to", f"{view.url}/hard", "--num-negatives", "2")
    status, out = finish(Command(line, env=clean_environment(), cwd=tmp_path))
    assert status == 0 and proxy.fired == 4, out
    assert view.keys("hard/") == ["hard/0.tar", "hard/1.tar", "hard/mined.json"]
    scores = features @ features.T
    np.fill_diagonal(scores, -np.inf)
    for shard in range(2):
        with tarfile.open(fileobj=io.BytesIO(view.get(f"hard/{shard}.tar"))) as tar:
            for i in range(6 * shard, 6 * shard + 6):
                fields = json.load(tar.extractfile(f"k{i}.json"))
                assert fields == {"negatives": [f"caption {j}" for j in np.argsort(-scores[i])[:2]]}
    assert not view.unfinished_uploads()
