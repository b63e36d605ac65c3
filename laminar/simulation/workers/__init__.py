"""Modelled workers that speak the real messages, and what starts them."""
