"""How far two layouts' results may lie apart after optimizer steps. docs/numerics.md, *Tolerances*, derives the rule.

Layouts sum in different orders, so their gradients differ by `GRADIENT`. An optimizer multiplies that difference by its
conditioning. The differences of several steps are independent, so they add up as the square root of their number.
What no optimizer step has touched (a loss, a gradient, a float64 result) is compared more strictly, where it is tested.

Exceptions, with numbers of their own:
- tests/test_examples.py reads losses that a program printed: half a unit of the last decimal on either side.
- engine/test_units.py and engine/test_buffers.py also compare weights themselves, piece by piece, not their update.
"""

from __future__ import annotations

import math

# The relative difference of the gradients of two layouts. In fp32, 16 roundings of 2^-24. In bf16 and fp16 sums are
# fp32, and each value is rounded once.
GRADIENT = {"fp32": 2.0**-20, "bf16": 2.0**-9, "fp16": 2.0**-12}

# The relative difference of the loss, per relative difference of the gradient.
CONDITIONING = {
    "sgd": 1.0,  # linear in the gradient
    "sgd with momentum": 4.0,  # its sum over steps; 1 / (1 - 0.9) = 10 at most
    "adamw": 2.0,  # bounded, and only the smallest elements of a gradient change their sign
    "torch.optim.RMSprop": 2.0,
    "lion_pytorch.Lion": 4.0,  # a sign: elements near zero move by twice the learning rate
    "examples.lamb.Lamb": 4.0,  # adamw's, and the trust ratio's: a quotient of two norms
    "muon": 64.0,  # Newton-Schulz in bf16 lifts the small singular values, where the rounding is
}
NORM = 6.0  # the gradient's norm is that much more sensitive to the weights than the loss is

# The relative difference of the whole update (all that the steps changed), in fp32. The loss hardly sees the elements
# whose gradient is nearly zero; the update does.
UPDATE = {
    "sgd": 5e-6,
    "adamw": 2e-4,  # g / |g| of elements at the size of their rounding
    "torch.optim.RMSprop": 2e-5,
    "lion_pytorch.Lion": 3e-2,  # one sign of a thousand
    "muon": 1e-2,  # products in bf16
}


def loss(steps: int, optimizer: str = "adamw", precision: str = "fp32") -> float:
    """Relative, of the loss after up to `steps` optimizer steps."""
    return CONDITIONING[optimizer] * GRADIENT[precision] * math.sqrt(steps)


def norm(steps: int, optimizer: str = "adamw", precision: str = "fp32") -> float:
    """Relative, of the gradient's global norm after up to `steps` optimizer steps."""
    return NORM * loss(steps, optimizer, precision)
