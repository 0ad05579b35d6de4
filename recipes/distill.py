"""Convert a pretrained language model to a subquadratic mechanism and have the original teach it, in three stages.

    accelerate launch recipes/distill.py recipes/models/llama.yaml --row hybrid

Calibration fits the mechanisms to the original's attention, attention transfer trains them on it, distillation trains
adapters or all weights on the text and on what the original says of it. Options come from flags, from the YAML file of
a model, and from a row of a board; recipes/README.md lists them. A rerun of the same command continues an interrupted
run.
"""

from __future__ import annotations

import sys

from hf_linattn.command_errors import exit_with_one_line
from hf_linattn.training.arguments import DISTILLATION
from hf_linattn.training.pipeline import main

if __name__ == "__main__":
    with exit_with_one_line():
        main(sys.argv[1:], DISTILLATION, "accelerate launch recipes/distill.py")
