"""Finding the best plans: the exact sweep, Optuna studies, the ranking."""

from tuner.verbs import callable_module

callable_module(__name__)  # tuner.search(...) searches
