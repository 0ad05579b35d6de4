"""Which few key/value heads, or layers, of a model must stay exact for it to find what stands far back.

With a tokenizer and a model that recalls it is `patch_model(model, choose_plan(model, tokenizer, keep=0.1))`; by text:

>>> import torch
>>> from transformers import LlamaConfig, LlamaForCausalLM
>>> from hf_linattn import choose_plan, patch_model
>>> sizes = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
>>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, intermediate_size=32, **sizes))
>>> text = [{"input_ids": torch.randint(50, (1, 32))}]
>>> window = {"streaming": {"window_size": 8}}
>>> plan = choose_plan(model, None, 1, replace=window, signal="divergence", batches=text)
>>> plan.record.num_kept, sum(plan.record.heads)
(1, 4)
>>> model = patch_model(model, plan)
"""

from .choose import SEARCHES, SIGNALS, choose_plan
from .gates import UNITS, Gates
from .options import SearchOptions, Signal

__all__ = ["SEARCHES", "SIGNALS", "UNITS", "Gates", "SearchOptions", "Signal", "choose_plan"]
