"""Training scripts that are written beside the configurations of DeepSpeed and Accelerate, which have none of their own.

Both build a transformers model from model/config.json with random weights, train it on random tokens for a few steps and print the lines
that the tuner's log reader knows (tuner-step, tuner-rank, tuner-versions). Their arguments are named as those of transformers' Trainer.
"""

DEEPSPEED = '''\
"""Trains a transformers model with DeepSpeed for a few steps: bash launch.sh.

The weights and the tokens are random: it measures step time and memory. Replace `build_model` and `batch` to train in earnest.
"""

import argparse
import json
import os
import time

import deepspeed
from deepspeed.accelerator import get_accelerator
import torch
import torch.distributed as dist
import transformers


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", default="model", help="folder with a config.json")
    parser.add_argument("--max_seq_length", type=int, required=True)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--attn_implementation", default="sdpa")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--deepspeed_config", default="ds_config.json")
    return parser.parse_args()


def say(kind, record):
    print(f"tuner-{kind} {json.dumps(record)}", flush=True)


def tokens(config, generator, rows, length):
    """Return random tokens; ranks with equal generators get equal tokens."""
    return torch.randint(0, config.vocab_size, (rows, length), generator=generator)


def build_model(args, settings, config, dtype, mpu):
    """Return the model with random weights; under ZeRO 3 no rank ever holds all of them."""
    build = {"attn_implementation": args.attn_implementation, "dtype": dtype}
    if settings.get("zero_optimization", {}).get("stage") == 3:
        with torch.device("meta"):  # imports all that the model needs: torch refuses some of that under zero.Init
            transformers.AutoModelForCausalLM.from_config(config)
        with deepspeed.zero.Init(config_dict_or_path=settings, mpu=mpu, dtype=dtype):
            return transformers.AutoModelForCausalLM.from_config(config, **build)
    with torch.device(get_accelerator().current_device_name()):
        return transformers.AutoModelForCausalLM.from_config(config, **build)


def batch(config, generator, args, micro, part, parts):
    """Return a micro batch: this rank's part of each sequence, with labels that are shifted already."""
    ids = tokens(config, generator, micro, args.max_seq_length)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    places = torch.arange(args.max_seq_length).expand(micro, -1)
    width = args.max_seq_length // parts
    cut = slice(part * width, (part + 1) * width)
    device = get_accelerator().current_device_name()
    return [each[:, cut].to(device) for each in (ids, labels, places)]


def main():
    args = arguments()
    with open(args.deepspeed_config) as file:
        settings = json.load(file)
    machine = get_accelerator()
    machine.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed()
    rank = dist.get_rank()
    parts = settings.get("sequence_parallel_size", 1)
    tensor = settings.get("tensor_parallel", {}).get("autotp_size", 0) or 1
    micro = settings["train_micro_batch_size_per_gpu"]
    config = transformers.AutoConfig.from_pretrained(args.model_name_or_path)
    config.use_cache = False
    enabled = [name for name in ("bf16", "fp16") if settings.get(name, {}).get("enabled")]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[enabled[0]] if enabled else torch.float32
    mpu = None
    if parts > 1:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        mpu = UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=args.model_name_or_path,
            core_attn_implementation=args.attn_implementation,
            sequence_parallel_size=parts,
            micro_batch_size=micro,
            seq_length=args.max_seq_length,
            seq_length_is_variable=False,
        )
    torch.manual_seed(0)
    model = build_model(args, settings, config, dtype, mpu)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings, mpu=mpu)
    if rank == 0:
        say("versions", {"deepspeed": deepspeed.__version__, "torch": torch.__version__, "transformers": transformers.__version__})
    generator = torch.Generator().manual_seed(rank // (tensor * parts))
    rounds = engine.gradient_accumulation_steps()
    for step in range(args.max_steps):
        machine.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(rounds):
            ids, labels, places = batch(config, generator, args, micro, rank % parts, parts)
            logits = engine(input_ids=ids, position_ids=places).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
            engine.backward(loss)
            engine.step()
        machine.synchronize()
        dist.barrier()
        if rank == 0:
            say("step", {"step": step, "seconds": time.perf_counter() - start, "loss": loss.item(), "microbatches": rounds})
    say("rank", {"rank": rank, "max_allocated_bytes": machine.max_memory_allocated() or None})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

ACCELERATE = '''\
"""Trains a transformers model with Accelerate for a few steps: bash launch.sh.

The weights and the tokens are random: it measures step time and memory. Replace `build_model` and `batch` to train in earnest.
"""

