"""The controller as it is, on a virtual clock, with modelled workers: cluster studies and fault schedules.

Nothing here imports torch, vllm, transformers or mpi4py. `docs/simulation-models.md` has every formula and constant.
"""
