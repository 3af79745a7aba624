"""Measured search: short runs of candidate plans, one after the other or side by side, that survive whatever kills them."""
