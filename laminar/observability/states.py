"""Names of what the trainer and the rollouts can be doing; everything that is not busy is idle, with its cause.

`docs/architecture.md` ("Who waits for what") says what each of them means.
"""

TRAINER_BUSY = ("training", "publishing", "checkpointing")
ROLLOUT_BUSY = ("generating",)
