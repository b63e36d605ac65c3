"""A reward that even an untrained model gets now and then, so that there is something to learn."""


def reward(*, response):
    """Between 0 and 1, from the response's characters."""
    return sum(map(ord, response)) % 8 / 7


def failing(*, response):
    """Raises once in a while: a run ends in the middle of a step."""
    if sum(map(ord, response)) % 8 == 7:
        raise ValueError("the answer is out of the question")
    return 0.5
