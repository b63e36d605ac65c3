"""Multi-turn environments and the sandbox for code that a model wrote; environment workers run them beside the rewards."""
