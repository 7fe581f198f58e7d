"""Evaluation beside clip_benchmark's and OpenCLIP's own functions: the same weights, the same shards."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train.data.tokenizer import Tokenizer
from clip_train.data.validation import ImageFolder, ValLoader
from clip_train.engines.base import PlainEngine
from clip_train.evaluate.config import EvaluateConfig
from clip_train.evaluate.loop import evaluate
from clip_train.evaluate.zero_shot import ZeroShotClasses
from clip_train.models.clip import CLIP
from clip_train.models.config import parse_architecture
from tests.data.shards import counted, write_shard
from tests.peers.clip_benchmark_cli import as_float

pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore"),
]  # the peers' warnings are not ours
MISSING = "PEER MISSING: no evaluation was compared with %s. Run scripts/setup_peers.sh, then "
MISSING += ".venv-peers/bin/python -m pytest -m peer"
open_clip = pytest.importorskip("open_clip", reason=MISSING % "OpenCLIP's", exc_type=ImportError)
builder = pytest.importorskip(
    "clip_benchmark.datasets.builder", reason=MISSING % "clip_benchmark's", exc_type=ImportError
)
MODEL: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8},
    "text_cfg": {"context_length": 24, "vocab_size": 49408, "width": 48, "heads": 4, "layers": 2},
}
NUM, BATCH = 90, 32
WORDS = [
    "red",
    "green",
    "blue",
    "large",
    "small",
    "round",
    "cat",
    "dog",
    "owl",
    "fox",
    "car",
    "tree",
    "boat",
    "lamp",
]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any, Any]:
    """OpenCLIP's, its transform of images; ours with the same weights."""
    torch.manual_seed(1)
    peer = open_clip.model.CLIP(**MODEL).eval()
    with torch.no_grad():
        for p in peer.parameters():
            p.add_(0.05 * torch.randn_like(p))
        peer.logit_scale.fill_(2.0)
    ours = CLIP(parse_architecture(MODEL, "test"))  # type: ignore[arg-type]
    state = {
        name: value.reshape(ours.state_dict()[name].shape)
        for name, value in peer.state_dict().items()
    }
    ours.load_state_dict(state)
    return peer, open_clip.image_transform(32, is_train=False), ours


def png(number: int) -> bytes:
    """Of the model's size, so that no resizing is compared here."""
    rng = np.random.default_rng(number)
    pixels = np.kron(rng.integers(0, 256, (8, 8, 3)), np.ones((4, 4, 1))).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_wds(folder: Path, captions: int, classes: int = 7) -> None:
    """clip_benchmark's layout: of retrieval with so many captions for each image; 0: of classification."""
    rng = np.random.default_rng(captions)
    (folder / "test").mkdir(parents=True)
    for shard in range(3):
        members = []
        for number in range(shard * NUM // 3, (shard + 1) * NUM // 3):
            lines = [f"{number} " + " ".join(rng.choice(WORDS, 5)) for _ in range(captions)]
            members.append((f"s{number:07d}.png", png(number)))
            more = (
                (f"s{number:07d}.txt", "\n".join(lines))
                if captions
                else (f"s{number:07d}.cls", str(number % classes))
            )
            members.append((more[0], more[1].encode()))
            members.append((f"s{number:07d}.json", json.dumps({"captions": lines}).encode()))
        write_shard(folder / "test" / f"{shard}.tar", members)
    (folder / "test" / "nshards.txt").write_text("3\n")
    if captions:
        (folder / "dataset_type.txt").write_text("retrieval\n")
    else:
        ours = {"classnames": WORDS[:classes], "templates": ["a photo of a {}.", "many {}"]}
        (folder / "classes.json").write_text(json.dumps(ours))
        (folder / "classnames.txt").write_text("\n".join(WORDS[:classes]) + "\n")
        (folder / "zeroshot_classification_templates.txt").write_text(
            "a photo of a {c}.\nmany {c}\n"
        )


def load(place: Path, folder: ImageFolder | None = None, **more: Any) -> ValLoader:
    tokenizer = Tokenizer(MODEL["text_cfg"]["context_length"])
    return ValLoader(
        folder or counted(place),
        image_size=32,
        context_length=24,
        batch_size=BATCH,
        tokenizer=tokenizer,
        **more,
    )


def measured(model: Any, config: EvaluateConfig, loader: ValLoader) -> dict[str, float]:
    """Retrieval, or zero-shot classification if the config has classes."""
    classes = None
    if config.zero_shot_classes is not None:
        classes = ZeroShotClasses.load(config.zero_shot_classes, config.templates)
    tokenize, captions = Tokenizer(24), classes is None
    return evaluate(PlainEngine(model), loader, config, tokenize, classes, captions=captions)


def clip_benchmarks(folder: Path, transform: Any, task: str) -> Any:
    """Its own reader of shards."""
    dataset = builder.build_dataset(
        "wds/test", root=str(folder), transform=transform, split="test", task=task
    )
    collate = builder.image_captions_collate_fn if task == "zeroshot_retrieval" else None
    return dataset, torch.utils.data.DataLoader(
        dataset.batched(BATCH, collation_fn=collate or builder.default_collate), batch_size=None
    )


@pytest.mark.parametrize("captions", [1, 5])
def test_retrieval(tmp_path: Path, models: tuple[Any, Any, Any], captions: int):
    from clip_benchmark.metrics import zeroshot_retrieval

    peer, transform, ours = models
    write_wds(tmp_path, captions)
    shards = load(tmp_path / "test" / "{0..2}.tar", caption_key="captions")
    found = measured(ours, EvaluateConfig(batch_size=BATCH), shards)
    _, loader = clip_benchmarks(tmp_path, transform, "zeroshot_retrieval")
    tokenizer = open_clip.SimpleTokenizer(context_length=24)
    theirs = zeroshot_retrieval.evaluate(
        peer, loader, tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10]
    )
    assert len(theirs) == 6 and len(set(theirs.values())) > 3
    assert {name: found[name] for name in theirs} == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("captions", [1, 5])
