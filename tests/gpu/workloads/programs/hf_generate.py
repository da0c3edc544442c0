#!/usr/bin/env python3
"""transformers: greedy generation by a Llama of a billion random weights (2 GiB); nothing is downloaded."""
import os
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
import program
program.need("torch", "transformers")
torch = program.torch_once()
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16, vocab_size=32000, max_position_embeddings=4096, tie_word_embeddings=False)
torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"): model = LlamaForCausalLM(config).eval()
torch.set_default_dtype(torch.float32)
prompt = torch.randint(3, 32000, (8, 128), device="cuda")
def generate(n):
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
generate(4)
n = program.steps(180)
with program.work(torch.cuda.synchronize): tokens = generate(n)
program.tell(f"{program.digest(tokens)} {program.digest(*model.parameters())}", ok=tokens.shape == (8, 128 + n))
