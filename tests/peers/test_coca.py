"""A CoCa against OpenCLIP's own losses, gradients and generation; and its step on every engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import tests.peers.torchvision_shim  # noqa: F401  before open_clip
from clip_train import dist
from clip_train.losses.config import LossConfig
from clip_train.models.clip import build_model
from clip_train.models.config import AnyArchitecture, load_architecture
from clip_train.models.weights import export_openclip
from clip_train.optim.config import OptimConfig
from clip_train.step import train_step
from clip_train.task import Batch
from launcher.cli.main import main
from tests.covering import pairwise
from tests.engine.layouts import engine_at
from tests.peers.test_openclip_models import architecture_of, inputs
from tests.ranks import run_ranks
from tests.toy import columns_of, share

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("default")]
open_clip = pytest.importorskip(
    "open_clip", reason="PEER MISSING: scripts/setup_peers.sh", exc_type=ImportError
)
N, LR = 11, 0.3
LOSSES = ("contrastive_loss", "caption_loss")


def batch_of(architecture: AnyArchitecture) -> Batch:
    """Texts of 3 to 15 tokens: the mean of two micro-batches' means is not the mean."""
    images, texts, seeds = inputs(architecture, N)
    for row, text in enumerate(texts):
        text[3 + row :] = 0
        text[2 + row] = 49407
    return Batch(columns_of(images, texts, seeds))


def model_of(architecture: AnyArchitecture) -> Any:
    torch.manual_seed(2)
    return build_model(architecture)


def pixels(architecture: AnyArchitecture, images: Tensor) -> Tensor:
    mean, std = (
        torch.tensor(each, dtype=torch.float64).view(3, 1, 1)
        for each in (architecture.image_mean, architecture.image_std)
    )
    return (images.double() / 255 - mean) / std


def openclips(architecture: AnyArchitecture, weights: tuple[float, float], folder: Path):
    """Both losses, and the gradient of each parameter, of OpenCLIP's own model and loss in float64."""
    export = export_openclip(model_of(architecture).state_dict(), architecture, folder)
    peer = open_clip.create_model(f"local-dir:{export}").double().train()
    batch = batch_of(architecture)
    criterion = open_clip.CoCaLoss(clip_loss_weight=weights[0], caption_loss_weight=weights[1])
    out = peer(pixels(architecture, batch.images), batch.texts)
    if "labels" not in out:  # version 4 leaves the shift to its CoCaTask
        out["labels"] = batch.texts[:, 1:]
        out["logits"] = out["logits"][:, :-1]
    losses = criterion(**out, output_dict=True)
    sum(losses.values()).backward()
    gradients = {name: p.grad for name, p in peer.named_parameters()}
    return [losses[name].item() for name in LOSSES], gradients


def steps(
    layout: str, architecture: AnyArchitecture, weights: tuple[float, float], micro_size: int,
    kept: int, precision: str = "fp32", checkpointing: bool = False,
) -> tuple[list[float], Any]:  # fmt: skip
    """The losses of a step, and what it took from each parameter: LR times the gradient."""
    before = model_of(architecture).state_dict()  # DeepSpeed is not building yet
    optim = OptimConfig(name="sgd", lr=LR, weight_decay=0.0)

    def make() -> Any:
        model = model_of(architecture)
        if checkpointing:
            model.set_grad_checkpointing()
        return model

    engine = engine_at(layout, make, optim, precision=precision)
    objective = LossConfig(contrastive_weight=weights[0], caption_weight=weights[1]).build()
    own = share(batch_of(architecture), dist.rank(), dist.world_size())
    result = train_step(engine, own, objective, micro_size=micro_size, kept_graphs=kept, lr=LR)
    taken = [
        (f.name, f.start, before[f.name].flatten()[f.start : f.start + len(after)] - after)
        for f in engine.state_fragments()
        for after in (f.tensors["param"],)
    ]
    engine.close()
    told = [result.metrics[name] * each for name, each in zip(LOSSES, weights, strict=True)]
    return [*told, result.loss, result.grad_norm], taken


LAYOUTS = ["fsdp 0", *(f"{engine} {stage}" for engine in ("fsdp", "zero") for stage in (1, 2, 3))]


