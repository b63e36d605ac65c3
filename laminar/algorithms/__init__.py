"""Advantages, losses, their metrics, and batching: pure functions on arrays and tensors, which know no process.

`advantages`, `aggregation`, `batching` and `overlong` need numpy or nothing, so that any process may use them; the other
modules import torch. docs/algorithms.md says which name in a config is which function, and from which paper it is.
"""
