"""The stage that leaves adapters as they are published: with a card, and without the merged model if so asked for."""

from __future__ import annotations

from typing import Any

from hf_linattn.cards import CARD_FILE
from hf_linattn.report import REPORT_FILE, Report, save_adapter_card
from hf_linattn.training.arguments import ALONE
from hf_linattn.training.run_folders import ADAPTER
from hf_linattn.training.stages.base import OneProcessStage
from hf_linattn.training.training_run import TrainingRun

# of a merged model; the report, its pictures and the tokenizer stay
MERGED = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
          "configuration_hf_linattn.py", CARD_FILE)  # fmt: skip


class AdapterStage(OneProcessStage):
    """Write the card of the adapters, with what the report says of the model that they make."""

    name = "adapter"
    inputs: tuple[str, ...] = ("report",)

    def compute(self, context: TrainingRun) -> dict[str, Any]:
        folder = context.directory.path
        report = Report.load(folder)
        save_adapter_card(report, folder / ADAPTER)
        report.save(folder / ADAPTER)
        removed = []
        if context.arguments.distillation.save_adapter == ALONE:
            removed = sorted(file for pattern in MERGED for file in folder.glob(pattern))
            for file in removed:
                file.unlink()
        return {"files": sorted(file.name for file in (folder / ADAPTER).iterdir()), "report": REPORT_FILE,
                "removed": [file.name for file in removed]}  # fmt: skip
