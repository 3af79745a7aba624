"""A config.json with a memory: which of its keys were read, and every problem found on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import Problem, SpecError

if TYPE_CHECKING:
    from collections.abc import Mapping

# A switch of a family: fixed, or read from (key, default).
Flag = bool | tuple[str, bool]


class Config:
    """Reads keys by their synonyms (`hidden_size`, `n_embd`, ...); null counts as absent, as it does for transformers."""

    def __init__(self, data: dict[str, Any], where: str, kind: str) -> None:
        self.data = data
        self.where = where
        self.kind = kind
        self.used: set[str] = set()
        self.problems: list[Problem] = []
        self._defaults: Mapping[str, Any] = {}

    def use_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Fall back on the values of the family's configuration class for keys that the file leaves out."""
        self._defaults = defaults

    def add(self, key: str, value: object, rule: str) -> None:
        """Note a problem of a key."""
        text = repr(value) if isinstance(value, (str, list, dict)) and value else str(value)
        self.problems.append(Problem(where=self.where, path=key, value=text[:80], rule=rule))

    def refusal(self, key: str, part: str, value: object = None) -> SpecError:
        """Return the error that names a part of the architecture which is not modelled."""
        shown = self.data.get(key) if value is None else value
        rule = f"{self.kind}: {part} are not modelled, so this model is refused rather than guessed"
        return SpecError([Problem(where=self.where, path=key, value=_brief(shown), rule=rule)])

    def finish(self) -> None:
        """Raise all problems noted so far."""
        if self.problems:
            raise SpecError(self.problems)

    def get(self, *names: str) -> Any:
        """Return the first of these keys that is there and not null, else the family's default, else None."""
        self.used.update(names)
        for source in (self.data, self._defaults):
            for name in names:
                if source.get(name) is not None:
                    return source[name]
        return None

    def states(self, name: str) -> bool:
        """Whether the file has the key, be it null."""
        return name in self.data

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = 2**31) -> int:
        """Return a whole number; a missing one without a default and a wrong one are problems."""
        value = self.get(*names)
        if value is None:
            if default is None:
                self.add(names[0], "", "is missing")
            return least or 1 if default is None else default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            self.add(next(n for n in names if self.data.get(n) is not None), value, f"must be a whole number from {least} to {most}")
            return least or 1
        return value

    def flag(self, flag: Flag) -> bool:
        """Return a switch: fixed, or read from its key."""
        if isinstance(flag, bool):
            return flag
        key, default = flag
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.add(key, value, "must be true or false")
            return default
        return value

    def rate(self, *names: str, default: bool) -> bool:
        """Return whether any of these dropout rates is above zero, or the default when the file has none of them."""
        rates = {name: self.get(name) for name in names}
        given = {name: rate for name, rate in rates.items() if rate is not None}
        for name, rate in given.items():
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
                self.add(name, rate, "must be a rate from 0 to 1")
                return default
        return any(rate > 0 for rate in given.values()) if given else default

    def sequence(self, key: str, length: int) -> list[Any] | None:
        """Return a list with one entry for each layer, or None when the key is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < length:
            self.add(key, value, f"must be a list with an entry for each of {length} layers")
            return None
        return value[:length]


def _brief(value: object) -> str:
    text = "" if value is None else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