import argparse
import json
import os
import time

import accelerate
import torch
import transformers


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_name_or_path", default="model", help="folder with a config.json")
    parser.add_argument("--max_seq_length", type=int, required=True)
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--attn_implementation", default="sdpa")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--per_device_train_batch_size", type=int, required=True)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--write_weights", action="store_true", help="write random weights beside the config.json, and end")
    return parser.parse_args()


def say(kind, record):
    print(f"tuner-{kind} {json.dumps(record)}", flush=True)


def tokens(config, generator, rows, length):
    """Return random tokens; ranks with equal generators get equal tokens."""
    return torch.randint(0, config.vocab_size, (rows, length), generator=generator)


def build_model(accelerator, args, config):
    """Return the model with random weights. FSDP spreads those of rank 0; tensor parallelism has transformers cut them as it reads them."""
    build = {"attn_implementation": args.attn_implementation}
    parallel = accelerator.parallelism_config
    if parallel is not None and parallel.tp_size > 1:  # as accelerate's examples/fsdp2/nd_parallel.py
        build |= {"tp_plan": "auto", "tp_size": parallel.tp_size, "device_mesh": accelerator.torch_device_mesh}
        return transformers.AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.bfloat16, **build)
    if accelerator.is_fsdp2 and not accelerator.is_main_process:
        with accelerate.init_empty_weights(include_buffers=False):
            return transformers.AutoModelForCausalLM.from_config(config, **build)
    return transformers.AutoModelForCausalLM.from_config(config, **build)


def batch(config, generator, args, device):
    """Return a micro batch, with labels that are shifted already."""
    ids = tokens(config, generator, args.per_device_train_batch_size, args.max_seq_length)
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    places = torch.arange(args.max_seq_length).expand(args.per_device_train_batch_size, -1).contiguous()
    return [each.to(device) for each in (ids, labels, places)]


def main():
    args = arguments()
    config = transformers.AutoConfig.from_pretrained(args.model_name_or_path)
    config.use_cache = False
    if args.write_weights:
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(args.model_name_or_path)
        return
    # Under FSDP whole gradients would be kept until the last micro batch: each is reduced and cut instead.
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    rounds = accelerate.utils.GradientAccumulationPlugin(num_steps=args.gradient_accumulation_steps, sync_each_batch=sharded)
    accelerator = accelerate.Accelerator(gradient_accumulation_plugin=rounds)
    parallel = accelerator.parallelism_config
    shared = parallel.tp_size * parallel.cp_size if parallel is not None else 1  # ranks that share their tokens
    torch.manual_seed(0)
    model = build_model(accelerator, args, config)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=torch.cuda.is_available())
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, device = accelerator.process_index, accelerator.device
    if rank == 0:
        say("versions", {"accelerate": accelerate.__version__, "torch": torch.__version__, "transformers": transformers.__version__})
    generator = torch.Generator().manual_seed(rank // shared)
    cuda = device.type == "cuda"
    for step in range(args.max_steps):
        if cuda:
            torch.cuda.synchronize()
        accelerator.wait_for_everyone()
        start = time.perf_counter()
        for _ in range(args.gradient_accumulation_steps):
            parts = batch(config, generator, args, device)
            cut = {"buffers": parts, "buffer_seq_dims": [1] * len(parts), "no_restore_buffers": set(parts)}
            with accelerator.accumulate(model), accelerator.maybe_context_parallel(**cut):
                ids, labels, places = parts
                logits = model(input_ids=ids, position_ids=places).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        accelerator.wait_for_everyone()
        if rank == 0:
            seconds = time.perf_counter() - start
            say("step", {"step": step, "seconds": seconds, "loss": loss.item(), "microbatches": args.gradient_accumulation_steps})
    say("rank", {"rank": rank, "max_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None})
    accelerator.end_training()


if __name__ == "__main__":
    main()
'''
