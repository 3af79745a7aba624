"""What Megatron-LM, Megatron-Bridge, NeMo and Primus share: Megatron-Core's settings of a model and a plan."""
