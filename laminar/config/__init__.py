"""Typed experiment configuration: schema, loading, checks, reference. Imports no torch, vllm, transformers or mpi4py."""
