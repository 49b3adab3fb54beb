"""The backbone's training step on one accelerator: MFU, the use of the rest of the time, and memory against prediction.

python benchmarks/backbone_gpu.py [--model qwen3-1.7b] [--tokens 8192] [--profile-to FILE] [--json]

Random weights, samples of log-normal lengths packed to ``--tokens``, bfloat16 compute on float32 master weights, fused
AdamW, clipping. Needs neither Ray nor data. Without an accelerator it prints a line and exits with 0.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from _backbone_runs import MODELS, Ours, Setting, specs_of
from _report import Figure, at_least, at_most, commit, emit
from rich.console import Console
from shared.backbone_data import Mix, draw_lengths, packed_step
from shared.device_profile import profile_step
from shared.memory_trace import held_by, peak_above_now

from flowtrain.costs.flops import backbone_training_flops
from flowtrain.costs.memory import StepMemory, predict_step_memory
from flowtrain.costs.training_setup import Chunk, MicrobatchSize, TrainingSetup
from flowtrain.models.attention import resolve_attention
from flowtrain.training.batch import PackedBatch
from flowtrain.training.peak import device_peak
from flowtrain.types.plan import StepPlan

TARGET_MFU, TARGET_MEMORY_ERROR = 0.55, 0.10
NUM_WARMUP_STEPS = 3
Step = tuple[StepPlan, list[PackedBatch]]


def predicted(args: argparse.Namespace, batches: list[PackedBatch], attention: str) -> StepMemory:
    """The cost model's prediction of one step's memory."""
    spec, connector = specs_of(args.model)
    largest = max(batches, key=lambda batch: batch.num_tokens)
    setup = TrainingSetup(
        dtype=args.dtype,
        sharding=args.sharding,
        activation_checkpointing=args.checkpointing,
        attention=attention,  # type: ignore[arg-type]  # one of the configuration's
        repeats_kv=attention == "torch_varlen" and not varlen_takes_fewer_heads(),
        accumulates=len(batches) > 1,
    )
    size = MicrobatchSize(largest.num_tokens, largest.num_target_tokens)
    return predict_step_memory(spec, connector, (Chunk(spec.num_layers),), setup, size)


def varlen_takes_fewer_heads() -> bool:
    """Whether this torch's kernel takes fewer heads of keys than of queries."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def timed_steps(ours: Ours, steps: list[Step], device: torch.device) -> list[float]:
    """Wall seconds of each step, each until the device is done with it."""
    durations_s = []
    for plan, batches in steps:
        torch.accelerator.synchronize(device)
        started = time.perf_counter()
        ours.step(plan, batches)
        torch.accelerator.synchronize(device)
        durations_s.append(time.perf_counter() - started)
    return durations_s


def speed_figures(args: argparse.Namespace, steps: list[Step], durations_s: list[float], peak: float) -> list[Figure]:
    """MFU and tokens/s over the steps."""
    spec, _ = specs_of(args.model)
    flops = [backbone_training_flops(spec, plan.lengths, num_target_tokens=plan.num_target_tokens) for plan, _ in steps]
    mfu = np.array(flops) / np.array(durations_s) / peak
    rates = np.array([plan.num_tokens for plan, _ in steps]) / np.array(durations_s)
    low, middle, high = np.quantile(mfu, [0.25, 0.5, 0.75])
    note = f"quartiles {low:.4f} to {high:.4f} of {len(mfu)} steps; over {peak / 1e12:.1f} TFLOP/s, {args.dtype}"
    return [
        at_least("backbone_mfu", float(middle), "1", TARGET_MFU, note),
        Figure("tokens_per_s", float(np.median(rates)), "tokens/s", note=f"{len(steps[0][1])} microbatches a step"),
        Figure("step_time", float(np.median(durations_s)), "s", note=f"{steps[0][0].num_tokens} tokens in the first"),
    ]


