"""Multi-turn environments (tools, sandboxes) come here; environment workers will run them beside the rewards."""
