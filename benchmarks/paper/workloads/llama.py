"""A small model of the Llama architecture with random weights generates tokens (Transformers)."""

from __future__ import annotations

import os

from workload import SEED, finish, parse

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    # Importing takes seconds; --help does without.
    arguments = parse(__doc__ or "", modes=("inference",))
    import torch  # type: ignore[import-not-found,unused-ignore]
    from transformers import (  # type: ignore[import-not-found,unused-ignore]
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=8000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    dtype = torch.float16 if arguments.device == "cuda" else torch.float32
    model = LlamaForCausalLM(config).to(device=arguments.device, dtype=dtype).eval()
    prompt = torch.randint(3, config.vocab_size, (arguments.batch, 32)).to(arguments.device)
    with torch.inference_mode():
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            min_new_tokens=arguments.steps,
            max_new_tokens=arguments.steps,
            pad_token_id=0,
        )
        # Of the prompt: a tie between two tokens would change all that follow.
        scores = model(prompt).logits[0, -1].float().log_softmax(0).topk(8).values
    if tokens.shape[1] != prompt.shape[1] + arguments.steps:
        raise SystemExit(f"{arguments.steps} tokens wanted, shape {tuple(tokens.shape)} generated")
    finish(arguments, scores.tolist())


if __name__ == "__main__":
    main()
