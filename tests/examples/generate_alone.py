"""Create a small model, and generate text without DeepSpeed and without padding.

``python generate_alone.py MODEL_DEF MODEL_DIR OUTPUT.json NUM_PROMPTS NUM_CHARS NUM_NEW_TOKENS``
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])

import torch
from prompts import read_prompts, train_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

model_dir, output = Path(sys.argv[2]), Path(sys.argv[3])
num_prompts, num_chars, num_new_tokens = map(int, sys.argv[4:])
torch.manual_seed(3)
tokenizer = train_tokenizer(300)
model = AutoModelForCausalLM.from_config(
    AutoConfig.for_model(
        "gpt2",
        vocab_size=len(tokenizer),
        n_positions=256,
        n_layer=2,
        n_head=2,
        n_embd=32,
        initializer_range=0.5,  # so that the likeliest token is far ahead of the next one
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
).eval()
tokenizer.save_pretrained(model_dir)
model.save_pretrained(model_dir)
texts = []
for prompt in read_prompts(num_prompts, num_chars, 20):
    batch = tokenizer([prompt], return_tensors="pt", return_token_type_ids=False)
    tokens = model.generate(
        **batch, max_new_tokens=num_new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
    )
    texts.append(
        [prompt, tokenizer.decode(tokens[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)]
    )
output.write_text(json.dumps(texts))
