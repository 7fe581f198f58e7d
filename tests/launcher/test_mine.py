"""`clip-train mine`, and a run on its shards, through the real command."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from clip_train.models.clip import CLIP
from clip_train.models.config import load_architecture
from clip_train.models.weights import export_openclip
from tests.data.shards import jpeg, write_shard
from tests.documents import blocks, own_arguments
from tests.launcher.conftest import clean_environment, finish, metrics
from tests.warm import Command

pytestmark = pytest.mark.engine
COLORS = ("red", "Red ", "blue", "green", "black", "white", "golden", "pink")


def call(folder: Path, *arguments: str) -> tuple[int, str]:
    return finish(Command([*arguments], env=clean_environment(), cwd=folder))


def members_of(shard: Path) -> dict[str, dict[str, bytes]]:
    """By key and extension, as tarfile reads them."""
    out: dict[str, dict[str, bytes]] = {}
    with tarfile.open(shard) as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            out.setdefault(key, {})[extension] = tar.extractfile(member).read()
    return out


@pytest.fixture(scope="module")
def home(tmp_path_factory, model) -> Path:
    """Two shards of 20 samples, each with a caption of its own, one that another sample has too, and a city;
    one image is broken. Random weights in runs/clip, and what `embed` writes."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "shards").mkdir()
    for shard in range(2):
        members = []
        for i in range(20 * shard, 20 * shard + 20):
            fields = {"captions": [f"picture {i}", f"a {COLORS[i % 8]} thing"], "city": "Oslo"}
            image = b"broken" if i == 7 else jpeg(i)
            members += [(f"k{i}.jpg", image), (f"k{i}.txt", f"picture {i}".encode())]
            members += [(f"k{i}.json", json.dumps(fields).encode())]
        write_shard(folder / "shards" / f"{shard:03d}.tar", members)
    torch.manual_seed(1)
    architecture = load_architecture(str(model))
    export_openclip(CLIP(architecture).state_dict(), architecture, folder / "runs" / "clip")
    status, out = call(folder, *EMBED)
    assert status == 0 and "39 samples embedded, 1 could not be used" in out, out
    return folder


EMBED = ("embed", "runs/clip", "data.val=shards/*.tar", "data.caption_key=captions")


def features_of(home: Path) -> tuple[np.ndarray, np.ndarray, list[dict]]:
    features = home / "features"
    lines = (features / "samples-00000-00000.jsonl").read_text().splitlines()
    image, text = (np.load(features / f"{kind}-00000-00000.npy") for kind in ("image", "text"))
    return image, text, [json.loads(line) for line in lines]


def test_each_sample_gets_the_texts_of_brute_force(home):
    status, out = call(home, "mine", "features", "--to", "hard", "--absolute-margin", "0.01")
    assert status == 0 and "data.negative_texts='{json.negatives: 3}'" in out, out
    image, text, samples = features_of(home)
    texts = [sample["captions"][0] for sample in samples]
    mined = members_of(home / "hard" / "000.tar") | members_of(home / "hard" / "001.tar")
    source = members_of(home / "shards" / "000.tar") | members_of(home / "shards" / "001.tar")
    numbers = {0: 0, 1: 0, 2: 0, 3: 0}
    for row, sample in enumerate(samples):
        scores = image[row].astype(np.float64) @ text.astype(np.float64).T
        ranked = [j for j in np.argsort(-scores) if scores[j] <= scores[row] - 0.01]
        wanted = [texts[j] for j in ranked[:3]]
        numbers[len(wanted)] += 1
        if not wanted:
            assert sample["key"] not in mined
            continue
        members = mined[sample["key"]]
        fields = json.loads(members.pop("json"))
        assert fields.pop("negatives") == wanted
        assert fields == json.loads(source[sample["key"]].pop("json"))
        assert members == source[sample["key"]]
    assert "k7" not in mined and numbers[3] > 10
    summary = json.loads((home / "hard" / "mined.json").read_text())
    assert summary["queries_by_number_of_negatives"] == {str(k): v for k, v in numbers.items()}
    assert summary["queries"] == 39 and summary["dropped_pairs"]["positive"] == 39
    assert "'not embedded': 1" in out and "39 images, among 39 different texts" in out


