"""A run with a loss and a callback of its own, as objects, under any launcher.

python examples/own_run.py RECIPE [KEY=VALUE ...]
torchrun --nproc-per-node 2 examples/own_run.py RECIPE [KEY=VALUE ...]
"""

import sys

import torch.nn.functional as F

import clip_train


def margin_loss(image, text, scale, bias, rows, *, margin: float = 0.0):
    """CLIP's loss with a margin on the positives: the terms of the samples `rows`."""
    terms = 0.0
    for own, other in ((image, text), (text, image)):
        logits = scale * own[rows] @ other.T  # [rows, N]
        positives = range(rows.start, rows.stop)
        logits[range(len(positives)), positives] -= margin
        terms = terms + F.cross_entropy(
            logits, logits.new_tensor(positives).long(), reduction="sum"
        )
    return terms / (2 * len(image))


margin_loss.sums_over_rows = True


class Lowest(clip_train.Callback):
    """Print the lowest loss at the end."""

    loss = float("inf")

    def after_step(self, record, keys, invalid):
        self.loss = min(self.loss, record["loss"])

    def close(self):
        print(f"the lowest loss was {self.loss:.6f}")


if __name__ == "__main__":
    clip_train.train(sys.argv[1], sys.argv[2:], loss=margin_loss, callbacks=[Lowest()])
