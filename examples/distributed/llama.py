"""A small model of the Llama architecture with random weights, whole or split over ranks.

Run: torchrun --nproc-per-node 2 llama.py
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM


def make_llama(device: torch.device) -> LlamaForCausalLM:
    """The same model on each device."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config).to(device).eval()


def split(model: LlamaForCausalLM, device: torch.device) -> LlamaForCausalLM:
    """Split the heads and the hidden columns of each layer over all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    plan = {
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in ("q", "k", "v")},
        "self_attn.o_proj": RowwiseParallel(),
        **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def generate(model: LlamaForCausalLM, device: torch.device, steps: int = 8) -> torch.Tensor:
    """Logits of the prompt's last token, and the tokens that follow it: shape (2000 + steps,)."""
    torch.manual_seed(11)
    tokens = torch.randint(3, 2000, (1, 16)).to(device)
    with torch.inference_mode():
        first = model(tokens).logits[0, -1]
        for _ in range(steps):
            following = model(tokens).logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, following], dim=1)
    return torch.cat([first.float(), tokens[0, -steps:].float()]).cpu()


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    tokens = generate(split(make_llama(device), device), device)[-8:]
    if rank == 0:
        sys.stdout.write(f"tokens {tokens.int().tolist()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
