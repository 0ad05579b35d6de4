"""What an installed wheel can do in an empty folder: `make test-package` runs it with the wheel's own python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_linattn
from hf_linattn import explain_backend, patch_model

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
PROMPT = torch.arange(1, 24)[None]


def command(*arguments: str) -> str:
    """Run a command of the wheel and return what it prints."""
    return subprocess.run(["hf-linattn", *arguments], check=True, capture_output=True, text=True).stdout


def check(what: str, right: bool) -> None:
    """Say what was looked at, or stop."""
    if not right:
        raise SystemExit(f"wrong: {what}")
    print(f"right: {what}")


def main() -> None:
    home = Path(hf_linattn.__file__).resolve()
    check(f"the package is the installed one, {home}", home.is_relative_to(Path(sys.prefix).resolve()))
    check("its version", command("--version").split()[-1] == hf_linattn.__version__)
    check("its mechanisms", {"hybrid", "linear"} <= {row["name"] for row in json.loads(command("list", "--json"))})
    check("its recipes", "model_name_or_path" in command("recipes", "show", "smollm2-135m"))
    model = patch_model(LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=97)).eval(), "linear")
    check("C without a compiler", "cpu      cpu       cpu" in str(explain_backend(model, PROMPT)))
    model.save_pretrained("model")
    loaded = AutoModelForCausalLM.from_pretrained("model").eval()
    with torch.no_grad():
        same = torch.equal(model(input_ids=PROMPT).logits, loaded(input_ids=PROMPT).logits)
    check("a saved model loads with the same logits", same)
    check("it writes", loaded.generate(PROMPT, max_new_tokens=4, min_new_tokens=4, pad_token_id=0).shape[1] == 27)


if __name__ == "__main__":
    main()
