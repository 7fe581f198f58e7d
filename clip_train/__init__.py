"""CLIP training whose result does not depend on how the global batch is computed."""

__version__ = "0.1.0"
