"""The trainer: ranks that learn from whole batches of trajectories and publish weights.

`main` talks to the controller; `actor` makes the updates; `publish` and `checkpoint` write weights down.
"""
