"""Exact arithmetic of the KV cache of LLM serving, one function per formula."""

__version__ = "0.1.0"
