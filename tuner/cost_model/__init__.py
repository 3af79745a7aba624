"""What a training step costs: one set of formulas, for a single plan and for a million."""
