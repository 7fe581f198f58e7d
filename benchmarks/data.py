"""What a sample costs on its way from a tar to a batch on the device: this project's loader beside OpenCLIP's.

Both read the same shards, photographs as JPEGs of quality 90, with one worker process and one thread: OpenCLIP by its
own `get_wds_dataset` and `image_transform`, normalised floats; this project by `TrainLoader`, uint8, normalised on the
device. They are told in turn to deliver an epoch. A round's CPU seconds are those of all processes of a loader, from
idle (its queues full) to idle, so prefetching is counted where it belongs. Where the device is this CPU, our
normalisation is the device's work: the ratio leaves it out, and a second one has it in.

Also: the same with `data.scaled_decode`, with its PSNR against decoding in full (of the crop that is drawn, and of the
box that its edges are rounded to); how far our crops are from Pillow's (PSNR of the same box); and with `--memory` a
worker's resident memory over 50,000 samples. OpenCLIP runs in the environment of `scripts/setup_peers.sh`:
`--peer-python .venv-peers/bin/python`.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TARGETS = {
    "speed": "at least 2.5x OpenCLIP's images/s per core at 512 px and 3.5x at 256 px, from tar to device",
    "pixels": "PSNR of our crops against Pillow's at least 54 dB at the worst, 70 dB in the mean",
    "memory": "--memory: a worker's resident memory within 5% over 50,000 samples, after the first 10,000",
}
FASTER = {256: 3.5, 512: 2.5}  # pixels -> times OpenCLIP
SIZES = (256, 512, 768)
LOADERS = {
    "ours": "ours",
    "ours, scaled": "scaled",
    "OpenCLIP": "openclip",
}  # as `serve` calls them
WORST_DB, MEAN_DB, SAME_DB = 54.0, 70.0, 99.0  # the last: what equal images count as
DRIFT = 0.05
S, BATCH, SHARDS = 224, 64, 4  # pixels, samples, files
TINY = {
    "embed_dim": 32,
    "vision_cfg": {"image_size": S, "layers": 1, "width": 64, "head_width": 32, "patch_size": 32},
    "text_cfg": {"context_length": 77, "vocab_size": 64, "width": 32, "heads": 2, "layers": 1},
}
IDLE_SECONDS = 0.3  # without a tick of any process: its queues are full


# -- the shards ----------------------------------------------------------------------------------------------


def photographs() -> list[Any]:
    """The three that come with this project's `bench` dependencies, as Pillow images."""
    import matplotlib
    from PIL import Image
    from sklearn.datasets import load_sample_images

    pictures = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    hopper = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    return [*pictures, Image.open(hopper).convert("RGB")]


