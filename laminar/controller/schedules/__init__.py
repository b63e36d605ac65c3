"""How generation and training are interleaved: pure policies behind `Schedule`; coroutines elsewhere drive them."""
