"""What an installed wheel can do in an empty folder: `make test-package` runs it with the wheel's own python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import hf_linattn
from hf_linattn import explain_backend, patch_model

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
PROMPT = torch.arange(1, 24)[None]
WORDS = {f"w{index}": index for index in range(97)}
# a recipe of the package, made short
RECIPE = (
    "distill recipe:llama --row hybrid --model_name_or_path original --train_file book.txt --output_dir recovered"
    " --control none --block_size 32 --max_train_tokens 768 --calibration_tokens 256 --transfer_tokens 256"
    " --max_test_documents 1 --speed_lengths 32 --fidelity_windows 0 --plan_steps 0 --use_cpu true"
)


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
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=97)).eval()
    model.save_pretrained("original")
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w1", eos_token="w2").save_pretrained("original")
    Path("book.txt").write_text("\n".join(f"w{3 + i * i % 94}" for i in range(4000)))
    command(*RECIPE.split())
    report = json.loads(command("report", "recovered", "--json"))
    check("a recipe of the package runs", report["perplexity"]["recovered"] > 1)
    model = patch_model(model, "linear")
    check("C without a compiler", "cpu      cpu       cpu" in str(explain_backend(model, PROMPT)))
    model.save_pretrained("model")
    loaded = AutoModelForCausalLM.from_pretrained("model").eval()
    with torch.no_grad():
        same = torch.equal(model(input_ids=PROMPT).logits, loaded(input_ids=PROMPT).logits)
    check("a saved model loads with the same logits", same)
    check("it writes", loaded.generate(PROMPT, max_new_tokens=4, min_new_tokens=4, pad_token_id=0).shape[1] == 27)


if __name__ == "__main__":
    main()
