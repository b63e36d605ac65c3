"""Modelled workers and the virtual clock come here; they run the controller as it is, on `protocol/memory.py`'s channels."""
