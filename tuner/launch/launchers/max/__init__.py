"""MaxText's keys, and how its files are read."""
