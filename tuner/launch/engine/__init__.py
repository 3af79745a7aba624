"""The built-in training step: torch.distributed alone, the same code on gloo with CPUs and on NCCL with GPUs.

Only `tuner.launch.workload` imports this package, and only inside a trial's own processes: torch is an optional extra.
Activations are (sequence, batch, hidden), so that sequences are cut and gathered without copies. Ranks are numbered with tensor
parallelism innermost, then context, data, pipeline (Megatron-LM's order tp-cp-dp-pp; experts: ep innermost in a stage's ranks).
"""