def test_the_same_line_continues_another_is_refused(home):
    line = ["mine", "features", "--to", "again", "--num-negatives", "1"]
    status, out = call(home, *line)
    assert status == 0, out
    first, second = (home / "again" / f"00{i}.tar" for i in range(2))
    content, written = first.read_bytes(), second.stat().st_mtime_ns
    first.unlink()
    status, out = call(home, *line)
    assert status == 0 and first.read_bytes() == content, out
    assert second.stat().st_mtime_ns == written
    for more, message in [
        (["--num-negatives", "2"], "--to (again) holds shards made with"),
        (["--to", "shards"], "--to (shards) has 000.tar, which this command did not write"),
        (["--to", "x", "--range-max", "0"], "range_max (0) must be at least"),
        (["--to", "x", "--max-score", "-2"], "no candidate is left for any of 39 queries"),
        (["--to", "x", "--key", "city"], "--key (city): the .json of k0 has this key already"),
    ]:
        status, out = call(home, *line, *more)
        assert status == 2 and message in out and "Traceback" not in out, out


def test_features_that_do_not_fit(home, tmp_path):
    """Each is a message that says what to do."""
    for name in ("shards", "features"):
        shutil.copytree(home / name, tmp_path / name)
    line = ["mine", "features", "--to", "x"]

    def refused(message: str) -> None:
        status, out = call(tmp_path, *line)
        assert status == 2 and message in out and "Traceback" not in out, out

    features = tmp_path / "features"
    samples, text = features / "samples-00000-00000.jsonl", features / "text-00000-00000.npy"
    lines = samples.read_text()
    write_shard(
        tmp_path / "shards" / "001.tar", [("k20.jpg", jpeg(20)), ("k20.txt", b"picture 20")]
    )
    refused("does not have the sample k21, which was embedded (19 such samples)")
    (tmp_path / "shards" / "001.tar").unlink()
    refused("shards/001.tar is no shard, seen from")
    samples.write_text(lines + lines.splitlines()[0] + "\n")
    refused("image-00000-00000.npy has 39 rows and samples-00000-00000.jsonl 40")
    samples.write_text(lines)
    text.rename(tmp_path / "text.npy")
    refused("has no text-00000-00000.npy: embed again, without --images-only")
    (tmp_path / "text.npy").rename(text)
    for file in sorted(features.iterdir()):  # as of a second rank, which embedded the same
        shutil.copy(file, features / file.name.replace("-00000-", "-00001-"))
    refused("of shards/000.tar 2 times: embed again into an empty folder")
    shutil.rmtree(features)
    refused("has no samples-*.jsonl: give the folder that `clip-train embed` wrote")


def test_the_chain_of_the_page_trains_a_step(home, recipe, tmp_path):
    """The lines of docs/data.md as they are, from features to a run that reads the negatives."""
    (block,) = [each for each in blocks("bash") if "clip-train mine" in each.text]
    lines = block.text.splitlines()
    assert [line.split()[1] for line in lines] == ["embed", "mine", "index", "train"]
    (tmp_path / "my.yaml").write_text(recipe.read_text())
    for name in ("shards", "runs"):
        (tmp_path / name).symlink_to(home / name)
    short = ["run.steps=1", "schedule.warmup_steps=0", "batch.global_size=12", "batch.micro_size=6"]
    for line in lines:
        arguments = own_arguments(line.partition("#")[0])
        assert arguments is not None
        if arguments[0] == "train":
            arguments += short
        status, out = call(tmp_path, *arguments)
        assert status == 0 and "Traceback" not in out, out
    assert [step["step"] for step in metrics(tmp_path / "run")] == [1]
    assert "'no caption': " not in out