def jpegs(size: int, count: int) -> Iterator[bytes]:
    """`count` different crops of photographs, size x size."""
    from PIL import Image

    rng, pictures = random.Random(size), photographs()
    for i in range(count):
        picture = pictures[i % len(pictures)]
        side = rng.randint(max(256, 3 * min(picture.size) // 4), min(picture.size))
        left, top = rng.randint(0, picture.width - side), rng.randint(0, picture.height - side)
        crop = picture.crop((left, top, left + side, top + side)).resize(
            (size, size), Image.Resampling.BICUBIC
        )
        if i // len(pictures) % 2:
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        buffer = io.BytesIO()
        crop.save(buffer, "JPEG", quality=90)
        yield buffer.getvalue()


def captions(count: int) -> Iterator[str]:
    """Of 5 to 20 words, the frequent ones often."""
    from clip_train.data.tokenizer import vocabulary

    rng = random.Random(0)
    tokens = [token.removesuffix("</w>") for token in vocabulary().tokens[320:12_000]]
    words = [token for token in tokens if token.isalpha() and token.isascii()]
    weights = [1 / (i + 10) for i in range(len(words))]
    for i in range(count):
        yield f"{' '.join(rng.choices(words, weights, k=rng.randint(5, 20))).capitalize()} no{i}."


def write_dataset(folder: Path, size: int, count: int, different: int) -> None:
    from clip_train.data.tar import write_shards

    images = list(jpegs(size, different))
    samples = (
        {"__key__": f"{i:06d}", "jpg": images[i % different], "txt": caption}
        for i, caption in enumerate(captions(count))
    )
    write_shards(folder, samples, per_shard=count // SHARDS)


# -- in a process of its own: one loader, told how many samples to take --------------------------------------


def our_batches(folder: str, scaled: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    from clip_train.data.config import DataConfig
    from clip_train.data.loader import TrainLoader

    device = the_device()
    config = DataConfig(
        train=f"{folder}/*.tar",
        workers=1,
        lanes=SHARDS,
        shuffle_block=128,
        scaled_decode=scaled,
    )
    loader = TrainLoader(
        config,
        image_size=S,
        context_length=77,
        global_size=BATCH,
        seed=0,
        pin_memory=device.type == "cuda",
    )
    for batch in loader:
        there = batch.to(device)
        yield there.images, there.texts


def openclip_batches(folder: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    import tests.peers.torchvision_shim  # noqa: F401  before open_clip
    import open_clip  # isort: skip
    from open_clip_train.data import get_wds_dataset

    device = the_device()
    shards = sorted(Path(folder).glob("*.tar"))
    args = SimpleNamespace(
        train_data=f"{folder}/{{{shards[0].stem}..{shards[-1].stem}}}.tar", train_num_samples=1_000_000_000,
        dataset_resampled=False, train_data_upsampling_factors=None, seed=0, workers=1, world_size=1, batch_size=BATCH,
    )  # fmt: skip
    transform = open_clip.transform.image_transform(S, is_train=True)
    data = get_wds_dataset(args, transform, is_train=True, tokenizer=open_clip.SimpleTokenizer())
    for images, texts in data.dataloader:  # as its train_one_epoch moves them
        yield (
            images.to(device, dtype=torch.float32, non_blocking=True),
            texts.to(device, non_blocking=True),
        )


def model_input() -> Callable[[torch.Tensor], torch.Tensor]:
    """What our model does first on the device: uint8 -> normalised floats."""
    from clip_train.models.blocks import normalised
    from clip_train.models.config import Architecture

    model = Architecture.model_validate(TINY)
    numbers = list(zip(model.image_mean, model.image_std, strict=True))

    def pixels(images: torch.Tensor) -> torch.Tensor:
        channels = [normalised(images[:, c], *numbers[c], torch.float32) for c in range(3)]
        return torch.stack(channels, 1)

    return pixels


def the_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def serve(kind: str, folder: str) -> int:
    """Reads a number of samples a line, delivers so many, and answers with the seconds that the device took."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    torch.set_num_threads(1)
    batches = (
        openclip_batches(folder) if kind == "openclip" else our_batches(folder, kind == "scaled")
    )
    normalise = model_input() if kind != "openclip" else None
    floats = BATCH * 3 * S * S  # normalised pixels
    for line in sys.stdin:
        taken, device_seconds = 0, 0.0
        while taken < int(line):
            images, texts = next(batches)
            if normalise is not None:
                start = time.process_time()
                images = normalise(images)
                device_seconds += time.process_time() - start
            assert (
                images.dtype == torch.float32
                and images.numel() == floats
                and texts.shape == (BATCH, 77)
            )
            taken += len(images)
        if images.is_cuda:
            torch.cuda.synchronize()
        print(device_seconds, file=answers)
    return 0


# -- in the parent -------------------------------------------------------------------------------------------


class Server:
    """A loader and its workers, in processes of their own."""

    def __init__(self, kind: str, python: str, folder: Path) -> None:
        threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(
            [python, str(Path(__file__).resolve()), "--serve", kind, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **threads},
        )  # fmt: skip

    def deliver(self, count: int) -> tuple[float, float]:
        """CPU seconds of all its processes until they are idle again, and how many of them are the device's."""
        assert self.process.stdin is not None and self.process.stdout is not None
        before = self.cpu_seconds()
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"a loader ended with status {self.process.wait()}; its error is above"
            )
        after = self.cpu_seconds()
        while True:
            time.sleep(IDLE_SECONDS)
            before_that, after = after, self.cpu_seconds()
            if after == before_that:
                return after - before, float(line)

    def cpu_seconds(self) -> float:
        return sum(ticks for _, ticks in process_tree(self.process.pid)) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        family = [pid for pid, _ in process_tree(self.process.pid)]
        self.process.kill()
        self.process.wait()
        for pid in family[1:]:  # they would see it themselves, later
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def process_tree(root: int) -> list[tuple[int, int]]:
    """(process id, CPU ticks) of a process and of all below it; of those that have ended in their parent's."""
    parents, ticks = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(fields[1])
            ticks[int(folder.name)] = sum(map(int, fields[11:15]))
    tree = [root]
    for pid in tree:
        tree += [child for child, parent in parents.items() if parent == pid]
    return [(pid, ticks.get(pid, 0)) for pid in tree]


def speed(
    folder: Path, size: int, count: int, rounds: int, peer: str | None
) -> list[dict[str, Any]]:
    """Images per second and core of both loaders, and the ratio: the median over rounds of that within a round."""
    data = folder / str(size)
    write_dataset(data, size, count, different=min(count, 256))
    python = dict.fromkeys(LOADERS, sys.executable) | {"OpenCLIP": peer}
    servers = {name: Server(LOADERS[name], path, data) for name, path in python.items() if path}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    try:
        for server in servers.values():
            server.deliver(count)  # warm-up: shuffle buffers full, shards in the page cache
        for _ in range(rounds):
            for name, server in servers.items():
                seconds[name].append(server.deliver(count))
    finally:
        for server in servers.values():
            server.stop()
    kilobytes = sum(shard.stat().st_size for shard in data.glob("*.tar")) / count / 1000
    rows = []
    full = statistics.median(total - device for total, device in seconds["ours"])
    for name, each in seconds.items():
        rows.append(
            {
                "loader": name,
                "px": size,
                "kB each": kilobytes,
                "images/s per core": count
                / statistics.median(total - device for total, device in each),
                "x OpenCLIP": faster(seconds, name, device=0),
                "normalised too": faster(seconds, name, device=1),
                "x full": full / statistics.median(total - device for total, device in each),
                "PSNR mean": "",
                "PSNR worst": "",
            }
        )
    return rows


def faster(seconds: dict[str, list[tuple[float, float]]], name: str, device: int) -> float | str:
    """The median over rounds of OpenCLIP's seconds by those of `name`, with the device's or without."""
    theirs = seconds.get("OpenCLIP")
    if theirs is None:
        return ""
    without = 1 - device
    pairs = zip(theirs, seconds[name], strict=True)
    return statistics.median((a - without * b) / (c - without * d) for (a, b), (c, d) in pairs)


def pixels(size: int, count: int) -> tuple[float, float]:
    """Mean and worst PSNR, dB, of our crops of photographs, large and small, against Pillow's of the same boxes."""
    import numpy as np
    from PIL import Image

    from clip_train.data.images import TrainTransform
    from clip_train.data.pixels import decode_image

    decibels = []
    for seed, data in enumerate(jpegs(size, count)):
        transform = TrainTransform(S, (0.9, 1.0) if seed % 2 else (0.3, 1.0))
        ours = transform(decode_image(data), seed).permute(1, 2, 0).numpy().astype(float)
        top, left, h, w = transform.crop(size, size, random.Random(seed))
        region = Image.open(io.BytesIO(data)).convert("RGB").crop((left, top, left + w, top + h))
        decibels.append(psnr(ours, np.asarray(region.resize((S, S), Image.Resampling.BICUBIC))))
    return statistics.mean(decibels), min(decibels)


def scaled_pixels(size: int, count: int, snapped: bool) -> tuple[float, float]:
    """Mean and worst PSNR, dB, of crops of a scaled decode against those of the full one.

    snapped: against the same box, with its edges at pixels of the smaller image.
    """
    from clip_train.data.images import TrainTransform, _resize
    from clip_train.data.pixels import decode_image

    transform, decibels = TrainTransform(S, scaled_decode=True), []
    for seed, data in enumerate(jpegs(size, count)):
        divisor = transform.divisor(size, size, seed)
        ours = transform(decode_image(data, divisor), seed, (size, size)).numpy()
        image = decode_image(data)
        full = transform(image, seed)
        if snapped:
            box = transform.crop(size, size, random.Random(seed))
            top, left, h, w = (divisor * round(edge / divisor) for edge in box)
            full = _resize(image[:, top : top + h, left : left + w], S, S)
        decibels.append(psnr(ours.astype(float), full.numpy()))
    return statistics.mean(decibels), min(decibels)


def psnr(a: Any, b: Any) -> float:
    """dB, of pixels in floats and pixels."""
    error = ((a - b) ** 2).mean()
    return float(10 * math.log10(255**2 / error)) if error else SAME_DB


def memory(folder: Path, samples: int) -> float:
    """How far a worker's resident memory moves after a fifth of `samples`, as a fraction.

    The images are small, to end soon; every caption holds a word that no other has, as addresses and names do.
    """
    data = folder / "memory"
    write_dataset(data, 64, samples, different=256)
    server = Server("ours", sys.executable, data)
    resident = []
    try:
        for taken in range(0, samples, BATCH * 20):
            server.deliver(BATCH * 20)
            if taken >= samples // 5:
                resident.append(
                    max(rss_bytes(pid) for pid, _ in process_tree(server.process.pid)[1:])
                )
    finally:
        server.stop()
    print(f"a worker's resident memory, MiB: {', '.join(f'{r / 2**20:.0f}' for r in resident)}")
    return max(resident) / min(resident) - 1


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    from common import find_peer, finish, parser

    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--peer-python", metavar="PYTHON", help="a Python that has open_clip (default: .venv-peers)"
    )
    arguments.add_argument(
        "--rounds", type=int, default=5, help="timed epochs of each loader (2 with --quick)"
    )
    arguments.add_argument(
        "--memory", action="store_true", help="a worker's memory over 50,000 samples, nothing else"
    )
    args = arguments.parse_args()
    peer = find_peer(args.peer_python, "open_clip_train.data")
    rows: list[dict[str, Any]] = []
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        if args.memory:
            drift = memory(Path(name), 5_000 if args.quick else 50_000)
            rows.append(
                {"loader": "ours", "samples": 5_000 if args.quick else 50_000, "RSS drift": drift}
            )
            if drift > DRIFT:
                missed.append(f"a worker's memory moved by {drift:.1%}, not at most {DRIFT:.0%}")
            return finish("data", rows, TARGETS, missed, args)
        for size in SIZES:
            count, rounds = (512, 2) if args.quick else (2048, args.rounds)
            ours, scaled, *theirs = speed(Path(name), size, count, rounds, peer)
            mean, worst = pixels(size, 24 if args.quick else 200)
            of_crop, of_box = (
                scaled_pixels(size, 24 if args.quick else 200, snapped) for snapped in (False, True)
            )
            rows += [
                {**ours, "PSNR mean": mean, "PSNR worst": worst},
                {**scaled, "PSNR mean": of_crop[0], "PSNR worst": of_crop[1]},
                *theirs,
            ]
            print(f"{size} px, scaled, same box: PSNR {of_box[0]:.1f} dB, worst {of_box[1]:.1f} dB")
            if worst < WORST_DB or mean < MEAN_DB:
                missed.append(
                    f"{size} px: PSNR {mean:.1f} dB in the mean, {worst:.1f} dB at the worst"
                )
            if not theirs:
                rows.append(
                    {
                        **dict.fromkeys(ours, ""),
                        "loader": "OpenCLIP: not installed (scripts/setup_peers.sh)",
                    }
                )
            elif ours["x OpenCLIP"] < FASTER.get(size, 0):
                missed.append(
                    f"{size} px: {ours['x OpenCLIP']:.2f}x OpenCLIP's images/s per core, not {FASTER[size]}x"
                )
    return finish("data", rows, TARGETS, missed, args)


if __name__ == "__main__":
    sys.exit(serve(*sys.argv[2:]) if sys.argv[1:2] == ["--serve"] else main())
