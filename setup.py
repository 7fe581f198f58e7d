"""Installs `clip_train`, `launcher` and `clip_tools`, as pyproject.toml says."""

from setuptools import setup

setup()
