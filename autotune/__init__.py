"""Autotune finds, by measuring, the speculative-decoding configuration that serves your traffic best."""

__version__ = "0.1.0"
