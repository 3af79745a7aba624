"""torchtitan's keys, model flavors and how its files are read."""