def memory_figures(ours: Ours, step: Step, memory: StepMemory, device: torch.device) -> list[Figure]:
    """Peak of one step against the prediction."""
    states = [value for state in ours.trainer.optimizer.state.values() for value in state.values()]
    tensors = [parameter for _, parameter in ours.trainer.model.named_parameters()]
    held = held_by(tensors + [value for value in states if isinstance(value, torch.Tensor)])
    measured = held + peak_above_now(lambda: ours.step(*step), device)
    parts = ", ".join(f"{name} {getattr(memory, name) / 2**30:.2f}" for name in memory.__slots__)
    return [
        Figure("peak_memory", measured / 2**30, "GiB", note=f"{held / 2**30:.2f} of it weights and optimizer state"),
        Figure("predicted_memory", memory.peak / 2**30, "GiB", note=f"GiB: {parts}"),
        at_most("memory_error", abs(memory.peak / measured - 1.0), "1", TARGET_MEMORY_ERROR, "of the prediction"),
    ]


def measure(args: argparse.Namespace, device: torch.device, console: Console) -> list[Figure]:
    """Train some steps, then one for memory and one under the profiler."""
    backbone = {
        "attention": args.attention,
        "activation_checkpointing": args.checkpointing,
        "sharding": args.sharding,
        "compile": args.compile,
    }
    spec, _ = specs_of(args.model)
    attention = resolve_attention(args.attention, device, getattr(torch, args.dtype))
    peak = device_peak(device, getattr(torch, args.dtype))
    console.print(f"{args.model} on {peak.device}; attention {attention}; peak by {peak.source}", highlight=False)
    num_steps = NUM_WARMUP_STEPS + args.steps
    lengths = draw_lengths(None, num_steps, args.samples, args.tokens, 1.0)
    mix = Mix(lengths, spec.vocab_size, args.target_share)
    steps = [packed_step(mix, step, args.tokens, device) for step in range(num_steps)]
    ours = Ours(Setting(args.model, args.dtype, args.threads, device, backbone))
    try:
        timed_steps(ours, steps[:NUM_WARMUP_STEPS], device)
        durations_s = timed_steps(ours, steps[NUM_WARMUP_STEPS:], device)
        found = speed_figures(args, steps[NUM_WARMUP_STEPS:], durations_s, peak.flops)
        fullest = max(steps, key=lambda step: max(batch.num_tokens for batch in step[1]))
        found += memory_figures(ours, fullest, predicted(args, fullest[1], attention), device)
        if args.profile_to is not None:
            found += profile_figures(lambda: ours.step(*steps[-1]), args.profile_to, found[0])
    finally:
        ours.close()
    return found


def profile_figures(run: Callable[[], object], path: Path, mfu: Figure) -> list[Figure]:
    """Write the breakdown of one step to ``path``; returns the shares."""
    profiled = profile_step(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", *sys.argv])
    path.write_text(f"$ {command}\ncommit {commit()}\nMFU without the profiler: {mfu.value:.4f}\n\n{profiled.text()}\n")
    return [
        Figure(f"time.{kind.replace(' ', '_')}", seconds / profiled.wall_s, "1", note="share of a profiled step")
        for kind, seconds in sorted(profiled.seconds.items(), key=lambda item: -item[1])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-1.7b", choices=sorted(MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=8192, help="capacity of a packed microbatch")
    parser.add_argument("--samples", type=int, default=96, help="samples of a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--target-share", type=float, default=1.0, help="share of a sample's tokens that carries loss")
    parser.add_argument("--attention", default="auto", choices=["auto", "flash_attn", "torch_varlen", "sdpa"])
    parser.add_argument("--checkpointing", default="none", choices=["none", "full", "selective", "every_n"])
    parser.add_argument("--sharding", default="full", choices=["full", "gradients"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--profile-to", type=Path, metavar="FILE", help="file for the breakdown of one step")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not torch.accelerator.is_available():
        sys.stderr.write("backbone_gpu: skipped, torch sees no accelerator on this machine\n")
        return
    device = torch.accelerator.current_accelerator()
    assert device is not None
    console = Console(stderr=args.json)
    emit("backbone_gpu", measure(args, torch.device(device.type, 0), console), args.json)


if __name__ == "__main__":
    main()
