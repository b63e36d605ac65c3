"""Laminar: an asyncio single-controller engine for asynchronous RL post-training of language models."""

__version__ = "0.1.0"
