"""Advantages, losses, their metrics, and batching: pure functions on arrays and tensors, which know no process.

`advantages` and `batching` need numpy or nothing, so that any process may use them; the other modules import torch.
"""
