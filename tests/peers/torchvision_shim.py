"""Import this before open_clip: it lets PyPI's torchvision, built for CUDA, be imported beside CPU torch.

OpenCLIP uses torchvision's Python half only (its image transforms). What fails on import is the
registration of meta and autograd kernels for C++ operators that were never loaded: those two modules
are replaced by empty ones. Beside a CUDA torch nothing is touched.
"""

from __future__ import annotations

import sys
import types

import torch

if torch.version.cuda is None and "torchvision" not in sys.modules:
    for _name in ("torchvision._meta_registrations", "torchvision._autograd_registrations"):
        sys.modules.setdefault(_name, types.ModuleType(_name))
