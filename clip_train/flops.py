"""The arithmetic of a model's forward, as `models.clip.forward_flops` counts it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardFlops:
    """Floating point operations of one sample going forward: 2 for each multiplication and addition.

    Counted by torch on tensors without data. Causal attention counts in full, by convention.
    """

    image: float
    # of the sample's texts: those of full length, and the parts that grow with the number of tokens
    # of a text and with its square
    text: float
    text_per_token: float
    text_per_square: float
    # the same of the patches of an image, at native resolution; 0: all images are alike
    image_per_token: float = 0.0
    image_per_square: float = 0.0

    @property
    def total(self) -> float:
        """With all padding, which the model may skip."""
        return self.image + self.text

    def image_of(self, tokens: float | None) -> float:
        """An image of that many patches; None: as all images."""
        if tokens is None:
            return self.image
        return self.image_per_token * tokens + self.image_per_square * tokens**2

    def text_of(self, tokens: float) -> float:
        """The texts, with that many tokens each."""
        return self.text_per_token * tokens + self.text_per_square * tokens**2