@pytest.mark.parametrize(
    "layout, weights, world_size, cut, checkpointing",
    pairwise(
        LAYOUTS, ((1.0, 2.0), (0.5, 1.0)), (1, 2, 3), ((64, 1), (3, 1), (3, 2), (1, 1)),
        (False, True),
    ),
)  # fmt: skip
def test_losses_and_gradients_are_openclips(
    layout, weights, world_size, cut, checkpointing, tmp_path
):
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed", reason="PEER MISSING: scripts/setup_peers.sh")
    architecture = architecture_of("coca", tmp_path)
    losses, gradients = openclips(architecture, weights, tmp_path / "export")
    norm = torch.stack([each.norm() for each in gradients.values()]).norm().item()
    results = run_ranks(
        steps, world_size, layout, architecture, weights, *cut, "fp32", checkpointing
    )
    seen = set()
    for told, taken in results:
        assert told == pytest.approx([*losses, sum(losses), norm], rel=1e-5)
        for name, start, change in taken:
            expected = gradients[name].flatten()[start : start + len(change)]
            assert (change / LR - expected).norm() <= 1e-5 * norm, name
            seen.add(name)
    assert seen == gradients.keys()


@pytest.mark.parametrize("layout", ["fsdp 2", "zero 2"])
def test_bf16_is_near(layout, tmp_path):
    if layout.startswith("zero"):
        pytest.importorskip("deepspeed", reason="PEER MISSING: scripts/setup_peers.sh")
    architecture = architecture_of("coca", tmp_path)
    losses, _ = openclips(architecture, (1.0, 2.0), tmp_path / "export")
    ((told, _),) = run_ranks(steps, 1, layout, architecture, (1.0, 2.0), 4, 1, "bf16")
    assert told[:3] == pytest.approx([*losses, sum(losses)], rel=0.02)


def test_captions_are_openclips(tmp_path: Path):
    """Greedy decoding beside OpenCLIP's with one candidate. What ends a caption is a token that some have early."""
    if open_clip.coca_model.GENERATION_TYPES["top_k"] is None:
        pytest.skip("PEER MISSING: OpenCLIP generates with transformers before 4.56 alone")
    architecture = architecture_of("coca", tmp_path)
    model = model_of(architecture).eval()
    images, _, _ = inputs(architecture, 16)
    export = export_openclip(model.state_dict(), architecture, tmp_path / "export")
    peer = open_clip.create_model(f"local-dir:{export}").double().eval()
    model.double()
    end = int(model.captions(images, 49406, -1)[0, 6])
    expected = peer.generate(
        pixels(architecture, images), seq_len=16, max_seq_len=16, min_seq_len=0,
        generation_type="top_k", top_k=1, fixed_output_length=True, eos_token_id=end,
    )  # fmt: skip
    ours = model.captions(images, 49406, end)
    assert int((ours != 0).sum(dim=1).min()) < 8
    assert torch.equal(ours[:, :-1], expected[:, :-1])  # OpenCLIP puts an end in the last place


def test_the_verb_writes_openclips_captions_of_a_folder(tmp_path: Path, capsys):
    """An oracle in a loop over OpenCLIP's forward, one image at a time. What cannot be read is named. A file's name may
    be any bytes."""
    architecture = architecture_of("coca", tmp_path)
    export = export_openclip(model_of(architecture).state_dict(), architecture, tmp_path / "export")
    images, _, _ = inputs(architecture, 5)
    names = ["b/1.png", "a.png", "b/2.png", "b/c/3.png", os.fsdecode(b"caf\xe9.png")]
    for name, image in zip(names, images, strict=True):
        file = tmp_path / "photos" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(file)
    Path(file.parent, "broken.png").write_bytes(b"")
    Path(file.parent, "notes.txt").write_text("no image")
    assert main(["caption", str(export), "--images", str(tmp_path / "photos")]) == 1
    out, err = capsys.readouterr()
    told = {line["file"]: line["caption"] for line in map(json.loads, out.splitlines())}
    assert "broken.png" in err and len(told) == 5
    peer = open_clip.create_model(f"local-dir:{export}").eval()
    for name, image in zip(names, images, strict=True):
        tokens = torch.tensor([[49406]])
        while tokens.shape[1] < 16 and 49407 not in tokens:
            seen = pixels(architecture, image[None]).float()
            with torch.no_grad():
                logits = peer(seen, tokens, output_labels=False)["logits"]
            tokens = torch.cat([tokens, logits[:, -1:].argmax(dim=2)], dim=1)
        words = open_clip.decode(tokens[0, 1:]).replace("<end_of_text>", "")
        assert told[str(tmp_path / "photos" / name)] == " ".join(words.split())


def test_another_model_writes_no_captions(tmp_path: Path, capsys):
    architecture = load_architecture("tiny")
    state = build_model(architecture).state_dict()
    export = export_openclip(state, architecture, tmp_path / "export")
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png")
    assert main(["caption", str(export), "--images", str(tmp_path)]) == 2
    assert "is not a CoCa" in capsys.readouterr().err
