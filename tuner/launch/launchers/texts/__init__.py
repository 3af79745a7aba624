"""Texts that launchers write and read: shell scripts, Python, TOML and YAML; nothing is ever run."""
