"""Print the rows that a model has on the board of the recipes, for `make board`.

python -m benchmarks.board recipes/models/llama.yaml
"""

from __future__ import annotations

import sys

from hf_linattn.training.arguments.board import CommandLine

if __name__ == "__main__":
    print(*CommandLine(sys.argv[1:]).on_board())  # those that train a control before those that take it over