def test_openclips_evaluation(tmp_path: Path, models: tuple[Any, Any, Any], captions: int):
    """Its whole `evaluate`: loss and ranks of each image with its first caption."""
    from open_clip_train import train

    peer, transform, ours = models
    write_wds(tmp_path, captions)
    shards = load(tmp_path / "test" / "{0..2}.tar", caption_key="captions")
    found = measured(ours, EvaluateConfig(batch_size=BATCH), shards)
    _, loader = clip_benchmarks(tmp_path, transform, "zeroshot_retrieval")
    tokenizer = open_clip.SimpleTokenizer(context_length=24)
    batches = [(images, tokenizer([each[0] for each in texts])) for images, texts in loader]
    task = peer
    if hasattr(open_clip, "CLIPTask"):  # of version 4, on columns
        task = open_clip.CLIPTask(peer, default_loss=False)
        batches = [{"image": images, "text": texts} for images, texts in batches]
    dataloader = type("Loader", (list,), {"num_samples": NUM})(batches)
    args = Namespace(
        rank=0, local_rank=0, log_local=False, device="cpu", precision="fp32", val_frequency=1, epochs=1,
        save_logs=False, wandb=False, distributed=False, horovod=False,
    )  # fmt: skip
    peer.output_dict = True
    theirs = train.evaluate(task, {"val": SimpleNamespace(dataloader=dataloader)}, 1, args)
    peer.output_dict = False
    assert theirs.pop("epoch") == 1 and len(batches) == 3
    assert found["val_loss"] == pytest.approx(theirs.pop("clip_val_loss"), abs=1e-4)
    assert len(theirs) == 11 and {name: found[name] for name in theirs} == pytest.approx(
        theirs, abs=1e-4
    )


def test_zero_shot_of_clip_benchmark(
    tmp_path: Path, models: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
):
    from clip_benchmark.metrics import zeroshot_classification

    monkeypatch.setattr(zeroshot_classification, "float", as_float, raising=False)
    peer, transform, ours = models
    write_wds(tmp_path, 0)
    config = EvaluateConfig(zero_shot_classes=str(tmp_path / "classes.json"))
    found = measured(ours, config, load(tmp_path / "test" / "{0..2}.tar", labelled=True))
    dataset, loader = clip_benchmarks(tmp_path, transform, "zeroshot_classification")
    tokenizer = open_clip.SimpleTokenizer(context_length=24)
    theirs = zeroshot_classification.evaluate(
        peer, loader, tokenizer, dataset.classes, dataset.templates, "cpu", amp=False
    )
    assert found["zero_shot_samples"] == NUM
    assert found["zero_shot_top1"] == pytest.approx(theirs["acc1"], abs=1e-4)
    assert found["zero_shot_top5"] == pytest.approx(theirs["acc5"], abs=1e-4)
    assert found["zero_shot_mean_per_class_recall"] == pytest.approx(
        theirs["mean_per_class_recall"], abs=1e-4
    )


def test_zero_shot_of_openclip_on_a_folder_for_each_class(
    tmp_path: Path, models: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
):
    """ImageNet's 1000 classes by name, as many folders; read by torchvision there."""
    from open_clip_train import zero_shot
    from torchvision.datasets import ImageFolder as TorchvisionFolder

    monkeypatch.setattr(zero_shot, "float", as_float, raising=False)
    peer, transform, ours = models
    for i in range(1000):
        (tmp_path / f"n{i:04d}").mkdir()
        if i % 20 == 0 or i % 7 == 0:
            (tmp_path / f"n{i:04d}" / f"{i}.png").write_bytes(png(i))
    config = EvaluateConfig(zero_shot_classes="imagenet", templates="simple")
    folder = ImageFolder.find(str(tmp_path), "evaluate.zero_shot_data")
    found = measured(ours, config, load(tmp_path, folder, labelled=True))
    dataset = TorchvisionFolder(str(tmp_path), transform=transform, allow_empty=True)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH)
    classifier = open_clip.build_zero_shot_classifier(
        peer, open_clip.SimpleTokenizer(context_length=24), open_clip.IMAGENET_CLASSNAMES,
        open_clip.SIMPLE_IMAGENET_TEMPLATES,
    )  # fmt: skip
    args = Namespace(device="cpu", precision="fp32", batch_size=BATCH, rank=0)
    run = getattr(zero_shot, "run_zero_shot_classifier", None) or zero_shot.run  # 4.x, 3.3
    top1, top5 = run(peer, classifier, loader, args)
    assert found["zero_shot_samples"] == len(dataset) > 150
    assert (found["zero_shot_top1"], found["zero_shot_top5"]) == pytest.approx(
        (top1, top5), abs=1e-4
    )


def test_imagenets_names_and_templates_are_openclips():
    imagenet = ZeroShotClasses.load("imagenet")
    assert tuple(imagenet.classnames) == tuple(open_clip.IMAGENET_CLASSNAMES)
    for templates, theirs in (
        ("openai", open_clip.OPENAI_IMAGENET_TEMPLATES),
        ("simple", open_clip.SIMPLE_IMAGENET_TEMPLATES),
    ):
        assert ZeroShotClasses.load("imagenet", templates).prompts(0) == [
            each("tench") for each in theirs
        ]
    assert imagenet.prompts(7) == [each("rooster") for each in open_clip.OPENAI_IMAGENET_TEMPLATES]
