"""Finding the best plans: the exact sweep, Optuna studies, the ranking."""
