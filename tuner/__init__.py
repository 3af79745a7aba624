"""tuner: the best parallelism configuration for training a large language model, and how sure it is."""
