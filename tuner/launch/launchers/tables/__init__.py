"""Vocabularies as tables: what a key or flag means, and how its value is written and read."""
