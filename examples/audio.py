"""Audio and text in place of images and text: tones, and what they are called.

    python examples/audio.py DATA                                    # writes shards of tones
    clip-train train examples/audio.yaml data.train='DATA/train/*.tar' data.val='DATA/val/*.tar'

The recipe names `waveform` and `AudioText`; Python must find this folder's parent (PYTHONPATH=.).
"""

from __future__ import annotations

import io
import math
import random
import sys
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clip_train.data.tar import write_shards

RATE, SAMPLES = 8000, 4000
PITCHES = (220, 262, 311, 370, 440, 523, 622, 740)  # hertz, at the beginning
GLIDES = {"falling": -0.5, "steady": 0.0, "rising": 1.0}  # to so much more at the end


def waveform(sample: dict) -> np.ndarray:
    """A sample's .wav, 16 bits and mono: float32 [4000] in [-1, 1], cut or padded at the end."""
    with wave.open(io.BytesIO(sample["wav"])) as file:
        pcm = np.frombuffer(file.readframes(SAMPLES), dtype="<i2")
    out = np.zeros(SAMPLES, np.float32)
    out[: len(pcm)] = pcm / 32768
    return out


waveform.shape, waveform.dtype = (SAMPLES,), torch.float32


class BagOfWords(nn.Module):
    """The mean of the words' embeddings: int64 [b, L] -> [b, D]."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)

    def forward(self, texts: Tensor) -> Tensor:
        words = self.words(texts) * (texts > 0)[..., None]
        return words.sum(1) / (texts > 0).sum(1, keepdim=True).clamp(min=1)


class AudioText(nn.Module):
    """For `model.name`: a CNN over the samples. The parameters of the inputs' tower are those of
    `visual`."""

    embed_dim, context_length = 64, 16

    def __init__(self):
        super().__init__()
        width, D = 32, self.embed_dim
        self.visual = nn.Sequential(
            nn.Conv1d(1, width, 64, stride=8), nn.GELU(),  # 493 of 4000 samples
            nn.Conv1d(width, width, 16, stride=8), nn.GELU(), nn.Flatten(), nn.Linear(60 * width, D),
        )  # fmt: skip
        self.text = BagOfWords(49408, D)
        self.logit_scale = nn.Parameter(torch.full((1,), math.log(1 / 0.07)))

    def encode(self, inputs: dict[str, Tensor]) -> Tensor:
        audio = inputs["audio"].to(self.visual[0].weight.dtype)  # float32 [b, 4000]; perhaps bf16
        return self.visual(audio[:, None])

    def forward(self, inputs=None, texts=None, sample_seeds=None):
        image = None if inputs is None else F.normalize(self.encode(inputs).float(), dim=-1)
        text = None if texts is None else F.normalize(self.text(texts).float(), dim=-1)
        return image, text, self.logit_scale.float().exp(), None


def tone(pitch: float, glide: float, rng: random.Random) -> bytes:
    """A .wav of half a second, with a little noise and any phase."""
    t = np.arange(SAMPLES) / SAMPLES
    cycles = pitch * SAMPLES / RATE * (t + glide * t**2 / 2) + rng.random()
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 0.05, SAMPLES)
    samples = 0.3 * np.sin(2 * np.pi * cycles) + noise
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return content.getvalue()


def tones(rounds: int, seed: int) -> Iterator[dict]:
    """Each of the 24 tones `rounds` times, in any order."""
    rng = random.Random(seed)
    kinds = [(pitch, name) for pitch in PITCHES for name in GLIDES] * rounds
    rng.shuffle(kinds)
    for number, (pitch, name) in enumerate(kinds):
        caption = f"a {name} tone of {pitch} hertz"
        yield {
            "__key__": f"{number:05d}",
            "wav": tone(pitch, GLIDES[name], rng),
            "txt": caption.encode(),
        }


if __name__ == "__main__":
    data = Path(sys.argv[1])
    for part, rounds in (("train", 40), ("val", 1)):
        (data / part).mkdir(parents=True)
        write_shards(data / part, tones(rounds, seed=rounds), per_shard=240)
