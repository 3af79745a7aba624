"""What Accelerate and DeepSpeed share: transformers' model files, training scripts and the line that launches them."""
