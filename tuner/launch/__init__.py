"""What runs a plan on real machines."""
