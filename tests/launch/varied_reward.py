"""A reward that even an untrained model gets now and then, so that there is something to learn."""


def reward(*, response):
    """Between 0 and 1, from the response's characters."""
    return sum(map(ord, response)) % 8 / 7
