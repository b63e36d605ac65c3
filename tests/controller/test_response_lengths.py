from laminar.controller.response_lengths import WINDOW, ResponseLengths


def test_the_median_of_those_that_were_longer_says_what_is_left():
    lengths = ResponseLengths(limit=1000)
    for tokens in range(100):
        lengths.finished(tokens)
    assert lengths.remaining([0]) == 50
    assert lengths.remaining([49]) == 26
    assert lengths.remaining([79]) == 11


def test_one_that_is_longer_than_all_goes_on_as_long_again_within_the_limit():
    lengths = ResponseLengths(limit=1000)
    assert lengths.remaining([200]) == 200
    assert lengths.remaining([900]) == 100
    assert lengths.remaining([1000]) == 0
    lengths.finished(500)
    assert lengths.remaining([300]) == 200
    assert lengths.remaining([500]) == 500


def test_the_last_of_many_takes_longer_than_one():
    lengths = ResponseLengths(limit=1000)
    for tokens in range(1, 101):
        lengths.finished(tokens)
    assert lengths.remaining([]) == 0
    assert [lengths.remaining([0] * n) for n in (1, 2, 4, 100)] == [51, 71, 85, 100]
    assert lengths.remaining([0, 95]) == 71  # that one is nearly through


def test_the_oldest_are_forgotten():
    lengths = ResponseLengths(limit=100)
    for tokens in [90] * 10 + [50] * WINDOW:
        lengths.finished(tokens)
    assert lengths.remaining([40]) == 10
    assert lengths.remaining([60]) == 40
