"""The folders that a recipe's run has beside the recovered model, which lies in the run's own."""

STAGES = "stages"  # results of finished stages, and checkpoints
CONTROL, WINDOW = "control", "window"  # models to compare with
ADAPTER = "adapter"  # what adapters have trained
