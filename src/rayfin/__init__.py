"""Rayfin: large language models served as Ray actors."""

__version__ = "0.1.0"
