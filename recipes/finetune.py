"""Convert a pretrained language model to a subquadratic mechanism, fine-tune it, and measure what came of it.

    accelerate launch recipes/finetune.py recipes/models/bert-finetune.yaml --row performer

Options come from flags, from the YAML file of a model, and from a row of a board; recipes/README.md lists them. A
rerun of the same command continues an interrupted run.
"""

from __future__ import annotations

import sys

from hf_linattn.command_errors import exit_with_one_line
from hf_linattn.training.arguments import FINETUNING
from hf_linattn.training.pipeline import main

if __name__ == "__main__":
    with exit_with_one_line():
        main(sys.argv[1:], FINETUNING, "accelerate launch recipes/finetune.py")
